"""Hypothesis strategies and checks that hold code to the reference, bit for bit.

For the tests of this package, and for those of an engine that reproduces its algorithms. Needs
hypothesis: ``pip install kvcodec-cpu[test]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcodec._backend import available_simd_levels, config_context, resolve
from kvcodec.codebook import HEAD_DIMS
from kvcodec.codec import PRESETS, ROTATIONS, SIDES, Codec, codec
from kvcodec.quantize import LLOYD_MAX_SCALE_RULES, SCALE_DTYPES
from kvcodec.reference.fwht import factor_order

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "kvcodec.testing needs hypothesis, which the extra 'test' installs: "
        "pip install kvcodec-cpu[test]"
    ) from error

__all__ = [
    "KINDS",
    "ORDINARY_KINDS",
    "TILE_SIZES",
    "Backend",
    "arrays",
    "assert_equivalent",
    "assert_same_bits",
    "assert_within_twice",
    "backends",
    "codecs",
    "exact_attention",
    "kv_arrays",
    "orders",
    "sizes",
    "twin",
]

TILE_SIZES: tuple[int, ...] = (0, 1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129)
"""Sizes on, just below and just above the tiles of the kernels, and some far from any."""

_LARGEST = np.float32(1.26e30)


def _ordinary(x: NDArray, rng: np.random.Generator) -> NDArray:
    return x


def _outlier_channels(x: NDArray, rng: np.random.Generator) -> NDArray:
    channels = rng.integers(0, x.shape[-1], size=2)
    x[..., channels] += rng.choice(np.float32([20, -12, 50]), size=2)
    return x


def _constant_channels(x: NDArray, rng: np.random.Generator) -> NDArray:
    channels = rng.random(x.shape[-1]) < 0.5
    x[..., channels] = rng.standard_normal(channels.sum(), dtype=np.float32)
    return x


def _zero_vectors(x: NDArray, rng: np.random.Generator) -> NDArray:
    x[rng.random(x.shape[:-1]) < 0.5] = 0
    x[rng.random(x.shape) < 0.1] = -0.0
    return x


def _ties(x: NDArray, rng: np.random.Generator) -> NDArray:
    return (rng.integers(-14, 15, size=x.shape) / 2).astype(np.float32)


def _huge(x: NDArray, rng: np.random.Generator) -> NDArray:
    return x * np.float32(1e30)


def _tiny(x: NDArray, rng: np.random.Generator) -> NDArray:
    return x * np.float32(1e-30)


def _mixed_magnitudes(x: NDArray, rng: np.random.Generator) -> NDArray:
    exponents = rng.uniform(-30, 30, size=(*x.shape[:-1], 1))
    return x * (10.0**exponents).astype(np.float32)


_MAKERS: dict[str, Callable[[NDArray, np.random.Generator], NDArray]] = {
    "normal": _ordinary,
    "outlier_channels": _outlier_channels,
    "constant_channels": _constant_channels,
    "zero_vectors": _zero_vectors,
    "ties": _ties,
    "huge": _huge,
    "tiny": _tiny,
    "mixed_magnitudes": _mixed_magnitudes,
}

KINDS: tuple[str, ...] = tuple(_MAKERS)
"""What `arrays` can be filled with."""

ORDINARY_KINDS: tuple[str, ...] = KINDS[:5]
"""Those kinds of which no value is huge or tiny."""


def sizes(min_size: int = 0, max_size: int = 129) -> st.SearchStrategy[int]:
    """Sizes around the tiles of the kernels.

    Parameters
    ----------
    min_size, max_size : int
        Limits of what is drawn from `TILE_SIZES`.

    Returns
    -------
    hypothesis strategy for int
        The smallest size first.

    Examples
    --------
    >>> from hypothesis import given
    >>> from kvcodec.testing import sizes
    >>> @given(sizes(max_size=33))
    ... def check(n):
    ...     assert n <= 33
    >>> check()
    """
    return st.sampled_from([n for n in TILE_SIZES if min_size <= n <= max_size])


def orders(max_order: int = 1024) -> st.SearchStrategy[int]:
    """Orders of the Hadamard transforms.

    Parameters
    ----------
    max_order : int, default 1024
        The largest to draw.

    Returns
    -------
    hypothesis strategy for int
        Numbers m * 2^k that `kvcodec.fwht` takes.

    Examples
    --------
    >>> from hypothesis import given
    >>> import kvcodec as kv
    >>> @given(orders(64))
    ... def check(n):
    ...     assert kv.hadamard_matrix(n).shape == (n, n)
    >>> check()
    """
    return st.sampled_from([n for n in range(1, max_order + 1) if factor_order(n)])


@st.composite
def arrays(
    draw: st.DrawFn,
    shape: tuple[int, ...] | st.SearchStrategy[tuple[int, ...]],
    kinds: Sequence[str] = KINDS,
) -> NDArray[np.float32]:
    """Arrays of vectors along the last axis that are hard on a quantizer.

    The numbers come from a seeded generator, so that large arrays are drawn quickly; what shrinks
    is the shape and the kind.

    Parameters
    ----------
    shape : tuple of int, or strategy for it
        Shape of the array.
    kinds : sequence of str, default `KINDS`
        "normal"; "outlier_channels", some with a mean of many standard deviations;
        "constant_channels"; "zero_vectors", with zeros of both signs; "ties", multiples of 1/2;
        "huge", up to 1.26e30; "tiny", around 1e-30; "mixed_magnitudes", each vector with its own.

    Returns
    -------
    hypothesis strategy for ndarray of float32
        Finite arrays that every function of the package takes.

    Examples
    --------
    >>> import numpy as np
    >>> from hypothesis import given
    >>> from kvcodec.testing import arrays
    >>> @given(arrays((3, 64)))
    ... def check(x):
    ...     assert x.shape == (3, 64) and np.isfinite(x).all()
    >>> check()
    """
    if isinstance(shape, st.SearchStrategy):
        shape = draw(shape)
    kind = draw(st.sampled_from(kinds))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal(shape, dtype=np.float32)
    if x.size:
        x = _MAKERS[kind](x, rng)
    return np.clip(x, -_LARGEST, _LARGEST)


def kv_arrays(
    *,
    batch: Iterable[int] = (1, 2),
    heads: Iterable[int] = (1, 2, 3),
    tokens: Iterable[int] = TILE_SIZES,
    head_dim: Iterable[int] = TILE_SIZES[1:],
    kinds: Sequence[str] = KINDS,
) -> st.SearchStrategy[NDArray[np.float32]]:
    """Arrays of the shape of keys and values.

    Parameters
    ----------
    batch, heads, tokens, head_dim : iterable of int
        The sizes to draw from.
    kinds : sequence of str, default `KINDS`
        As in `arrays`.

    Returns
    -------
    hypothesis strategy for ndarray of float32, shape (batch, heads, tokens, head_dim)
        Keys, values or queries.

    Examples
    --------
    >>> from hypothesis import given
    >>> import kvcodec as kv
    >>> @given(kv_arrays(head_dim=[64], tokens=[1, 65]))
    ... def check(k):
    ...     assert kv.codec("lm4").encode(k, side="key").shape == k.shape
    >>> check()
    """
    shape = st.tuples(*(st.sampled_from(tuple(axis)) for axis in (batch, heads, tokens, head_dim)))
    return arrays(shape, kinds)


@st.composite
def codecs(draw: st.DrawFn, side: str | None = None, head_dim: int = 64) -> Codec:
    """Codecs with options changed from every preset, for one side.

    Parameters
    ----------
    side : {"key", "value"}, optional
        Which side; by default either.
    head_dim : int, default 64
        Channels that the codec has to take.

    Returns
    -------
    hypothesis strategy for Codec
        With `side`, `center` and `equalize` settled.

    Examples
    --------
    >>> from hypothesis import given
    >>> from kvcodec.testing import codecs
    >>> @given(codecs("value", head_dim=7))
    ... def check(codec):
    ...     assert codec.rotation == "none" and not codec.center
    >>> check()
    """
    names = [
        name
        for name, preset in PRESETS.items()
        if preset["code"] not in ("lloyd_max", "trellis") or head_dim in HEAD_DIMS
    ]
    name = draw(st.sampled_from(names))
    side = draw(st.sampled_from(SIDES)) if side is None else side
    options: dict[str, Any] = {
        "side": side,
        "scale_dtype": draw(st.sampled_from(SCALE_DTYPES)),
        "rotation": draw(st.sampled_from(ROTATIONS)) if factor_order(head_dim) else "none",
        "block": draw(st.sampled_from((1, 16, 60, 64))),
    }
    code, bits = PRESETS[name]["code"], PRESETS[name]["bits"]
    if options["rotation"] == "srht":
        options["seed"] = draw(st.integers(0, 2**64 - 1))
    if code == "asymmetric":
        options["group_size"] = draw(st.sampled_from((1, 5, 32, 128)))
        options["block"] = options["group_size"] * draw(st.sampled_from((1, 3)))
    elif side == "key":
        options["center"] = options["block"] > 1 and draw(st.booleans())
        options["equalize"] = draw(st.booleans())
    if code in ("lloyd_max", "trellis"):
        options["scale_rule"] = draw(st.sampled_from(LLOYD_MAX_SCALE_RULES))
    if bits == 3 and code != "trellis":
        options["layout"] = draw(st.sampled_from(("dense", "padded")))
    return codec(name, **options).for_side(side)


class Backend(NamedTuple):
    """One way to run a call.

    Attributes
    ----------
    label : str
        A name for messages and test ids.
    backend : {"reference", "fast"}
        Which twin runs.
    simd : {"baseline", "avx2", "avxvnni", "avx512", "amx"} or None
        SIMD level of the fast path.
    num_threads : int or None
        Threads of the fast path.
    """

    label: str
    backend: str
    simd: str | None = None
    num_threads: int | None = None

    def context(self) -> AbstractContextManager[None]:
        """The `kvcodec.config_context` that makes calls run this way.

        Returns
        -------
        context manager
            For a ``with`` block.
        """
        return config_context(backend=self.backend, simd=self.simd, num_threads=self.num_threads)


def backends(threads: Iterable[int] = (1, 2)) -> list[Backend]:
    """The reference, and every SIMD level that is available here with each number of threads.

    Parameters
    ----------
    threads : iterable of int, default (1, 2)
        Numbers of threads.

    Returns
    -------
    list of Backend
        The reference first; it alone where the fast path is not installed.

    Examples
    --------
    >>> from kvcodec.testing import backends
    >>> backends()[0].label
    'reference'
    """
    threads = tuple(threads)
    return [
        Backend("reference", "reference"),
        *(
            Backend(f"{level}-{count}", "fast", level, count)
            for level in available_simd_levels()
            for count in threads
        ),
    ]


def twin(name: str) -> Callable[..., Any]:
    """A function of `kvcodec.reference.__all__`, or its twin on the backend of the moment.

    Parameters
    ----------
    name : str
        The name that both have.

    Returns
    -------
    callable
        It is looked up at each call, so that `assert_equivalent` can run it everywhere.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcodec.testing import assert_equivalent, twin
    >>> assert_equivalent(twin("block_means"), np.ones((1, 4, 2), np.float32), 4)
    array([[[1., 1.]]], dtype=float32)
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(resolve(), name)(*args, **kwargs)

    call.__name__ = name
    return call


