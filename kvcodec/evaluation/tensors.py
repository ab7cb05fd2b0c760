"""Queries, keys and values to evaluate on: the shipped sample, or a file of the user's own."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcodec import _validate
from kvcodec.attention import query_positions
from kvcodec.data import load_sample

__all__ = ["Tensors", "load_tensors", "sample_tensors"]

REQUIRED = ("q", "k", "v")
OPTIONAL = "positions"


# Arrays have no single truth value, so a generated __eq__ would only raise.
@dataclass(frozen=True, eq=False)
class Tensors:
    """What attention was given in some layers of a model, each layer a problem of its own.

    Attributes
    ----------
    q : ndarray of float32, shape (layers, q_heads, q_len, head_dim)
        Queries, after the rotary embedding.
    k : ndarray of float32, shape (layers, kv_heads, tokens, head_dim)
        Keys, after the rotary embedding.
    v : ndarray of float32, shape (layers, kv_heads, tokens, value head_dim)
        Values.
    positions : ndarray of int64, shape (q_len,)
        The token that each query belongs to; None stands for the newest tokens.
    source : str
        Where they come from.
    """

    q: NDArray[np.float32] = field(repr=False)
    k: NDArray[np.float32] = field(repr=False)
    v: NDArray[np.float32] = field(repr=False)
    positions: NDArray[np.int64] | None = field(repr=False)
    source: str

    def __post_init__(self) -> None:
        for name in REQUIRED:
            object.__setattr__(self, name, _validate.kv_array(getattr(self, name), name))
        _validate.query_heads(self.q, self.k.shape)
        if self.k.shape[:3] != self.v.shape[:3]:
            raise ValueError(
                f"v must have the layers, heads and tokens of k, {self.k.shape[:3]}, "
                f"but has {self.v.shape[:3]}."
            )
        q_len, tokens = self.q.shape[2], self.k.shape[2]
        if self.positions is not None and np.ndim(self.positions) != 1:
            raise ValueError(
                f"positions must have shape ({q_len},), but have shape {np.shape(self.positions)}."
            )
        positions = query_positions(self.positions, 1, q_len, tokens)[0]
        object.__setattr__(self, "positions", positions)


def sample_tensors() -> Tensors:
    """The sample that is shipped with the package.

    Returns
    -------
    Tensors
        See `kvcodec.load_sample`.

    Examples
    --------
    >>> from kvcodec.evaluation import sample_tensors
    >>> sample_tensors().q.shape
    (4, 9, 192, 64)
    """
    sample = load_sample()
    return Tensors(
        q=sample.q,
        k=sample.k,
        v=sample.v,
        positions=sample.positions.astype(np.int64),
        source=f"sample of {sample.provenance['model']}",
    )


def load_tensors(path: str | os.PathLike[str]) -> Tensors:
    """Queries, keys and values from an npz file.

    Parameters
    ----------
    path : str or path
        A file of `numpy.savez` with the arrays ``q``, ``k``, ``v`` of the shapes of `Tensors`, or
        without the axis of the layers, and optionally ``positions``, integers of shape (q_len,).
        Without positions the queries are the newest tokens. Nothing in it is unpickled.

    Returns
    -------
    Tensors
        Checked: finite values, shapes that fit together.

    Raises
    ------
    ValueError
        If the file cannot be read or is no npz file, or an array is missing, has the wrong shape or
        dtype, or holds a value that is not finite.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from kvcodec.evaluation import load_tensors
    >>> q, k, v = np.ones((2, 8, 1, 64)), np.ones((2, 2, 500, 64)), np.ones((2, 2, 500, 64))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "tensors.npz")
    ...     np.savez(path, q=q, k=k, v=v)
    ...     load_tensors(path).positions
    array([499])
    """
    arrays = _read_arrays(path)
    try:
        q, k, v = (_layers(arrays[name], name) for name in REQUIRED)
        return Tensors(q, k, v, arrays.get(OPTIONAL), os.fspath(path))
    except (ValueError, TypeError) as error:
        raise ValueError(f"tensors file {path}: {error}") from None


def _layers(array: NDArray[np.floating], name: str) -> NDArray[np.float32]:
    """A clean array with an axis of layers."""
    if array.ndim not in (3, 4):
        raise ValueError(
            f"{name} must have shape (layers, heads, tokens, head_dim) or "
            f"(heads, tokens, head_dim), but has shape {array.shape}."
        )
    return _validate.kv_array(array if array.ndim == 4 else array[None], name)


def _read_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray]:
    """The arrays q, k, v and, where it is there, positions of an npz file."""
    try:
        with open(path, "rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise ValueError("it is no npz file, or is cut short")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as archive:
                return _read_members(archive)
    except OSError as error:
        raise ValueError(
            f"tensors file {path} cannot be read: {error.strerror or error}."
        ) from None
    except MemoryError:
        raise ValueError(
            f"tensors file {path} cannot be read: an array does not fit in memory."
        ) from None
    except Exception as error:  # a damaged file makes NumPy and zipfile raise almost anything
        reason = " ".join(str(error).split()).rstrip(".") or "it is damaged"
        raise ValueError(f"tensors file {path} cannot be read: {reason}.") from None


def _read_members(archive: np.lib.npyio.NpzFile) -> dict[str, NDArray]:
    missing = [name for name in REQUIRED if name not in archive.files]
    if missing:
        there = ", ".join(archive.files) or "nothing"
        raise ValueError(
            f"it must hold q, k and v, but {', '.join(missing)} is missing; it holds {there}"
        )
    arrays = {name: archive[name] for name in (*REQUIRED, OPTIONAL) if name in archive.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{name} is no array")
    return arrays
