"""How much a codec costs in quality: on queries, keys and values, and on the text of a model."""

from kvcodec.evaluation.attention_quality import (
    AttentionQuality,
    check_pair,
    evaluate_attention,
)
from kvcodec.evaluation.codecs import (
    DEFAULT_NAMES,
    GREEDY_NAMES,
    MODEL_NAMES,
    NEEDLE_NAMES,
    VARIANTS,
    CodecPair,
    codec_pair,
)
from kvcodec.evaluation.greedy import GreedyQuality, compare_greedy
from kvcodec.evaluation.language_model import ChunkOptions, Predictions, evaluate_chunk
from kvcodec.evaluation.model_quality import ModelQuality, summarize
from kvcodec.evaluation.model_report import (
    draw_model_plot,
    make_greedy_table,
    make_model_table,
    make_needle_table,
)
from kvcodec.evaluation.models import LanguageModel, cut_chunks, load_language_model, read_text
from kvcodec.evaluation.needle import (
    NeedleQuality,
    Probes,
    make_probes,
    run_probes,
    wilson_interval,
)
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
    "GREEDY_NAMES",
    "MODEL_NAMES",
    "NEEDLE_NAMES",
    "VARIANTS",
    "AttentionQuality",
    "ChunkOptions",
    "CodecPair",
    "GreedyQuality",
    "LanguageModel",
    "ModelQuality",
    "NeedleQuality",
    "Predictions",
    "Probes",
    "Tensors",
    "check_pair",
    "check_plot",
    "check_writable",
    "codec_pair",
    "compare_greedy",
    "cut_chunks",
    "draw_model_plot",
    "draw_plot",
    "evaluate_attention",
    "evaluate_chunk",
    "load_language_model",
    "load_tensors",
    "make_greedy_table",
    "make_model_table",
    "make_needle_table",
    "make_probes",
    "make_table",
    "print_table",
    "read_text",
    "run_probes",
    "sample_tensors",
    "summarize",
    "to_json",
    "wilson_interval",
    "write_file",
]
