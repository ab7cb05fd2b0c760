# Lloyd-Max codes. The norm is a float64 sum in 8 lanes; a code is the number of boundaries below
# the scaled value, compared a vector at a time (simd.h), which needs no branches and no search.
# The scale rules other than "norm" take a second pass. Threads take rows.

cdef enum:
    NORM = 0
    LEAST_SQUARES = 1
    NORM_PRESERVING = 2
    UNBIASED = 3

cdef dict SCALE_RULES = {
    "norm": NORM,
    "least_squares": LEAST_SQUARES,
    "norm_preserving": NORM_PRESERVING,
    "unbiased": UNBIASED,
}


cdef struct Book:
    const int8_t *levels
    const float *boundaries
    int count
    double step
    int scale_rule


cdef inline float fitted_scale(const float *x, const uint8_t *codes, Py_ssize_t n, double norm,
                               const Book *book) noexcept nogil:
    """The scale that a rule other than "norm" gives to the chosen levels y."""
    cdef double lane[8]
    cdef double projection
    cdef int64_t energy = 0
    cdef Py_ssize_t i
    cdef int32_t y
    for i in range(8):
        lane[i] = 0
    for i in range(n):
        y = book.levels[codes[i]]
        lane[i % 8] = lane[i % 8] + <double> x[i] * y
        energy = energy + y * y
    projection = sum_of_8(lane)
    if not projection > 0:
        return 0
    if book.scale_rule == LEAST_SQUARES:
        return <float> (projection / <double> energy)
    if book.scale_rule == NORM_PRESERVING:
        return <float> (norm / sqrt(<double> energy))
    return <float> (norm * norm / projection)


cdef inline float lloyd_max_row(const float *x, Py_ssize_t n, const Book *book, bint bfloat16,
                                uint8_t *codes) noexcept nogil:
    """Write the codes of one vector and return its scale."""
    cdef double norm = sqrt(sum_of_squares(x, n))
    cdef float scale = round_scale(<float> (norm * book.step), bfloat16)
    count_boundaries(x, n, reciprocal(scale), book.boundaries, book.count, codes)
    if book.scale_rule != NORM:
        scale = round_scale(fitted_scale(x, codes, n, norm, book), bfloat16)
    if book.scale_rule == LEAST_SQUARES:
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
    book.scale_rule = SCALE_RULES[scale_rule]
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
