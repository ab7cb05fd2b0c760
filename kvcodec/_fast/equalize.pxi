# Channel energies for equalizing: float64, a lane for each channel, token by token. Threads take
# heads.

cdef inline void energy_row(const float *x, Py_ssize_t tokens, Py_ssize_t n,
                            double *total) noexcept nogil:
    cdef Py_ssize_t t, c
    for t in range(tokens):
        for c in range(n):
            total[c] = total[c] + <double> x[t * n + c] * x[t * n + c]


def channel_energy(x):
    """Sum over the tokens of x^2."""
    cdef Py_ssize_t tokens = x.shape[x.ndim - 2], n = x.shape[x.ndim - 1], task
    cdef Py_ssize_t outer = x.size // (tokens * n) if tokens * n else 0
    cdef int threads = threads_for(x.size)
    total = np.zeros(x.shape[:-2] + (n,), dtype=np.float64)
    cdef const float *source = <const float *> address(x)
    cdef double *target = <double *> address(total)
    for task in prange(outer, nogil=True, num_threads=threads, schedule="static"):
        energy_row(source + task * tokens * n, tokens, n, target + task * n)
    return total
