"""Doctests of what needs an extra are left out where it is not installed."""

from importlib.util import find_spec

HAS_HF = all(find_spec(name) for name in ("torch", "transformers"))
collect_ignore_glob = [] if HAS_HF else ["kvcodec/integrations/*.py", "docs/transformers.md"]
