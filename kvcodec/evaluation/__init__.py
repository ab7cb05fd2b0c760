"""How much a codec costs in quality: on queries, keys and values, with the real attention path."""

from kvcodec.evaluation.attention_quality import (
    AttentionQuality,
    check_pair,
    evaluate_attention,
)
from kvcodec.evaluation.codecs import DEFAULT_NAMES, VARIANTS, CodecPair, codec_pair
from kvcodec.evaluation.report import (
    check_plot,
    check_writable,
    draw_plot,
    make_table,
    print_table,
    to_json,
    write_file,
)
from kvcodec.evaluation.tensors import Tensors, load_tensors, sample_tensors

__all__ = [
    "DEFAULT_NAMES",
    "VARIANTS",
    "AttentionQuality",
    "CodecPair",
    "Tensors",
    "check_pair",
    "check_plot",
    "check_writable",
    "codec_pair",
    "draw_plot",
    "evaluate_attention",
    "load_tensors",
    "make_table",
    "print_table",
    "sample_tensors",
    "to_json",
    "write_file",
]
