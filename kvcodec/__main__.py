"""``python -m kvcodec`` is the command ``kvcodec``."""

from kvcodec.cli import main

if __name__ == "__main__":
    main(prog_name="kvcodec")
