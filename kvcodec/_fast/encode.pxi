# Encoding and decoding. All six steps run on one block of tokens while it lies in the cache: copy,
# center, weigh, rotate in place, then code and pack row by row. Threads take blocks, which do not
# depend on each other, so the bytes depend neither on threads nor on how many blocks there are.

from dataclasses import replace
from functools import lru_cache

from kvcodec.encoded import empty_encoded

cdef enum:
    SYMMETRIC = 0
    ASYMMETRIC = 1
    LLOYD_MAX = 2


cdef struct Plan:
    int code
    int bits
    int width                  # bits in the packed row: 4 for padded 3-bit codes
    bint bfloat16
    bint center
    bint rotated
    bint by_token              # groups of an asymmetric code extend along tokens
    Py_ssize_t block
    Py_ssize_t group_size      # head_dim where one scale serves a token
    Py_ssize_t groups          # groups of channels
    Py_ssize_t n
    Py_ssize_t row_bytes
    const int8_t *levels       # 2^width entries
    Book book
    const Rotation *rotation


cdef class CodecPlan:
    """A codec at one head_dim as plain C, with the arrays that its pointers lead to."""
    cdef Plan plan
    cdef RotationTables rotation
    cdef object levels
    cdef object boundaries

    def __init__(self, codec, Py_ssize_t n):
        cdef Plan *plan = &self.plan
        plan.code = {"symmetric": SYMMETRIC, "asymmetric": ASYMMETRIC}.get(codec.code, LLOYD_MAX)
        plan.bits = codec.bits
        plan.width = 4 if codec.layout == "padded" else codec.bits
        plan.bfloat16 = codec.scale_dtype == "bfloat16"
        plan.center = bool(codec.center)
        plan.by_token = codec.code == "asymmetric" and codec.group_axis == "token"
        plan.block = codec.block
        plan.group_size = codec.group_size if codec.code == "asymmetric" else n
        plan.groups = (n + plan.group_size - 1) // plan.group_size
        plan.n = n
        plan.row_bytes = (n * plan.width + 7) // 8
        levels = codec.levels(n)
        self.levels = np.ascontiguousarray(np.resize(levels, 1 << plan.width))
        plan.levels = <const int8_t *> address(self.levels)
        if plan.code == LLOYD_MAX:
            book = codec.codebook(n)
            self.boundaries = book.boundaries.astype(np.float32)
            plan.book.levels = plan.levels
            plan.book.boundaries = <const float *> address(self.boundaries)
            plan.book.count = self.boundaries.size
            plan.book.step = book.step
            plan.book.scale_rule = SCALE_RULES[codec.scale_rule]
        plan.rotated = codec.rotation != "none"
        if plan.rotated:
            signs = codec.signs(n) if codec.rotation == "srht" else None
            self.rotation = RotationTables(n, signs)
            plan.rotation = &self.rotation.rotation


@lru_cache(maxsize=256)
def plan_for(codec, head_dim):
    """The plan of a codec, made once."""
    return CodecPlan(codec, head_dim)


cdef struct Side:
    # Keys or values of one segment: an exact array, or the arrays of an Encoded.
    const float *exact
    const uint16_t *half       # exact tokens in bfloat16
    const uint8_t *packed
    void *scale
    void *zero_point
    const int8_t *center_levels
    const void *center_scale
    const float *weights
    const Plan *plan
    Py_ssize_t tokens
    Py_ssize_t n
    Py_ssize_t token_groups    # groups of tokens
    Py_ssize_t blocks


cdef Side side_of(x, list keep):
    """The pointers of a clean array or an Encoded; x and what goes to keep must stay alive."""
    cdef Side side
    cdef CodecPlan plan
    memset(&side, 0, sizeof(Side))
    side.tokens = x.shape[2]
    side.n = x.shape[3]
    if isinstance(x, np.ndarray):
        if x.dtype == np.uint16:
            side.half = <const uint16_t *> address(x)
        else:
            side.exact = <const float *> address(x)
        return side
    plan = plan_for(x.codec, x.head_dim)
    keep.append(plan)
    side.plan = &plan.plan
    side.packed = <const uint8_t *> address(x.packed)
    side.scale = <void *> address(x.scale)
    side.zero_point = <void *> address(x.zero_point)
    side.center_levels = <const int8_t *> address(x.center_levels)
    side.center_scale = address(x.center_scale)
    side.weights = <const float *> address(x.weights)
    side.blocks = (side.tokens + plan.plan.block - 1) // plan.plan.block
    side.token_groups = (side.tokens + plan.plan.group_size - 1) // plan.plan.group_size
    return side


cdef inline const float *exact_row(const Side *side, Py_ssize_t index,
                                   float *row) noexcept nogil:
    """An exact token; bfloat16 is turned into floats in `row`."""
    cdef Py_ssize_t c
    if side.half == NULL:
        return side.exact + index * side.n
    for c in range(side.n):
        row[c] = bits_to_float(<uint32_t> side.half[index * side.n + c] << 16)
    return row


