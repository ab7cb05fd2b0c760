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

OLDEST = (5, 20)  # caches are cropped by a number of tokens to take back since then
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(
        f"kvcodec.integrations.transformers needs transformers {'.'.join(map(str, OLDEST))} or "
        f"newer, but {transformers.__version__} is installed; install the extra 'hf': "
        'pip install "kvcodec-cpu[hf]".'
    )

__all__ = ["torch", "transformers"]
