"""PyTorch: grouped matrix products in bfloat16, and scaled_dot_product_attention in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcodec.benchmark.peers.cases import Job
from kvcodec.benchmark.peers.worker import Prepared, arguments

if TYPE_CHECKING:
    import torch


def prepare(job: Job) -> Prepared:
    """The case's call; query heads that share a KV head are rows of one product."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(job.threads)
    torch.set_grad_enabled(False)
    q, k, v = (torch.from_numpy(x) for x in arguments(job))
    if job.task == "prefill":
        each = job.q_heads // job.kv_heads
        k, v = (x.repeat_interleave(each, dim=1) for x in (k, v))

        def call() -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True)

        return Prepared(call, call()[0, :, -1].numpy())
    q = q.view(1, job.kv_heads, -1, job.head_dim)
    if job.case == "bf16 matmuls":
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))

        def call() -> torch.Tensor:
            scores = (q @ k.transpose(-1, -2)) * job.head_dim**-0.5
            return scores.softmax(-1) @ v
    else:

        def call() -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v)

    return Prepared(call, call().float().view(job.q_heads, job.head_dim).numpy())
