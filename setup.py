"""Extensions and compiler flags; everything else is in setup.cfg and pyproject.toml."""

import os
import sysconfig
import tempfile
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError

# The results are the same bits at every SIMD level: no contraction, no reassociation.
FLAGS = [
    "-O3",
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
]
AVX2 = ["-mavx2", "-mfma", "-mbmi2"]
AVX512 = [
    *AVX2,
    *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni", "vbmi")),
    "-mprefer-vector-width=512",
]
LEVELS = {
    "_kernels_avx2": AVX2,
    "_kernels_avxvnni": [*AVX2, "-mavxvnni"],
    "_kernels_avx512": AVX512,
    "_kernels_amx": [*AVX512, "-mamx-tile", "-mamx-int8"],
}
OPENMP_PROBE = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"


class BuildKernels(build_ext):
    """Builds what the compiler can: each SIMD level, and with OpenMP where it has it."""

    def build_extensions(self):
        openmp = ["-fopenmp"] if self.works(OPENMP_PROBE, ["-fopenmp"]) else []
        for extension in list(self.extensions):
            name = extension.name.rpartition(".")[2]
            flags = LEVELS.get(name, [])
            if flags and not self.works("int main(void) { return 0; }\n", flags):
                print(f"kvcodec: {name} is left out, the compiler does not take {flags}")
                self.extensions.remove(extension)
            extension.extra_compile_args = [*FLAGS, *openmp, *flags]
            extension.extra_link_args = openmp
        if not openmp:
            print("kvcodec: the fast path is built without threads, the compiler has no OpenMP")
        self.parallel = self.parallel or os.cpu_count()
        super().build_extensions()

    def works(self, program, flags):
        """Whether a program compiles and links with these flags."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(program)
            try:
                objects = self.compiler.compile(
                    [str(source)], output_dir=folder, extra_postargs=flags
                )
                self.compiler.link_executable(
                    objects, str(Path(folder, "probe")), extra_postargs=flags
                )
            except CCompilerError:
                return False
        return True


target = sysconfig.get_platform().rpartition("-")[2].lower()
names = ["_cpu", "_kernels", *(LEVELS if target in ("x86_64", "amd64") else ())]
extensions = [
    Extension(
        f"kvcodec._fast.{name}",
        [f"kvcodec/_fast/{name}.pyx"],
        include_dirs=["kvcodec/_fast"],
        depends=[str(path) for path in sorted(Path("kvcodec/_fast").glob("*.h"))],
        libraries=["m"],
    )
    for name in names
]
directives = {
    "language_level": 3,
    "boundscheck": False,
    "initializedcheck": False,
    "cdivision": True,
}
setup(
    ext_modules=cythonize(extensions, compiler_directives=directives),
    cmdclass={"build_ext": BuildKernels},
)
