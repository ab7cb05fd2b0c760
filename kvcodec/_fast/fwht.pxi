# Fast Walsh-Hadamard transform. A row is copied to the output and transformed there in place: the
# butterflies inside each of the m pieces by vectors (simd.h), then for m > 1 the small symmetric
# Paley matrix across the pieces, one piece after the other as in the reference, so that every
# output is the same tree of float32 additions. Threads take rows.

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


cdef inline void transform_row(float *x, const Rotation *rotation, float *scratch) noexcept nogil:
    """H x / sqrt(n) in place; scratch holds n floats."""
    cdef Py_ssize_t m = rotation.m, power = rotation.power, out_piece, piece, j
    cdef float *total
    cdef float sign
    for piece in range(m):
        butterflies(x + piece * power, power)
    if m > 1:
        memcpy(scratch, x, rotation.n * sizeof(float))
        for out_piece in range(m):
            total = x + out_piece * power
            sign = rotation.paley[out_piece * m]
            for j in range(power):
                total[j] = sign * scratch[j]
            for piece in range(1, m):
                sign = rotation.paley[out_piece * m + piece]
                for j in range(power):
                    total[j] = total[j] + sign * scratch[piece * power + j]
    for j in range(rotation.n):
        x[j] = x[j] * rotation.factor


cdef inline void sign_row(float *x, const float *signs, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t j
    for j in range(n):
        x[j] = x[j] * signs[j]


cdef void transform_rows(x, out, signs, bint inverse):
    """Write D H x, H D x or H x to out, for rows of any number."""
    cdef Py_ssize_t n = x.shape[x.ndim - 1], rows = rows_of(x), row
    cdef int threads = threads_for(rows * n)
    cdef RotationTables tables = RotationTables(n, signs)
    cdef const Rotation *rotation = &tables.rotation
    cdef float[:, ::1] scratch = np.empty((threads, n), dtype=np.float32)
    cdef const float *source = <const float *> address(x)
    cdef float *target = <float *> address(out)
    cdef float *y
    for row in prange(rows, nogil=True, num_threads=threads, schedule="static"):
        y = target + row * n
        if target != source:
            memcpy(y, source + row * n, n * sizeof(float))
        if rotation.signs != NULL and not inverse:
            sign_row(y, rotation.signs, n)
        transform_row(y, rotation, &scratch[threadid(), 0])
        if rotation.signs != NULL and inverse:
            sign_row(y, rotation.signs, n)


def fwht(x, out):
    """Write the orthonormal transform of the last axis of x to out."""
    transform_rows(x, out, None, False)
