"""Other libraries on the same shapes, each case in a process of its own."""

from kvcodec.benchmark.peers.cases import PEERS, Peer, PeerCase
from kvcodec.benchmark.peers.compare import PeerMeasurement, compare_with_peers

__all__ = ["PEERS", "Peer", "PeerCase", "PeerMeasurement", "compare_with_peers"]
