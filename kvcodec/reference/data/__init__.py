"""Generated codebooks; ``tools/gen_codebooks.py`` writes and checks them."""
