# Encoding and decoding. All six steps run on a few tokens at a time while they lie in the
# first-level cache: center, weigh, rotate, code, pack, each step for all of them before the next
# one, so that none waits for a sum or a division of a single token; meanwhile the next tokens are
# fetched. What the tokens of a block share is taken first, and groups along tokens wait until their
# tokens are rotated. Threads take blocks, which do not depend on each other, so the bytes depend
# neither on threads nor on how many blocks there are.

from kvcodec.encoded import empty_encoded

cdef enum:
    SYMMETRIC = 0
    ASYMMETRIC = 1
    LLOYD_MAX = 2
    TRELLIS = 3

cdef dict CODE_OF = {
    "symmetric": SYMMETRIC,
    "asymmetric": ASYMMETRIC,
    "lloyd_max": LLOYD_MAX,
    "trellis": TRELLIS,
}


cdef struct Plan:
    int code
    int bits
    int width                  # bits in the packed row: 4 for padded 3-bit codes
    int dot_width              # bits of what dot.h multiplies: 8 for the levels of a trellis code
    bint bfloat16
    bint center
    bint rotated
    bint by_token              # groups of an asymmetric code extend along tokens
    Py_ssize_t block
    Py_ssize_t group_size      # head_dim where one scale serves a token
    Py_ssize_t groups          # groups of channels
    Py_ssize_t span            # 16 lanes each that share a scale; 0 where groups end among them
    Py_ssize_t n
    Py_ssize_t row_bytes
    const int8_t *levels       # 2^width entries, or 256 for the windows of a trellis code
    const int8_t *table        # the same, NULL if they are code - 2^(width - 1)
    bint values                # the side, which decides how tiles lie
    Book book
    TrellisPlan trellis
    const Rotation *rotation


cdef Py_ssize_t span_of(Py_ssize_t group_size, bint single) noexcept:
    """How many times 16 lanes of a tile a group takes; 0 where groups end among them."""
    if single or group_size % 64 == 0:
        return 4
    return group_size // 16 if group_size in (16, 32) else 0


cdef class CodecPlan:
    """A codec at one head_dim as plain C, with the arrays that its pointers lead to."""
    cdef Plan plan
    cdef RotationTables rotation
    cdef object levels

    def __init__(self, codec, Py_ssize_t n):
        cdef Plan *plan = &self.plan
        plan.code = CODE_OF[codec.code]
        plan.bits = codec.bits
        plan.width = 4 if codec.layout == "padded" else codec.bits
        plan.bfloat16 = codec.scale_dtype == "bfloat16"
        plan.center = bool(codec.center)
        plan.by_token = codec.code == "asymmetric" and codec.group_axis == "token"
        plan.block = codec.block
        plan.group_size = codec.group_size if codec.code == "asymmetric" else n
        plan.groups = (n + plan.group_size - 1) // plan.group_size
        plan.span = span_of(plan.group_size, not plan.by_token and plan.groups == 1)
        plan.n = n
        plan.row_bytes = (n * plan.width + 7) // 8
        levels = codec.levels(n)
        # At least 16, which is what a byte shuffle looks up.
        self.levels = np.ascontiguousarray(np.resize(levels, max(levels.size, 16)))
        plan.levels = <const int8_t *> address(self.levels)
        half = 1 << (plan.width - 1)
        straight = np.arange(-half, half)
        plan.table = NULL if np.array_equal(levels, straight) else plan.levels
        plan.dot_width = plan.width
        plan.values = codec.side == "value"
        if plan.code == LLOYD_MAX:
            book = codec.codebook(n)
            make_book(&plan.book, book.levels, book.boundaries, book.step, codec.scale_rule)
        elif plan.code == TRELLIS:
            plan.dot_width = 8
            plan.table = NULL
            make_trellis_plan(&plan.trellis, self.levels, codec.trellis.step(n), codec.bits,
                              codec.scale_rule)
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
    # Keys or values of one segment: an exact array, the arrays of an Encoded, or a page.
    const float *exact
    const uint16_t *bfloat16   # exact tokens in 16 bits
    const uint8_t *packed      # canonical rows, or tiles
    Py_ssize_t tile_bytes      # 0 for canonical rows
    void *scale
    void *zero_point
    const int8_t *center_levels
    const void *center_scale
    const float *weights
    const Plan *plan
    Py_ssize_t heads           # KV heads
    Py_ssize_t tokens
    Py_ssize_t pitch           # exact tokens from the first of one head to that of the next
    Py_ssize_t n
    Py_ssize_t token_groups    # groups of tokens
    Py_ssize_t blocks


