# Symmetric INTn. Two passes over a row that lies in the first-level cache: the largest magnitude by
# integer comparison of the bits, then multiply, round by adding and subtracting 1.5 * 2^23, clip
# (simd.h). Codes are levels plus an offset. Threads take rows.

cdef inline float symmetric_codes(const float *x, Py_ssize_t n, int bits, bint bfloat16,
                                  int offset, uint8_t *codes) noexcept nogil:
    """Write level + offset for one vector and return its scale."""
    cdef float largest = (1 << (bits - 1)) - 1
    cdef float scale = round_scale(largest_magnitude(x, n) / largest, bfloat16)
    round_codes(x, n, 0, reciprocal(scale), -largest, largest, offset, codes)
    return scale


cdef inline float symmetric_row(const float *x, Py_ssize_t n, int bits, bint bfloat16,
                                int8_t *levels) noexcept nogil:
    """Write the levels of one vector and return its scale."""
    return symmetric_codes(x, n, bits, bfloat16, 0, <uint8_t *> levels)


def quantize_symmetric(x, int bits, str scale_dtype):
    """Levels and scales of the vectors along the last axis."""
    cdef Py_ssize_t n = x.shape[x.ndim - 1], rows = rows_of(x), row
    cdef bint bfloat16 = scale_dtype == "bfloat16"
    cdef int threads = threads_for(rows * n)
    levels = np.empty(x.shape, dtype=np.int8)
    scale = np.empty(x.shape[:-1], dtype=np.float32)
    cdef const float *source = <const float *> address(x)
    cdef int8_t *target = <int8_t *> address(levels)
    cdef float *scales = <float *> address(scale)
    for row in prange(rows, nogil=True, num_threads=threads, schedule="static"):
        scales[row] = symmetric_row(source + row * n, n, bits, bfloat16, target + row * n)
    return levels, scale[()]


def dequantize_symmetric(levels, scale):
    """Level times scale."""
    cdef Py_ssize_t n = levels.shape[levels.ndim - 1], rows = rows_of(levels), row, i
    cdef int threads = threads_for(rows * n)
    out = np.empty(levels.shape, dtype=np.float32)
    scale = np.ascontiguousarray(scale)
    cdef const int8_t *source = <const int8_t *> address(levels)
    cdef const float *scales = <const float *> address(scale)
    cdef float *target = <float *> address(out)
    for row in prange(rows, nogil=True, num_threads=threads, schedule="static"):
        for i in range(n):
            target[row * n + i] = source[row * n + i] * scales[row]
    return out
