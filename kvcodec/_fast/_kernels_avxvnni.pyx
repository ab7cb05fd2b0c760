"""The fast path compiled for avxvnni."""

include "_kernels.pyx"
