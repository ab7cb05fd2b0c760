# Value sums. The weights of a tile of 64 tokens are rounded to integers of 7 bits, or of two 7-bit
# digits, relative to the largest of their row; the codes of the values are read once for all query
# rows, their levels are summed as integers (dot.h), and the sums go into the float accumulators
# once a tile. Probabilities that stay in floats are multiplied with the scales and then with the
# levels of the same tiles (dot_floats.h). Exact values, and those with groups if the probabilities
# stay in floats, are added up token by token with fused multiply-adds.

cdef inline void add_integer_values(const Side *values, const uint8_t *tile, Py_ssize_t start,
                                    Py_ssize_t stop, Py_ssize_t rows, int bits, float *sums,
                                    Work *work) noexcept nogil:
    """sums += step * (digits . levels) + midpoints for the channels start <= c < stop.

    They are 64 at a time. Where groups end among 16 lanes, they are of one group.
    """
    cdef const Plan *plan = values.plan
    cdef Py_ssize_t vectors = chunk_vectors(plan.dot_width) * TILE
    cdef Py_ssize_t lane = start // GROUP * GROUP, first, count = 0, group, i
    cdef int digits = 2 if bits > 7 else 1
    cdef Product *piece
    while lane + count * TILE < stop:
        first = lane + count * TILE
        group = first // plan.group_size if plan.span else 0
        piece = work.piece + count
        piece.packed = tile + first // GROUP * vectors
        piece.stride_groups = groups_of(plan.n)
        piece.groups = min(<Py_ssize_t> TILE // GROUP, groups_of(stop) - first // GROUP)
        piece.chunks = chunks_of(TILE, plan.dot_width)
        piece.span = plan.span if plan.span else TILE // GROUP
        piece.weights = work.digits + group * digits * rows * TILE
        piece.weights_stride = TILE
        piece.next_weights = digits * rows * TILE
        piece.weight_sums = work.digit_sum + group * digits * rows
        piece.next_sums = digits * rows
        piece.sums = work.sums + count * digits * rows * TILE
        count += 1
    dot_products(work.piece, count, plan.dot_width, plan.table, True, digits * rows, fetch_of(work),
                 work.tile_rows)
    for i in range(count):
        first = max(start, lane)
        group = lane // plan.group_size if plan.span else 0
        add_scaled_sums(work.piece[i].sums + first - lane, digits, rows,
                        min(stop, lane + TILE) - first, plan.group_size, work.step + group * rows,
                        work.midpoints + group * rows if plan.code == ASYMMETRIC else NULL,
                        sums + first, work.n)
        lane += TILE


cdef inline void add_float_values(const Side *values, const uint8_t *tile, Py_ssize_t rows,
                                  float *sums, Work *work) noexcept nogil:
    """sums += (probability * scale) . levels, for all channels; turns work.scores into weights."""
    cdef const Plan *plan = values.plan
    cdef Py_ssize_t row
    for row in range(rows):
        multiply(work.scores + row * TILE, work.scale, TILE, work.scores + row * TILE)
    float_lanes(tile, groups_of(plan.n), plan.n, chunks_of(TILE, plan.dot_width), plan.dot_width,
                plan.table, work.scores, TILE, rows, sums, work.n, fetch_of(work))


cdef inline void add_exact_values(const Unit *unit, Py_ssize_t first, Py_ssize_t next_count,
                                  Py_ssize_t rows, float *sums, Work *work) noexcept nogil:
    """sums += sum_t p_t v_t of a tile's exact values; meanwhile keys of the next tile are fetched.

    There are `next_count` of them. Without any all values are summed at once, in registers.
    """
    cdef Py_ssize_t n = unit.values.n, t = work.low, ahead = 0, count
    cdef Py_ssize_t most = EXACT_BATCH if next_count > 0 else TILE
    cdef const float *token = floats_at(unit.values, unit.value_head, first, TILE, work)
    while t < work.high:
        count = min(most, work.high - t)
        fetch_exact(unit.keys, unit.key_head, first + TILE + ahead, min(count, next_count - ahead))
        add_scaled_tokens(token + t * n, count, n, work.scores + t, TILE, rows, sums, work.n)
        ahead += count
        t += count


cdef inline void add_values(const Side *values, Py_ssize_t head, Py_ssize_t first,
                            Py_ssize_t tokens, Py_ssize_t rows, int bits, float *sums,
                            Work *work) noexcept nogil:
    """sums (rows, n) += sum_t p_t v_t, with the probabilities p of a tile in work.scores."""
    cdef const Plan *plan = values.plan
    cdef Py_ssize_t n = values.n, group, stored, start, at = head * values.tokens + first
    cdef int digits = 2 if bits > 7 else 1
    cdef bint sums_matter
    cdef const uint8_t *tile
    cdef const float *token
    cdef float *scale = work.scale
    cdef float *middle = NULL
    if plan == NULL or bits == 0 and plan.code == ASYMMETRIC:
        token = floats_at(values, head, first, tokens, work)
        add_scaled_tokens(token + work.low * n, work.high - work.low, n, work.scores + work.low,
                          TILE, rows, sums, work.n)
        return
    tile = tile_at(values, head, first, tokens, work)
    if plan.code == ASYMMETRIC:
        scale = work.channel_scales
        middle = scale + plan.groups * TILE
        load_channel_groups(values.scale, values.zero_point, at, plan.groups, tokens, plan.bfloat16,
                            1 << (plan.bits - 1), scale, middle)
    else:
        load_scales(values, at, tokens, work.scale)
    if bits == 0:
        add_float_values(values, tile, rows, sums, work)
        return
    sums_matter = dot_needs_sums(plan.dot_width, True)
    for group in range(plan.groups):
        stored = group if plan.span else 0
        digits_of_rows(work.scores, scale + group * TILE,
                       NULL if middle == NULL else middle + group * TILE, rows, bits,
                       SMALLEST_TILE_WEIGHT, work.digits + stored * digits * rows * TILE,
                       work.digit_sum + stored * digits * rows if sums_matter else NULL,
                       work.step + stored * rows, work.midpoints + stored * rows)
        if plan.code == ASYMMETRIC:
            fetch_as_for(rows * ROUND_AS_BYTES, work)
        if not plan.span:
            start = group * plan.group_size
            add_integer_values(values, tile, start, min(start + plan.group_size, n), rows, bits,
                               sums, work)
    if plan.span:
        add_integer_values(values, tile, 0, n, rows, bits, sums, work)


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
