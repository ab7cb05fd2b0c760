# Lloyd-Max codes. The norm is a float64 sum in 8 lanes; a code is the number of boundaries below
# the scaled value, found for a vector of integers at a time by halving tables of boundaries that
# lie in registers (codes.h), without branches. The scale rules other than "norm" take another pass
# over levels and values. Some rows take each of these steps together. Threads take some rows at a
# time.

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


cdef inline void find_codes(const float *x, Py_ssize_t rows, Py_ssize_t n, const Book *book,
                            const float *scale, uint8_t *codes) noexcept nogil:
    cdef float inverse[TOGETHER]
    cdef Py_ssize_t row
    for row in range(rows):
        inverse[row] = reciprocal(scale[row])
    for row in range(rows):
        find_cells(x + row * n, n, inverse[row], &book.cells, codes + row * n)


cdef inline void lloyd_max_rows(const float *x, Py_ssize_t rows, Py_ssize_t n, const Book *book,
                                bint bfloat16, float *y, float *scale,
                                uint8_t *codes) noexcept nogil:
    """Write the codes and the scale of up to TOGETHER vectors; y is scratch for n floats."""
    cdef double norm[TOGETHER]
    cdef Py_ssize_t row
    for row in range(rows):
        norm[row] = dot_8(x + row * n, x + row * n, n)
    for row in range(rows):
        norm[row] = sqrt(norm[row])
        scale[row] = round_scale(<float> (norm[row] * book.step), bfloat16)
    find_codes(x, rows, n, book, scale, codes)
    if book.scale_rule == NORM:
        return
    for row in range(rows):
        if book.scale_rule == NORM_PRESERVING and scale[row] > 0:
            # Levels have the signs of their cells, so that the projection is positive.
            scale[row] = <float> (norm[row] / sqrt(energy_of_cells(codes + row * n, n,
                                                                   &book.cells)))
        else:
            levels_of_cells(codes + row * n, n, &book.cells, y)
            scale[row] = fitted_scale(x + row * n, y, n, norm[row], book.scale_rule)
    for row in range(rows):
        scale[row] = round_scale(scale[row], bfloat16)
    if book.scale_rule == LEAST_SQUARES:
        find_codes(x, rows, n, book, scale, codes)


def quantize_lloyd_max(x, levels, boundaries, double step, str scale_rule, str scale_dtype):
    """Codes and scales of the vectors along the last axis."""
    cdef Py_ssize_t n = x.shape[x.ndim - 1], rows = rows_of(x), first
    cdef Py_ssize_t task, tasks = (rows + TOGETHER - 1) // TOGETHER
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
    for task in prange(tasks, nogil=True, num_threads=threads, schedule="static"):
        first = task * TOGETHER
        lloyd_max_rows(source + first * n, min(TOGETHER, rows - first), n, &book, bfloat16,
                       &scratch[threadid(), 0], scales + first, target + first * n)
    return codes, scale[()]


def dequantize_lloyd_max(codes, levels, scale):
    """levels[code] times scale."""
    return dequantize_symmetric(levels[codes], scale)
