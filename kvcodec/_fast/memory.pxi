# Reading memory: the yardstick of the benchmark. Sixteen words at a time are folded into as many
# running ones, which stay in registers, so that nothing but the loads takes time. Each thread reads
# one stretch, and as many threads are started as for other calls.

from libc.stdint cimport uint64_t


cdef uint64_t xor_of_words(const uint64_t *words, Py_ssize_t n) noexcept nogil:
    """The exclusive or of all words."""
    cdef uint64_t lane[16]
    cdef Py_ssize_t i, j, whole = n - n % 16
    for j in range(16):
        lane[j] = 0
    for i in range(0, whole, 16):
        for j in range(16):
            lane[j] ^= words[i + j]
    for i in range(whole, n):
        lane[0] ^= words[i]
    for j in range(1, 16):
        lane[0] ^= lane[j]
    return lane[0]


def read_all(x):
    """The exclusive or of an array's 64-bit words, the last one filled up with zeros."""
    cdef Py_ssize_t n = x.nbytes // 8, share
    cdef const uint64_t *words = <const uint64_t *> address(x)
    cdef int threads = threads_for(n), thread
    cdef uint64_t last = 0
    if words == NULL:
        return 0
    share = n // threads
    cdef uint64_t[::1] found = np.empty(threads + 1, dtype=np.uint64)
    for thread in prange(threads, nogil=True, num_threads=threads, schedule="static"):
        found[thread] = xor_of_words(
            words + thread * share, share if thread < threads - 1 else n - thread * share)
    memcpy(&last, words + n, x.nbytes % 8)
    found[threads] = last
    return xor_of_words(&found[0], threads + 1)
