"""A transformer's KV cache in 2 to 8 bits, with attention over the packed form, on CPUs."""

from kvcodec._backend import (
    config_context,
    get_config,
    num_threads,
    set_num_threads,
    show_config,
)
from kvcodec._version import __version__
from kvcodec.attention import (
    AttentionResult,
    attention,
    merge_attention,
    scores,
)
from kvcodec.cache import KVCache
from kvcodec.codebook import Codebook, codebook
from kvcodec.codec import PRESETS, Codec, codec
from kvcodec.data import Sample, load_sample
from kvcodec.encoded import Encoded
from kvcodec.packing import pack, unpack
from kvcodec.quantize import (
    dequantize_asymmetric,
    dequantize_lloyd_max,
    dequantize_symmetric,
    quantize_asymmetric,
    quantize_kivi_keys,
    quantize_lloyd_max,
    quantize_symmetric,
)
from kvcodec.transform import (
    fwht,
    hadamard_matrix,
    inverse_srht,
    srht,
    srht_signs,
    supported_head_dims,
)
from kvcodec.trellis import TrellisTable, dequantize_trellis, quantize_trellis, trellis_table
from kvcodec.window import windowed_attention

__all__ = [
    "PRESETS",
    "AttentionResult",
    "Codebook",
    "Codec",
    "Encoded",
    "KVCache",
    "Sample",
    "TrellisTable",
    "__version__",
    "attention",
    "codebook",
    "codec",
    "config_context",
    "dequantize_asymmetric",
    "dequantize_lloyd_max",
    "dequantize_symmetric",
    "dequantize_trellis",
    "fwht",
    "get_config",
    "hadamard_matrix",
    "inverse_srht",
    "load_sample",
    "merge_attention",
    "num_threads",
    "pack",
    "quantize_asymmetric",
    "quantize_kivi_keys",
    "quantize_lloyd_max",
    "quantize_symmetric",
    "quantize_trellis",
    "scores",
    "set_num_threads",
    "show_config",
    "srht",
    "srht_signs",
    "supported_head_dims",
    "trellis_table",
    "unpack",
    "windowed_attention",
]
