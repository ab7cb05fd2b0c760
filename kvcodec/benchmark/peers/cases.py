"""Which libraries there are, what of them is measured, and what of kvcodec that stands beside."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["PEERS", "Job", "Peer", "PeerCase", "check_library"]


@dataclass(frozen=True)
class PeerCase:
    """One call of a library.

    Attributes
    ----------
    name : str
        What it is.
    task : str
        decode, prefill, fwht or encode.
    ours : str
        The codec (or, of fwht, the way) that it is compared with.
    """

    name: str
    task: str
    ours: str


@dataclass(frozen=True)
class Peer:
    """A library.

    Attributes
    ----------
    name : str
        Its name.
    module : str
        The module of this package that drives it.
    needs : tuple of str
        The modules that must be there, unless the library is given by its path.
    cases : tuple of PeerCase
        What is measured.
    option : str or None
        The option that gives a path to the library.
    """

    name: str
    module: str
    needs: tuple[str, ...]
    cases: tuple[PeerCase, ...]
    option: str | None = None

    def missing(self, library: str | None) -> str | None:
        """Why it cannot run; None where it can."""
        if library is not None:
            return None
        if not self.needs:
            return f"not given by {self.option}"
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        more = f", nor given by {self.option}" if self.option else ""
        return f"{', '.join(absent)} not installed{more}" if absent else None

    def version(self, library: str | None) -> str | None:
        """The version that is installed; None where it is given by its path."""
        if library is not None or not self.needs:
            return None
        distributions = metadata.packages_distributions().get(self.needs[0])
        return metadata.version(distributions[0]) if distributions else None


@dataclass(frozen=True)
class Job:
    """What a process is asked to prepare.

    Attributes
    ----------
    peer, case : str
        The names.
    task : str
        The task of the case.
    q_heads, kv_heads, head_dim : int
        The shape.
    tokens : int
        Tokens, or vectors.
    threads : int
        Threads.
    library : str or None
        A path to the library.
    """

    peer: str
    case: str
    task: str
    q_heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    threads: int
    library: str | None


PEERS: tuple[Peer, ...] = (
    Peer(
        "torch",
        "torch_attention",
        ("torch",),
        (
            PeerCase("bf16 matmuls", "decode", "int4"),
            PeerCase("fp32 SDPA", "decode", "int4"),
            PeerCase("fp32 SDPA", "prefill", "int4"),
        ),
    ),
    Peer(
        "onnxruntime",
        "onnxruntime_attention",
        ("onnxruntime", "onnx"),
        (PeerCase("GQA int8", "decode", "int8"), PeerCase("GQA int4", "decode", "int4")),
    ),
    Peer(
        "openvino",
        "openvino_attention",
        ("openvino",),
        (
            PeerCase("SDPA u8", "decode", "int8"),
            PeerCase("SDPA u4", "decode", "int4"),
            PeerCase("SDPA TURBO u4", "decode", "lm4"),
        ),
    ),
    Peer(
        "llama.cpp",
        "ggml_attention",
        ("llama_cpp",),
        (
            PeerCase("FA f16", "decode", "int4"),
            PeerCase("FA q8_0", "decode", "int8"),
            PeerCase("FA q4_0", "decode", "int4"),
        ),
        "--llama",
    ),
    Peer(
        "ik_llama",
        "ggml_attention",
        (),
        (PeerCase("FA q8_0", "decode", "int8"), PeerCase("FA q4_0", "decode", "int4")),
        "--ik-llama",
    ),
    Peer(
        "fht-cpu",
        "fht_transform",
        ("fht_cpu",),
        (
            PeerCase("in place", "fwht", "in place"),
            PeerCase("out of place", "fwht", "out of place"),
        ),
    ),
    Peer("faiss", "faiss_encode", ("faiss",), (PeerCase("rotated 4 bits", "encode", "lm4"),)),
)
"""The libraries, in the order in which they run."""

LOAD = """
import sys
from kvcodec.benchmark.peers.ggml_attention import Library
Library(sys.argv[1])
"""


def check_library(path: str | os.PathLike[str], option: str) -> str:
    """The path of a shared library, or of a folder of them, made absolute.

    Raises
    ------
    ValueError
        If there is none, or if it cannot be loaded, which a process of its own tries.
    """
    found = Path(path).resolve()
    folder_of_some = found.is_dir() and any(found.glob("libggml*"))
    if not (found.is_file() or folder_of_some):
        raise ValueError(
            f"{option} must be a shared library of ggml or the folder that holds it, but "
            f"{str(path)!r} was given."
        )
    tried = subprocess.run(
        [sys.executable, "-c", LOAD, str(found)], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        said = tried.stderr.strip().split("\n")[-1].removesuffix(".")
        reason = said or f"exit code {tried.returncode}"
        raise ValueError(
            f"{option} must be a shared library of ggml or the folder that holds it, but "
            f"{str(path)!r} cannot be loaded: {reason}."
        )
    return str(found)
