"""The textbook: every algorithm of the package in plain NumPy, one chapter a file.

The functions take clean arrays (float32, right shape) and hold only the algorithm; the public
functions of the package check what they are given and then call these, or their twins of the same
name in the compiled fast path. Read in this order: `_numbers`, `fwht`, `srht`, `symmetric`, `kivi`,
`codebook_solver`, `lloyd_max`, `trellis`, `trellis_training`, `packing`, `center`, `equalize`,
`encode`, `tiles`, `attention`, `window`; `memory` serves the benchmark.
"""

from kvcodec.reference._numbers import largest_magnitude_of
from kvcodec.reference.attention import attend, merge, scores, value_sums
from kvcodec.reference.center import block_means, center_blocks
from kvcodec.reference.encode import decode, encode
from kvcodec.reference.equalize import channel_energy
from kvcodec.reference.fwht import fwht
from kvcodec.reference.kivi import dequantize_asymmetric, quantize_asymmetric
from kvcodec.reference.lloyd_max import dequantize_lloyd_max, quantize_lloyd_max
from kvcodec.reference.memory import read_all
from kvcodec.reference.packing import pack, unpack
from kvcodec.reference.srht import inverse_srht, srht
from kvcodec.reference.symmetric import dequantize_symmetric, quantize_symmetric
from kvcodec.reference.tiles import read_tiles, write_tiles
from kvcodec.reference.trellis import dequantize_trellis, quantize_trellis
from kvcodec.reference.window import attend_sequence, clean_tokens, keep_tokens

__all__ = [
    "attend",
    "attend_sequence",
    "block_means",
    "center_blocks",
    "channel_energy",
    "clean_tokens",
    "decode",
    "dequantize_asymmetric",
    "dequantize_lloyd_max",
    "dequantize_symmetric",
    "dequantize_trellis",
    "encode",
    "fwht",
    "inverse_srht",
    "keep_tokens",
    "largest_magnitude_of",
    "merge",
    "pack",
    "quantize_asymmetric",
    "quantize_lloyd_max",
    "quantize_symmetric",
    "quantize_trellis",
    "read_all",
    "read_tiles",
    "scores",
    "srht",
    "unpack",
    "value_sums",
    "write_tiles",
]
