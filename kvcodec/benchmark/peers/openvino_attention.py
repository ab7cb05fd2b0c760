"""OpenVINO: stateful scaled dot-product attention, its cache in u8, u4 or TurboQuant's 4 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcodec.benchmark.peers.cases import Job
from kvcodec.benchmark.peers.worker import Prepared, arguments

FOUR_BITS = {"KEY_CACHE_PRECISION": "u4", "VALUE_CACHE_PRECISION": "u4"}
CACHES = {
    "SDPA u8": {"KV_CACHE_PRECISION": "u8"},
    "SDPA u4": FOUR_BITS,
    "SDPA TURBO u4": FOUR_BITS | {"KEY_CACHE_QUANT_ALG": "TURBO", "VALUE_CACHE_QUANT_ALG": "TURBO"},
}


def prepare(job: Job) -> Prepared:
    """A query with one more token, so that the cache grows by one at each call."""
    import openvino

    compiled = openvino.Core().compile_model(
        _model(job),
        "CPU",
        {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": job.threads}
        | CACHES[job.case],
    )
    request = compiled.create_infer_request()
    q, k, v = arguments(job)
    beam = np.zeros(1, dtype=np.int32)
    past = [np.ascontiguousarray(x[:, :, :-1]) for x in (k, v)]
    newest = [np.ascontiguousarray(x[:, :, -1:]) for x in (k, v)]
    output = request.infer([q, *newest, beam, *past])[0].copy()
    none = [x[:, :, :0] for x in past]
    return Prepared(
        lambda: request.infer([q, *newest, beam, *none]), output.reshape(job.q_heads, job.head_dim)
    )


def _model(job: Job) -> Any:
    """Attention over a state that is read, extended and assigned."""
    import openvino
    from openvino import opset6, opset13

    floats, heads, dim = openvino.Type.f32, job.kv_heads, job.head_dim
    q = opset13.parameter([-1, job.q_heads, -1, dim], floats, name="q")
    new, first = (
        [opset13.parameter([-1, heads, -1, dim], floats, name=f"{name}_{side}") for side in "kv"]
        for name in ("new", "first")
    )
    beam = opset13.parameter([-1], openvino.Type.i32, name="beam")
    states, assigned = [], []
    for side, added, initial in zip("kv", new, first, strict=True):
        shape = openvino.PartialShape([-1, heads, -1, dim])
        past = opset6.read_value(initial, f"past_{side}", floats, shape)
        rows = opset13.gather(past, beam, opset13.constant(np.zeros(1, dtype=np.int32)))
        states.append(opset13.concat([rows, added], 2))
        assigned.append(opset6.assign(states[-1], f"past_{side}"))
    shared = [_repeated(state, job) for state in states]
    output = opset13.scaled_dot_product_attention(q, *shared, causal=False)
    result = opset13.result(opset13.add(output, opset13.constant(np.zeros(1, dtype=np.float32))))
    return openvino.Model([result], assigned, [q, *new, beam, *first], "attention")


def _repeated(x: Any, job: Job) -> Any:
    """Each KV head as often as query heads share it, in the form that the plugin recognizes."""
    from openvino import opset13

    each = job.q_heads // job.kv_heads
    if each == 1:
        return x
    x = opset13.unsqueeze(x, opset13.constant(np.int32(2)))
    x = opset13.multiply(x, opset13.constant(np.ones((1, 1, each, 1, 1), dtype=np.float32)))
    shape = np.array([0, job.q_heads, -1, job.head_dim], dtype=np.int32)
    return opset13.reshape(x, opset13.constant(shape), special_zero=True)
