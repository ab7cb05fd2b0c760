"""The fast path: the reference's chapters in Cython, one ``.pxi`` each, compiled for each SIMD level.

``_kernels.pyx`` includes the chapters; ``_kernels_avx2.pyx`` and ``_kernels_avx512.pyx`` include
``_kernels.pyx`` and are compiled with the flags of their level. ``_cpu.pyx`` detects the processor.
"""