cdef Side side_of(x, list keep):
    """The pointers of a clean array or an Encoded; x and what goes to keep must stay alive."""
    cdef Side side
    cdef CodecPlan plan
    if isinstance(x, ndarray):
        return side_of_array(x)
    memset(&side, 0, sizeof(Side))
    _, side.heads, side.tokens, side.n = x.shape
    plan = plan_for(x.codec, x.head_dim)
    keep.append(plan)
    side.plan = &plan.plan
    side.packed = <const uint8_t *> address(x.packed)
    side.scale = <void *> address(x.scale)
    side.zero_point = <void *> address(x.zero_point)
    side.center_levels = <const int8_t *> address(x.center_levels)
    side.center_scale = address(x.center_scale)
    side.weights = <const float *> address(x.weights)
    count_groups(&side)
    return side


cdef Side side_of_array(x):
    """The pointer of exact tokens (batch, kv_heads, tokens, head_dim) and their shape.

    The tokens of a head must lie in one piece, and heads one as far from the next as all others.
    """
    cdef Side side
    cdef Py_buffer view
    cdef Py_ssize_t row
    cdef bint even
    memset(&side, 0, sizeof(Side))
    PyObject_GetBuffer(x, &view, PyBUF_STRIDES)
    side.heads, side.tokens, side.n = view.shape[1], view.shape[2], view.shape[3]
    row = side.n * view.itemsize
    side.pitch = view.strides[1] // row if row and side.heads > 1 else side.tokens
    # The stride of an axis of one element says nothing.
    even = PyBuffer_IsContiguous(&view, c"C") or (
        (side.n == 1 or view.strides[3] == view.itemsize)
        and (side.tokens == 1 or view.strides[2] == row)
        and (side.heads == 1 or view.strides[1] == side.pitch * row)
        and (view.shape[0] == 1 or view.strides[0] == side.heads * side.pitch * row))
    if view.itemsize == 2:
        side.bfloat16 = <const uint16_t *> view.buf
    else:
        side.exact = <const float *> view.buf
    PyBuffer_Release(&view)  # the caller keeps x, and with it the memory
    if not even:
        raise ValueError("exact tokens of a head must lie in one piece.")
    return side


cdef void count_groups(Side *side) noexcept nogil:
    side.blocks = (side.tokens + side.plan.block - 1) // side.plan.block
    side.token_groups = (side.tokens + side.plan.group_size - 1) // side.plan.group_size


cdef Side side_of_page(dict page, CodecPlan plan, Py_ssize_t n):
    """The pointers of a page of Blocks, which must stay alive; weights are not in it."""
    cdef Side side
    memset(&side, 0, sizeof(Side))
    side.n = n
    if plan is None:
        return side_of_array(page["exact"])
    packed = page["packed"]
    side.tokens = packed.shape[2] * TILE
    if plan.plan.code == TRELLIS:
        side.tile_bytes = stream_tile_bytes(n, plan.plan.bits, plan.plan.values)
    else:
        side.tile_bytes = tile_size(n, plan.plan.width, plan.plan.values)
    if packed.shape[3] != side.tile_bytes:
        raise ValueError(f"packed must hold tiles of {side.tile_bytes} bytes.")
    side.plan = &plan.plan
    side.packed = <const uint8_t *> address(packed)
    side.scale = <void *> address(page["scale"])
    side.zero_point = <void *> address(page.get("zero_point"))
    side.center_levels = <const int8_t *> address(page.get("center_levels"))
    side.center_scale = address(page.get("center_scale"))
    count_groups(&side)
    return side


cdef inline void rotate_row(float *x, const Plan *plan, float *scratch) noexcept nogil:
    if plan.rotated:
        transform_row(x, plan.rotation.signs, plan.rotation, scratch, x)


