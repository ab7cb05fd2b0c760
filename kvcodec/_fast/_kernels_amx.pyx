"""The fast path compiled for amx."""

include "_kernels.pyx"
