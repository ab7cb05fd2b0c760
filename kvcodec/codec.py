"""Codec: what happens to one side of a cache, keys or values; presets by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcodec import _backend, _validate
from kvcodec.codebook import Codebook, codebook
from kvcodec.encoded import Encoded
from kvcodec.packing import check_layout
from kvcodec.quantize import ASYMMETRIC_BITS, LLOYD_MAX_SCALE_RULES, SCALE_DTYPES
from kvcodec.reference.center import center_tokens
from kvcodec.reference.equalize import equalizing_weights
from kvcodec.reference.packing import packed_bytes
from kvcodec.reference.srht import srht_signs
from kvcodec.trellis import TrellisTable, trellis_step, trellis_table

__all__ = ["PRESETS", "Codec", "codec"]

SIDES = ("key", "value")
LEAST_WEIGHT, LARGEST_WEIGHT = 2.0**-10, 2.0**10
OPEN = ("side", "center", "equalize", "scale_rule")
ROTATIONS = ("none", "hadamard", "srht")
CODES = {
    "symmetric": {"bits": (2, 3, 4, 8), "scale_rule": ("absmax",)},
    "asymmetric": {"bits": ASYMMETRIC_BITS, "scale_rule": ("range",)},
    "lloyd_max": {"bits": (2, 3, 4), "scale_rule": LLOYD_MAX_SCALE_RULES},
    "trellis": {"bits": (2, 3, 4), "scale_rule": LLOYD_MAX_SCALE_RULES},
}


@dataclass(frozen=True)
class Codec:
    """How the keys or the values of a cache are packed: center, equalize, rotate, scale, code.

    Immutable; made by `codec` from a preset. The options that differ between keys and values
    (`side`, `center`, `equalize`, `scale_rule`) may be left open and are then settled by
    `for_side`: keys coded with one scale a token and at most 4 bits are centered and equalized;
    Lloyd-Max and trellis codes preserve the norm of keys and are unbiased for values.

    Attributes
    ----------
    name : str
        The preset it was made from.
    code : {"symmetric", "asymmetric", "lloyd_max", "trellis"}
        The kind of code.
    bits : {2, 3, 4, 8}
        Bits a code.
    rotation : {"none", "hadamard", "srht"}
        Rotation of the channels before coding.
    seed : int
        Seed of the signs of "srht".
    scale_rule : {"absmax", "range", "norm", "least_squares", "norm_preserving", "unbiased"} or None
        How the scale is chosen.
    scale_dtype : {"bfloat16", "float32"}
        How scales, zero points and the scale of centers are stored.
    group_size : int or None
        Members of a group of an asymmetric code.
    layout : {"dense", "padded"}
        Layout of 3-bit codes.
    block : int
        Tokens that are encoded as one unit: those that share a center, and whole groups of tokens.
    side : {"key", "value"} or None
        Which side it is for.
    center, equalize : bool or None
        Whether keys are centered and equalized.

    Examples
    --------
    >>> import kvcodec as kv
    >>> kv.codec("int4").for_side("key").bits_per_value(128)
    4.251953125
    """

    name: str = field(compare=False)
    code: str
    bits: int
    rotation: str
    scale_rule: str | None = None
    seed: int = 0
    scale_dtype: str = "bfloat16"
    group_size: int | None = None
    layout: str = "dense"
    block: int = 64
    side: str | None = None
    center: bool | None = None
    equalize: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a string that is not empty, but is {self.name!r}.")
        code = _validate.choice(self.code, "code", tuple(CODES))
        check = {
            "bits": _validate.choice(self.bits, "bits", CODES[code]["bits"]),
            "rotation": _validate.choice(self.rotation, "rotation", ROTATIONS),
            "seed": _validate.integer(self.seed, "seed", 0, 2**64 - 1),
            "scale_dtype": _validate.choice(self.scale_dtype, "scale_dtype", SCALE_DTYPES),
            "block": _validate.integer(self.block, "block", 1, _validate.LARGEST_GROUP),
        }
        check["layout"] = check_layout(check["bits"], self.layout)[1]
        for name in ("center", "equalize"):
            if getattr(self, name) is not None:
                check[name] = _validate.boolean(getattr(self, name), name)
        if self.scale_rule is not None:
            allowed = CODES[code]["scale_rule"]
            check["scale_rule"] = _validate.choice(self.scale_rule, "scale_rule", allowed)
        if self.side is not None:
            check["side"] = _validate.choice(self.side, "side", SIDES)
        for name, value in check.items():
            object.__setattr__(self, name, value)
        self._check_combination()

    def _check_combination(self) -> None:
        """Refuse options that would do nothing or could not work together."""
        if self.seed != 0 and self.rotation != "srht":
            raise ValueError(
                f"seed is for rotation 'srht' only, but rotation is {self.rotation!r} "
                f"and seed is {self.seed}."
            )
        if self.code == "trellis" and self.layout != "dense":
            raise ValueError(f"layout must be 'dense' for code 'trellis', but is {self.layout!r}.")
        if self.code == "asymmetric":
            object.__setattr__(
                self,
                "group_size",
                _validate.integer(self.group_size, "group_size", 1, _validate.LARGEST_GROUP),
            )
            if self.center or self.equalize:
                raise ValueError(
                    "center and equalize are for codes with one scale a token, but code "
                    "'asymmetric' has a scale and a zero point for each channel."
                )
            if self.side != "value" and self.block % self.group_size:
                raise ValueError(
                    f"block must be a multiple of group_size ({self.group_size}) for keys, "
                    f"but {self.block} was given."
                )
        elif self.group_size is not None:
            raise ValueError(
                f"group_size is for code 'asymmetric' only, but code is {self.code!r}."
            )
        if self.side == "value" and (self.center or self.equalize):
            raise ValueError("center and equalize are for keys only, but side is 'value'.")
        if self.block == 1 and self.center:
            raise ValueError("center needs blocks of at least 2 tokens, but block is 1.")

    @property
    def group_axis(self) -> str:
        """Along which axis the groups of an asymmetric code extend: "token" or "channel"."""
        return "channel" if self.side == "value" else "token"

    def for_side(self, side: str) -> Codec:
        """The same codec with everything settled for keys or for values.

        Parameters
        ----------
        side : {"key", "value"}
            Which side it is for.

        Returns
        -------
        Codec
            With `side`, `center`, `equalize` and `scale_rule` set.

        Raises
        ------
        ValueError
            If the codec is made for the other side, or has options of the other side.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.codec("int4").for_side("value").center
        False
        """
        side = _validate.choice(side, "side", SIDES)
        if self.side not in (None, side):
            raise ValueError(f"side must be {self.side!r} for this codec, but {side!r} was given.")
        low_bit_key = side == "key" and self.code != "asymmetric" and self.bits <= 4
        center = (low_bit_key and self.block > 1) if self.center is None else self.center
        equalize = (low_bit_key and self.block > 1) if self.equalize is None else self.equalize
        scale_rule = self.scale_rule
        if scale_rule is None:
            rules = CODES[self.code]["scale_rule"]
            fitted = "norm_preserving" if side == "key" else "unbiased"
            scale_rule = fitted if fitted in rules else rules[0]
        return replace(self, side=side, center=center, equalize=equalize, scale_rule=scale_rule)

    def signs(self, head_dim: int) -> NDArray[np.float32]:
        """The signs of the rotation "srht".

        Parameters
        ----------
        head_dim : int
            Channels of a vector.

        Returns
        -------
        ndarray of float32, shape (head_dim,)
            +1 and -1, from `srht_signs` with the codec's seed.

        Raises
        ------
        ValueError
            If head_dim is below 1.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.codec("lm4").signs(4)
        array([-1., -1., -1.,  1.], dtype=float32)
        """
        return srht_signs(head_dim, self.seed)

    def codebook(self, head_dim: int) -> Codebook:
        """The Lloyd-Max codebook for vectors of head_dim channels.

        Parameters
        ----------
        head_dim : int
            Channels of a vector.

        Returns
        -------
        Codebook
            The one of the codec's bits.

        Raises
        ------
        ValueError
            If there is none for head_dim or the codec's bits.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.codec("lm2").codebook(128).levels
        array([-123,  -37,   37,  123], dtype=int8)
        """
        return codebook(head_dim, self.bits)

    @property
    def trellis(self) -> TrellisTable:
        """The level table of the codec's bits, for code "trellis"; ValueError for 8 bits."""
        return trellis_table(self.bits)

    def levels(self, head_dim: int) -> NDArray[np.int8]:
        """The int8 level that each unsigned code, or window of a trellis code, stands for.

        Parameters
        ----------
        head_dim : int
            Channels of a vector, which Lloyd-Max codebooks depend on.

        Returns
        -------
        ndarray of int8, shape (2^bits,), or (256,) for code "trellis"
            The levels: of codes in ascending order, of windows as in `trellis_table`.

        Raises
        ------
        ValueError
            If the codec is "lloyd_max" and has no codebook for head_dim.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.codec("int2").levels(128)
        array([-2, -1,  0,  1], dtype=int8)
        """
        if self.code == "lloyd_max":
            return self.codebook(head_dim).levels
        if self.code == "trellis":
            return self.trellis.levels
        half = 2 ** (self.bits - 1)
        return np.arange(-half, half).astype(np.int8)

    def check_head_dim(self, head_dim: int, name: str = "head_dim") -> int:
        """Raise unless vectors of head_dim channels can be encoded.

        Parameters
        ----------
        head_dim : int
            Channels of a vector.
        name : str, default "head_dim"
            What an error calls it.

        Returns
        -------
        int
            head_dim.

        Raises
        ------
        ValueError
            If head_dim is not from 1 to 1024, cannot be rotated, or has no codebook.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.codec("int4").check_head_dim(96)
        96
        """
        _validate.integer(head_dim, name, 1, _validate.LARGEST_HEAD_DIM)
        if self.rotation != "none":
            _validate.transform_order(head_dim, f"{name} (for rotation {self.rotation!r})")
        if self.code == "lloyd_max":
            self.codebook(head_dim)
        if self.code == "trellis":
            trellis_step(head_dim, self.bits)
        return head_dim

    def bits_per_value(self, head_dim: int, side: str | None = None) -> float:
        """Bits that a long cache stores for each number, all metadata counted.

        Scales, zero points and centers are counted; the equalizing weights, which are stored once
        a sequence and not with each token, are not.

        Parameters
        ----------
        head_dim : int
            Channels of a vector.
        side : {"key", "value"}, optional
            Needed unless the codec is made for one side.

        Returns
        -------
        float
            Bits a value.

        Raises
        ------
        ValueError
            If the side is not known or head_dim cannot be encoded.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.codec("kivi2", group_size=128).bits_per_value(128, "key")
        2.25
        """
        codec = self._settled(side)
        codec.check_head_dim(head_dim)
        scale_bits = 16 if codec.scale_dtype == "bfloat16" else 32
        bits = 8 * packed_bytes(head_dim, codec.bits, codec.layout) / head_dim
        if codec.code != "asymmetric":
            bits += scale_bits / head_dim
        elif codec.group_axis == "token":
            bits += 2 * scale_bits / codec.group_size
        else:
            bits += 2 * scale_bits * -(-head_dim // codec.group_size) / head_dim
        if codec.center:
            bits += (8 * head_dim + scale_bits) / (codec.block * head_dim)
        return bits

    def encode(
        self,
        x: ArrayLike,
        *,
        side: str | None = None,
        queries: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        backend: str | None = None,
    ) -> Encoded:
        """Pack keys or values.

        Parameters
        ----------
        x : array_like of float, shape (batch, kv_heads, tokens, head_dim)
            Keys (after the rotary embedding) or values; any float dtype, any strides. The last
            block and the last group of tokens may be short.
        side : {"key", "value"}, optional
            Needed unless the codec is made for one side.
        queries : array_like of float, shape (batch, q_heads, q_len, head_dim), optional
            Queries from which, with the first block of the keys, the equalizing weights are taken.
            Without queries and weights a codec whose `equalize` is open does not equalize.
        weights : array_like of float, shape (batch, kv_heads, head_dim), optional
            Equalizing weights to use instead, for instance those of tokens encoded before.
        backend : {"auto", "fast", "reference"}, optional
            Which twin computes it; see `config_context`.

        Returns
        -------
        Encoded
            The packed tokens.

        Raises
        ------
        ValueError
            If a shape, an option or a value is not allowed, or queries are missing.
        TypeError
            If an array does not hold floats.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcodec as kv
        >>> k = np.random.default_rng(0).standard_normal((1, 2, 128, 64), dtype=np.float32)
        >>> kv.codec("int4").encode(k, side="key")
        <Encoded int4 key (1, 2, 128, 64), 4.38 bits a value>
        """
        x = _validate.kv_shaped(x, "x")
        given = queries is not None or weights is not None
        codec = self if self.equalize is not None or given else replace(self, equalize=False)
        codec = codec._settled(side)
        codec.check_head_dim(x.shape[-1], "the last axis of x")
        kernels = _backend.resolve(backend)
        if given and not codec.equalize:
            name = "queries" if queries is not None else "weights"
            raise ValueError(f"{name} must be left out for a codec that does not equalize.")
        if codec.equalize:
            _validate.magnitudes(x, "x")
            weights = _weights(x, codec, queries, weights, kernels)
        encoded = kernels.encode(x, codec, weights)
        if encoded is None:  # it looks at the values itself, which saves a pass over memory
            _validate.magnitudes(x, "x")
        return encoded.freeze()

    def decode(self, encoded: Encoded, *, backend: str | None = None) -> NDArray[np.float32]:
        """Unpack to floats, undoing all steps.

        Parameters
        ----------
        encoded : Encoded
            Made by `encode` of this codec.
        backend : {"auto", "fast", "reference"}, optional
            Which twin computes it; see `config_context`.

        Returns
        -------
        ndarray of float32, shape (batch, kv_heads, tokens, head_dim)
            The decoded keys or values.

        Raises
        ------
        TypeError
            If encoded is not an `Encoded`.
        ValueError
            If it was made by another codec.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcodec as kv
        >>> int8 = kv.codec("int8", side="value")
        >>> v = np.linspace(-1, 1, 128, dtype=np.float32).reshape(1, 1, 2, 64)
        >>> bool(np.abs(int8.decode(int8.encode(v)) - v).max() < 0.005)
        True
        """
        if not isinstance(encoded, Encoded):
            raise TypeError(f"encoded must be an Encoded, but is {type(encoded).__name__}.")
        made = encoded.codec
        open_fields = {name: None for name in OPEN if getattr(self, name) is None}
        if replace(made, **open_fields) != self:
            raise ValueError(f"encoded must be made by {self!r}, but was made by {made!r}.")
        return _backend.resolve(backend).decode(encoded)

    def to_config(self) -> dict[str, Any]:
        """All options as a dict that JSON can hold; `from_config` inverts it.

        Returns
        -------
        dict
            Option names and values.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.Codec.from_config(kv.codec("lm4").to_config()) == kv.codec("lm4")
        True
        """
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Codec:
        """Make a codec from what `to_config` returned.

        Parameters
        ----------
        config : mapping
            Option names and values; options that are left out have their defaults.

        Returns
        -------
        Codec
            The codec.

        Raises
        ------
        ValueError
            If an option is unknown, missing or not allowed.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.Codec.from_config(kv.codec("int2").to_config()).bits
        2
        """
        if not isinstance(config, Mapping):
            raise ValueError(f"config must map names of options to values, but is {config!r}.")
        names = {option.name for option in fields(cls)}
        needed = {option.name for option in fields(cls) if option.default is MISSING}
        wrong = sorted(map(str, (set(config) - names) | (needed - set(config))))
        if wrong:
            raise ValueError(
                f"config must have the options {', '.join(sorted(needed))} and may have "
                f"{', '.join(sorted(names - needed))}, but these are missing or unknown: "
                f"{', '.join(wrong)}."
            )
        return cls(**config)

    def _settled(self, side: str | None) -> Codec:
        if side is None and self.side is None:
            raise ValueError(f"side must be one of {', '.join(SIDES)}, but none was given.")
        return self.for_side(self.side if side is None else side)

    def __repr__(self) -> str:
        preset = PRESETS.get(self.name, {})
        default = {option.name: option.default for option in fields(self)} | preset
        changed = [
            f"{option.name}={getattr(self, option.name)!r}"
            for option in fields(self)
            if option.name != "name" and getattr(self, option.name) != default[option.name]
        ]
        return f"codec({', '.join([repr(self.name), *changed])})"


def _weights(
    x: NDArray[np.float32],
    codec: Codec,
    queries: ArrayLike | None,
    weights: ArrayLike | None,
    kernels: Any,
) -> NDArray[np.float32] | None:
    """The equalizing weights that are given, or those of the queries and the first block."""
    shape = (x.shape[0], x.shape[1], x.shape[3])
    if weights is not None:
        if queries is not None:
            raise ValueError("queries must be left out where weights are given.")
        weights = _validate.shaped(_validate.float_array(weights, "weights"), "weights", shape)
        if not (weights >= LEAST_WEIGHT).all() or not (weights <= LARGEST_WEIGHT).all():
            raise ValueError(
                f"weights must lie between 2^-10 and 2^10, but lie from "
                f"{weights.min():g} to {weights.max():g}."
            )
        return weights.copy()
    if queries is None:
        raise ValueError("queries must be given to a codec that equalizes, or equalize=False set.")
    q = _validate.kv_array(queries, "queries")
    _validate.query_heads(q, x.shape, "queries")
    if x.shape[2] == 0:
        return None  # there is no block to take weights from yet
    first = x[:, :, : codec.block]
    if codec.center and first.shape[2]:
        center = kernels.center_blocks(np.ascontiguousarray(first), codec.block, codec.scale_dtype)
        first, _ = center_tokens(first, *center, codec.block)
    energy = kernels.channel_energy(q).reshape(*shape[:2], -1, shape[2]).sum(axis=2)
    return equalizing_weights(energy, kernels.channel_energy(np.ascontiguousarray(first)))


def as_codec(choice: str | Codec, name: str) -> Codec:
    """The codec of a preset name, or a codec itself."""
    if isinstance(choice, str):
        _validate.choice(choice, name, tuple(PRESETS))
        return codec(choice)
    if not isinstance(choice, Codec):
        raise TypeError(f"{name} must be the name of a preset or a Codec, but is {choice!r}.")
    return choice


def _preset(code: str, bits: int, rotation: str, **more: Any) -> dict[str, Any]:
    return {"code": code, "bits": bits, "rotation": rotation, **more}


PRESETS: dict[str, dict[str, Any]] = {
    "int8": _preset("symmetric", 8, "none"),
    "int4": _preset("symmetric", 4, "hadamard"),
    "int3": _preset("symmetric", 3, "hadamard"),
    "int2": _preset("symmetric", 2, "hadamard"),
    "kivi4": _preset("asymmetric", 4, "none", group_size=32),
    "kivi2": _preset("asymmetric", 2, "none", group_size=32),
    "lm4": _preset("lloyd_max", 4, "srht"),
    "lm3": _preset("lloyd_max", 3, "srht"),
    "lm2": _preset("lloyd_max", 2, "srht"),
    "tcq4": _preset("trellis", 4, "srht"),
    "tcq3": _preset("trellis", 3, "srht"),
    "tcq2": _preset("trellis", 2, "srht"),
}
"""The options that each preset name stands for; every other option has its default."""


def codec(name: str, **options: Any) -> Codec:
    """A codec by its preset name, with options changed.

    Parameters
    ----------
    name : {"int8", "int4", "int3", "int2", "kivi4", "kivi2", "lm4", "lm3", "lm2", "tcq4", "tcq3", \
"tcq2"}
        The preset: symmetric INTn, KIVI, Lloyd-Max, or trellis.
    **options
        Any attribute of `Codec`, for instance ``rotation="none"`` or ``side="key"``. Where
        `group_size` is larger than the default `block` of 64 and `block` is not given, the block
        is one group.

    Returns
    -------
    Codec
        The codec.

    Raises
    ------
    ValueError
        If the name or an option is not known, or a value or a combination is not allowed.

    References
    ----------
    KIVI: arXiv:2402.02750. Lloyd-Max codes after a rotation (TurboQuant): arXiv:2504.19874.
    Trellis codes: QTIP, arXiv:2406.11235.
    Hadamard rotation of the KV cache (QuaRot): arXiv:2404.00456.

    Examples
    --------
    >>> import kvcodec as kv
    >>> kv.codec("int4", rotation="none")
    codec('int4', rotation='none')
    """
    name = _validate.choice(name, "name", tuple(PRESETS))
    allowed = [option.name for option in fields(Codec) if option.name != "name"]
    for given in options:
        _validate.choice(given, "option", allowed)
    settings = PRESETS[name] | options
    group_size = settings.get("group_size")
    if "block" not in settings and isinstance(group_size, (int, np.integer)) and group_size > 64:
        settings["block"] = int(group_size)
    return Codec(name=name, **settings)
