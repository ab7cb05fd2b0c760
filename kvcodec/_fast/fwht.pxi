# Fast Walsh-Hadamard transform. A row of 128 (64 without AVX-512) stays in eight vectors for all of
# its butterflies, with one load and one store (simd.h); longer rows go through the cache once for
# each distance more than twice that. For m > 1 the small symmetric Paley matrix follows across the
# pieces, one piece after the other as in the reference, so that every output is the same tree of
# float32 additions. Threads take a few rows at a time.

cdef struct Rotation:
    Py_ssize_t n
    Py_ssize_t m
    Py_ssize_t power
    float factor
    const float *paley
    const float *signs


cdef class RotationTables:
    """A rotation of one size, with the arrays that its pointers lead to."""
    cdef Rotation rotation
    cdef object paley
    cdef object signs

    def __init__(self, n, signs):
        m, power = factor_order(n)
        self.paley = paley_matrix(m).astype(np.float32)
        self.signs = signs
        self.rotation.n = n
        self.rotation.m = m
        self.rotation.power = power
        self.rotation.factor = inverse_square_root(n)
        self.rotation.paley = <const float *> address(self.paley)
        self.rotation.signs = <const float *> address(signs)


@lru_cache(maxsize=64)
def plain_tables(n):
    """The tables without signs, made once."""
    return RotationTables(n, None)


cdef inline void transform_row(const float *x, const float *signs, const Rotation *rotation,
                               float *scratch, float *y) noexcept nogil:
    """y = H x / sqrt(n), or H D x / sqrt(n) with signs D; y may be x, scratch holds n floats."""
    cdef Py_ssize_t m = rotation.m, power = rotation.power, out_piece, piece, j
    cdef const float *piece_signs = NULL
    cdef float *total
    cdef float sign
    if m == 1:
        butterflies(x, signs, power, rotation.factor, y)
        return
    for piece in range(m):
        if signs != NULL:
            piece_signs = signs + piece * power
        butterflies(x + piece * power, piece_signs, power, 1, scratch + piece * power)
    for out_piece in range(m):
        total = y + out_piece * power
        sign = rotation.paley[out_piece * m]
        for j in range(power):
            total[j] = sign * scratch[j]
        for piece in range(1, m):
            sign = rotation.paley[out_piece * m + piece]
            for j in range(power):
                total[j] = total[j] + sign * scratch[piece * power + j]
    for j in range(rotation.n):
        y[j] = y[j] * rotation.factor


cdef enum:
    ROWS_AT_ONCE = 32


cdef void transform_few(const float *x, const Rotation *rotation, bint inverse, Py_ssize_t rows,
                        float *scratch, float *y) noexcept nogil:
    """Write D H x, H D x or H x to y."""
    cdef Py_ssize_t n = rotation.n, row
    cdef const float *before = rotation.signs
    if inverse:
        before = NULL
    if rotation.m == 1:
        butterflies_of_rows(x, before, rows, n, rotation.factor, y)
    else:
        for row in range(rows):
            transform_row(x + row * n, before, rotation, scratch, y + row * n)
    if inverse and rotation.signs != NULL:
        for row in range(rows):
            multiply(y + row * n, rotation.signs, n, y + row * n)


cdef void transform_rows(x, out, signs, bint inverse):
    """Write D H x, H D x or H x to out, for rows of any number."""
    cdef Py_ssize_t n = x.shape[x.ndim - 1], rows = rows_of(x), first
    cdef Py_ssize_t task, tasks = (rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    cdef int threads = threads_for(rows * n)
    cdef RotationTables tables = plain_tables(n) if signs is None else RotationTables(n, signs)
    cdef const Rotation *rotation = &tables.rotation
    cdef float[:, ::1] scratch = np.empty((threads, n), dtype=np.float32)
    cdef const float *source = <const float *> address(x)
    cdef float *target = <float *> address(out)
    for task in prange(tasks, nogil=True, num_threads=threads, schedule="static"):
        first = task * ROWS_AT_ONCE
        transform_few(source + first * n, rotation, inverse,
                      ROWS_AT_ONCE if first + ROWS_AT_ONCE < rows else rows - first,
                      &scratch[threadid(), 0], target + first * n)


def fwht(x, out):
    """Write the orthonormal transform of the last axis of x to out."""
    transform_rows(x, out, None, False)
