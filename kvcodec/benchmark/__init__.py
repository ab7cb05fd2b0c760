"""How fast kvcodec is, beside the bandwidth of the memory and beside other libraries."""

from kvcodec.benchmark.machine import describe_machine
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
    "Measurement",
    "PeerMeasurement",
    "Settings",
    "Shape",
    "compare_with_peers",
    "describe_machine",
    "describe_settings",
    "draw_times",
    "make_settings",
    "make_tables",
    "results_to_json",
    "run_benchmark",
]
