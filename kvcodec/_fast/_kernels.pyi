from collections import abc
from typing import Any

from numpy import float32, float64, int8, uint8
from numpy.typing import NDArray

from kvcodec._segment import Segment
from kvcodec.codec import Codec
from kvcodec.encoded import Encoded
from kvcodec.sequence import Sequence

def largest_magnitude_of(x: NDArray[float32]) -> float: ...
def clean_tokens(x: object, batch: int, heads: int, head_dim: int) -> int: ...
def fwht(x: NDArray[float32], out: NDArray[float32]) -> None: ...
def srht(x: NDArray[float32], signs: NDArray[float32], out: NDArray[float32]) -> None: ...
def inverse_srht(y: NDArray[float32], signs: NDArray[float32], out: NDArray[float32]) -> None: ...
def quantize_symmetric(
    x: NDArray[float32], bits: int, scale_dtype: str
) -> tuple[NDArray[int8], NDArray[float32]]: ...
def dequantize_symmetric(levels: NDArray[int8], scale: NDArray[float32]) -> NDArray[float32]: ...
def quantize_asymmetric(
    x: NDArray[float32], bits: int, group_size: int, axis: str, scale_dtype: str
) -> tuple[NDArray[uint8], NDArray[float32], NDArray[float32]]: ...
def dequantize_asymmetric(
    codes: NDArray[uint8],
    scale: NDArray[float32],
    zero_point: NDArray[float32],
    group_size: int,
    axis: str,
) -> NDArray[float32]: ...
def quantize_lloyd_max(
    x: NDArray[float32],
    levels: NDArray[int8],
    boundaries: NDArray[float64],
    step: float,
    scale_rule: str,
    scale_dtype: str,
) -> tuple[NDArray[uint8], NDArray[float32]]: ...
def dequantize_lloyd_max(
    codes: NDArray[uint8], levels: NDArray[int8], scale: NDArray[float32]
) -> NDArray[float32]: ...
def quantize_trellis(
    x: NDArray[float32],
    levels: NDArray[int8],
    step: float,
    bits: int,
    scale_rule: str,
    scale_dtype: str,
) -> tuple[NDArray[uint8], NDArray[float32]]: ...
def dequantize_trellis(
    codes: NDArray[uint8], levels: NDArray[int8], scale: NDArray[float32], bits: int
) -> NDArray[float32]: ...
def pack(codes: NDArray[uint8], bits: int, layout: str) -> NDArray[uint8]: ...
def unpack(packed: NDArray[uint8], n: int, bits: int, layout: str) -> NDArray[uint8]: ...
def write_tiles(
    tiles: NDArray[uint8], slot: int, packed: NDArray[uint8], n: int, width: int, side: str
) -> None: ...
def read_tiles(
    tiles: NDArray[uint8], tokens: int, n: int, width: int, side: str
) -> NDArray[uint8]: ...
def block_means(x: NDArray[float32], block: int) -> NDArray[float32]: ...
def center_blocks(
    x: NDArray[float32], block: int, scale_dtype: str
) -> tuple[NDArray[int8], NDArray[Any]]: ...
def channel_energy(x: NDArray[float32]) -> NDArray[float64]: ...
def encode(
    x: NDArray[float32], codec: Codec, weights: NDArray[float32] | None, bound: float = ...
) -> Encoded | None: ...
def decode(encoded: Encoded) -> NDArray[float32]: ...
def attend(
    q: NDArray[float32],
    segments: abc.Sequence[Segment],
    scale: float,
    softcap: float | None,
    query_bits: int | None,
    probability_bits: int | None,
) -> tuple[NDArray[float32], NDArray[float32]]: ...
def attend_sequence(
    q: NDArray[float32],
    sequence: Sequence,
    packed_end: int,
    most_blocks: int,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    query_bits: int | None,
    probability_bits: int | None,
) -> tuple[NDArray[float32], NDArray[float32]]: ...
def keep_tokens(
    kept: NDArray[Any], slot: int, x: NDArray[float32], first: int, stop: int
) -> None: ...
def scores(
    q: NDArray[float32], keys: NDArray[float32] | Encoded, scale: float, query_bits: int | None
) -> NDArray[float32]: ...
def value_sums(
    probabilities: NDArray[float32],
    values: NDArray[float32] | Encoded,
    probability_bits: int | None,
) -> NDArray[float32]: ...
def merge(
    outputs: NDArray[float32], log_sum_exps: NDArray[float32]
) -> tuple[NDArray[float32], NDArray[float32]]: ...
def read_all(x: NDArray[Any]) -> int: ...
