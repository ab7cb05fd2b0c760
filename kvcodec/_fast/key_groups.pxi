# Scores of keys with groups of tokens (KIVI). The channel scales of a group move into the queries,
# which are rounded again for it; zero points become an offset of all its scores. Groups that fit
# into a tile, or tiles into them, go through one product together, and the softmax takes their
# integer sums with a scale and an offset for each 16 tokens; other groups go one by one.

cdef inline void fold_group(const Side *keys, Py_ssize_t at, Py_ssize_t rows, Py_ssize_t lane,
                            Py_ssize_t lanes, Work *work) noexcept nogil:
    """Move the channel scales of a group of tokens into the queries; round them again."""
    cdef const Plan *plan = keys.plan
    cdef Folded folded
    cdef Py_ssize_t group = lane // lanes
    folded.levels = work.folded + group * work.rows * work.depth
    folded.sums = work.folded_sum + group * work.rows
    folded.scale = work.folded_scale + lane * work.rows
    folded.offset = work.offset + lane * work.rows
    folded.lanes = lanes
    folded.next = work.rows
    load_group(keys.scale, keys.zero_point, at, plan.n, plan.bfloat16, 1 << (plan.bits - 1),
               work.tokens, work.middle)
    fold_rows(work.rotated, work.depth, rows, work.tokens, work.middle, plan.n, work.depth,
              work.products, &folded)


cdef inline void fold_tile(const Side *keys, Py_ssize_t at, Py_ssize_t rows, Py_ssize_t tokens,
                           Work *work) noexcept nogil:
    """Fold all groups of tokens of a tile; where tokens are missing, the queries become 0."""
    cdef Py_ssize_t span = keys.plan.span, lane = 0
    while lane < groups_of(tokens):
        fold_group(keys, at, rows, lane, span, work)
        fetch_as_for(rows * FOLD_AS_BYTES, work)
        at += keys.n
        lane += span
    if lane < TILE // GROUP:
        memset(work.folded + lane // span * work.rows * work.depth, 0,
               (TILE // GROUP - lane) // span * work.rows * work.depth)
        memset(work.folded_sum + lane // span * work.rows, 0,
               (TILE // GROUP - lane) // span * work.rows * sizeof(int32_t))
        memset(work.folded_scale + lane * work.rows, 0,
               (TILE // GROUP - lane) * work.rows * sizeof(float))
        memset(work.offset + lane * work.rows, 0,
               (TILE // GROUP - lane) * work.rows * sizeof(float))


cdef inline void scale_sums(const int32_t *sums, float scale, float offset, Py_ssize_t count,
                            float *out) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count):
        out[i] = sums[i] * scale + offset


cdef inline void products_per_group(const Side *keys, const uint8_t *tile, Py_ssize_t head,
                                    Py_ssize_t first, Py_ssize_t tokens, Py_ssize_t rows,
                                    Work *work) noexcept nogil:
    """Products with keys that have a scale and a zero point for each channel."""
    cdef const Plan *plan = keys.plan
    cdef Py_ssize_t t = 0, stop, group = first // plan.group_size, row, lanes, start
    cdef Py_ssize_t at = (head * keys.token_groups + group) * plan.n
    cdef Py_ssize_t vectors = chunk_vectors(plan.width) * TILE
    work.in_sums = plan.span > 0
    if plan.span:
        fold_tile(keys, at, rows, tokens, work)
        multiply_keys(plan, tile, TILE // GROUP, plan.span, work.folded, work.folded_sum, rows,
                      work)
        return
    while t < tokens:
        group += 1
        stop = min(group * plan.group_size - first, tokens)
        fold_group(keys, at, rows, 0, 1, work)
        start = t // GROUP
        lanes = groups_of(stop) - start
        multiply_keys(plan, tile + start * vectors, lanes, TILE // GROUP, work.folded,
                      work.folded_sum, rows, work)
        for row in range(rows):
            scale_sums(work.sums + row * TILE + t - start * GROUP, work.folded_scale[row],
                       work.offset[row], stop - t, work.scores + row * TILE + t)
        t = stop
        at += plan.n
