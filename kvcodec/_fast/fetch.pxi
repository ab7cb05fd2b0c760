# What to fetch while attention goes over tiles (fetch.h). Pages of 4 KiB are what the processor's
# prefetcher goes by: so that each stream has pages of its own, two tiles or, of small ones, more
# are fetched together. They lie side by side, but for those in different pages of tokens. Their
# scales and centers are fetched tile by tile. Where both sides are exact, the values of a tile are
# fetched during the products with its keys, and keys of the next one while they are summed.

cdef enum:
    MEMORY_PAGE = 4096
    MOST_TILES = 8             # that are fetched together
    EXACT_BATCH = 16           # exact tokens between two rounds of fetching
    MOST_ARRAYS = 8            # scales, zero points, centers and their scales of both sides


cdef struct Ahead:
    # What is read next of a KV head of a segment.
    const Part *part
    Py_ssize_t head
    Py_ssize_t kv_head
    Py_ssize_t unit_tiles      # tiles of a unit
    Py_ssize_t tiles           # tiles that are fetched together, a power of two
    int touches                # in the time of a tile
    Py_ssize_t arrays
    const char *array[MOST_ARRAYS]  # where in it to fetch next
    Py_ssize_t bytes[MOST_ARRAYS]   # of a tile


cdef inline float bytes_of_products(const Side *side, bint integers) noexcept nogil:
    """What is multiplied of a tile in pages: codes, or the levels of a trellis code."""
    if side.tile_bytes == 0 or side.plan.code == ASYMMETRIC and not integers:
        return 0
    return tile_size(side.n, side.plan.dot_width, side.plan.values)


cdef inline bint softmax_fetches(const Plan *plan, const Options *options) noexcept nogil:
    """Whether probabilities are taken from integer sums of whole tiles."""
    return (plan != NULL and (not plan.by_token or plan.span > 0) and options.integer_query
            and options.softcap == 0 and (not plan.center or plan.block % TILE == 0))


