"""The fast path compiled for avx2."""

include "_kernels.pyx"
