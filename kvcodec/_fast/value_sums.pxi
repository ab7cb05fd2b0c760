# Value sums. The weights of a tile of 64 tokens are rounded to integers of 7 bits, or of two 7-bit
# digits, relative to the largest of their row; the codes of the values are read once for all query
# rows, their levels are summed as integers (dot.h), and the sums go into the float accumulators
# once a tile. Exact values, and all values if the probabilities stay in floats, are added up token
# by token with fused multiply-adds.

cdef inline void round_rows(const Side *values, Py_ssize_t at, Py_ssize_t tokens, Py_ssize_t group,
                            Py_ssize_t rows, int bits, Work *work) noexcept nogil:
    """Round probabilities times the scales of a group of channels, for all rows."""
    cdef const Plan *plan = values.plan
    cdef Py_ssize_t row
    cdef int8_t *digits
    cdef const float *p
    if plan.groups == 1:
        load_scales(values, at, tokens, work.scale)
    else:
        memset(work.scale + tokens, 0, (TILE - tokens) * sizeof(float))
        load_strided(values.scale, at * plan.groups + group, plan.groups, tokens, plan.bfloat16,
                     work.scale)
    for row in range(rows):
        p = work.scores + row * TILE
        digits = work.digits + row * TILE
        if bits > 7:
            work.step[row] = two_digits(p, work.scale, bits, SMALLEST_TILE_WEIGHT, digits,
                                        digits + rows * TILE, work.digit_sum + row,
                                        work.digit_sum + rows + row)
        else:
            work.step[row] = one_digit(p, work.scale, bits, SMALLEST_TILE_WEIGHT, digits,
                                       work.digit_sum + row)


cdef inline void add_scaled_ints(float *out, const int32_t *x, float step,
                                 Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t c
    for c in range(n):
        out[c] = out[c] + x[c] * step


cdef inline void add_scaled_digits(float *out, const int32_t *high, const int32_t *low, float step,
                                   Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t c
    for c in range(n):
        out[c] = out[c] + (high[c] * 128 + low[c]) * step


cdef inline void add_integer_values(const Side *values, const uint8_t *tile, Py_ssize_t start,
                                    Py_ssize_t stop, Py_ssize_t rows, int bits, float *sums,
                                    Work *work) noexcept nogil:
    """sums += step * (digits . levels) for the channels start <= c < stop, 64 at a time."""
    cdef const Plan *plan = values.plan
    cdef Py_ssize_t groups = groups_of(plan.n), vectors = chunk_vectors(plan.dot_width) * TILE
    cdef Py_ssize_t lane = start // GROUP * GROUP, row, first, last
    cdef Py_ssize_t digits = 2 if bits > 7 else 1
    cdef const int32_t *total
    cdef float *target
    while lane < stop:
        dot_lanes(tile + lane // GROUP * vectors, groups,
                  min(<Py_ssize_t> TILE // GROUP, groups_of(stop) - lane // GROUP),
                  chunks_of(TILE, plan.dot_width), plan.dot_width, plan.table, work.digits, TILE,
                  work.digit_sum, True, digits * rows, work.sums, TILE, work.values_ahead)
        first = max(start, lane)
        last = min(stop, lane + TILE)
        for row in range(rows):
            target = sums + row * work.n + first
            total = work.sums + row * TILE + first - lane
            if bits > 7:
                add_scaled_digits(target, total, total + rows * TILE, work.step[row], last - first)
            else:
                add_scaled_ints(target, total, work.step[row], last - first)
        lane += TILE


cdef inline void add_midpoints(const Side *values, Py_ssize_t at, Py_ssize_t tokens,
                               Py_ssize_t group, Py_ssize_t start, Py_ssize_t stop,
                               Py_ssize_t rows, float *sums, Work *work) noexcept nogil:
    """Add what the midpoints of a group of channels weigh; its scales lie in work.scale."""
    cdef const Plan *plan = values.plan
    cdef Py_ssize_t row
    memset(work.weights + tokens, 0, (TILE - tokens) * sizeof(float))
    load_strided(values.zero_point, at * plan.groups + group, plan.groups, tokens, plan.bfloat16,
                 work.weights)
    add_scaled_row(work.weights, work.scale, 1 << (plan.bits - 1), TILE)
    for row in range(rows):
        add_to_row(sums + row * work.n + start,
                   dot_16(work.scores + row * TILE, work.weights, TILE), stop - start)


cdef inline void add_values(const Side *values, Py_ssize_t head, Py_ssize_t first,
                            Py_ssize_t tokens, Py_ssize_t rows, int bits, float *sums,
                            Work *work) noexcept nogil:
    """sums (rows, n) += sum_t p_t v_t, with the probabilities p of a tile in work.scores."""
    cdef const Plan *plan = values.plan
    cdef Py_ssize_t n = values.n, group, start, stop, at = head * values.tokens + first
    cdef const uint8_t *tile
    cdef const float *token
    if plan == NULL or bits == 0:
        token = floats_at(values, head, first, tokens, work)
        add_scaled_tokens(token + work.low * n, work.high - work.low, n, work.scores + work.low,
                          TILE, rows, sums, work.n)
        return
    tile = tile_at(values, head, first, tokens, work)
    for group in range(plan.groups):
        start = group * plan.group_size
        stop = min(start + plan.group_size, n)
        round_rows(values, at, tokens, group, rows, bits, work)
        add_integer_values(values, tile, start, stop, rows, bits, sums, work)
        if plan.code == ASYMMETRIC:
            add_midpoints(values, at, tokens, group, start, stop, rows, sums, work)


cdef void value_row(const float *p, const Side *values, Py_ssize_t head, int bits, float *out,
                    char *scratch) noexcept nogil:
    """Value sums of one row of probabilities."""
    cdef Work work
    cdef Py_ssize_t tile, first, tokens
    carve(scratch, &work, 1, values.n, 0)
    for tile in range((values.tokens + TILE - 1) // TILE):
        first = tile * TILE
        tokens = min(<Py_ssize_t> TILE, values.tokens - first)
        work.low, work.high = 0, tokens
        memset(work.scores, 0, TILE * sizeof(float))
        memcpy(work.scores, p + first, tokens * sizeof(float))
        add_values(values, head, first, tokens, 1, bits, out, &work)


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
