# Fused dequant-dot attention with an online softmax. A task is a KV head with some query
# positions: all query heads that share the KV head go through keys and values together. For each
# tile of 64 tokens that any of its queries sees, the products of all rows are taken (scores.pxi),
# the running maximum and sum are updated (softmax.h), and the values are summed (value_sums.pxi),
# which stay in the rotated domain until the end. At token numbers that are multiples of 1,024 (with
# the next unit, where tokens lie in pages) a new running softmax begins; they are folded into one
# another in the order of the tokens. So the result depends neither on threads nor on whether one
# thread goes through all of them or several take them in pieces, which happens where there are
# fewer tasks than threads could share. Tiles are counted from the beginning of an array or unit,
# and a token that is masked contributes exact zeros, so a skipped tile and a masked one are the
# same.

cdef enum:
    MOST_SEGMENTS = 8
    TASKS_A_THREAD = 4         # fewer would not share the work evenly


cdef struct Shape:
    # How the queries are cut into tasks.
    Py_ssize_t kv_heads
    Py_ssize_t q_len
    Py_ssize_t repeats         # query heads of a KV head
    Py_ssize_t each            # positions of a task
    Py_ssize_t slices          # tasks of a KV head
    Py_ssize_t n               # the larger head_dim
    Py_ssize_t accumulators
    Py_ssize_t spans


cdef struct Task:
    # Query heads of one KV head at some positions from `first` on.
    Py_ssize_t batch
    Py_ssize_t head            # batch * kv_heads + kv_head
    Py_ssize_t first
    Py_ssize_t positions
    Py_ssize_t repeats
    Py_ssize_t rows
    Py_ssize_t q_len
    bint normalized            # whether the queries are without their powers of two
    Py_ssize_t prepared        # the packed segment that they are prepared for, or -1
    int64_t all_from           # tokens of the segment that every row sees
    int64_t all_to
    int used                   # a bit for each accumulator that something was added to


cdef inline void scale_row(float *x, Py_ssize_t n, float factor) noexcept nogil:
    cdef Py_ssize_t c
    for c in range(n):
        x[c] = x[c] * factor


cdef inline void clear_sums(Sums *sums, Py_ssize_t rows, Py_ssize_t n,
                            Py_ssize_t accumulators) noexcept nogil:
    cdef Py_ssize_t row
    for row in range(rows):
        sums.largest[row] = -INFINITY
        sums.sum[row] = 0
    memset(sums.lanes, 0, rows * 16 * sizeof(float))
    memset(sums.values, 0, accumulators * rows * n * sizeof(float))


cdef inline void sums_to_probabilities(const Plan *plan, Py_ssize_t row, Py_ssize_t rows,
                                       Py_ssize_t low, Py_ssize_t high, Work *work) noexcept nogil:
    """Probabilities of rows that see the tokens low <= t < high of a tile."""
    if plan.by_token:
        probabilities_of_groups(
            work.sums + row * TILE, work.folded_scale + row, work.offset + row, work.rows,
            work.factor + row, SATURATION, rows, low, high, work.part.largest + row,
            work.part.lanes + row * 16, work.scores + row * TILE, work.ratio + row, fetch_of(work))
        return
    probabilities_of_sums(
        work.sums + row * TILE, work.scale, work.rounded_scale + row,
        work.center + row if plan.center else NULL, work.factor + row, SATURATION, rows, low, high,
        work.part.largest + row, work.part.lanes + row * 16, work.scores + row * TILE,
        work.ratio + row, fetch_of(work))


cdef inline void whole_rows(const Plan *plan, Py_ssize_t row, Py_ssize_t rows,
                            Work *work) noexcept nogil:
    """Probabilities of rows that see all of a tile."""
    cdef float *s = work.scores + row * TILE
    cdef float *largest = work.part.largest + row
    cdef float *lanes = work.part.lanes + row * 16
    cdef Py_ssize_t i
    if work.in_sums:
        sums_to_probabilities(plan, row, rows, 0, TILE, work)
        return
    for i in range(rows):
        work.ratio[row + i] = probabilities_of_products(
            s + i * TILE, work.factor[row + i], SATURATION, largest + i, lanes + i * 16)


