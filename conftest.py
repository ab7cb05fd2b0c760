"""Modules and pages that need an extra are left out where it is not installed."""

from importlib.util import find_spec

HAS_HF = all(find_spec(name) for name in ("torch", "transformers"))
NEED_HF = [
    "kvcodec/benchmark/model_report.py",
    "kvcodec/evaluation/language_model.py",
    "kvcodec/evaluation/needle.py",
    "kvcodec/integrations/*.py",
    "docs/transformers.md",
    "tests/hf_*.py",
]
collect_ignore_glob = [] if HAS_HF else NEED_HF
