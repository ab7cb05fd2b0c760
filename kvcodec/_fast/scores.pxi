# Scores. A query loses a power of two, is weighted and rotated like the keys and rounded to int8,
# once for a segment. The codes of a tile of 64 tokens are read once for all query rows of a task; a
# score is an integer sum (dot.h) and two multiplications. A block's center adds an integer product
# with the query in 15 bits; keys with groups of tokens are those of key_groups.pxi. A query that
# stays in floats is multiplied with the levels of the same tiles (dot_floats.h). Exact tokens, and
# those with groups if the query stays in floats, are brought to float32 in the cache and multiplied
# in 16 lanes of fused multiply-adds.

cdef enum:
    CENTER_QUERY_LIMIT = 16383

cdef float SATURATION = 8.507059173023462e37            # 2^126
cdef float SMALLEST_TILE_WEIGHT = 1.925929944387236e-34  # 2^-112


cdef inline float normalize_row(const float *q, Py_ssize_t n, double scale,
                                float *out) noexcept nogil:
    """Take a power of two out of a query; returns the factor of its products."""
    cdef int exponent
    cdef Py_ssize_t c
    cdef float power
    cdef double factor
    frexp(largest_magnitude(q, n), &exponent)
    exponent = -100 if exponent < -100 else exponent
    power = <float> ldexp(1.0, -exponent)
    for c in range(n):
        out[c] = q[c] * power
    factor = ldexp(scale, exponent)
    return <float> (SATURATION if factor > SATURATION else factor)


cdef inline float round_row(const float *q, Py_ssize_t n, float largest,
                            int16_t *out) noexcept nogil:
    """Symmetric integers up to `largest` and their scale."""
    cdef float scale = round_scale(largest_magnitude(q, n) / largest, False)
    cdef float inverse = reciprocal(scale), y
    cdef Py_ssize_t c
    for c in range(n):
        y = round_even(q[c] * inverse)
        y = y if y < largest else largest
        y = y if y > -largest else -largest
        out[c] = <int16_t> <int32_t> y
    return scale


cdef inline int32_t sum_of_bytes(const int8_t *x, Py_ssize_t n) noexcept nogil:
    cdef int32_t total = 0
    cdef Py_ssize_t i
    for i in range(n):
        total = total + x[i]
    return total


cdef inline float round_query_row(const float *q, Py_ssize_t n, Py_ssize_t depth, int8_t *out,
                                  int32_t *total) noexcept nogil:
    """int8 of a query, filled up with zeros, and their sum; returns their scale."""
    cdef float scale = symmetric_row(q, n, 8, False, out)
    memset(out + n, 0, depth - n)
    total[0] = sum_of_bytes(out, n)
    return scale


cdef inline void divide(const float *x, const float *divisors, Py_ssize_t n,
                        float *y) noexcept nogil:
    cdef Py_ssize_t c
    for c in range(n):
        y[c] = x[c] / divisors[c]


cdef inline void prepare_row(const Side *keys, Py_ssize_t kv_head, Py_ssize_t row,
                             const Options *options, Work *work) noexcept nogil:
    """Bring one normalized query into the domain of a segment's packed keys and round it."""
    cdef const Plan *plan = keys.plan
    cdef Py_ssize_t n = keys.n
    cdef float *query = work.query + row * work.n
    cdef float *rotated = work.rotated + row * work.depth
    if keys.weights != NULL:
        divide(query, keys.weights + kv_head * n, n, rotated)
    else:
        memcpy(rotated, query, n * sizeof(float))
    rotate_row(rotated, plan, work.row)
    memset(rotated + n, 0, (work.depth - n) * sizeof(float))
    if options.integer_query:
        if not plan.by_token:
            work.rounded_scale[row] = round_query_row(
                rotated, n, work.depth, work.rounded + row * work.depth, work.rounded_sum + row)
        if plan.center:
            work.center_query_scale[row] = round_row(query, n, CENTER_QUERY_LIMIT,
                                                     work.center_query + row * work.n)


