# Lloyd-Max codes. The norm is a float64 sum in 8 lanes; a code is the number of boundaries below
# the scaled value, found for a vector of values at a time by halving a table of boundaries that
# lies in registers (simd.h), without branches. The scale rules other than "norm" take a second
# pass over the levels that the search leaves behind. Threads take rows.

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
    Cells cells
    double step
    int scale_rule


cdef void make_book(Book *book, levels, boundaries, double step, str scale_rule):
    boundaries = boundaries.astype(np.float32)
    make_cells(&book.cells, <const float *> address(boundaries), boundaries.size,
               <const int8_t *> address(levels))
    book.step = step
    book.scale_rule = SCALE_RULES[scale_rule]


cdef inline float fitted_scale(const float *x, const float *y, Py_ssize_t n, double norm,
                               int scale_rule) noexcept nogil:
    """The scale that a rule other than "norm" gives to the chosen levels y."""
    cdef double projection = dot_8(x, y, n)
    if not projection > 0:
        return 0
    if scale_rule == LEAST_SQUARES:
        return <float> (projection / dot_8(y, y, n))
    if scale_rule == NORM_PRESERVING:
        return <float> (norm / sqrt(dot_8(y, y, n)))
    return <float> (norm * norm / projection)


cdef inline float lloyd_max_row(const float *x, Py_ssize_t n, const Book *book, bint bfloat16,
                                float *y, uint8_t *codes) noexcept nogil:
    """Write the codes of one vector and return its scale; y is scratch for n floats."""
    cdef double norm = sqrt(dot_8(x, x, n))
    cdef float scale = round_scale(<float> (norm * book.step), bfloat16)
    find_cells(x, n, reciprocal(scale), &book.cells, codes, NULL if book.scale_rule == NORM else y)
    if book.scale_rule != NORM:
        scale = round_scale(fitted_scale(x, y, n, norm, book.scale_rule), bfloat16)
    if book.scale_rule == LEAST_SQUARES:
        find_cells(x, n, reciprocal(scale), &book.cells, codes, NULL)
    return scale


def quantize_lloyd_max(x, levels, boundaries, double step, str scale_rule, str scale_dtype):
    """Codes and scales of the vectors along the last axis."""
    cdef Py_ssize_t n = x.shape[x.ndim - 1], rows = rows_of(x), row
    cdef bint bfloat16 = scale_dtype == "bfloat16"
    cdef int threads = threads_for(rows * n)
    cdef Book book
    make_book(&book, levels, boundaries, step, scale_rule)
    cdef float[:, ::1] scratch = np.empty((threads, n), dtype=np.float32)
    codes = np.empty(x.shape, dtype=np.uint8)
    scale = np.empty(x.shape[:-1], dtype=np.float32)
    cdef const float *source = <const float *> address(x)
    cdef uint8_t *target = <uint8_t *> address(codes)
    cdef float *scales = <float *> address(scale)
    for row in prange(rows, nogil=True, num_threads=threads, schedule="static"):
        scales[row] = lloyd_max_row(source + row * n, n, &book, bfloat16,
                                    &scratch[threadid(), 0], target + row * n)
    return codes, scale[()]


def dequantize_lloyd_max(codes, levels, scale):
    """levels[code] times scale."""
    return dequantize_symmetric(levels[codes], scale)