def assert_same_bits(actual: Any, expected: Any, name: str = "result") -> None:
    """Fail unless two results agree in type, dtype, shape and every bit.

    Parameters
    ----------
    actual, expected : ndarray, Encoded, None, or tuple, list or dict of such
        The results; other objects are compared with ``==``.
    name : str, default "result"
        What the message calls them.

    Raises
    ------
    AssertionError
        If they differ; the message names the first entry that does.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcodec.testing import assert_same_bits
    >>> assert_same_bits(np.float32([0.0]), np.float32([-0.0]))
    Traceback (most recent call last):
        ...
    AssertionError: result[0] is 0.0 but must be -0.0 (1 of 1 entries differ)
    """
    if type(actual) is not type(expected):
        raise AssertionError(
            f"{name} is of type {type(actual).__name__} but must be {type(expected).__name__}"
        )
    if isinstance(expected, (np.ndarray, np.generic)):
        _assert_same_array(np.asarray(actual), np.asarray(expected), name)
    elif isinstance(expected, (tuple, list)):
        if len(actual) != len(expected):
            raise AssertionError(f"{name} has {len(actual)} parts but must have {len(expected)}")
        for i, (part, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(part, other, f"{name}[{i}]")
    elif isinstance(expected, dict):
        assert_same_bits(list(actual), list(expected), f"the keys of {name}")
        for key in expected:
            assert_same_bits(actual[key], expected[key], f"{name}[{key!r}]")
    elif is_dataclass(expected) and not isinstance(expected, Codec):
        for field in fields(expected):
            part, other = getattr(actual, field.name), getattr(expected, field.name)
            assert_same_bits(part, other, f"{name}.{field.name}")
    elif actual != expected:
        raise AssertionError(f"{name} is {actual!r} but must be {expected!r}")


def _assert_same_array(actual: NDArray, expected: NDArray, name: str) -> None:
    for what in ("dtype", "shape"):
        given, wanted = getattr(actual, what), getattr(expected, what)
        if given != wanted:
            raise AssertionError(f"{name} has {what} {given} but must have {wanted}")
    raw = [
        np.frombuffer(x.tobytes(), np.uint8).reshape(*x.shape, x.itemsize)
        for x in (actual, expected)
    ]
    different = (raw[0] != raw[1]).any(axis=-1)
    if different.any():
        index = tuple(int(i) for i in np.argwhere(different)[0])
        where = ", ".join(map(str, index))
        raise AssertionError(
            f"{name}[{where}] is {actual[index]} but must be {expected[index]} "
            f"({different.sum()} of {different.size} entries differ)"
        )


def assert_equivalent(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a call on every backend and fail unless each gives the bits that the reference gives.

    Parameters
    ----------
    function : callable
        A function of this package, or one that calls some; it must not change its arguments.
    *args, **kwargs
        Its arguments.

    Returns
    -------
    object
        What the reference returned; None if it raised.

    Raises
    ------
    AssertionError
        If a result differs in dtype, shape or a bit, or an exception in type or message. The
        backend is named.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> from kvcodec.testing import assert_equivalent
    >>> assert_equivalent(kv.pack, np.array([1, 2, 3, 0]), bits=2)
    array([57], dtype=uint8)
    """
    reference, *fast = backends()
    expected = _outcome(reference, function, args, kwargs)
    for backend in fast:
        actual = _outcome(backend, function, args, kwargs)
        if isinstance(actual, Exception) and not isinstance(expected, Exception):
            raise AssertionError(f"{backend.label} raised an exception") from actual
        if isinstance(expected, Exception):
            if type(actual) is not type(expected) or str(actual) != str(expected):
                raise AssertionError(
                    f"{backend.label} gave {actual!r} but the reference raised {expected!r}"
                )
        else:
            assert_same_bits(actual, expected, f"{backend.label}: result")
    return None if isinstance(expected, Exception) else expected


def _outcome(
    backend: Backend, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with backend.context():
        try:
            return function(*args, **kwargs)
        except Exception as error:
            return error


def assert_within_twice(
    fast: ArrayLike, reference: ArrayLike, truth: ArrayLike, atol: float, name: str = "result"
) -> None:
    """Fail unless err(fast, truth) <= 2 * err(reference, truth) + atol.

    The error is the largest absolute difference; equal infinities differ by 0.

    Parameters
    ----------
    fast, reference : array_like
        Two float32 results.
    truth : array_like
        The same in float64.
    atol : float
        What is allowed where the reference happens to be exact.
    name : str, default "result"
        What the message calls it.

    Raises
    ------
    AssertionError
        If the error is larger, a shape differs, or an entry is NaN.

    References
    ----------
    The rule of https://github.com/Dao-AILab/fast-hadamard-transform.

    Examples
    --------
    >>> from kvcodec.testing import assert_within_twice
    >>> assert_within_twice([1.001], [1.0005], [1.0], atol=1e-6)
    >>> assert_within_twice([1.01], [1.0005], [1.0], atol=1e-6)
    Traceback (most recent call last):
        ...
    AssertionError: result has error 0.01, but may have 0.001001: twice that of the reference...
    """
    error, allowed = _error(fast, truth, name), 2 * _error(reference, truth, name) + atol
    if not error <= allowed:
        raise AssertionError(
            f"{name} has error {error:.4g}, but may have {allowed:.4g}: twice that of the "
            f"reference and {atol:.4g}"
        )


def _error(x: ArrayLike, truth: ArrayLike, name: str) -> float:
    x, truth = np.asarray(x, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    if x.shape != truth.shape:
        raise AssertionError(f"{name} has shape {x.shape} but must have {truth.shape}")
    with np.errstate(invalid="ignore"):
        return float(np.where(x == truth, 0.0, np.abs(x - truth)).max(initial=0))


def exact_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    visible: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Softmax attention in float64: the truth that both twins are measured against.

    Parameters
    ----------
    q : array_like of float, shape (batch, q_heads, q_len, head_dim)
        Queries.
    k, v : array_like of float, shape (batch, kv_heads, tokens, head_dim)
        Keys and values; the values may have another head_dim.
    visible : array_like of bool, broadcastable to (batch, q_len, tokens), optional
        Which tokens each query sees; by default all.
    scale : float, optional
        Factor of q . k; by default 1 / sqrt(head_dim).
    softcap : float, optional
        Scores s become ``softcap * tanh(s / softcap)``.

    Returns
    -------
    output : ndarray of float64, shape (batch, q_heads, q_len, value head_dim)
        The weighted mean of the values; 0 for a query that sees nothing.
    log_sum_exp : ndarray of float64, shape (batch, q_heads, q_len)
        Of the visible scores; minus infinity for a query that sees nothing.

    References
    ----------
    A. Vaswani et al., arXiv:1706.03762, equation 1.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcodec.testing import exact_attention
    >>> k = np.zeros((1, 1, 2, 4))
    >>> v = np.array([1.0, 3.0]).reshape(1, 1, 2, 1)
    >>> float(exact_attention(np.ones((1, 1, 1, 4)), k, v)[0][0, 0, 0, 0])
    2.0
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    batch, q_heads, q_len, head_dim = q.shape
    k, v = (x.repeat(q_heads // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("bhqd,bhtd->bhqt", q, k) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    if visible is not None:
        seen = np.broadcast_to(visible, (batch, q_len, k.shape[2]))
        s = np.where(seen[:, None], s, -np.inf)
    largest = s.max(axis=-1, initial=-np.inf, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0)
    p = np.exp(s - largest)
    total = p.sum(axis=-1, keepdims=True)
    output = np.einsum("bhqt,bhtd->bhqd", p, v) / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        return output, (largest + np.log(total))[..., 0]
