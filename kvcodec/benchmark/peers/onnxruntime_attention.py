"""ONNX Runtime: GroupQueryAttention over a cache in 8 or 4 bits, a scale a channel."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcodec.benchmark.peers.cases import Job
from kvcodec.benchmark.peers.worker import Prepared, arguments

# The operator's inputs; those that are left empty are for rotary embedding, masks and sinks.
INPUTS = ("q", "k", "v", "past_k", "past_v", "last", "total")
SCALES = ("", "", "", "", "", "k_scale", "v_scale")
BITS = {"GQA int8": 8, "GQA int4": 4}


def prepare(job: Job) -> Prepared:
    """A query of the newest token; past and present are the same memory."""
    import onnxruntime

    bits = BITS[job.case]
    q, k, v = arguments(job)
    newest = {"q": q.reshape(1, 1, -1), "k": k[:, :, -1].reshape(1, 1, -1)}
    newest["v"] = v[:, :, -1].reshape(1, 1, -1)
    past_k, k_scale = _quantized(k, bits)
    past_v, v_scale = _quantized(v, bits)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        _model(job, bits), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    fed = newest | {
        "last": np.array([job.tokens - 1], dtype=np.int32),
        "total": np.array([job.tokens], dtype=np.int32),
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    for name, x in fed.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(x))
    for side, past in (("k", past_k), ("v", past_v)):
        memory = onnxruntime.OrtValue.ortvalue_from_numpy(past)
        binding.bind_ortvalue_input(f"past_{side}", memory)
        binding.bind_ortvalue_output(f"present_{side}", memory)
    binding.bind_output("output")
    session.run_with_iobinding(binding)
    outputs = dict(zip(["present_k", "present_v", "output"], binding.get_outputs(), strict=True))
    output = outputs["output"].numpy().reshape(job.q_heads, job.head_dim)
    return Prepared(lambda: session.run_with_iobinding(binding), output)


def _quantized(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric codes and the scales of the channels of each head."""
    largest = 2 ** (bits - 1) - 1
    scale = np.abs(x).max(axis=2, keepdims=True) / np.float32(largest)
    codes = np.clip(np.rint(x / scale), -largest, largest).astype(np.int8)
    if bits == 4:
        nibbles = (codes + 8).view(np.uint8)
        codes = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return np.ascontiguousarray(codes), scale


def _model(job: Job, bits: int) -> bytes:
    """A model of the one operator."""
    from onnx import TensorProto, helper

    floats, integers = TensorProto.FLOAT, TensorProto.INT32
    packed = TensorProto.INT8 if bits == 8 else TensorProto.UINT8
    past = [1, job.kv_heads, "tokens", job.head_dim * bits // 8]
    scale = [1, job.kv_heads, 1, job.head_dim]
    shapes: dict[str, tuple[int, list[Any]]] = {
        "q": (floats, [1, 1, job.q_heads * job.head_dim]),
        **dict.fromkeys("kv", (floats, [1, 1, job.kv_heads * job.head_dim])),
        **dict.fromkeys(("past_k", "past_v"), (packed, past)),
        **dict.fromkeys(("last", "total"), (integers, [1])),
        **dict.fromkeys(("k_scale", "v_scale"), (floats, scale)),
    }
    node = helper.make_node(
        "GroupQueryAttention",
        [*INPUTS, *SCALES],
        ["output", "present_k", "present_v"],
        domain="com.microsoft",
        num_heads=job.q_heads,
        kv_num_heads=job.kv_heads,
        k_quant_type="PER_CHANNEL",
        v_quant_type="PER_CHANNEL",
        kv_cache_bit_width=bits,
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, *about) for name, about in shapes.items()],
        [
            helper.make_tensor_value_info("output", floats, None),
            helper.make_tensor_value_info("present_k", packed, None),
            helper.make_tensor_value_info("present_v", packed, None),
        ],
    )
    sets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=sets)
    model.ir_version = 10
    return bytes(model.SerializeToString())
