# Fast Walsh-Hadamard transform. A row of up to 128 (64 without AVX-512) stays in registers for all
# of its butterflies, with one load and one store (hadamard.h); longer rows go through the cache
# once for each distance more than twice that. For m > 1 the small symmetric Paley matrix follows
# across the pieces, one piece after the other as in the reference, so that every output is the same
# tree of float32 additions. Threads take a few rows at a time.

cdef struct Rotation:
    Py_ssize_t n
    Py_ssize_t m
    Py_ssize_t power
    float factor
    const float *signs_of_pieces
    Py_ssize_t stride
    const float *signs


cdef class RotationTables:
    """A rotation of one size, with the arrays that its pointers lead to."""
    cdef Rotation rotation
    cdef object signs_of_pieces
    cdef object signs

    def __init__(self, n, signs):
        m, power = factor_order(n)
        stride = (n + 15) // 16 * 16  # whole vectors
        self.signs_of_pieces = np.zeros((m, stride), dtype=np.float32)
        self.signs_of_pieces[:, :n] = paley_matrix(m).T.repeat(power, axis=1)
        self.signs = signs
        self.rotation.n = n
        self.rotation.m = m
        self.rotation.power = power
        self.rotation.factor = inverse_square_root(n)
        self.rotation.signs_of_pieces = <const float *> address(self.signs_of_pieces)
        self.rotation.stride = stride
        self.rotation.signs = <const float *> address(signs)


@lru_cache(maxsize=64)
def plain_tables(n):
    """The tables without signs, made once."""
    return RotationTables(n, None)


cdef inline void transform_row(const float *x, const float *diagonal, const Rotation *rotation,
                               float *scratch, float *y) noexcept nogil:
    """y = H x / sqrt(n), or H D x / sqrt(n) with a diagonal D.

    y may be x; scratch holds n floats.
    """
    if rotation.m == 1:
        butterflies(x, diagonal, rotation.n, rotation.factor, y)
    else:
        transform_pieces(x, diagonal, rotation.m, rotation.power, rotation.signs_of_pieces,
                         rotation.stride, rotation.factor, scratch, y)


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
