# Attention over a sequence of a cache. What its queries see of sinks, body and tail is worked out
# query by query, and all that the kernels need is taken straight from the sequence: for one query,
# array operations or an object for each segment would cost more than the attention that follows.

cdef inline bint is_float32(const Py_buffer *view) noexcept:
    """Whether a buffer is C-contiguous and of aligned float32."""
    return (view.format[0] == c"f" and view.format[1] == 0
            and <size_t> view.buf % sizeof(float) == 0 and PyBuffer_IsContiguous(view, c"C"))


def clean_tokens(x, Py_ssize_t batch, Py_ssize_t heads, Py_ssize_t head_dim):
    """How many tokens an array (batch, heads or a multiple, tokens, head_dim) is of.

    -1 of anything but a C-contiguous, aligned float32 array of this shape, with at least one token,
    whose values are below 2^100 in magnitude.
    """
    cdef Py_buffer view
    cdef Py_ssize_t tokens = -1
    if type(x) is not ndarray:
        return -1
    try:
        PyObject_GetBuffer(x, &view, PyBUF_STRIDES | PyBUF_FORMAT)
    except (ValueError, BufferError):  # a dtype that buffers do not know, such as bfloat16
        return -1
    try:
        if (view.ndim == 4 and view.len > 0 and is_float32(&view) and view.shape[0] == batch
                and view.shape[1] % heads == 0 and view.shape[3] == head_dim
                and largest_of_all(<const float *> view.buf, view.len // 4) < LARGEST):
            tokens = view.shape[2]
    finally:
        PyBuffer_Release(&view)
    return tokens


cdef void find_ranges(Py_ssize_t count, int64_t end, int64_t sinks, int64_t evicted,
                      int64_t packed_end, int64_t most_blocks, int64_t recent, int64_t block,
                      bint causal, int64_t window, int64_t ring, int64_t tail_base,
                      int64_t *out) noexcept nogil:
    """What the newest queries see of sinks, body and tail, (3, 2, count)."""
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


def attend_sequence(q, sequence, Py_ssize_t packed_end, Py_ssize_t most_blocks, bint causal,
                    window, double scale, softcap, query_bits, probability_bits):
    """Attention of the newest queries of a sequence of a cache over what they see of it."""
    cdef Part parts[3]
    cdef Py_ssize_t count = q.shape[2], i
    cdef Options options = options_of(scale, softcap, query_bits, probability_bits)
    cdef Memory ranges = Memory(6 * count * sizeof(int64_t))
    cdef int64_t *edges = <int64_t *> ranges.start
    layer, sinks = sequence.layer, sequence.sinks
    sink_k, sink_v = sinks.k, sinks.v
    tail_k, tail_v, base_number = sequence.exact()
    cdef int64_t base = base_number
    keep = []
    find_ranges(count, sequence.end, layer.sinks, sequence.evicted, packed_end, most_blocks,
                layer.recent, layer.block, causal, window or 0, layer.window or 0, base, edges)
    parts[0] = array_part(sink_k, sink_v, 0, keep)
    parts[1] = paged_part(sequence.keys, sequence.values, keep)
    parts[2] = array_part(tail_k, tail_v, base - layer.sinks, keep)
    for i in range(3):
        parts[i].start = edges + 2 * i * count
        parts[i].stop = parts[i].start + count
    return attend_parts(q, parts, 3, &options)


cdef inline void round_to_bfloat16(const float *x, Py_ssize_t n, uint16_t *out) noexcept nogil:
    """The nearest bfloat16, ties to even."""
    cdef const uint32_t *bits = <const uint32_t *> x
    cdef Py_ssize_t i
    for i in range(n):
        out[i] = (bits[i] + 0x7FFFu + (bits[i] >> 16 & 1u)) >> 16


def keep_tokens(kept, Py_ssize_t slot, x, Py_ssize_t first, Py_ssize_t stop):
    """Put the tokens first <= t < stop of x into slots of exact tokens, for each head."""
    cdef Side target = side_of_array(kept), source = side_of_array(x)
    cdef Py_ssize_t n = source.n, count = (stop - first) * n, head, to
    cdef const float *tokens
    if (not kept.flags.writeable or target.heads != source.heads or target.n != n or first < 0
            or slot < 0 or stop > source.tokens or slot + stop - first > target.tokens):
        raise ValueError("kept must be writable and have room for the tokens.")
    for head in range(source.heads):
        tokens = source.exact + (head * source.pitch + first) * n
        to = (head * target.pitch + slot) * n
        if target.bfloat16 == NULL:
            memcpy(<float *> target.exact + to, tokens, count * sizeof(float))
        else:
            round_to_bfloat16(tokens, count, <uint16_t *> target.bfloat16 + to)