cdef inline void rotate_row(float *x, const Plan *plan, float *scratch) noexcept nogil:
    if plan.rotated:
        if plan.rotation.signs != NULL:
            sign_row(x, plan.rotation.signs, plan.n)
        transform_row(x, plan.rotation, scratch)


cdef inline void unrotate_row(float *x, const Plan *plan, float *scratch) noexcept nogil:
    if plan.rotated:
        transform_row(x, plan.rotation, scratch)
        if plan.rotation.signs != NULL:
            sign_row(x, plan.rotation.signs, plan.n)


cdef struct Scratch:
    # Of one thread: a block of rows, a row of doubles, three of floats, a block of codes.
    float *rows
    double *total
    float *row
    uint8_t *codes
    bint *centered             # for each token of the block


cdef inline void center_rows(float *rows, Py_ssize_t tokens, const Plan *plan, Scratch scratch,
                             int8_t *levels, void *scales, Py_ssize_t index) noexcept nogil:
    """Store the mean of a block and subtract it where it belongs."""
    cdef Py_ssize_t n = plan.n, t
    cdef float scale
    mean_row(rows, tokens, n, scratch.total, scratch.row)
    scale = symmetric_row(scratch.row, n, 8, plan.bfloat16, levels)
    store_scale(scales, index, scale, plan.bfloat16)
    for t in range(tokens):
        scratch.centered[t] = center_row(rows + t * n, n, levels, scale, scratch.row)