cdef inline void masked_row(const Plan *plan, Py_ssize_t row, Py_ssize_t low, Py_ssize_t high,
                            float softcap, Work *work) noexcept nogil:
    """Probabilities of a row that sees the tokens low <= t < high of a tile; the others get 0."""
    cdef float *s = work.scores + row * TILE
    cdef float factor = work.factor[row]
    work.ratio[row] = 1
    if low >= high:
        memset(s, 0, TILE * sizeof(float))
        return
    if work.in_sums and softcap == 0:
        sums_to_probabilities(plan, row, 1, low, high, work)
        return
    if work.in_sums:
        products_of_row(plan, row, work)
    if softcap > 0:
        finish_scores(s, factor, SATURATION)
        cap_scores(s, softcap)
        factor = 1
    work.ratio[row] = probabilities_of_some(s, low, high, factor, SATURATION,
                                            work.part.largest + row, work.part.lanes + row * 16)


cdef inline void softmax_rows(const Unit *unit, Py_ssize_t first, Py_ssize_t tokens,
                              const Task *task, const int64_t *start, const int64_t *stop,
                              const Options *options, Work *work) noexcept nogil:
    """Turn the products of a tile into probabilities relative to the running maxima.

    Where a maximum is raised, what was summed so far is scaled down.
    """
    cdef const Plan *plan = unit.keys.plan
    cdef int64_t number = unit.number + first
    cdef Py_ssize_t row, i, low, high
    cdef bint whole = options.softcap == 0 and tokens == TILE
    if whole and task.all_from <= number and number + TILE <= task.all_to:
        whole_rows(plan, 0, task.rows, work)
    else:
        for row in range(task.rows):
            i = row % task.positions
            low = max(start[i] - number, <int64_t> 0)
            high = min(stop[i] - number, <int64_t> tokens)
            if whole and low == 0 and high == TILE:
                whole_rows(plan, row, 1, work)
            else:
                masked_row(plan, row, low, high, options.softcap, work)
    for row in range(task.rows):
        if work.ratio[row] != 1:
            scale_row(work.part.values + row * work.n, work.n, work.ratio[row])


cdef inline Py_ssize_t query_index(const Task *task, Py_ssize_t row) noexcept nogil:
    """Where a row of a task lies among the (batch, q_heads, q_len) queries."""
    cdef Py_ssize_t head = task.head * task.repeats + row // task.positions
    return head * task.q_len + task.first + row % task.positions


