# Fused dequant-dot attention with an online softmax. A task is a KV head with some query positions:
# all query heads that share the KV head go through keys and values together. For each tile of 64
# tokens that any of its queries sees, the keys are unpacked once to int8 levels in the first-level
# cache, the scores of all rows are integer dot products, the running maximum and sum are updated,
# the weights are rounded to integers, and the value levels are summed as integers into one float
# accumulator for each segment, which stays in the rotated domain until the end. Threads take tasks;
# a task does not depend on the others, so the result does not depend on the threads. Tiles are
# counted from the beginning of a segment, and a token that is masked contributes exact zeros, so a
# skipped tile and a masked one are the same.

cdef enum:
    TILE = 64
    ROWS = 16                  # rows of a task that are aimed for when there are many queries
    CENTER_QUERY_LIMIT = 16383

cdef float SATURATION = 8.507059173023462e37            # 2^126
cdef float SMALLEST_TILE_WEIGHT = 1.925929944387236e-34  # 2^-112


cdef struct Part:
    # A segment: both sides, what each query sees, and which accumulator its values go to.
    Side keys
    Side values
    const int64_t *start
    const int64_t *stop
    Py_ssize_t accumulator


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
    if keys.plan == NULL:
        for row in range(rows):
            for t in range(tokens):
                work.scores[row * TILE + t] = dot_16(
                    work.query + row * work.n,
                    keys.exact + (head * keys.tokens + first + t) * n, n)
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


cdef inline float cap_score(float s, float softcap) noexcept nogil:
    """softcap * tanh(s / softcap), with tanh from exp(-2 |x|)."""
    cdef float x = s / softcap
    cdef float power = exp_nonpositive(-2 * (x if x > 0 else -x))
    cdef float y = softcap * ((1 - power) / (1 + power))
    return y if x > 0 else -y


cdef inline void softmax_tile(Py_ssize_t row, Py_ssize_t tokens, Py_ssize_t low, Py_ssize_t high,
                              Py_ssize_t rows, Py_ssize_t accumulators, float softcap,
                              Work *work) noexcept nogil:
    """Turn the scores of a row into probabilities relative to the running maximum.

    Tokens outside low <= t < high of the tile, of which there must be one, get 0. Where the maximum
    grows, what was accumulated so far is scaled down.
    """
    cdef float *s = work.scores + row * TILE
    cdef float largest = work.largest[row], ratio
    cdef float lane[16]
    cdef Py_ssize_t t, c, a
    if softcap > 0:
        for t in range(low, high):
            s[t] = cap_score(s[t], softcap)
    for t in range(low, high):
        largest = s[t] if s[t] > largest else largest
    if largest > work.largest[row]:
        ratio = exp_nonpositive(work.largest[row] - largest)
        work.sum[row] = work.sum[row] * ratio
        for a in range(accumulators):
            for c in range(work.n):
                work.accumulator[(a * rows + row) * work.n + c] *= ratio
        work.largest[row] = largest
    for t in range(low):
        s[t] = -INFINITY
    for t in range(high, TILE):
        s[t] = -INFINITY
    for t in range(TILE):
        s[t] = exp_nonpositive(s[t] - largest)
    for t in range(16):
        lane[t] = (s[t] + s[t + 16]) + (s[t + 32] + s[t + 48])
    work.sum[row] = work.sum[row] + sum_of_16(lane)


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
            v = values.exact + at * n
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


cdef struct Shape:
    # How the queries are cut into tasks.
    Py_ssize_t kv_heads
    Py_ssize_t q_len
    Py_ssize_t repeats         # query heads of a KV head
    Py_ssize_t each            # positions of a task
    Py_ssize_t slices          # tasks of a KV head
    Py_ssize_t n               # the larger head_dim
    Py_ssize_t accumulators


cdef struct Task:
    # Query heads of one KV head at q_len positions from `first` on.
    Py_ssize_t batch
    Py_ssize_t head            # batch * kv_heads + kv_head
    Py_ssize_t first
    Py_ssize_t positions
    Py_ssize_t repeats
    Py_ssize_t q_len


cdef inline Py_ssize_t query_index(const Task *task, Py_ssize_t row) noexcept nogil:
    """Where a row of a task lies among the (batch, q_heads, q_len) queries."""
    cdef Py_ssize_t head = task.head * task.repeats + row // task.positions
    return head * task.q_len + task.first + row % task.positions