cdef inline Py_ssize_t tile_offset(const Side *side, Py_ssize_t head,
                                   Py_ssize_t tile) noexcept nogil:
    return (head * (side.tokens // TILE) + tile) * side.tile_bytes


cdef inline const uint8_t *trellis_tile(const Side *side, Py_ssize_t head, Py_ssize_t first,
                                        Py_ssize_t tokens, Work *work) noexcept nogil:
    """The 8-bit tile of a trellis code, made in the cache."""
    cdef const Plan *plan = side.plan
    cdef Py_ssize_t t
    if side.tile_bytes:
        expand_stream_tile(side.packed + tile_offset(side, head, first // TILE), plan.n,
                           plan.values, &plan.trellis.trellis, work.tile)
    else:
        for t in range(tokens):
            trellis_row_levels(side.packed + (head * side.tokens + first + t) * plan.row_bytes,
                               plan.n, plan.bits, plan.trellis.trellis.biased,
                               work.codes + t * plan.n)
        pack_tile(work.codes, tokens, plan.n, 8, plan.values, work.tile)
    return work.tile


cdef inline const uint8_t *tile_at(const Side *side, Py_ssize_t head, Py_ssize_t first,
                                   Py_ssize_t tokens, Work *work) noexcept nogil:
    """The tile that begins at a token; canonical rows are laid out as one.

    That of a trellis code is one of 8-bit levels.
    """
    cdef const Plan *plan = side.plan
    cdef Py_ssize_t t
    if plan.code == TRELLIS:
        return trellis_tile(side, head, first, tokens, work)
    if side.tile_bytes:
        return side.packed + tile_offset(side, head, first // TILE)
    for t in range(tokens):
        unpack_row(side.packed + (head * side.tokens + first + t) * plan.row_bytes, plan.n,
                   plan.width, CODES, <int8_t *> work.codes + t * plan.n)
    pack_tile(work.codes, tokens, plan.n, plan.width, plan.values, work.tile)
    return work.tile


cdef inline void dequantize_row(const Side *side, Py_ssize_t head, Py_ssize_t t,
                                const uint8_t *codes, float *out) noexcept nogil:
    """A token of an asymmetric code from its codes."""
    cdef const Plan *plan = side.plan
    cdef Py_ssize_t n = plan.n, c, at = head * side.tokens + t, group, size = plan.group_size
    cdef float scale, zero
    if plan.by_token:
        at = (head * side.token_groups + t // size) * n
        for c in range(n):
            scale = load_scale(side.scale, at + c, plan.bfloat16)
            out[c] = load_scale(side.zero_point, at + c, plan.bfloat16) + codes[c] * scale
        return
    for group in range(plan.groups):
        scale = load_scale(side.scale, at * plan.groups + group, plan.bfloat16)
        zero = load_scale(side.zero_point, at * plan.groups + group, plan.bfloat16)
        for c in range(group * size, min((group + 1) * size, n)):
            out[c] = zero + codes[c] * scale


cdef inline void dequantize_tile(const Side *side, Py_ssize_t head, Py_ssize_t first,
                                 Py_ssize_t tokens, Work *work) noexcept nogil:
    """Write the tokens of a tile of an asymmetric code to work.tokens."""
    cdef const Plan *plan = side.plan
    cdef Py_ssize_t n = plan.n, t, at
    if side.tile_bytes:
        unpack_tile(tile_at(side, head, first, tokens, work), tokens, n, plan.width, plan.values,
                    work.codes)
    for t in range(tokens):
        at = head * side.tokens + first + t
        if not side.tile_bytes:
            unpack_row(side.packed + at * plan.row_bytes, n, plan.width, CODES,
                       <int8_t *> work.codes + t * n)
        dequantize_row(side, head, first + t, work.codes + t * n, work.tokens + t * n)


cdef inline const float *floats_at(const Side *side, Py_ssize_t head, Py_ssize_t first,
                                   Py_ssize_t tokens, Work *work) noexcept nogil:
    """The tokens of a tile as float32 (tokens, n), of which work.low to work.high are filled in."""
    cdef Py_ssize_t at = (head * side.pitch + first) * side.n, low = work.low * side.n
    if side.exact != NULL:
        return side.exact + at
    if side.bfloat16 != NULL:
        widen_bfloat16(side.bfloat16 + at + low, work.high * side.n - low, work.tokens + low)
    else:
        dequantize_tile(side, head, first, tokens, work)
    return work.tokens


cdef inline void multiply_exact(const Unit *unit, Py_ssize_t first, Py_ssize_t rows,
                                Work *work) noexcept nogil:
    """Multiply rows with the exact keys of a tile; its values are fetched meanwhile."""
    cdef Py_ssize_t n = unit.keys.n, t = work.low, count
    cdef const float *token = floats_at(unit.keys, unit.key_head, first, TILE, work)
    work.in_sums = False
    while t < work.high:
        count = min(<Py_ssize_t> EXACT_BATCH, work.high - t)
        fetch_exact(unit.values, unit.value_head, first + t, count)
        float_dots(token + t * n, count, n, work.query, work.n, rows, work.scores + t, TILE)
        t += count


cdef inline void multiply_center(const Side *keys, Py_ssize_t block, Py_ssize_t rows,
                                 const Options *options, Work *work) noexcept nogil:
    """work.center = q . c of a block, for all rows."""
    cdef Py_ssize_t n = keys.n, row, c
    cdef const int8_t *center = keys.center_levels + block * n
    cdef float scale = load_scale(keys.center_scale, block, keys.plan.bfloat16)
    if options.integer_query:
        center_dots(work.center_query, work.n, rows, center, n, work.center_sum)
        for row in range(rows):
            work.center[row] = work.center_sum[row] * scale * work.center_query_scale[row]
        return
    for c in range(n):
        work.row[c] = center[c]
    float_dots(work.row, 1, n, work.query, work.n, rows, work.center, 1)
    for row in range(rows):
        work.center[row] = work.center[row] * scale


cdef inline void add_where_centered(float *s, const float *scale, float product,
                                    Py_ssize_t tokens) noexcept nogil:
    cdef const int32_t *sign = <const int32_t *> scale
    cdef Py_ssize_t t
    for t in range(tokens):
        s[t] = s[t] + product if sign[t] >= 0 else s[t]


cdef inline void add_centers(const Side *keys, Py_ssize_t head, Py_ssize_t first,
                             Py_ssize_t tokens, Py_ssize_t rows, const Options *options,
                             Work *work) noexcept nogil:
    """Add q . c to the products with tokens that are centered."""
    cdef const Plan *plan = keys.plan
    cdef Py_ssize_t t = 0, stop, block, row
    while t < tokens:
        block = (first + t) // plan.block
        stop = min((block + 1) * plan.block - first, tokens)
        multiply_center(keys, head * keys.blocks + block, rows, options, work)
        for row in range(rows):
            if stop - t == TILE:  # the compiler unrolls a loop of known length
                add_where_centered(work.scores + row * TILE, work.scale, work.center[row], TILE)
            else:
                add_where_centered(work.scores + row * TILE + t, work.scale + t, work.center[row],
                                   stop - t)
        t = stop


cdef inline Fetch *fetch_of(Work *work) noexcept nogil:
    """What to fetch meanwhile; NULL for nothing."""
    return &work.fetch if work.fetch.rate > 0 else NULL


cdef inline void fetch_as_for(Py_ssize_t read, Work *work) noexcept nogil:
    """Fetch as much as while so many bytes of codes are read."""
    if work.fetch.rate > 0:
        fetch_some(&work.fetch, <int> (read // 16 * work.fetch.rate))


cdef inline void load_scales(const Side *side, Py_ssize_t at, Py_ssize_t tokens,
                             float *scale) noexcept nogil:
    """The scales of a tile that has one a token."""
    if tokens < TILE:
        memset(scale + tokens, 0, (TILE - tokens) * sizeof(float))
    if not side.plan.bfloat16:
        memcpy(scale, <const float *> side.scale + at, tokens * sizeof(float))
    elif tokens == TILE:  # the compiler unrolls a loop of known length
        widen_bfloat16(<const uint16_t *> side.scale + at, TILE, scale)
    else:
        widen_bfloat16(<const uint16_t *> side.scale + at, tokens, scale)


cdef inline Py_ssize_t block_of(Py_ssize_t t, const Plan *plan) noexcept nogil:
    return 0 if t < plan.block else t // plan.block


cdef inline void multiply_keys(const Plan *plan, const uint8_t *packed, Py_ssize_t groups,
                               Py_ssize_t span, const int8_t *rounded, const int32_t *rounded_sum,
                               Py_ssize_t rows, Work *work) noexcept nogil:
    """work.sums = rounded queries, those of each span, times the levels of some tokens."""
    cdef Product product
    product.packed = packed
    product.stride_groups = TILE // GROUP
    product.groups = groups
    product.chunks = chunks_of(plan.n, plan.dot_width)
    product.span = span
    product.weights = rounded
    product.weights_stride = work.depth
    product.next_weights = work.rows * work.depth
    product.weight_sums = rounded_sum
    product.next_sums = work.rows
    product.sums = work.sums
    dot_products(&product, 1, plan.dot_width, plan.table, False, rows, fetch_of(work),
                 work.tile_rows)


cdef inline void products_per_token(const Side *keys, const uint8_t *tile, Py_ssize_t head,
                                    Py_ssize_t first, Py_ssize_t tokens, Py_ssize_t rows,
                                    const Options *options, Work *work) noexcept nogil:
    cdef const Plan *plan = keys.plan
    cdef bint one_center = plan.center and plan.block % TILE == 0
    cdef Py_ssize_t row, block = head * keys.blocks + block_of(first, plan)
    multiply_keys(plan, tile, TILE // GROUP, TILE // GROUP, work.rounded, work.rounded_sum, rows,
                  work)
    work.in_sums = one_center or not plan.center
    if one_center:
        multiply_center(keys, block, rows, options, work)
    elif plan.center:
        for row in range(rows):
            products_of_row(plan, row, work)
        add_centers(keys, head, first, tokens, rows, options, work)


cdef inline void float_products_per_token(const Side *keys, const uint8_t *tile, Py_ssize_t head,
                                          Py_ssize_t first, Py_ssize_t tokens, Py_ssize_t rows,
                                          const Options *options, Work *work) noexcept nogil:
    cdef const Plan *plan = keys.plan
    cdef bint one_center = plan.center and plan.block % TILE == 0
    cdef Py_ssize_t row
    memset(work.scores, 0, rows * TILE * sizeof(float))
    float_lanes(tile, TILE // GROUP, TILE, chunks_of(plan.n, plan.dot_width), plan.dot_width,
                plan.table, work.rotated, work.depth, rows, work.scores, TILE, fetch_of(work))
    if one_center:
        multiply_center(keys, head * keys.blocks + block_of(first, plan), rows, options, work)
    for row in range(rows):
        scale_products(work.scores + row * TILE, work.scale, work.center[row], one_center)
    if plan.center and not one_center:
        add_centers(keys, head, first, tokens, rows, options, work)


cdef inline void products_of_row(const Plan *plan, Py_ssize_t row, Work *work) noexcept nogil:
    """Turn integer sums into products."""
    if plan.by_token:
        products_of_groups(work.sums + row * TILE, work.folded_scale + row, work.offset + row,
                           work.rows, work.scores + row * TILE)
        return
    products_of_sums(work.sums + row * TILE, work.scale, work.rounded_scale[row],
                     work.center[row], work.in_sums and plan.center, work.scores + row * TILE)


cdef inline void multiply_tile(const Side *keys, Py_ssize_t head, Py_ssize_t first,
                               Py_ssize_t tokens, Py_ssize_t rows, const Options *options,
                               Work *work) noexcept nogil:
    """Multiply the prepared rows with the tokens of a tile.

    The products, which times work.factor are scores, are left in work.scores or, if work.in_sums
    is set, to be taken from work.sums.
    """
    cdef Py_ssize_t n = keys.n
    cdef const Plan *plan = keys.plan
    cdef const float *token
    work.in_sums = False
    if plan != NULL and not plan.by_token:
        load_scales(keys, head * keys.tokens + first, tokens, work.scale)
    if plan == NULL or plan.code == ASYMMETRIC and not options.integer_query:
        token = floats_at(keys, head, first, tokens, work)
        float_dots(token + work.low * n, work.high - work.low, n,
                   work.query if plan == NULL else work.rotated,
                   work.n if plan == NULL else work.depth, rows, work.scores + work.low, TILE)
    elif not options.integer_query:
        float_products_per_token(keys, tile_at(keys, head, first, tokens, work), head, first,
                                 tokens, rows, options, work)
    elif plan.by_token:
        products_per_group(keys, tile_at(keys, head, first, tokens, work), head, first, tokens,
                           rows, work)
    else:
        products_per_token(keys, tile_at(keys, head, first, tokens, work), head, first, tokens,
                           rows, options, work)


cdef void score_row(const float *q, const Side *keys, Py_ssize_t head, const Options *options,
                    float *out, char *scratch) noexcept nogil:
    """Scores of one query."""
    cdef Work work
    cdef Py_ssize_t tile, first, tokens
    carve(scratch, &work, 1, keys.n, 0)
    work.factor[0] = normalize_row(q, keys.n, options.scale, work.query)
    if keys.plan != NULL:
        prepare_row(keys, head, 0, options, &work)
    for tile in range((keys.tokens + TILE - 1) // TILE):
        first = tile * TILE
        tokens = min(<Py_ssize_t> TILE, keys.tokens - first)
        work.low, work.high = 0, tokens
        multiply_tile(keys, head, first, tokens, 1, options, &work)
        if work.in_sums:
            products_of_row(keys.plan, 0, &work)
        finish_scores(work.scores, work.factor[0], SATURATION)
        memcpy(out + first, work.scores, tokens * sizeof(float))


def scores(q, keys, double scale, query_bits):
    """scale * q . k for rows q (batch, kv_heads, rows, head_dim)."""
    keep = []
    cdef Side side = side_of(keys, keep)
    cdef Options options
    cdef Work unused
    cdef Py_ssize_t rows = q.shape[2], n = q.shape[3]
    cdef Py_ssize_t index, tasks = q.shape[0] * q.shape[1] * rows
    cdef Py_ssize_t thread_bytes = carve(NULL, &unused, 1, n, 0)
    cdef int threads = threads_for(tasks * side.tokens)
    memset(&options, 0, sizeof(Options))
    options.scale = scale
    options.integer_query = query_bits is not None
    out = np.empty((*q.shape[:3], side.tokens), dtype=np.float32)
    cdef uint8_t[::1] scratch = np.empty(threads * thread_bytes + 64, dtype=np.uint8)
    cdef const float *source = <const float *> address(q)
    cdef float *target = <float *> address(out)
    for index in prange(tasks, nogil=True, num_threads=threads, schedule="static"):
        score_row(source + index * n, &side, index // rows, &options,
                  target + index * side.tokens, aligned(scratch, thread_bytes, threadid()))
    return out