cdef inline void attend_unit(const Unit *unit, Py_ssize_t index, const Task *task,
                             const int64_t *start, const int64_t *stop, int64_t seen_low,
                             int64_t seen_high, const Options *options, Ahead *ahead,
                             Work *work) noexcept nogil:
    """Run the prepared rows of a task over the tiles of a unit that any of them sees."""
    cdef Py_ssize_t tile, first, tokens
    cdef bint exact
    seen_low = max(seen_low - unit.number, <int64_t> 0)
    seen_high = min(seen_high - unit.number, unit.tokens)
    if seen_low >= seen_high:
        return
    for tile in range(seen_low // TILE, (seen_high + TILE - 1) // TILE):
        first = tile * TILE
        tokens = min(<Py_ssize_t> TILE, unit.tokens - first)
        work.low = max(seen_low - first, <int64_t> 0)
        work.high = min(seen_high - first, <int64_t> tokens)
        look_ahead(ahead, index, tile, &work.fetch)
        exact = unit.keys.plan == NULL and unit.values.plan == NULL
        if exact:
            multiply_exact(unit, first, task.rows, work)
        else:
            multiply_tile(unit.keys, unit.key_head, first, tokens, task.rows, options, work)
        softmax_rows(unit, first, tokens, task, start, stop, options, work)
        if exact:
            add_exact_values(unit, first, min(seen_high - first - TILE, <int64_t> TILE), task.rows,
                             work.part.values, work)
        else:
            add_values(unit.values, unit.value_head, first, tokens, task.rows,
                       options.probability_bits, work.part.values, work)


cdef inline bint attend_span(const float *q, const Part *parts, const Span *span, Task *task,
                             const Options *options, Work *work) noexcept nogil:
    """Run the rows of a task over a span, into work.part; whether any row sees some of it."""
    cdef const Part *part = parts + span.part
    cdef const int64_t *start = part.start + task.batch * task.q_len + task.first
    cdef const int64_t *stop = part.stop + task.batch * task.q_len + task.first
    cdef const float *query
    cdef int64_t low = INT64_MAX, high = 0
    cdef Py_ssize_t row, i, index, kv_head = task.head % part.kv_heads
    cdef Unit unit
    cdef Ahead ahead
    task.all_from, task.all_to = 0, INT64_MAX
    for i in range(task.positions):
        task.all_from = max(task.all_from, start[i])
        task.all_to = min(task.all_to, stop[i])
        if start[i] < stop[i]:
            low = min(low, start[i])
            high = max(high, stop[i])
    low = max(low, span.start)
    high = min(high, span.stop)
    if low >= high:
        return False
    if not task.normalized:
        for row in range(task.rows):
            query = q + query_index(task, row) * part.keys.n
            fetch(<const float *> (<size_t> query + task.positions * part.keys.n * sizeof(float)),
                  part.keys.n)  # of the next task
            work.factor[row] = normalize_row(query, part.keys.n, options.scale,
                                             work.query + row * work.n)
        task.normalized = True
    if task.prepared != span.part and part.keys.plan != NULL:
        for row in range(task.rows):
            prepare_row(&part.keys, task.head, row, options, work)
        task.prepared = span.part
    clear_sums(&work.part, task.rows, work.n, 1)
    work.tile_rows = amx_begin(task.rows)
    prepare_fetching(part, task.head, kv_head, task.rows, options, &ahead, &work.fetch)
    for index in range(span.first_unit, span.last_unit):
        unit = unit_of(part, task.head, kv_head, index)
        attend_unit(&unit, index, task, start, stop, low, high, options, &ahead, work)
    amx_end(work.tile_rows)
    for row in range(task.rows):
        work.part.sum[row] = sum_of_16(work.part.lanes + row * 16)
    return True


cdef inline void fold(const Sums *part, Py_ssize_t accumulator, Py_ssize_t accumulators,
                      Py_ssize_t rows, Py_ssize_t n, Sums *total) noexcept nogil:
    """Add the running softmax of later tokens to that of earlier ones."""
    cdef Py_ssize_t row, a, c
    cdef float ratio, factor
    cdef float *target
    cdef const float *source
    for row in range(rows):
        if part.sum[row] == 0:
            continue
        factor = 1
        if part.largest[row] > total.largest[row]:
            if total.sum[row] > 0:
                ratio = exp_nonpositive(total.largest[row] - part.largest[row])
                total.sum[row] = total.sum[row] * ratio
                for a in range(accumulators):
                    scale_row(total.values + (a * rows + row) * n, n, ratio)
            total.largest[row] = part.largest[row]
        else:
            factor = exp_nonpositive(part.largest[row] - total.largest[row])
        total.sum[row] = total.sum[row] + part.sum[row] * factor
        source = part.values + row * n
        target = total.values + (accumulator * rows + row) * n
        for c in range(n):
            target[c] = target[c] + source[c] * factor


cdef inline void finish_row(const Part *parts, Py_ssize_t count, int used, Py_ssize_t row,
                            Py_ssize_t rows, float *output, float *log_sum_exp,
                            Work *work) noexcept nogil:
    """Rotate the accumulators of a row back, add them up and divide by the sum."""
    cdef Py_ssize_t n = parts[0].values.n, c, i
    cdef Sums *total = &work.total
    cdef float *accumulator
    cdef float inverse
    if total.sum[row] == 0:
        memset(output, 0, n * sizeof(float))
        log_sum_exp[0] = -INFINITY
        return
    memcpy(output, total.values + row * work.n, n * sizeof(float))
    for i in range(count):
        if parts[i].accumulator > 0 and used >> parts[i].accumulator & 1:
            accumulator = total.values + (parts[i].accumulator * rows + row) * work.n
            unrotate_row(accumulator, parts[i].values.plan, work.row)
            for c in range(n):
                output[c] = output[c] + accumulator[c]
    inverse = <float> (1 / total.sum[row])
    for c in range(n):
        output[c] = output[c] * inverse
    log_sum_exp[0] = <float> (total.largest[row] + log(total.sum[row]))


cdef inline Task task_of(Py_ssize_t index, const Shape *shape) noexcept nogil:
    cdef Task task
    task.head = index // shape.slices
    task.batch = task.head // shape.kv_heads
    task.first = index % shape.slices * shape.each
    task.positions = min(shape.each, shape.q_len - task.first)
    task.repeats = shape.repeats
    task.rows = task.positions * task.repeats
    task.q_len = shape.q_len
    task.normalized = False
    task.prepared = -1
    task.used = 0
    return task


cdef inline void finish_task(const Part *parts, Py_ssize_t count, const Task *task, float *output,
                             float *log_sum_exp, Work *work) noexcept nogil:
    cdef Py_ssize_t row, i
    for row in range(task.rows):
        i = query_index(task, row)
        finish_row(parts, count, task.used, row, task.rows, output + i * parts[0].values.n,
                   log_sum_exp + i, work)


cdef void attend_task(const float *q, const Part *parts, Py_ssize_t count, const Span *spans,
                      Py_ssize_t index, const Shape *shape, const Options *options, float *output,
                      float *log_sum_exp, char *scratch) noexcept nogil:
    """Attend for the index-th group of queries; everything that changes is local."""
    cdef Task task = task_of(index, shape)
    cdef Work work
    cdef Py_ssize_t i
    carve(scratch, &work, shape.each * shape.repeats, shape.n, shape.accumulators)
    clear_sums(&work.total, task.rows, work.n, shape.accumulators)
    for i in range(shape.spans):
        if attend_span(q, parts, spans + i, &task, options, &work):
            task.used |= 1 << parts[spans[i].part].accumulator
            fold(&work.part, parts[spans[i].part].accumulator, shape.accumulators, task.rows,
                 work.n, &work.total)
    finish_task(parts, count, &task, output, log_sum_exp, &work)


cdef void attend_piece(const float *q, const Part *parts, const Span *spans, Py_ssize_t index,
                       Py_ssize_t first, Py_ssize_t last, const Shape *shape,
                       const Options *options, char *store, Py_ssize_t store_bytes,
                       char *scratch) noexcept nogil:
    """Attend to some spans for the index-th group of queries and keep each one's sums."""
    cdef Task task = task_of(index, shape)
    cdef Work work
    cdef Py_ssize_t i, at
    carve(scratch, &work, shape.each * shape.repeats, shape.n, shape.accumulators)
    for i in range(first, last):
        at = 0
        carve_sums(store + (index * shape.spans + i) * store_bytes, &at, &work.part,
                   shape.each * shape.repeats, shape.n, 1)
        if not attend_span(q, parts, spans + i, &task, options, &work):
            memset(work.part.sum, 0, task.rows * sizeof(double))


cdef void fold_pieces(const Part *parts, Py_ssize_t count, const Span *spans, Py_ssize_t index,
                      const Shape *shape, char *store, Py_ssize_t store_bytes, float *output,
                      float *log_sum_exp, char *scratch) noexcept nogil:
    """Put together what `attend_piece` left of all spans."""
    cdef Task task = task_of(index, shape)
    cdef Work work
    cdef Py_ssize_t i, at
    carve(scratch, &work, shape.each * shape.repeats, shape.n, shape.accumulators)
    clear_sums(&work.total, task.rows, work.n, shape.accumulators)
    for i in range(shape.spans):
        at = 0
        carve_sums(store + (index * shape.spans + i) * store_bytes, &at, &work.part,
                   shape.each * shape.repeats, shape.n, 1)
        task.used |= 1 << parts[spans[i].part].accumulator
        fold(&work.part, parts[spans[i].part].accumulator, shape.accumulators, task.rows,
             work.n, &work.total)
    finish_task(parts, count, &task, output, log_sum_exp, &work)


cdef Options options_of(double scale, softcap, query_bits, probability_bits):
    cdef Options options
    options.scale = scale
    options.softcap = softcap or 0
    options.integer_query = query_bits is not None
    options.probability_bits = probability_bits or 0
    return options


def attend(q, segments, double scale, softcap, query_bits, probability_bits):
    """Attention of q (batch, q_heads, q_len, head_dim) over all segments under one softmax."""
    cdef Part parts[MOST_SEGMENTS]
    cdef Py_ssize_t count = len(segments), i
    cdef Options options = options_of(scale, softcap, query_bits, probability_bits)
    if count > MOST_SEGMENTS:
        raise ValueError(f"segments must be at most {MOST_SEGMENTS}, but {count} were given.")
    keep = []
    for i in range(count):
        parts[i] = part_of(segments[i], keep)
    return attend_parts(q, parts, count, &options)


cdef attend_parts(q, Part *parts, Py_ssize_t count, const Options *options):
    """What `attend` gives, from segments as plain C; the caller keeps what they point to."""
    cdef Py_ssize_t batch, q_heads, q_len, n, i, tasks, index, pieces = 1
    cdef Py_ssize_t thread_bytes, store_bytes = 0
    cdef int threads
    cdef Shape shape
    cdef Work unused
    batch, q_heads, q_len, n = q.shape
    shape.accumulators = 1
    shape.spans = 0
    for i in range(count):
        shape.spans += most_spans(parts + i)
        if parts[i].values.plan != NULL:
            parts[i].accumulator = shape.accumulators
            shape.accumulators += 1
    cdef Memory room = Memory(shape.spans * sizeof(Span))
    cdef Span *spans = <Span *> room.start
    shape.spans = 0
    for i in range(count):
        shape.spans += cut_part(parts + i, i, spans + shape.spans)
    cdef int64_t seen = 0
    for i in range(shape.spans):
        seen += spans[i].stop - spans[i].start

    shape.kv_heads = parts[0].kv_heads
    shape.q_len = q_len
    shape.repeats = q_heads // shape.kv_heads
    shape.each = max(1, min(shape.q_len, TASK_ROWS // shape.repeats))
    shape.slices = (shape.q_len + shape.each - 1) // shape.each
    shape.n = max(parts[0].keys.n, parts[0].values.n)
    tasks = batch * shape.kv_heads * shape.slices
    thread_bytes = carve(NULL, &unused, shape.each * shape.repeats, shape.n, shape.accumulators)
    threads = threads_for(tasks * shape.each * shape.repeats * seen)
    if threads > 1 and 0 < tasks < TASKS_A_THREAD * threads:
        pieces = min(shape.spans, (TASKS_A_THREAD * threads + tasks - 1) // tasks)
    if pieces > 1:
        carve_sums(NULL, &store_bytes, &unused.part, shape.each * shape.repeats, shape.n, 1)

    output = empty((batch, q_heads, q_len, parts[0].values.n), float32)
    log_sum_exp = empty((batch, q_heads, q_len), float32)
    cdef Py_ssize_t scratch_bytes = threads * thread_bytes
    cdef Memory scratch = Memory(scratch_bytes + tasks * shape.spans * store_bytes)
    cdef char *base = scratch.start
    cdef char *store = base + scratch_bytes
    cdef const float *source = <const float *> address(q)
    cdef float *target = <float *> address(output)
    cdef float *target_lse = <float *> address(log_sum_exp)
    if threads == 1:
        with nogil:
            for index in range(tasks):
                attend_task(source, parts, count, spans, index, &shape, options, target,
                            target_lse, base)
        return output, log_sum_exp
    if pieces <= 1:
        for index in prange(tasks, nogil=True, num_threads=threads, schedule="dynamic"):
            attend_task(source, parts, count, spans, index, &shape, options, target, target_lse,
                        base + thread_bytes * threadid())
        return output, log_sum_exp
    for index in prange(tasks * pieces, nogil=True, num_threads=threads, schedule="dynamic"):
        attend_piece(source, parts, spans, index // pieces,
                     index % pieces * shape.spans // pieces,
                     (index % pieces + 1) * shape.spans // pieces, &shape, options, store,
                     store_bytes, base + thread_bytes * threadid())
    for index in prange(tasks, nogil=True, num_threads=threads, schedule="static"):
        fold_pieces(parts, count, spans, index, &shape, store, store_bytes, target, target_lse,
                    base + thread_bytes * threadid())
    return output, log_sum_exp


def merge(outputs, log_sum_exps):
    """Combine attention over disjoint sets of tokens, stacked along the first axis."""
    cdef Py_ssize_t parts = outputs.shape[0], n = outputs.shape[outputs.ndim - 1]
    cdef Py_ssize_t rows = log_sum_exps.size // parts, row, part, c
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
