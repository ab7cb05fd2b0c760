# Value sums. The weights of a tile of 64 tokens are rounded to integers of 7 bits, or of two 7-bit
# digits, relative to the largest; the int8 levels of the values, unpacked once for all query rows,
# are summed as integers with a lane for each channel, and go into the float accumulator once a
# tile.

cdef inline float round_tile(Py_ssize_t tokens, int bits, Work *work) noexcept nogil:
    """Round the weights of a tile to two 7-bit digits; returns the step, 0 if nothing is left."""
    cdef float top = (1 << bits) - 1, largest = 0, inverse
    cdef int32_t u
    cdef Py_ssize_t t
    largest = largest_magnitude(work.weights, tokens)
    if largest < SMALLEST_TILE_WEIGHT:
        return 0
    inverse = top / largest
    for t in range(tokens):
        u = <int32_t> round_even(work.weights[t] * inverse)
        work.high[t] = u >> 7
        work.low[t] = u & 127
    return largest / top


cdef inline void sum_levels(const int8_t *levels, const uint8_t *digits, Py_ssize_t tokens,
                            Py_ssize_t stride, Py_ssize_t n, int32_t *total) noexcept nogil:
    """total += sum over the tokens of digit * level."""
    cdef Py_ssize_t t, c
    cdef int16_t digit
    for t in range(tokens):
        digit = digits[t]
        if digit != 0:
            for c in range(n):
                total[c] = total[c] + <int16_t> (digit * <int16_t> levels[t * stride + c])


cdef inline void add_integer_values(const Side *values, Py_ssize_t head, Py_ssize_t first,
                                    Py_ssize_t tokens, const float *p, float *accumulator,
                                    int bits, Work *work) noexcept nogil:
    """accumulator += sum_t p_t v_t by integer sums, for each group of channels."""
    cdef const Plan *plan = values.plan
    cdef Py_ssize_t n = plan.n, group, start, size, t, c, at = head * values.tokens + first
    cdef float half = 1 << (plan.bits - 1), step, scale, offset
    cdef float middle[TILE]
    for group in range(plan.groups):
        start = group * plan.group_size
        size = plan.group_size if start + plan.group_size < n else n - start
        for t in range(tokens):
            scale = load_scale(values.scale, (at + t) * plan.groups + group, plan.bfloat16)
            work.weights[t] = p[t] * scale
            if plan.code == ASYMMETRIC:
                middle[t] = load_scale(values.zero_point, (at + t) * plan.groups + group,
                                       plan.bfloat16) + half * scale
        step = round_tile(tokens, bits, work)
        if step > 0:
            memset(work.total, 0, size * sizeof(int32_t))
            if bits > 7:
                sum_levels(work.levels + start, work.high, tokens, n, size, work.total)
                for c in range(size):
                    work.total[c] = work.total[c] * 128
            sum_levels(work.levels + start, work.low, tokens, n, size, work.total)
            for c in range(size):
                accumulator[start + c] = accumulator[start + c] + work.total[c] * step
        if plan.code == ASYMMETRIC:
            offset = dot_16(p, middle, tokens)
            for c in range(size):
                accumulator[start + c] = accumulator[start + c] + offset


cdef inline void add_float_values(const Side *values, Py_ssize_t head, Py_ssize_t first,
                                  Py_ssize_t tokens, const float *p, float *accumulator,
                                  Work *work) noexcept nogil:
    """accumulator += sum_t p_t v_t in floating point, from exact or packed values."""
    cdef const Plan *plan = values.plan
    cdef Py_ssize_t n = values.n, t, c, g, at
    cdef const float *v
    cdef float weight, offset, half
    for t in range(tokens):
        at = head * values.tokens + first + t
        if p[t] == 0:
            continue
        if plan == NULL:
            v = exact_row(values, at, work.folded)
            for c in range(n):
                accumulator[c] = accumulator[c] + p[t] * v[c]
        elif plan.code != ASYMMETRIC:
            weight = p[t] * load_scale(values.scale, at, plan.bfloat16)
            for c in range(n):
                accumulator[c] = accumulator[c] + weight * work.levels[t * n + c]
        else:
            half = 1 << (plan.bits - 1)
            for c in range(n):
                g = at * plan.groups + c // plan.group_size
                weight = load_scale(values.scale, g, plan.bfloat16)
                offset = load_scale(values.zero_point, g, plan.bfloat16)
                accumulator[c] = accumulator[c] + p[t] * (
                    offset + (work.levels[t * n + c] + half) * weight)


cdef inline void add_values(const Side *values, Py_ssize_t head, Py_ssize_t first,
                            Py_ssize_t tokens, const float *p, float *accumulator, int bits,
                            Work *work) noexcept nogil:
    if values.plan == NULL or bits == 0:
        add_float_values(values, head, first, tokens, p, accumulator, work)
    else:
        add_integer_values(values, head, first, tokens, p, accumulator, bits, work)


cdef void value_row(const float *p, const Side *values, Py_ssize_t head, int bits, float *out,
                    char *scratch) noexcept nogil:
    """Value sums of one row of probabilities."""
    cdef Work work
    cdef Py_ssize_t tile, first, tokens
    carve(scratch, &work, 1, values.n, 0)
    for tile in range((values.tokens + TILE - 1) // TILE):
        first = tile * TILE
        tokens = min(<Py_ssize_t> TILE, values.tokens - first)
        if values.plan != NULL:
            unpack_tile(values, head, first, tokens, work.levels)
        add_values(values, head, first, tokens, p + first, out, bits, &work)


def value_sums(probabilities, values, probability_bits):
    """sum_t p_t v_t in the values' rotated domain."""
    keep = []
    cdef Side side = side_of(values, keep)
    cdef Work unused
    cdef int bits = probability_bits or 0
    cdef Py_ssize_t rows = probabilities.shape[2]
    cdef Py_ssize_t index, tasks = probabilities.shape[0] * probabilities.shape[1] * rows
    cdef Py_ssize_t thread_bytes = carve(NULL, &unused, 1, side.n, 0)
    cdef int threads = threads_for(tasks * side.tokens)
    out = np.zeros((*probabilities.shape[:3], side.n), dtype=np.float32)
    cdef uint8_t[::1] scratch = np.empty(threads * thread_bytes + 64, dtype=np.uint8)
    cdef const float *source = <const float *> address(probabilities)
    cdef float *target = <float *> address(out)
    for index in prange(tasks, nogil=True, num_threads=threads, schedule="static"):
        value_row(source + index * side.tokens, &side, index // rows, bits,
                  target + index * side.n, aligned(scratch, thread_bytes, threadid()))
    return out
