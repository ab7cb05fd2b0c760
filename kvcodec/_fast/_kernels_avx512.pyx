"""The fast path compiled for avx512."""

include "_kernels.pyx"
