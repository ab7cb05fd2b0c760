"""How fast kvcodec is, beside the bandwidth of the memory and beside other libraries and caches."""

from kvcodec.benchmark.machine import describe_machine
from kvcodec.benchmark.model_report import describe_model_settings, make_decoding_table
from kvcodec.benchmark.model_suite import (
    DecodingMeasurement,
    ModelSettings,
    make_model_settings,
    run_model_benchmark,
)
from kvcodec.benchmark.peers import PEERS, PeerMeasurement, compare_with_peers
from kvcodec.benchmark.report import (
    describe_settings,
    draw_times,
    make_tables,
    results_to_json,
)
from kvcodec.benchmark.settings import Settings, Shape, make_settings
from kvcodec.benchmark.suite import Measurement, run_benchmark

__all__ = [
    "PEERS",
    "DecodingMeasurement",
    "Measurement",
    "ModelSettings",
    "PeerMeasurement",
    "Settings",
    "Shape",
    "compare_with_peers",
    "describe_machine",
    "describe_model_settings",
    "describe_settings",
    "draw_times",
    "make_decoding_table",
    "make_model_settings",
    "make_settings",
    "make_tables",
    "results_to_json",
    "run_benchmark",
    "run_model_benchmark",
]