cdef inline void unrotate_row(float *x, const Plan *plan, float *scratch) noexcept nogil:
    if plan.rotated:
        transform_row(x, NULL, plan.rotation, scratch, x)
        if plan.rotation.signs != NULL:
            multiply(x, plan.rotation.signs, plan.n, x)


cdef struct Scratch:
    # Of one thread.
    float *rows                # a block of rows for groups of tokens, else TOGETHER
    double *total
    float *center              # the decoded mean of the block
    float *diagonal            # weights times signs
    float *row
    float *scale               # of each group, like the next two
    float *zero_point
    float *inverse
    uint8_t *codes             # of a group of tokens, else of TOGETHER
    TrellisScratch trellis


cdef inline const float *diagonal_of(const Plan *plan, const float *weights,
                                     Scratch scratch) noexcept nogil:
    """What channels are multiplied with before they are rotated; NULL for ones."""
    cdef const float *signs = plan.rotation.signs if plan.rotated else NULL
    if weights == NULL or signs == NULL:
        return signs if weights == NULL else weights
    multiply(weights, signs, plan.n, scratch.diagonal)
    return scratch.diagonal


cdef inline const float *transformed_rows(const float *x, Py_ssize_t rows, const float *diagonal,
                                          const Plan *plan, Scratch scratch, const float *next,
                                          uint32_t *uncentered) noexcept nogil:
    """Center, weigh and rotate tokens, and ask for the next ones; returns where the tokens are."""
    cdef Py_ssize_t n = plan.n, row
    cdef float *out = scratch.rows
    cdef const float *source
    if plan.center:
        uncentered[0] = center_rows(x, rows, n, scratch.center, out)
    for row in range(rows):
        if next != NULL:
            fetch(next + row * n, n)
        source = x + row * n
        if plan.center and not uncentered[0] >> row & 1:
            source = out + row * n
        if plan.rotated:
            transform_row(source, diagonal, plan.rotation, scratch.row, out + row * n)
        elif diagonal != NULL:
            multiply(source, diagonal, n, out + row * n)
        elif plan.center and source != out + row * n:
            memcpy(out + row * n, source, n * sizeof(float))
    return out if plan.center or plan.rotated or diagonal != NULL else x


cdef inline void code_rows(const float *x, Py_ssize_t rows, const Plan *plan,
                           Scratch scratch) noexcept nogil:
    """Code tokens to the scratch."""
    cdef Py_ssize_t n = plan.n, row
    if plan.code == ASYMMETRIC:
        asymmetric_channels(x, rows, n, plan.bits, plan.group_size, plan.bfloat16, scratch.scale,
                            scratch.zero_point, scratch.inverse, scratch.codes)
    elif plan.code == SYMMETRIC:
        symmetric_rows(x, rows, n, plan.bits, plan.bfloat16, 1 << (plan.bits - 1), scratch.scale,
                       scratch.codes)
    elif plan.code == LLOYD_MAX:
        lloyd_max_rows(x, rows, n, &plan.book, plan.bfloat16, scratch.row, scratch.scale,
                       scratch.codes)
    else:
        for row in range(rows):
            scratch.scale[row] = trellis_row(x + row * n, n, &plan.trellis, plan.bfloat16,
                                             &scratch.trellis, scratch.codes + row * n)


cdef inline void store_scales(void *stored, Py_ssize_t first, const float *scales,
                              Py_ssize_t count, bint bfloat16) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count):
        store_scale(stored, first + i, scales[i], bfloat16)


cdef inline void center_block(const float *x, Py_ssize_t tokens, const Plan *plan,
                              Scratch scratch, int8_t *levels, void *scales,
                              Py_ssize_t index) noexcept nogil:
    """Store the mean of a block, and decode it to scratch."""
    cdef Py_ssize_t n = plan.n, c
    cdef float scale
    mean_row(x, tokens, n, scratch.total, scratch.row)
    scale = symmetric_row(scratch.row, n, 8, plan.bfloat16, levels)
    store_scale(scales, index, scale, plan.bfloat16)
    for c in range(n):
        scratch.center[c] = levels[c] * scale


