"""Every check of what a public function is given, and every message about it.

Each check returns the clean value or raises one sentence that names the argument, what was given
and what is allowed. Nothing is changed before all checks of a call have passed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcodec import _backend, reference
from kvcodec.reference._numbers import LARGEST_MAGNITUDE
from kvcodec.reference.fwht import PALEY_ORDERS, factor_order

LARGEST_HEAD_DIM = 1024
MOST_TOKENS = 2**40
LARGEST_GROUP = 4096


def choice(value: Any, name: str, allowed: Sequence[Any]) -> Any:
    """One of the allowed values (True is not taken for 1)."""
    if isinstance(value, np.str_):
        value = str(value)
    for candidate in allowed:
        if type(value) is type(candidate) and value == candidate:
            return candidate
    if isinstance(value, np.integer) and int(value) in allowed:
        return int(value)
    text = ", ".join(str(candidate) for candidate in allowed)
    raise ValueError(f"{name} must be one of {text}, but {value!r} was given.")


def integer(value: object, name: str, low: int, high: int | None = None) -> int:
    """A whole number in [low, high]."""
    if type(value) is int and value >= low and (high is None or value <= high):
        return value
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be a whole number {limit}, but {value!r} was given.")
    return int(value)


def boolean(value: object, name: str) -> bool:
    """True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, but {value!r} was given.")
    return bool(value)


def positive(value: Any, name: str) -> float:
    """A number from 2^-100 to 2^100."""
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    if not is_number or isinstance(value, bool) or not 2.0**-100 <= value <= 2.0**100:
        raise ValueError(f"{name} must be a number from 2^-100 to 2^100, but {value!r} was given.")
    return float(value)


def token_count(value: Any, name: str, low: int = 0) -> int:
    """A number of tokens, at most 2^40."""
    return integer(value, name, low, MOST_TOKENS)


def log_sum_exp(x: object, name: str) -> np.ndarray:
    """A float32 array of finite numbers and minus infinities."""
    array = as_array(x, name)
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be an array of floats, but has dtype {array.dtype}.")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        array = np.require(array, dtype=np.float32, requirements=["C", "A"])
    if np.isnan(array).any() or np.isposinf(array).any():
        raise ValueError(
            f"{name} must hold finite float32 numbers or minus infinity, but does not."
        )
    return array


