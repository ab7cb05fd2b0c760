# Scores. A query loses a power of two, is weighted and rotated like the keys and rounded to int8,
# once for a segment. The keys of a tile of 64 tokens are unpacked to int8 levels in the first-
# level cache, once for all query rows of a task; a score is an integer dot product and two
# multiplications. A block's center adds an integer product with the query in 15 bits; groups of
# tokens (KIVI) fold their scales into the query and round it again for each group.

cdef enum:
    TILE = 64
    CENTER_QUERY_LIMIT = 16383

cdef float SATURATION = 8.507059173023462e37            # 2^126
cdef float SMALLEST_TILE_WEIGHT = 1.925929944387236e-34  # 2^-112


cdef struct Options:
    double scale
    float softcap              # 0 for none
    bint integer_query
    int probability_bits       # 0 for floating point


cdef struct Work:
    # Scratch of one thread; rows is the most query rows of a task, n the largest head_dim.
    Py_ssize_t n
    float *query               # (rows, n): without its power of two
    float *rotated             # (rows, n): weighted and rotated like the keys
    float *factor              # (rows): turns products into scores
    int8_t *rounded            # (rows, n)
    float *rounded_scale       # (rows)
    int16_t *center_query      # (rows, n)
    float *center_query_scale  # (rows)
    int8_t *levels             # (TILE, n): of keys, then of values
    float *scores              # (rows, TILE): scores, then probabilities
    float *weights             # (TILE)
    uint8_t *high              # (TILE): the upper 7 bits of the rounded weights
    uint8_t *low               # (TILE): the lower 7 bits
    int32_t *total             # (n)
    float *folded              # (n): query times the scales of a group
    float *middle              # (n): midpoints of a group
    int8_t *folded_rounded     # (n)
    float *largest             # (rows): running maximum of the scores
    double *sum                # (rows): running sum of the probabilities
    float *accumulator         # (accumulators, rows, n)


cdef Py_ssize_t carve(char *base, Work *work, Py_ssize_t rows, Py_ssize_t n,
                      Py_ssize_t accumulators) noexcept nogil:
    """Lay the arrays of a thread's scratch out from base; returns the bytes they need."""
    cdef Py_ssize_t at = 0
    work.n = n
    work.query = <float *> take(base, &at, rows * n * 4)
    work.rotated = <float *> take(base, &at, rows * n * 4)
    work.factor = <float *> take(base, &at, rows * 4)
    work.rounded = <int8_t *> take(base, &at, rows * n)
    work.rounded_scale = <float *> take(base, &at, rows * 4)
    work.center_query = <int16_t *> take(base, &at, rows * n * 2)
    work.center_query_scale = <float *> take(base, &at, rows * 4)
    work.levels = <int8_t *> take(base, &at, TILE * n)
    work.scores = <float *> take(base, &at, rows * TILE * 4)
    work.weights = <float *> take(base, &at, TILE * 4)
    work.high = <uint8_t *> take(base, &at, TILE)
    work.low = <uint8_t *> take(base, &at, TILE)
    work.total = <int32_t *> take(base, &at, n * 4)
    work.folded = <float *> take(base, &at, n * 4)
    work.middle = <float *> take(base, &at, n * 4)
    work.folded_rounded = <int8_t *> take(base, &at, n)
    work.largest = <float *> take(base, &at, rows * 4)
    work.sum = <double *> take(base, &at, rows * 8)
    work.accumulator = <float *> take(base, &at, accumulators * rows * n * 4)
    return at


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


cdef inline void prepare_row(const float *q, const Side *keys, Py_ssize_t kv_head, Py_ssize_t row,
                             const Options *options, Work *work) noexcept nogil:
    """Bring one query into the domain of a segment's keys and round it."""
    cdef const Plan *plan = keys.plan
    cdef Py_ssize_t n = keys.n, c
    cdef float *query = work.query + row * work.n
    cdef float *rotated = work.rotated + row * work.n
    work.factor[row] = normalize_row(q, n, options.scale, query)
    if plan == NULL:
        return
    for c in range(n):
        rotated[c] = query[c] / keys.weights[kv_head * n + c] if keys.weights != NULL else query[c]
    rotate_row(rotated, plan, work.folded)
    if options.integer_query:
        if not plan.by_token:
            work.rounded_scale[row] = symmetric_row(rotated, n, 8, False,
                                                    work.rounded + row * work.n)
        if plan.center:
            work.center_query_scale[row] = round_row(query, n, CENTER_QUERY_LIMIT,
                                                     work.center_query + row * work.n)


cdef inline void unpack_tile(const Side *side, Py_ssize_t head, Py_ssize_t first,
                             Py_ssize_t tokens, int8_t *levels) noexcept nogil:
    cdef const Plan *plan = side.plan
    cdef Py_ssize_t t
    for t in range(tokens):
        unpack_row(side.packed + (head * side.tokens + first + t) * plan.row_bytes, plan.n,
                   plan.width, plan.levels, levels + t * plan.n)


