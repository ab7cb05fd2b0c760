# Key centering. The sum over the tokens of a block runs with a lane for each channel, in float64
# and token by token, so vectorizing does not change its order; the mean is then coded like any
# other INT8 vector and decoded once for all tokens of the block. Whether a token gets longer is
# told by sums in float32 where they differ clearly, else by those in 8 lanes of float64 (codes.h).
# Threads take blocks.

cdef inline void mean_row(const float *x, Py_ssize_t tokens, Py_ssize_t n, double *total,
                          float *mean) noexcept nogil:
    """Mean over the tokens of one block; total is scratch for n doubles."""
    cdef Py_ssize_t c
    memset(total, 0, n * sizeof(double))
    add_tokens(x, tokens, n, total)
    for c in range(n):
        mean[c] = <float> (total[c] / tokens)


def block_means(x, Py_ssize_t block):
    """Mean over each block of tokens."""
    cdef Py_ssize_t tokens = x.shape[x.ndim - 2], n = x.shape[x.ndim - 1]
    cdef Py_ssize_t outer = x.size // (tokens * n) if tokens * n else 0
    cdef Py_ssize_t blocks = (tokens + block - 1) // block, task, first, members
    cdef int threads = threads_for(outer * tokens * n)
    means = np.zeros(x.shape[:-2] + (blocks, n), dtype=np.float32)
    cdef double[:, ::1] total = np.empty((threads, n), dtype=np.float64)
    cdef const float *source = <const float *> address(x)
    cdef float *target = <float *> address(means)
    for task in prange(outer * blocks, nogil=True, num_threads=threads, schedule="static"):
        first = task // blocks * tokens + task % blocks * block
        members = tokens - task % blocks * block
        members = block if members > block else members
        mean_row(source + first * n, members, n, &total[threadid(), 0], target + task * n)
    return means


def center_blocks(x, Py_ssize_t block, str scale_dtype):
    """The stored means: int8 levels and stored scales."""
    levels, scale = quantize_symmetric(block_means(x, block), 8, scale_dtype)
    return levels, store(scale, scale_dtype)