def as_array(x: object, name: str, kind: str = "floats") -> np.ndarray:
    """What NumPy makes of x."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must be an array without a mask, but is a masked array.")
    try:
        return np.asarray(x)
    # Tensors that need a gradient raise a RuntimeError.
    except (ValueError, TypeError, RuntimeError) as error:
        message = f"{name} must be an array of {kind}, but is no array: {str(error).rstrip('.')}"
        if _is_tensor_of_other_floats(x):
            message += (
                f"; give {name}.float() of a tensor of {x.dtype}, or use KVCodecCache of "
                "kvcodec.integrations.transformers"
            )
        raise TypeError(f"{message}.") from None


def _is_tensor_of_other_floats(x: Any) -> bool:
    """Whether x is a tensor of torch with floats that NumPy does not have, such as bfloat16."""
    dtype = getattr(x, "dtype", None)
    if type(x).__module__.partition(".")[0] != "torch" or not dtype.is_floating_point:
        return False
    return not hasattr(np, str(dtype).removeprefix("torch."))


def _largest_magnitude(array: np.ndarray) -> float:
    """The largest magnitude, NaN if there is a NaN; the fast path takes one pass over the array."""
    try:
        kernels = _backend.resolve()
    except RuntimeError:  # a fast path that cannot be had is for the call itself to report
        kernels = reference
    return kernels.largest_magnitude_of(array)


def float_array(x: object, name: str, ndim: int | None = None) -> np.ndarray:
    """A C-contiguous float32 array of finite values below 2^100 in magnitude.

    Takes NumPy's float dtypes and bfloat16 of ml_dtypes, any strides, and whatever NumPy turns
    into such an array.
    """
    array = _contiguous_floats(x, name, ndim)
    magnitudes(array, name)
    return array


def _contiguous_floats(x: object, name: str, ndim: int | None) -> np.ndarray:
    array = as_array(x, name)
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be an array of floats, but has dtype {array.dtype}.")
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, but has shape {array.shape}.")
    if ndim is None and array.ndim == 0:
        raise ValueError(f"{name} must have at least 1 dimension, but is a scalar.")
    if array.dtype != np.float32 or not array.flags.c_contiguous or not array.flags.aligned:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            array = np.require(array, dtype=np.float32, requirements=["C", "A"])
    return array


def magnitudes(array: np.ndarray, name: str) -> None:
    """Raise unless all values of a float32 array are finite and below 2^100 in magnitude."""
    largest = _largest_magnitude(array) if array.size else 0.0
    if not largest < LARGEST_MAGNITUDE:
        given = "a NaN" if math.isnan(largest) else f"a magnitude of {largest:g}"
        raise ValueError(
            f"{name} must hold finite values below 2^100 (about 1.27e30) in magnitude, "
            f"but holds {given}."
        )


def kv_array(x: object, name: str) -> np.ndarray:
    """A clean array (batch, heads, tokens, head_dim) with a head_dim from 1 to 1024."""
    array = kv_shaped(x, name)
    magnitudes(array, name)
    return array


def kv_shaped(x: object, name: str) -> np.ndarray:
    """What `kv_array` returns, whatever its values."""
    array = _contiguous_floats(x, name, ndim=4)
    if not 1 <= array.shape[-1] <= LARGEST_HEAD_DIM:
        raise ValueError(
            f"{name} must have a last axis (head_dim) of 1 to {LARGEST_HEAD_DIM}, "
            f"but has shape {array.shape}."
        )
    if array.shape[0] == 0 or array.shape[1] == 0:
        raise ValueError(
            f"{name} must have a batch and at least one head, but has shape {array.shape}."
        )
    return array


def code_array(x: object, name: str, largest: int) -> np.ndarray:
    """A C-contiguous uint8 array of codes from 0 to `largest`."""
    array = as_array(x, name, "integers")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be an array of integers, but has dtype {array.dtype}.")
    if array.ndim == 0:
        raise ValueError(f"{name} must have at least 1 dimension, but is a scalar.")
    if array.size and (int(array.min()) < 0 or int(array.max()) > largest):
        raise ValueError(
            f"{name} must hold codes from 0 to {largest}, "
            f"but holds values from {array.min()} to {array.max()}."
        )
    return np.ascontiguousarray(array, dtype=np.uint8)


def level_array(x: object, name: str) -> np.ndarray:
    """A C-contiguous int8 array."""
    array = as_array(x, name, "int8")
    if array.dtype != np.int8:
        raise TypeError(f"{name} must be an array of int8, but has dtype {array.dtype}.")
    if array.ndim == 0:
        raise ValueError(f"{name} must have at least 1 dimension, but is a scalar.")
    return np.ascontiguousarray(array)


def shaped(array: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of exactly this shape."""
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, but has shape {array.shape}.")
    return array


def transform_order(n: int, name: str) -> int:
    """An order for which a Hadamard matrix is known here."""
    if factor_order(n) is None:
        raise ValueError(
            f"{name} must be m * 2^k with m in 1, {', '.join(map(str, PALEY_ORDERS))} "
            f"(a Hadamard matrix of that order), but {n} was given."
        )
    return n


def output_array(out: object, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A writable C-contiguous float32 array to put a result in."""
    if not isinstance(out, np.ndarray) or out.dtype != np.float32:
        given = getattr(out, "dtype", type(out).__name__)
        raise TypeError(f"{name} must be a float32 ndarray, but {given} was given.")
    shaped(out, name, shape)
    if not (out.flags.c_contiguous and out.flags.writeable and out.flags.aligned):
        raise ValueError(f"{name} must be C-contiguous, aligned and writable, but is not.")
    return out


def query_heads(q: np.ndarray, kv_shape: tuple[int, ...], name: str = "q") -> None:
    """Queries that fit keys of shape kv_shape: batch, a multiple of the KV heads, head_dim."""
    batch, kv_heads, _, head_dim = kv_shape
    if q.shape[0] != batch or q.shape[1] % kv_heads or q.shape[3] != head_dim:
        raise ValueError(
            f"{name} must have shape ({batch}, a multiple of {kv_heads}, q_len, {head_dim}) "
            f"for keys of shape ({batch}, {kv_heads}, tokens, {head_dim}), "
            f"but has shape {q.shape}."
        )