cdef inline void encode_rows(const float *x, Py_ssize_t rows, const Side *side,
                             const float *diagonal, Scratch scratch, Py_ssize_t index,
                             uint8_t *packed) noexcept nogil:
    """Encode tokens that do not share a group; the first is the index-th of all heads."""
    cdef const Plan *plan = side.plan
    cdef Py_ssize_t n = plan.n, groups = plan.groups, row
    cdef uint32_t uncentered = 0
    # The mean of the next block will go over all of its tokens before they are needed one by one.
    x = transformed_rows(x, rows, diagonal, plan, scratch,
                         x + (plan.block if plan.center else TOGETHER) * n, &uncentered)
    code_rows(x, rows, plan, scratch)
    for row in range(rows):
        if uncentered >> row & 1:
            scratch.scale[row] = -scratch.scale[row]
    store_scales(side.scale, index * groups, scratch.scale, rows * groups, plan.bfloat16)
    if plan.code == ASYMMETRIC:
        store_scales(side.zero_point, index * groups, scratch.zero_point, rows * groups,
                     plan.bfloat16)
    pack_rows(scratch.codes, rows, n, plan.width, packed + index * plan.row_bytes)


cdef inline void encode_groups(const float *x, Py_ssize_t tokens, const Side *side,
                               const float *diagonal, Scratch scratch, Py_ssize_t index,
                               Py_ssize_t group, uint8_t *packed) noexcept nogil:
    """The same for groups of tokens, the first of which is the group-th of all heads."""
    cdef const Plan *plan = side.plan
    cdef Py_ssize_t n = plan.n, g, first, members
    x = transformed_rows(x, tokens, diagonal, plan, scratch, NULL, NULL)
    for g in range((tokens + plan.group_size - 1) // plan.group_size):
        first = g * plan.group_size
        members = min(plan.group_size, tokens - first)
        asymmetric_tokens(x + first * n, members, n, plan.bits, plan.bfloat16, scratch.scale,
                          scratch.zero_point, scratch.inverse, scratch.codes)
        store_scales(side.scale, (group + g) * n, scratch.scale, n, plan.bfloat16)
        store_scales(side.zero_point, (group + g) * n, scratch.zero_point, n, plan.bfloat16)
        pack_rows(scratch.codes, members, n, plan.width,
                  packed + (index + first) * plan.row_bytes)


cdef Py_ssize_t carve_scratch(char *base, Scratch *scratch, const Plan *plan,
                              Py_ssize_t unit) noexcept nogil:
    """Lay the scratch of a thread out from base; returns the bytes it needs."""
    cdef Py_ssize_t at = 0, n = plan.n, rows = unit if plan.by_token else TOGETHER
    cdef Py_ssize_t groups = n if plan.by_token else TOGETHER * plan.groups
    scratch.rows = <float *> take(base, &at, rows * n * 4)
    scratch.total = <double *> take(base, &at, n * 8)
    scratch.center = <float *> take(base, &at, n * 4)
    scratch.diagonal = <float *> take(base, &at, n * 4)
    scratch.row = <float *> take(base, &at, n * 4)
    scratch.scale = <float *> take(base, &at, groups * 4)
    scratch.zero_point = <float *> take(base, &at, groups * 4)
    scratch.inverse = <float *> take(base, &at, groups * 4)
    scratch.codes = <uint8_t *> take(base, &at, rows * n)
    if plan.code == TRELLIS:
        at = carve_trellis(base, at, n, plan.bits, &scratch.trellis)
    return at


cdef bint encode_block(const float *x, Py_ssize_t pitch, float bound, const Side *side,
                       uint8_t *packed, int8_t *center_levels, void *center_scale,
                       Py_ssize_t head, Py_ssize_t first, Py_ssize_t tokens,
                       Scratch scratch) noexcept nogil:
    """Returns whether all values are below the bound in magnitude; if not, nothing is written."""
    cdef const Plan *plan = side.plan
    cdef Py_ssize_t n = plan.n, index = head * side.tokens + first, block, t, rows
    cdef const float *weights = side.weights
    if weights != NULL:
        weights = weights + head * n
    cdef const float *diagonal = diagonal_of(plan, weights, scratch)
    x = x + (head * pitch + first) * n
    if not are_bounded(x, tokens * n, bound):
        return False
    if plan.center:
        block = head * side.blocks + first // plan.block
        center_block(x, tokens, plan, scratch, center_levels + block * n, center_scale, block)
    if plan.by_token:
        encode_groups(x, tokens, side, diagonal, scratch, index,
                      head * side.token_groups + first // plan.group_size, packed)
        return True
    t = 0
    while t < tokens:
        rows = min(TOGETHER, tokens - t)
        encode_rows(x + t * n, rows, side, diagonal, scratch, index + t, packed)
        t += rows
    return True


cdef bint encode_unit(const float *x, Py_ssize_t pitch, float bound, const Side *side,
                      uint8_t *packed, int8_t *center_levels, void *center_scale,
                      Py_ssize_t task, Py_ssize_t unit, char *base) noexcept nogil:
    """Encode the task-th stretch of `unit` tokens of all heads; returns like `encode_block`."""
    cdef Py_ssize_t units = (side.tokens + unit - 1) // unit
    cdef Py_ssize_t head = task // units, first = task % units * unit
    cdef Scratch scratch
    carve_scratch(base, &scratch, side.plan, unit)
    return encode_block(x, pitch, bound, side, packed, center_levels, center_scale, head, first,
                        min(unit, side.tokens - first), scratch)


def encode(x, codec, weights, float bound=LARGEST_MAGNITUDE):
    """Encode x (batch, kv_heads, tokens, head_dim) of float32.

    None if a value is not below the bound in magnitude.
    """
    cdef Py_ssize_t tokens = x.shape[2], n = x.shape[3]
    cdef CodecPlan codec_plan = plan_for(codec, n)
    cdef const Plan *plan = &codec_plan.plan
    # One token alone where nothing is shared would only make the tasks small.
    cdef Py_ssize_t unit = plan.block if plan.center or plan.by_token else 64
    cdef Py_ssize_t units = (tokens + unit - 1) // unit
    cdef int threads = threads_for(x.size)

    encoded = empty_encoded(codec, x.shape, weights)
    keep = []
    cdef Side side = side_of(encoded, keep)
    cdef Side source = side_of_array(x)
    cdef uint8_t *packed = <uint8_t *> address(encoded.packed)
    cdef int8_t *center_levels = <int8_t *> address(encoded.center_levels)
    cdef void *center_scale = <void *> address(encoded.center_scale)
    cdef Scratch unused
    cdef Py_ssize_t thread_bytes = carve_scratch(NULL, &unused, plan, unit)
    cdef uint8_t[::1] scratch = np.empty(threads * thread_bytes + 64, dtype=np.uint8)
    cdef Py_ssize_t task, tasks = x.shape[0] * x.shape[1] * units, unbounded = 0
    for task in prange(tasks, nogil=True, num_threads=threads, schedule="static"):
        unbounded += not encode_unit(source.exact, source.pitch, bound, &side, packed,
                                     center_levels, center_scale, task, unit,
                                     aligned(scratch, thread_bytes, threadid()))
    return None if unbounded else encoded


cdef inline void levels_of_row(const uint8_t *packed, const Plan *plan,
                               int8_t *levels) noexcept nogil:
    """The levels of a canonical row."""
    if plan.code == TRELLIS:
        trellis_row_levels(packed, plan.n, plan.bits, <const uint8_t *> plan.levels,
                           <uint8_t *> levels)
    else:
        unpack_row(packed, plan.n, plan.width, plan.levels, levels)


cdef inline bint is_centered(const Side *side, Py_ssize_t token) noexcept nogil:
    return side.plan.center and not signbit(load_scale(side.scale, token, side.plan.bfloat16))


cdef inline void decode_row(const Side *side, Py_ssize_t head, Py_ssize_t t, float *out,
                            int8_t *levels, float *scratch) noexcept nogil:
    """Undo all steps for one token."""
    cdef const Plan *plan = side.plan
    cdef Py_ssize_t n = plan.n, token = head * side.tokens + t, c, at, block
    cdef float scale, zero
    cdef int half = 1 << (plan.bits - 1)
    levels_of_row(side.packed + token * plan.row_bytes, plan, levels)
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