cdef inline void attend_part(const float *q, const Part *part, const Task *task,
                             const Options *options, Py_ssize_t accumulators,
                             Work *work) noexcept nogil:
    """Run the rows of a task over one segment."""
    cdef Py_ssize_t rows = task.positions * task.repeats, n = part.keys.n, row, i, t, tokens, first
    cdef Py_ssize_t low, high, seen_low = part.keys.tokens, seen_high = 0, tile
    cdef const int64_t *start = part.start + task.batch * task.q_len + task.first
    cdef const int64_t *stop = part.stop + task.batch * task.q_len + task.first
    cdef bint unpacked
    for i in range(task.positions):
        if start[i] < stop[i]:
            seen_low = start[i] if start[i] < seen_low else seen_low
            seen_high = stop[i] if stop[i] > seen_high else seen_high
    if seen_low >= seen_high:
        return
    for row in range(rows):
        prepare_row(q + query_index(task, row) * n, &part.keys, task.head, row, options, work)
    for tile in range(seen_low // TILE, (seen_high + TILE - 1) // TILE):
        first = tile * TILE
        tokens = TILE if first + TILE < part.keys.tokens else part.keys.tokens - first
        score_tile(&part.keys, task.head, first, tokens, rows, options, work)
        unpacked = False
        for row in range(rows):
            i = row % task.positions
            low = start[i] - first if start[i] > first else 0
            high = stop[i] - first if stop[i] - first < tokens else tokens
            if low >= high:
                continue
            softmax_tile(row, tokens, low, high, rows, accumulators, options.softcap, work)
            if part.values.plan != NULL and not unpacked:
                unpack_tile(&part.values, task.head, first, tokens, work.levels)
                unpacked = True
            add_values(&part.values, task.head, first, tokens, work.scores + row * TILE,
                       work.accumulator + (part.accumulator * rows + row) * work.n,
                       options.probability_bits, work)


cdef inline void finish_row(const Part *parts, Py_ssize_t count, Py_ssize_t row, Py_ssize_t rows,
                            float *output, float *log_sum_exp, Work *work) noexcept nogil:
    """Rotate the accumulators of a row back, add them up and divide by the sum."""
    cdef Py_ssize_t n = parts[0].values.n, c, i
    cdef float *accumulator
    cdef float inverse
    if work.sum[row] == 0:
        memset(output, 0, n * sizeof(float))
        log_sum_exp[0] = -INFINITY
        return
    memcpy(output, work.accumulator + row * work.n, n * sizeof(float))
    for i in range(count):
        if parts[i].accumulator > 0:
            accumulator = work.accumulator + (parts[i].accumulator * rows + row) * work.n
            unrotate_row(accumulator, parts[i].values.plan, work.folded)
            for c in range(n):
                output[c] = output[c] + accumulator[c]
    inverse = <float> (1 / work.sum[row])
    for c in range(n):
        output[c] = output[c] * inverse
    log_sum_exp[0] = <float> (work.largest[row] + log(work.sum[row]))


cdef void attend_task(const float *q, const Part *parts, Py_ssize_t count, Py_ssize_t index,
                      const Shape *shape, const Options *options, float *output,
                      float *log_sum_exp, char *scratch) noexcept nogil:
    """Attend for the index-th group of queries; everything that changes is local."""
    cdef Task task
    cdef Work work
    cdef Py_ssize_t rows, row, i, n = parts[0].values.n
    task.head = index // shape.slices
    task.batch = task.head // shape.kv_heads
    task.first = index % shape.slices * shape.each
    task.positions = min(shape.each, shape.q_len - task.first)
    task.repeats = shape.repeats
    task.q_len = shape.q_len
    rows = task.positions * task.repeats
    carve(scratch, &work, shape.each * shape.repeats, shape.n, shape.accumulators)
    for row in range(rows):
        work.largest[row] = -INFINITY
        work.sum[row] = 0
    memset(work.accumulator, 0, shape.accumulators * rows * work.n * sizeof(float))
    for i in range(count):
        attend_part(q, &parts[i], &task, options, shape.accumulators, &work)
    for row in range(rows):
        i = query_index(&task, row)
        finish_row(parts, count, row, rows, output + i * n, log_sum_exp + i, &work)


def attend(q, segments, double scale, softcap, query_bits, probability_bits):
    """Attention of q (batch, q_heads, q_len, head_dim) over all segments under one softmax."""
    cdef Part parts[8]
    cdef Py_ssize_t count = len(segments), i
    cdef Options options
    cdef Shape shape
    cdef Work unused
    shape.accumulators = 1
    options.scale = scale
    options.softcap = softcap or 0
    options.integer_query = query_bits is not None
    options.probability_bits = probability_bits or 0
    if count > 8:
        raise ValueError(f"segments must be at most 8, but {count} were given.")
    keep = []
    for i in range(count):
        keys, values, start, stop = segments[i]
        start = np.ascontiguousarray(start, dtype=np.int64)
        stop = np.ascontiguousarray(stop, dtype=np.int64)
        keep.append((start, stop))
        parts[i].keys = side_of(keys)
        parts[i].values = side_of(values)
        parts[i].start = <const int64_t *> address(start)
        parts[i].stop = <const int64_t *> address(stop)
        parts[i].accumulator = 0
        if parts[i].values.plan != NULL:
            parts[i].accumulator = shape.accumulators
            shape.accumulators += 1

    shape.kv_heads = segments[0].keys.shape[1]
    shape.q_len = q.shape[2]
    shape.repeats = q.shape[1] // shape.kv_heads
    shape.each = max(1, min(shape.q_len, ROWS // shape.repeats))
    shape.slices = (shape.q_len + shape.each - 1) // shape.each
    shape.n = max(parts[0].keys.n, parts[0].values.n)
    cdef Py_ssize_t tasks = q.shape[0] * shape.kv_heads * shape.slices, index
    cdef Py_ssize_t thread_bytes = carve(NULL, &unused, shape.each * shape.repeats, shape.n,
                                         shape.accumulators)
    seen = sum(parts[i].keys.tokens for i in range(count))
    cdef int threads = threads_for(tasks * shape.each * shape.repeats * seen)

    output = np.empty((*q.shape[:3], parts[0].values.n), dtype=np.float32)
    log_sum_exp = np.empty(q.shape[:3], dtype=np.float32)
    cdef uint8_t[::1] scratch = np.empty(threads * thread_bytes + 64, dtype=np.uint8)
    cdef const float *source = <const float *> address(q)
    cdef float *target = <float *> address(output)
    cdef float *target_lse = <float *> address(log_sum_exp)
    for index in prange(tasks, nogil=True, num_threads=threads, schedule="dynamic"):
        attend_task(source, parts, count, index, &shape, &options, target, target_lse,
                    aligned(scratch, thread_bytes, threadid()))
    return output, log_sum_exp


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
    cdef Side side = side_of(keys)
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
    cdef Side side = side_of(values)
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


def merge(outputs, log_sum_exps):
    """Combine attention over disjoint sets of tokens, stacked along the first axis."""
    cdef Py_ssize_t parts = outputs.shape[0], n = outputs.shape[outputs.ndim - 1]
    cdef Py_ssize_t rows = rows_of(outputs[0]), row, part, c
    cdef int threads = threads_for(parts * rows * n)
    cdef double largest, total, weight
    output = np.zeros(outputs.shape[1:], dtype=np.float32)
    log_sum_exp = np.empty(log_sum_exps.shape[1:], dtype=np.float32)
    cdef double[:, ::1] sums = np.empty((threads, n), dtype=np.float64)
    cdef const float *source = <const float *> address(outputs)
    cdef const float *source_lse = <const float *> address(log_sum_exps)
    cdef float *target = <float *> address(output)
    cdef float *target_lse = <float *> address(log_sum_exp)
    cdef double *acc
    for row in prange(rows, nogil=True, num_threads=threads, schedule="static"):
        largest = -INFINITY
        for part in range(parts):
            if source_lse[part * rows + row] > largest:
                largest = source_lse[part * rows + row]
        target_lse[row] = -INFINITY
        if largest > -INFINITY:
            acc = &sums[threadid(), 0]
            memset(acc, 0, n * sizeof(double))
            total = 0
            for part in range(parts):
                weight = exp(source_lse[part * rows + row] - largest)
                total = total + weight
                for c in range(n):
                    acc[c] = acc[c] + weight * source[(part * rows + row) * n + c]
            for c in range(n):
                target[row * n + c] = <float> (acc[c] / total)
            target_lse[row] = <float> (largest + log(total))
    return output, log_sum_exp[()]
