# What the queries of a cache see, worked out query by query: at one query an array operation would
# cost more than the attention that follows.

def cache_ranges(Py_ssize_t count, int64_t end, int64_t sinks, int64_t evicted, int64_t packed_end,
                 int64_t most_blocks, int64_t recent, int64_t block, bint causal, int64_t window,
                 int64_t ring, int64_t tail_base):
    """What the newest queries see of sinks, body and tail, int64 (3, 2, 1, count)."""
    ranges = np.empty((3, 2, 1, count), dtype=np.int64)
    cdef int64_t *out = <int64_t *> address(ranges)
    cdef int64_t position, oldest, start, stop, ready, body_end, first = sinks + evicted
    cdef Py_ssize_t i
    for i in range(count):
        position = end - count + i
        if position < first:
            position -= evicted
        stop = position + 1 if causal else end
        oldest = position + 1 - window if window else 0
        start = max(oldest, first)
        if ring:
            start = max(start, position + 1 - ring)
        ready = position + 1 - recent - packed_end
        ready = min(max(ready, 0) // block, most_blocks)
        body_end = packed_end + ready * block
        out[i] = max(oldest, 0)
        out[count + i] = min(stop, min(sinks, end))
        out[2 * count + i] = start
        out[3 * count + i] = min(stop, body_end)
        out[4 * count + i] = max(start, body_end) - tail_base
        out[5 * count + i] = stop - tail_base
    return ranges