cdef inline void code_rows(const float *rows, const Side *side, Py_ssize_t head, Py_ssize_t first,
                           Py_ssize_t tokens, Scratch scratch) noexcept nogil:
    """Scale and code the rows of a block; the codes go to scratch."""
    cdef const Plan *plan = side.plan
    cdef Py_ssize_t n = plan.n, token = head * side.tokens + first, t, g, c, members, at
    cdef float *scale = scratch.row
    cdef float *zero = scratch.row + n
    cdef uint8_t *codes
    cdef int half = 1 << (plan.bits - 1)
    if plan.by_token:
        for g in range((tokens + plan.group_size - 1) // plan.group_size):
            t = g * plan.group_size
            members = plan.group_size if t + plan.group_size < tokens else tokens - t
            asymmetric_tokens(rows + t * n, members, n, plan.bits, plan.bfloat16, scale, zero,
                              scratch.row + 2 * n, scratch.codes + t * n)
            at = (head * side.token_groups + (first + t) // plan.group_size) * n
            for c in range(n):
                store_scale(side.scale, at + c, scale[c], plan.bfloat16)
                store_scale(side.zero_point, at + c, zero[c], plan.bfloat16)
        return
    for t in range(tokens):
        codes = scratch.codes + t * n
        if plan.code == ASYMMETRIC:
            asymmetric_channels(rows + t * n, n, plan.bits, plan.group_size, plan.bfloat16, scale,
                                zero, codes)
            for g in range(plan.groups):
                store_scale(side.scale, (token + t) * plan.groups + g, scale[g], plan.bfloat16)
                store_scale(side.zero_point, (token + t) * plan.groups + g, zero[g], plan.bfloat16)
        elif plan.code == SYMMETRIC:
            scale[0] = symmetric_row(rows + t * n, n, plan.bits, plan.bfloat16, <int8_t *> codes)
            for c in range(n):
                codes[c] = <uint8_t> (codes[c] + half)
        else:
            scale[0] = lloyd_max_row(rows + t * n, n, &plan.book, plan.bfloat16, codes)
        if plan.code != ASYMMETRIC:
            if plan.center and not scratch.centered[t]:
                scale[0] = -scale[0]
            store_scale(side.scale, token + t, scale[0], plan.bfloat16)


cdef Py_ssize_t carve_scratch(char *base, Scratch *scratch, Py_ssize_t unit,
                              Py_ssize_t n) noexcept nogil:
    """Lay the scratch of a thread out from base; returns the bytes it needs."""
    cdef Py_ssize_t at = 0
    scratch.rows = <float *> take(base, &at, unit * n * 4)
    scratch.total = <double *> take(base, &at, n * 8)
    scratch.row = <float *> take(base, &at, 3 * n * 4)
    scratch.codes = <uint8_t *> take(base, &at, unit * n)
    scratch.centered = <bint *> take(base, &at, unit * sizeof(bint))
    return at


cdef void encode_block(const float *x, const Side *side, uint8_t *packed, int8_t *center_levels,
                       void *center_scale, Py_ssize_t head, Py_ssize_t first, Py_ssize_t tokens,
                       char *base, Py_ssize_t unit) noexcept nogil:
    cdef const Plan *plan = side.plan
    cdef Py_ssize_t n = plan.n, token = head * side.tokens + first, t, c, block
    cdef const float *weights
    cdef Scratch scratch
    carve_scratch(base, &scratch, unit, n)
    memcpy(scratch.rows, x + token * n, tokens * n * sizeof(float))
    if plan.center:
        block = head * side.blocks + first // plan.block
        center_rows(scratch.rows, tokens, plan, scratch, center_levels + block * n, center_scale,
                    block)
    for t in range(tokens):
        if side.weights != NULL:
            weights = side.weights + head * n
            for c in range(n):
                scratch.rows[t * n + c] = scratch.rows[t * n + c] * weights[c]
        rotate_row(scratch.rows + t * n, plan, scratch.row)
    code_rows(scratch.rows, side, head, first, tokens, scratch)
    for t in range(tokens):
        pack_row(scratch.codes + t * n, n, plan.width, packed + (token + t) * plan.row_bytes)


def encode(x, codec, weights):
    """Encode x (batch, kv_heads, tokens, head_dim) of float32."""
    cdef Py_ssize_t tokens = x.shape[2], n = x.shape[3]
    cdef CodecPlan codec_plan = plan_for(codec, n)
    cdef const Plan *plan = &codec_plan.plan
    # One token alone where nothing is shared would only make the tasks small.
    cdef Py_ssize_t unit = plan.block if plan.center or plan.by_token else 64
    cdef Py_ssize_t units = (tokens + unit - 1) // unit
    cdef int threads = threads_for(x.size)

    encoded = replace(empty_encoded(codec, x.shape), weights=weights)
    keep = []
    cdef Side side = side_of(encoded, keep)
    cdef const float *source = <const float *> address(x)
    cdef uint8_t *packed = <uint8_t *> address(encoded.packed)
    cdef int8_t *center_levels = <int8_t *> address(encoded.center_levels)
    cdef void *center_scale = <void *> address(encoded.center_scale)
    cdef Scratch unused
    cdef Py_ssize_t thread_bytes = carve_scratch(NULL, &unused, unit, n)
    cdef uint8_t[::1] scratch = np.empty(threads * thread_bytes + 64, dtype=np.uint8)
    cdef Py_ssize_t task, tasks = x.shape[0] * x.shape[1] * units, first, members
    for task in prange(tasks, nogil=True, num_threads=threads, schedule="static"):
        first = task % units * unit
        members = unit if first + unit < tokens else tokens - first
        encode_block(source, &side, packed, center_levels, center_scale, task // units, first,
                     members, aligned(scratch, thread_bytes, threadid()), unit)
    return encoded


cdef inline bint is_centered(const Side *side, Py_ssize_t token) noexcept nogil:
    return side.plan.center and not signbit(load_scale(side.scale, token, side.plan.bfloat16))


cdef inline void decode_row(const Side *side, Py_ssize_t head, Py_ssize_t t, float *out,
                            int8_t *levels, float *scratch) noexcept nogil:
    """Undo all steps for one token."""
    cdef const Plan *plan = side.plan
    cdef Py_ssize_t n = plan.n, token = head * side.tokens + t, c, at, block
    cdef float scale, zero
    cdef int half = 1 << (plan.bits - 1)
    unpack_row(side.packed + token * plan.row_bytes, n, plan.width, plan.levels, levels)
    if plan.code != ASYMMETRIC:
        scale = fabsf(load_scale(side.scale, token, plan.bfloat16))
        for c in range(n):
            out[c] = levels[c] * scale
    else:
        for c in range(n):
            if plan.by_token:
                at = (head * side.token_groups + t // plan.group_size) * n + c
            else:
                at = token * plan.groups + c // plan.group_size
            zero = load_scale(side.zero_point, at, plan.bfloat16)
            out[c] = zero + (levels[c] + half) * load_scale(side.scale, at, plan.bfloat16)
    unrotate_row(out, plan, scratch)
    if side.weights != NULL:
        for c in range(n):
            out[c] = out[c] / side.weights[head * n + c]
    if is_centered(side, token):
        block = head * side.blocks + t // plan.block
        scale = load_scale(side.center_scale, block, plan.bfloat16)
        for c in range(n):
            out[c] = out[c] + side.center_levels[block * n + c] * scale


def decode(encoded):
    """Undo all six steps."""
    keep = []
    cdef Side side = side_of(encoded, keep)
    cdef Py_ssize_t n = encoded.head_dim, rows = rows_of(encoded.packed), row
    cdef int threads = threads_for(rows * n)
    out = np.empty(encoded.shape, dtype=np.float32)
    cdef float *target = <float *> address(out)
    cdef int8_t[:, ::1] levels = np.empty((threads, n), dtype=np.int8)
    cdef float[:, ::1] scratch = np.empty((threads, n), dtype=np.float32)
    for row in prange(rows, nogil=True, num_threads=threads, schedule="static"):
        decode_row(&side, row // side.tokens, row % side.tokens, target + row * n,
                   &levels[threadid(), 0], &scratch[threadid(), 0])
    return out
