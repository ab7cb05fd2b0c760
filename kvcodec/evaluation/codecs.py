"""The codecs that are compared, by name.

A name is a preset (``int4``), or the presets of keys and values (``lm4/lm2``), as they are in the
package. A word behind it says what is different: ``int4 unrotated``, ``kivi2 g128``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcodec.cache_options import check_block
from kvcodec.codec import PRESETS, Codec, codec

__all__ = [
    "DEFAULT_NAMES",
    "GREEDY_NAMES",
    "MODEL_NAMES",
    "NEEDLE_NAMES",
    "VARIANTS",
    "CodecPair",
    "codec_pair",
    "distinct_pairs",
]

HALF_PRECISION = "fp16"
EXACT: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16"}
"""Number types in which a cache keeps tokens without a codec, by name."""

NUMBER_TYPES: tuple[str, ...] = (HALF_PRECISION, *EXACT)
"""All names that stand for no codec."""

VARIANTS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "hadamard": ({"rotation": "hadamard"}, {}),
    "unrotated": ({"rotation": "none"}, {"center": False, "equalize": False}),
    "plain": ({}, {"center": False, "equalize": False}),
    "centered": ({}, {"center": True, "equalize": False}),
    "g128": ({"group_size": 128}, {}),
}
"""What each word changes: options of both sides, and options of the keys."""

DEFAULT_NAMES: tuple[str, ...] = (
    HALF_PRECISION,
    "int8",
    "int4 unrotated",
    "int4 plain",
    "int4 centered",
    "int4",
    "int3 plain",
    "int3",
    "int2 plain",
    "int2",
    "kivi4",
    "kivi4 g128",
    "kivi2",
    "kivi2 g128",
    "lm4/lm4 plain",
    "lm4/lm4",
    "lm4/lm3 plain",
    "lm4/lm3",
    "lm4/lm2 plain",
    "lm4/lm2",
    "lm3/lm3 plain",
    "lm3/lm3",
    "lm3/lm2 plain",
    "lm3/lm2",
    "lm2/lm2 plain",
    "lm2/lm2",
    "tcq4 plain",
    "tcq4",
    "tcq4/tcq3",
    "tcq4/tcq2",
    "tcq3 plain",
    "tcq3",
    "tcq3/tcq2",
    "tcq2 plain",
    "tcq2",
)
"""The names that are compared where none is chosen."""

MODEL_NAMES: tuple[str, ...] = (*EXACT, "int8", "int8 hadamard", *DEFAULT_NAMES[2:])
"""The names that are compared on a model where none is chosen."""

NEEDLE_NAMES: tuple[str, ...] = ("fp32", "int8", "int4", "lm4/lm2")
"""The names that are compared by retrieval where none is chosen."""

GREEDY_NAMES: tuple[str, ...] = ("int8", "int4")
"""The names that are compared by greedy decoding where none is chosen."""


@dataclass(frozen=True)
class CodecPair:
    """How keys and values are stored, under a name.

    Attributes
    ----------
    name : str
        The name in a table.
    key, value : Codec or None
        The codec of each side; None in both is a number type without a codec.
    exact_dtype : {"float32", "bfloat16"} or None
        The number type, if it is one that a cache keeps tokens in.
    exact_block : int, default 64
        Tokens that leave the exact window as one unit where there is no codec to say so.
    """

    name: str
    key: Codec | None
    value: Codec | None
    exact_dtype: str | None = None
    exact_block: int = Codec.block

    @property
    def block(self) -> int:
        """Tokens that leave the exact window as one unit."""
        return self.exact_block if self.key is None else self.key.block

    def check_head_dims(self, key_dim: int, value_dim: int) -> None:
        """Raise unless keys and values of so many channels can be encoded.

        Parameters
        ----------
        key_dim, value_dim : int
            Channels of a key and of a value.

        Raises
        ------
        ValueError
            If they cannot.
        """
        for side, head_dim, name in (
            (self.key, key_dim, "the head_dim of k"),
            (self.value, value_dim, "the head_dim of v"),
        ):
            if side is not None:
                side.check_head_dim(head_dim, name)

    def bits_per_value(self, key_dim: int, value_dim: int) -> float:
        """Bits that are stored for each number of keys and values, all metadata counted.

        Parameters
        ----------
        key_dim, value_dim : int
            Channels of a key and of a value.

        Returns
        -------
        float
            The mean over keys and values.

        Raises
        ------
        ValueError
            If such vectors cannot be encoded.

        Examples
        --------
        >>> from kvcodec.evaluation import codec_pair
        >>> codec_pair("lm4/lm2 plain").bits_per_value(64, 64)
        3.25
        """
        if self.key is None or self.value is None:
            return 32.0 if self.exact_dtype == "float32" else 16.0
        key_bits = self.key.bits_per_value(key_dim, "key") * key_dim
        value_bits = self.value.bits_per_value(value_dim, "value") * value_dim
        return (key_bits + value_bits) / (key_dim + value_dim)


def codec_pair(
    name: str, block: int | None = None, number_types: Sequence[str] = NUMBER_TYPES
) -> CodecPair:
    """The codecs that a name stands for.

    Parameters
    ----------
    name : str
        ``fp16``, ``fp32``, ``bf16``; or a preset, or two of keys and values such as ``lm4/lm2``,
        and optionally a word that says what is different: ``hadamard`` (this rotation),
        ``unrotated`` (not rotated, centered or equalized), ``plain`` (rotated, but not centered
        or equalized), ``centered`` (but not equalized), ``g128`` (groups of 128).
    block : int, optional
        Tokens that are packed at a time, by default those of the codec, 64.
    number_types : sequence of str
        Which of ``fp16``, ``fp32`` and ``bf16`` are allowed; by default all.

    Returns
    -------
    CodecPair
        With this name.

    Raises
    ------
    ValueError
        If it is no such name, the word does not apply to the preset or changes nothing, or such a
        block is not possible.

    Examples
    --------
    >>> from kvcodec.evaluation import codec_pair
    >>> codec_pair("int4 unrotated").key
    codec('int4', rotation='none', side='key', center=False, equalize=False)
    """
    presets, _, variant = " ".join(name.split()).partition(" ")
    if presets in number_types and not variant:
        exact_block = Codec.block if block is None else check_block(block)
        return CodecPair(presets, None, None, EXACT.get(presets), exact_block)
    sides = presets.split("/")
    if len(sides) > 2 or not set(sides) <= set(PRESETS) or variant not in ("", *VARIANTS):
        raise ValueError(
            f"codec must be {''.join(f'{each}, ' for each in number_types)}one of "
            f"{', '.join(PRESETS)}, or two of them as lm4/lm2, and may end in "
            f"{', '.join(VARIANTS)}, but {name!r} was given."
        )
    try:
        key, value = _sides(sides, variant, block)
    except ValueError as error:
        raise ValueError(f"codec {name!r} is not possible: {error}") from None
    if variant and _settled(key, value) == _settled(*_sides(sides, "", block)):
        raise ValueError(f"codec {name!r} is the same as {presets!r}: leave out {variant!r}.")
    return CodecPair(f"{presets} {variant}".strip(), key, value)


def distinct_pairs(pairs: Iterable[CodecPair]) -> list[CodecPair]:
    """The pairs without those that only have another name for what an earlier one is.

    Parameters
    ----------
    pairs : iterable of CodecPair
        Pairs.

    Returns
    -------
    list of CodecPair
        The first of each kind.

    Examples
    --------
    >>> from kvcodec.evaluation.codecs import codec_pair, distinct_pairs
    >>> [pair.name for pair in distinct_pairs(map(codec_pair, ["lm4", "int4", "lm4/lm4"]))]
    ['lm4', 'int4']
    """
    found: dict[tuple[Codec | None, Codec | None, str | None], CodecPair] = {}
    for pair in pairs:
        found.setdefault((pair.key, pair.value, pair.exact_dtype), pair)
    return list(found.values())


def _sides(presets: list[str], variant: str, block: int | None) -> tuple[Codec, Codec]:
    """The codecs of keys and values of one or two presets, changed as the variant says."""
    shared, of_keys = VARIANTS[variant] if variant else ({}, {})
    if block is not None:
        shared = {**shared, "block": block}
    key = codec(presets[0], side="key", **shared, **of_keys)
    return key, codec(presets[-1], side="value", **shared)


def _settled(key: Codec, value: Codec) -> tuple[Codec, Codec]:
    return key.for_side("key"), value.for_side("value")