cdef inline void prepare_fetching(const Part *part, Py_ssize_t head, Py_ssize_t kv_head,
                                  Py_ssize_t rows, const Options *options, Ahead *ahead,
                                  Fetch *fetch) noexcept nogil:
    """Spread what is fetched over the bytes that products read, and over what lies between.

    Nothing is fetched of tokens that are not in pages, or whose products are all in floats of a
    dequantized tile.
    """
    cdef Unit unit = unit_of(part, head, kv_head, 0)
    cdef const Plan *plan
    cdef Py_ssize_t keys = unit.keys.tile_bytes, values = unit.values.tile_bytes
    cdef Py_ssize_t most = max(keys, values)
    cdef float read = (bytes_of_products(unit.keys, options.integer_query)
                       + bytes_of_products(unit.values, options.probability_bits > 0))
    memset(fetch, 0, sizeof(Fetch))
    memset(ahead, 0, sizeof(Ahead))
    if read == 0:
        return
    if softmax_fetches(unit.keys.plan, options):
        read += rows * ROW_AS_BYTES
        if unit.keys.plan.by_token:
            read += rows * (TILE // GROUP // unit.keys.plan.span) * FOLD_AS_BYTES
    plan = unit.values.plan
    if plan != NULL and plan.code == ASYMMETRIC and options.probability_bits > 0:
        read += rows * plan.groups * ROUND_AS_BYTES
    ahead.part, ahead.head, ahead.kv_head = part, head, kv_head
    ahead.unit_tiles = unit.keys.tokens // TILE if keys > 0 else unit.values.tokens // TILE
    ahead.tiles = 2
    while ahead.tiles < MOST_TILES and ahead.tiles * most < 2 * MEMORY_PAGE:
        ahead.tiles *= 2
    ahead.touches = (most + 2 * LINE - 1) // (2 * LINE)
    fetch.rate = <int> (<float> DUE * 16 * ahead.touches / read) + 1
    fetch.due = -DUE
    fetch.keys_step = (LINE * keys + most - 1) // most
    fetch.values_step = (LINE * values + most - 1) // most


cdef inline void add_array(const void *start, Py_ssize_t first, Py_ssize_t count,
                           Py_ssize_t size, Ahead *ahead) noexcept nogil:
    """Add an array to what is fetched: `count` elements of a tile, of `size` bytes, from one on."""
    if start != NULL:
        ahead.array[ahead.arrays] = <const char *> start + first * size
        ahead.bytes[ahead.arrays] = count * size
        ahead.arrays += 1


cdef inline const uint8_t *tile_ahead(const Side *side, Py_ssize_t head, Py_ssize_t tile,
                                      bint first, Ahead *ahead) noexcept nogil:
    """Where a tile lies; of the first one it is noted where its scales and centers lie."""
    cdef Py_ssize_t at = head * side.tokens + tile * TILE, count = TILE, size
    if side.tile_bytes == 0:
        return NULL
    if first:
        size = 2 if side.plan.bfloat16 else 4
        if side.plan.by_token:
            at = (head * side.token_groups + tile * TILE // side.plan.group_size) * side.n
            count = max(<Py_ssize_t> 1, TILE // side.plan.group_size) * side.n
        elif side.plan.code == ASYMMETRIC:
            at, count = at * side.plan.groups, count * side.plan.groups
        add_array(side.scale, at, count, size, ahead)
        add_array(side.zero_point, at, count, size, ahead)
        if side.plan.center:
            at = head * side.blocks + block_of(tile * TILE, side.plan)
            count = max(<Py_ssize_t> 1, TILE // side.plan.block)
            add_array(side.center_scale, at, count, size, ahead)
            add_array(side.center_levels, at * side.n, count * side.n, 1, ahead)
    return side.packed + tile_offset(side, head, tile)


cdef inline void find_streams(Ahead *ahead, Py_ssize_t place, Fetch *fetch) noexcept nogil:
    """Turn to the tiles from the place-th on."""
    cdef Py_ssize_t i, index
    cdef Unit unit
    ahead.arrays = 0
    for i in range(2):
        index = min(place // ahead.unit_tiles, ahead.part.units - 1)
        unit = unit_of(ahead.part, ahead.head, ahead.kv_head, index)
        fetch.streams[i] = tile_ahead(unit.keys, unit.key_head, place % ahead.unit_tiles, i == 0,
                                      ahead)
        fetch.streams[2 + i] = tile_ahead(unit.values, unit.value_head, place % ahead.unit_tiles,
                                          i == 0, ahead)
        if unit.keys.tile_bytes == 0:
            fetch.streams[i] = fetch.streams[2 + i]
        elif unit.values.tile_bytes == 0:
            fetch.streams[2 + i] = fetch.streams[i]
        place += ahead.tiles // 2
    fetch.keys = fetch.values = 0
    fetch.left = 0


cdef inline void fetch_arrays(Ahead *ahead) noexcept nogil:
    """Have the scales and centers of a tile in the cache when it is read."""
    cdef Py_ssize_t i
    cdef const char *at
    for i in range(ahead.arrays):
        at = <const char *> (<size_t> ahead.array[i] & -LINE)
        ahead.array[i] += ahead.bytes[i]
        while at < ahead.array[i]:
            fetch_line(at)
            at += LINE


cdef inline void look_ahead(Ahead *ahead, Py_ssize_t index, Py_ssize_t tile,
                            Fetch *fetch) noexcept nogil:
    """Have a part of the next tiles fetched while a tile of a unit is read."""
    cdef Py_ssize_t place, inside
    if fetch.rate == 0:
        return
    place = index * ahead.unit_tiles + tile
    inside = place & (ahead.tiles - 1)
    if inside == 0 or fetch.streams[0] == NULL:
        find_streams(ahead, place - inside + ahead.tiles, fetch)
    fetch.left += ahead.touches
    fetch_arrays(ahead)


cdef inline void fetch_exact(const Side *side, Py_ssize_t head, Py_ssize_t t,
                             Py_ssize_t count) noexcept nogil:
    """Have exact tokens in the cache when they are read; none where `count` is not positive."""
    cdef Py_ssize_t size = 4 if side.exact != NULL else 2, line
    cdef size_t at = <size_t> side.exact if side.exact != NULL else <size_t> side.bfloat16
    at += (head * side.pitch + t) * side.n * size
    for line in range((count * side.n * size + LINE - 1) // LINE):
        fetch_line(<const char *> at + line * LINE)
