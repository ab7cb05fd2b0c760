"""The libraries of the extra `hf`, or one sentence that says how to get them."""

from __future__ import annotations

try:
    import torch
    import transformers
except ImportError as error:
    raise ImportError(
        f"kvcodec.integrations.transformers needs torch and transformers, of which {error.name} "
        "is missing; install the extra 'hf': pip install \"kvcodec-cpu[hf]\"."
    ) from error

__all__ = ["torch", "transformers"]
