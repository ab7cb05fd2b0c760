# Lloyd-Max codes. The norm is a float64 sum in 8 lanes; a code is the number of boundaries below
# the scaled value, compared a vector at a time (simd.h), which needs no branches and no search.
# The least-squares scale takes a second pass. Threads take rows.

cdef struct Book:
    const int8_t *levels
    const float *boundaries
    int count
    double step
    bint least_squares


cdef inline float best_scale(const float *x, const uint8_t *codes, Py_ssize_t n,
                             const int8_t *levels) noexcept nogil:
    """The multiplier of the chosen levels with the least squared error, <x, y> / <y, y>."""
    cdef double lane[8]
    cdef double projection
    cdef int64_t energy = 0
    cdef Py_ssize_t i
    cdef int32_t y
    for i in range(8):
        lane[i] = 0
    for i in range(n):
        y = levels[codes[i]]
        lane[i % 8] = lane[i % 8] + <double> x[i] * y
        energy = energy + y * y
    projection = sum_of_8(lane)
    if projection < 0:
        projection = 0
    return <float> (projection / <double> (energy if energy > 1 else 1))


cdef inline float lloyd_max_row(const float *x, Py_ssize_t n, const Book *book, bint bfloat16,
                                uint8_t *codes) noexcept nogil:
    """Write the codes of one vector and return its scale."""
    cdef double norm = sqrt(sum_of_squares(x, n))
    cdef float scale = round_scale(<float> (norm * book.step), bfloat16)
    count_boundaries(x, n, reciprocal(scale), book.boundaries, book.count, codes)
    if book.least_squares:
        scale = round_scale(best_scale(x, codes, n, book.levels), bfloat16)
        count_boundaries(x, n, reciprocal(scale), book.boundaries, book.count, codes)
    return scale


def quantize_lloyd_max(x, levels, boundaries, double step, str scale_rule, str scale_dtype):
    """Codes and scales of the vectors along the last axis."""
    cdef Py_ssize_t n = x.shape[x.ndim - 1], rows = rows_of(x), row
    cdef bint bfloat16 = scale_dtype == "bfloat16"
    cdef int threads = threads_for(rows * n)
    cdef Book book
    boundaries = boundaries.astype(np.float32)
    book.levels = <const int8_t *> address(levels)
    book.boundaries = <const float *> address(boundaries)
    book.count = boundaries.size
    book.step = step
    book.least_squares = scale_rule == "least_squares"
    codes = np.empty(x.shape, dtype=np.uint8)
    scale = np.empty(x.shape[:-1], dtype=np.float32)
    cdef const float *source = <const float *> address(x)
    cdef uint8_t *target = <uint8_t *> address(codes)
    cdef float *scales = <float *> address(scale)
    for row in prange(rows, nogil=True, num_threads=threads, schedule="static"):
        scales[row] = lloyd_max_row(source + row * n, n, &book, bfloat16, target + row * n)
    return codes, scale[()]


def dequantize_lloyd_max(codes, levels, scale):
    """levels[code] times scale."""
    return dequantize_symmetric(levels[codes], scale)
