# Fused dequant-dot attention with an online softmax. A task is a KV head with some query
# positions: all query heads that share the KV head go through keys and values together. For each
# tile of 64 tokens that any of its queries sees, the scores of all rows are taken (scores.pxi),
# the running maximum and sum are updated, and the values are summed (value_sums.pxi) into one
# accumulator for each segment, which stays in the rotated domain until the end. Threads take
# tasks; a task does not depend on the others, so the result does not depend on the threads. Tiles
# are counted from the beginning of an array or unit, and a token that is masked contributes exact
# zeros, so a skipped tile and a masked one are the same.

from kvcodec.blocks import Blocks

cdef enum:
    ROWS = 16                  # rows of a task that are aimed for when there are many queries
    PAGE_UNITS = 4             # as in blocks.py


cdef struct Pages:
    # The pages of a Blocks, NULL where a side is one array: unit u lies in page u // PAGE_UNITS.
    const Side *pages
    const int64_t *first       # of each unit, the number of its first token
    const int64_t *count       # of each unit, its tokens
    Py_ssize_t units


cdef struct Part:
    # A segment: both sides, what each query sees, and which accumulator its values go to.
    Side keys
    Side values
    Pages key_pages
    Pages value_pages
    Py_ssize_t kv_heads
    const int64_t *start
    const int64_t *stop
    Py_ssize_t accumulator


cdef inline float cap_score(float s, float softcap) noexcept nogil:
    """softcap * tanh(s / softcap), with tanh from exp(-2 |x|) - 1, which does not cancel."""
    cdef float x = s / softcap
    cdef float power = expm1_nonpositive(-2 * (x if x > 0 else -x))
    cdef float y = softcap * (-power / (2 + power))
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


cdef struct Unit:
    # A stretch of tokens that lies in one array per side: where, and the number of its first.
    const Side *keys
    const Side *values
    Py_ssize_t head            # of both arrays, batch * kv_heads + kv_head
    int64_t number
    int64_t tokens


cdef inline Unit unit_of(const Part *part, const Task *task, Py_ssize_t index) noexcept nogil:
    cdef Unit unit
    cdef Py_ssize_t page = index // PAGE_UNITS
    if part.key_pages.pages == NULL:
        unit.keys = &part.keys
        unit.values = &part.values
        unit.head = task.head
        unit.number = 0
        unit.tokens = part.keys.tokens
    else:
        unit.keys = part.key_pages.pages + page
        unit.values = part.value_pages.pages + page
        unit.head = index % PAGE_UNITS * part.kv_heads + task.head % part.kv_heads
        unit.number = part.key_pages.first[index]
        unit.tokens = part.key_pages.count[index]
    return unit


cdef inline void attend_unit(const Unit *unit, const Part *part, const Task *task,
                             const int64_t *start, const int64_t *stop, int64_t seen_low,
                             int64_t seen_high, const Options *options, Py_ssize_t accumulators,
                             Work *work) noexcept nogil:
    """Run the prepared rows of a task over the tiles of a unit that any of them sees."""
    cdef Py_ssize_t rows = task.positions * task.repeats, row, i, tile, first, tokens, low, high
    cdef bint unpacked
    seen_low = max(seen_low - unit.number, <int64_t> 0)
    seen_high = min(seen_high - unit.number, unit.tokens)
    if seen_low >= seen_high:
        return
    for tile in range(seen_low // TILE, (seen_high + TILE - 1) // TILE):
        first = tile * TILE
        tokens = min(<Py_ssize_t> TILE, unit.tokens - first)
        score_tile(unit.keys, unit.head, first, tokens, rows, options, work)
        unpacked = False
        for row in range(rows):
            i = row % task.positions
            low = max(start[i] - unit.number - first, <int64_t> 0)
            high = min(stop[i] - unit.number - first, <int64_t> tokens)
            if low >= high:
                continue
            softmax_tile(row, tokens, low, high, rows, accumulators, options.softcap, work)
            if unit.values.plan != NULL and not unpacked:
                unpack_tile(unit.values, unit.head, first, tokens, work.levels)
                unpacked = True
            add_values(unit.values, unit.head, first, tokens, work.scores + row * TILE,
                       work.accumulator + (part.accumulator * rows + row) * work.n,
                       options.probability_bits, work)


cdef inline void attend_part(const float *q, const Part *part, const Task *task,
                             const Options *options, Py_ssize_t accumulators,
                             Work *work) noexcept nogil:
    """Run the rows of a task over one segment."""
    cdef Py_ssize_t rows = task.positions * task.repeats, n = part.keys.n, row, i, index
    cdef int64_t seen_low = INT64_MAX, seen_high = 0
    cdef const int64_t *start = part.start + task.batch * task.q_len + task.first
    cdef const int64_t *stop = part.stop + task.batch * task.q_len + task.first
    cdef Unit unit
    for i in range(task.positions):
        if start[i] < stop[i]:
            seen_low = min(seen_low, start[i])
            seen_high = max(seen_high, stop[i])
    if seen_low >= seen_high:
        return
    for row in range(rows):
        prepare_row(q + query_index(task, row) * n, &part.keys, task.head, row, options, work)
    for index in range(part.key_pages.units):
        unit = unit_of(part, task, index)
        attend_unit(&unit, part, task, start, stop, seen_low, seen_high, options, accumulators,
                    work)


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


cdef class PageTable:
    """The pages of a Blocks as plain C; the Blocks drops it when its pages change."""
    cdef Side *sides
    cdef list keep

    def __cinit__(self, blocks):
        cdef Py_ssize_t i
        self.keep = list(blocks.pages)
        self.sides = <Side *> malloc(max(1, len(self.keep)) * sizeof(Side))
        if self.sides == NULL:
            raise MemoryError
        for i in range(len(self.keep)):
            self.sides[i] = side_of(blocks.pages[i], self.keep)

    def __dealloc__(self):
        free(self.sides)


cdef Pages pages_of(x, Side *side, list keep):
    """The pages of a Blocks, or one unit for an array; fills what all units have in common."""
    cdef Pages pages
    cdef PageTable table
    cdef CodecPlan plan
    pages.pages = NULL
    pages.units = 1
    if not isinstance(x, Blocks):
        side[0] = side_of(x, keep)
        return pages
    table = x.tables.get(__name__)
    if table is None:
        table = x.tables[__name__] = PageTable(x)
    keep += [table, x.first, x.count]
    memset(side, 0, sizeof(Side))
    side.n = x.head_dim
    side.tokens = x.end
    if x.codec is not None:
        plan = plan_for(x.codec, x.head_dim)
        keep.append(plan)
        side.plan = &plan.plan
        side.weights = <const float *> address(x.weights)
    pages.pages = table.sides
    pages.first = <const int64_t *> address(x.first)
    pages.count = <const int64_t *> address(x.count)
    pages.units = x.units
    return pages


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
        keep += [start, stop]
        parts[i].key_pages = pages_of(keys, &parts[i].keys, keep)
        parts[i].value_pages = pages_of(values, &parts[i].values, keep)
        parts[i].kv_heads = keys.shape[1]
        if parts[i].key_pages.units != parts[i].value_pages.units:
            raise ValueError("segments must have keys and values of the same tokens.")
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