cdef inline float float_product(const float *q, const int8_t *levels, float *scratch,
                                Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t c
    for c in range(n):
        scratch[c] = levels[c]
    return dot_16(q, scratch, n)


cdef inline int32_t center_dot(const int16_t *q, const int8_t *center,
                               Py_ssize_t n) noexcept nogil:
    cdef int32_t total = 0
    cdef Py_ssize_t c
    for c in range(n):
        total = total + <int32_t> q[c] * center[c]
    return total


cdef inline float center_product(const Side *keys, Py_ssize_t block, Py_ssize_t row,
                                 const Options *options, Work *work) noexcept nogil:
    """q . c of a block."""
    cdef Py_ssize_t n = keys.n
    cdef const int8_t *center = keys.center_levels + block * n
    cdef float scale = load_scale(keys.center_scale, block, keys.plan.bfloat16)
    if options.integer_query:
        return (center_dot(work.center_query + row * work.n, center, n) * scale
                * work.center_query_scale[row])
    return float_product(work.query + row * work.n, center, work.folded, n) * scale


cdef inline void products_per_token(const Side *keys, Py_ssize_t head, Py_ssize_t first,
                                    Py_ssize_t tokens, Py_ssize_t rows, const Options *options,
                                    Work *work) noexcept nogil:
    cdef Py_ssize_t n = keys.n, row, t
    cdef float scale
    for t in range(tokens):
        scale = fabsf(load_scale(keys.scale, head * keys.tokens + first + t, keys.plan.bfloat16))
        for row in range(rows):
            if options.integer_query:
                work.scores[row * TILE + t] = (
                    dot_int8(work.rounded + row * work.n, work.levels + t * n, n) * scale
                    * work.rounded_scale[row])
            else:
                work.scores[row * TILE + t] = float_product(
                    work.rotated + row * work.n, work.levels + t * n, work.folded, n) * scale


cdef inline void products_per_group(const Side *keys, Py_ssize_t head, Py_ssize_t first,
                                    Py_ssize_t tokens, Py_ssize_t rows, const Options *options,
                                    Work *work) noexcept nogil:
    """Products with keys that have a scale and a zero point for each channel."""
    cdef const Plan *plan = keys.plan
    cdef Py_ssize_t n = keys.n, row, t = 0, u, stop, c, at
    cdef float half = 1 << (plan.bits - 1)
    cdef float offset, scale
    cdef const float *q
    while t < tokens:
        at = (first + t) // plan.group_size
        stop = (at + 1) * plan.group_size - first
        stop = stop if stop < tokens else tokens
        at = (head * keys.token_groups + at) * n
        for c in range(n):
            work.middle[c] = (load_scale(keys.zero_point, at + c, plan.bfloat16)
                              + half * load_scale(keys.scale, at + c, plan.bfloat16))
        for row in range(rows):
            q = work.rotated + row * work.n
            offset = dot_16(q, work.middle, n)
            for c in range(n):
                work.folded[c] = q[c] * load_scale(keys.scale, at + c, plan.bfloat16)
            if options.integer_query:
                scale = symmetric_row(work.folded, n, 8, False, work.folded_rounded)
                for u in range(t, stop):
                    work.scores[row * TILE + u] = (
                        dot_int8(work.folded_rounded, work.levels + u * n, n) * scale + offset)
            else:
                for u in range(t, stop):
                    work.scores[row * TILE + u] = float_product(
                        work.folded, work.levels + u * n, <float *> work.total, n) + offset
        t = stop


cdef inline void score_tile(const Side *keys, Py_ssize_t head, Py_ssize_t first, Py_ssize_t tokens,
                            Py_ssize_t rows, const Options *options, Work *work) noexcept nogil:
    """Scores of the prepared rows with up to TILE tokens, before softcap and mask."""
    cdef Py_ssize_t n = keys.n, row, t, u, block, stop
    cdef float product
    cdef float *s
    cdef const float *key
    if keys.plan == NULL:
        for t in range(tokens):
            key = exact_row(keys, head * keys.tokens + first + t, work.folded)
            for row in range(rows):
                work.scores[row * TILE + t] = dot_16(work.query + row * work.n, key, n)
    else:
        unpack_tile(keys, head, first, tokens, work.levels)
        if keys.plan.by_token:
            products_per_group(keys, head, first, tokens, rows, options, work)
        else:
            products_per_token(keys, head, first, tokens, rows, options, work)
        if keys.plan.center:
            t = 0
            while t < tokens:
                block = (first + t) // keys.plan.block
                stop = (block + 1) * keys.plan.block - first
                stop = stop if stop < tokens else tokens
                for row in range(rows):
                    product = center_product(keys, head * keys.blocks + block, row, options, work)
                    for u in range(t, stop):
                        if is_centered(keys, head * keys.tokens + first + u):
                            work.scores[row * TILE + u] = work.scores[row * TILE + u] + product
                t = stop
    for row in range(rows):
        s = work.scores + row * TILE
        for t in range(tokens):
            product = s[t] * work.factor[row]
            product = product if product < SATURATION else SATURATION
            s[t] = product if product > -SATURATION else -SATURATION


cdef void score_row(const float *q, const Side *keys, Py_ssize_t head, const Options *options,
                    float *out, char *scratch) noexcept nogil:
    """Scores of one query."""
    cdef Work work
    cdef Py_ssize_t tile, first, tokens
    carve(scratch, &work, 1, keys.n, 0)
    prepare_row(q, keys, head, 0, options, &work)
    for tile in range((keys.tokens + TILE - 1) // TILE):
        first = tile * TILE
        tokens = min(<Py_ssize_t> TILE, keys.tokens - first)
        score_tile(keys, head, first, tokens, 1, options, &work)
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
