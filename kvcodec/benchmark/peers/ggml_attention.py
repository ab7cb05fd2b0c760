"""ggml's flash_attn_ext, in the shared libraries of llama.cpp or ik_llama.cpp."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvcodec.benchmark.peers.cases import Job
from kvcodec.benchmark.peers.worker import Prepared, arguments

TYPES = {"FA f16": 1, "FA q4_0": 2, "FA q8_0": 8}
FLOATS, HALVES = 0, 1
MASK_ROWS = 64  # as many as ggml pads to
# Each call takes its working memory from the context, which cannot give it back.
WORK_BYTES = 2**30

Pointer = ctypes.c_void_p
Dims = (ctypes.c_int64,) * 4


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class Library:
    """The functions of ggml, wherever they are."""

    def __init__(self, path: str | None) -> None:
        self._parts = [ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL) for part in _files(path)]

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        """A function by its name."""
        for part in self._parts:
            if hasattr(part, name):
                found = getattr(part, name)
                found.restype, found.argtypes = result, arguments
                return found
        raise ValueError(f"the library has no function {name}")


def _files(path: str | None) -> Sequence[Path]:
    """The shared libraries, those first that others need."""
    if path is None:
        spec = importlib.util.find_spec("llama_cpp")
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent / "lib"
    elif Path(path).is_file():
        return [Path(path)]
    else:
        folder = Path(path)
    names = ("libggml-base.so", "libggml-cpu.so", "libggml.so")
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise ValueError(f"there is no libggml.so in {folder}")
    return found


def prepare(job: Job) -> Prepared:
    """A query over keys and values of one of ggml's types."""
    ggml = Library(job.library)
    _set_up_processor(ggml)
    new_tensor = ggml.function("ggml_new_tensor_4d", Pointer, Pointer, ctypes.c_int, *Dims)
    data = ggml.function("ggml_get_data", Pointer, Pointer)
    q, k, v = arguments(job)
    room = InitParams(2 * k.nbytes + WORK_BYTES, None, False)
    context = ggml.function("ggml_init", Pointer, InitParams)(room)
    kind = TYPES[job.case]
    dims = job.head_dim, job.tokens, job.kv_heads, 1
    query = new_tensor(context, FLOATS, job.head_dim, 1, job.q_heads, 1)
    ctypes.memmove(data(query), q.ctypes.data, q.nbytes)
    sides = []
    for x in (k, v):
        sides.append(new_tensor(context, kind, *dims))
        _fill(ggml, data(sides[-1]), x, kind)
    attend = ggml.function("ggml_flash_attn_ext", Pointer, *(Pointer,) * 5, *(ctypes.c_float,) * 3)
    # A mask that hides nothing: some kernels for shared KV heads are only chosen with a mask.
    mask = new_tensor(context, HALVES, job.tokens, MASK_ROWS, 1, 1)
    ctypes.memset(data(mask), 0, 2 * job.tokens * MASK_ROWS)
    output = attend(context, query, *sides, mask, job.head_dim**-0.5, 0.0, 0.0)
    graph = ggml.function("ggml_new_graph", Pointer, Pointer)(context)
    ggml.function("ggml_build_forward_expand", None, Pointer, Pointer)(graph, output)
    compute = ggml.function(
        "ggml_graph_compute_with_ctx", ctypes.c_int, Pointer, Pointer, ctypes.c_int
    )
    compute(context, graph, job.threads)
    numbers = ctypes.cast(data(output), ctypes.POINTER(ctypes.c_float))
    result = np.ctypeslib.as_array(numbers, (job.q_heads, job.head_dim)).copy()
    return Prepared(lambda: compute(context, graph, job.threads), result)


def _set_up_processor(ggml: Library) -> None:
    """What newer versions want to be called before anything else."""
    try:
        set_up = ggml.function("ggml_cpu_init", None)
    except ValueError:
        return
    set_up()


def _fill(ggml: Library, target: int, x: np.ndarray, kind: int) -> None:
    """Write floats in one of ggml's types."""
    if kind == HALVES:
        halves = x.astype(np.float16)
        ctypes.memmove(target, halves.ctypes.data, halves.nbytes)
        return
    sizes, more = (ctypes.c_int64,) * 3, (Pointer,) * 2  # the last one is of ik_llama.cpp only
    quantize = ggml.function(
        "ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, Pointer, Pointer, *sizes, *more
    )
    rows = x.size // x.shape[-1]
    quantize(kind, x.ctypes.data, target, 0, rows, x.shape[-1], None, None)
