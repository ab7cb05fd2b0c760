# Symmetric INTn. Two passes over some rows that lie in the first-level cache: the largest
# magnitudes, and, when all scales are known, the levels (codes.h). Codes are levels plus an offset.
# Threads take some rows at a time.

cdef inline void symmetric_rows(const float *x, Py_ssize_t rows, Py_ssize_t n, int bits,
                                bint bfloat16, int offset, float *scale,
                                uint8_t *codes) noexcept nogil:
    """Write level + offset and the scale for up to TOGETHER vectors."""
    cdef float inverse[TOGETHER]
    cdef float largest = (1 << (bits - 1)) - 1
    cdef Py_ssize_t row
    magnitudes_of_rows(x, rows, n, scale)
    for row in range(rows):
        scale[row] = round_scale(scale[row] / largest, bfloat16)
        inverse[row] = reciprocal(scale[row])
    for row in range(rows):
        round_codes(x + row * n, n, 0, inverse[row], offset, codes + row * n)


cdef inline float symmetric_row(const float *x, Py_ssize_t n, int bits, bint bfloat16,
                                int8_t *levels) noexcept nogil:
    """Write the levels of one vector and return its scale."""
    cdef float scale
    symmetric_rows(x, 1, n, bits, bfloat16, 0, &scale, <uint8_t *> levels)
    return scale


def quantize_symmetric(x, int bits, str scale_dtype):
    """Levels and scales of the vectors along the last axis."""
    cdef Py_ssize_t n = x.shape[x.ndim - 1], rows = rows_of(x), first
    cdef Py_ssize_t task, tasks = (rows + TOGETHER - 1) // TOGETHER
    cdef bint bfloat16 = scale_dtype == "bfloat16"
    cdef int threads = threads_for(rows * n)
    levels = np.empty(x.shape, dtype=np.int8)
    scale = np.empty(x.shape[:-1], dtype=np.float32)
    cdef const float *source = <const float *> address(x)
    cdef uint8_t *target = <uint8_t *> address(levels)
    cdef float *scales = <float *> address(scale)
    for task in prange(tasks, nogil=True, num_threads=threads, schedule="static"):
        first = task * TOGETHER
        symmetric_rows(source + first * n, min(TOGETHER, rows - first), n, bits, bfloat16, 0,
                       scales + first, target + first * n)
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
