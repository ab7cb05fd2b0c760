"""Extensions and compiler flags; everything else is in setup.cfg and pyproject.toml."""

import os
import platform
import shutil
import subprocess
import tempfile

from Cython.Build import cythonize
from setuptools import Extension, setup

# The results are the same bits at every SIMD level: no contraction, no reassociation.
FLAGS = [
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
]
AVX2 = ["-mavx2", "-mfma", "-mbmi2"]
AVX512 = [
    *AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512vnni",
    "-mavx512vbmi",
    "-mprefer-vector-width=512",
]


def compiles(*flags: str) -> bool:
    """Whether the C compiler takes these flags and links what they need."""
    compiler = os.environ.get("CC", "cc").split()
    if shutil.which(compiler[0]) is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "probe.c")
        with open(source, "w") as file:
            file.write("int main(void) { return 0; }\n")
        command = [*compiler, *flags, source, "-o", os.path.join(folder, "probe")]
        return subprocess.run(command, capture_output=True).returncode == 0


OPENMP = ["-fopenmp"] if compiles("-fopenmp") else []


def kernels(name: str, *flags: str) -> Extension:
    return Extension(
        f"kvcodec._fast.{name}",
        [f"kvcodec/_fast/{name}.pyx"],
        include_dirs=["kvcodec/_fast"],
        extra_compile_args=[*FLAGS, *OPENMP, *flags],
        extra_link_args=OPENMP,
        libraries=["m"],
    )


extensions = [kernels("_cpu"), kernels("_kernels")]
if platform.machine().lower() in ("x86_64", "amd64"):
    if compiles(*AVX2):
        extensions.append(kernels("_kernels_avx2", *AVX2))
    if compiles(*AVX512):
        extensions.append(kernels("_kernels_avx512", *AVX512))

setup(
    ext_modules=cythonize(
        extensions,
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "initializedcheck": False,
            "cdivision": True,
        },
    )
)
