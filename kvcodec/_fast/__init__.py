"""The fast path: the chapters of the reference in Cython, compiled for each SIMD level.

``_kernels.pyx`` includes the chapters, a ``.pxi`` each; ``_kernels_avx2.pyx`` and its like include
``_kernels.pyx`` and are compiled with the flags of their level. ``_cpu.pyx`` detects the processor.
"""
