# Tiles. Codes of 64 tokens lie as lanes times depth (lanes.h), so that the kernels of dot.h read
# them straight from memory. Writing whole tiles packs them from codes in the first-level cache; a
# tile that is written in part is unpacked, filled in and packed again. Arrays in the canonical
# layout are brought into tiles one by one while attention goes over them.

cdef extern from "dot_products.h" nogil:
    Py_ssize_t chunks_of(Py_ssize_t depth, int bits)
    int chunk_vectors(int bits)
    Py_ssize_t groups_of(Py_ssize_t lanes)
    Py_ssize_t key_tile_bytes(Py_ssize_t n, int bits)
    Py_ssize_t value_tile_bytes(Py_ssize_t n, int bits)
    void pack_keys(const uint8_t *codes, Py_ssize_t stride, Py_ssize_t tokens, Py_ssize_t n,
                   int bits, uint8_t *packed)
    void pack_values(const uint8_t *codes, Py_ssize_t stride, Py_ssize_t tokens, Py_ssize_t n,
                     int bits, uint8_t *packed)
    void unpack_keys(const uint8_t *packed, Py_ssize_t tokens, Py_ssize_t n, int bits,
                     uint8_t *codes, Py_ssize_t stride)
    void unpack_values(const uint8_t *packed, Py_ssize_t tokens, Py_ssize_t n, int bits,
                       uint8_t *codes, Py_ssize_t stride)
    enum: TASK_ROWS
    ctypedef struct Product:
        const uint8_t *packed
        Py_ssize_t stride_groups
        Py_ssize_t groups
        Py_ssize_t chunks
        Py_ssize_t span
        const int8_t *weights
        Py_ssize_t weights_stride
        Py_ssize_t next_weights
        const int32_t *weight_sums
        Py_ssize_t next_sums
        int32_t *sums
    void dot_products(const Product *products, Py_ssize_t count, int bits, const int8_t *table,
                      bint nonnegative, Py_ssize_t rows, Fetch *fetch, Py_ssize_t tile_rows)
    bint dot_needs_sums(int bits, bint nonnegative)
    Py_ssize_t amx_begin(Py_ssize_t rows)
    void amx_end(Py_ssize_t tile_rows)

cdef extern from "dot_floats.h" nogil:
    void float_lanes(const uint8_t *packed, Py_ssize_t stride_groups, Py_ssize_t lanes,
                     Py_ssize_t chunks, int bits, const int8_t *table, const float *weights,
                     Py_ssize_t weights_stride, Py_ssize_t rows, float *sums,
                     Py_ssize_t sums_stride, Fetch *fetch)

cdef enum:
    TILE = 64
    GROUP = 16                 # lanes of a group

cdef int8_t CODES[256]         # unpacks to the codes themselves

cdef void fill_codes() noexcept:
    cdef int code
    for code in range(256):
        CODES[code] = <int8_t> <uint8_t> code

fill_codes()


cdef inline Py_ssize_t tile_size(Py_ssize_t n, int width, bint values) noexcept nogil:
    return value_tile_bytes(n, width) if values else key_tile_bytes(n, width)


cdef inline void pack_tile(const uint8_t *codes, Py_ssize_t tokens, Py_ssize_t n, int width,
                           bint values, uint8_t *tile) noexcept nogil:
    if values:
        pack_values(codes, n, tokens, n, width, tile)
    else:
        pack_keys(codes, n, tokens, n, width, tile)


cdef inline void unpack_tile(const uint8_t *tile, Py_ssize_t tokens, Py_ssize_t n, int width,
                             bint values, uint8_t *codes) noexcept nogil:
    if values:
        unpack_values(tile, tokens, n, width, codes, n)
    else:
        unpack_keys(tile, tokens, n, width, codes, n)


cdef inline void write_tile(uint8_t *tile, Py_ssize_t slot, const uint8_t *packed,
                            Py_ssize_t tokens, Py_ssize_t row_bytes, Py_ssize_t n, int width,
                            bint values, uint8_t *codes) noexcept nogil:
    """Put canonical rows into a tile from this slot on."""
    cdef Py_ssize_t t
    if tokens < TILE:
        unpack_tile(tile, TILE, n, width, values, codes)
    for t in range(tokens):
        unpack_row(packed + t * row_bytes, n, width, CODES, <int8_t *> codes + (slot + t) * n)
    pack_tile(codes, TILE, n, width, values, tile)


def write_tiles(tiles, Py_ssize_t slot, packed, Py_ssize_t n, int width, str side):
    """Put canonical rows (heads, tokens, row_bytes) into tiles (heads, count, tile_bytes)."""
    cdef Py_ssize_t heads = tiles.shape[0]
    cdef Py_ssize_t tokens = packed.shape[1], row_bytes = packed.shape[2], tile, first, last
    cdef Py_ssize_t first_tile = slot // TILE, used = (slot + tokens + TILE - 1) // TILE
    cdef Py_ssize_t task
    cdef bint values = side == "value"
    cdef int threads = threads_for(heads * tokens * n)
    cdef uint8_t[:, :, :] target = tiles
    if tiles.strides[2] != 1:
        raise ValueError("tiles must have their bytes side by side.")
    if packed.strides[1:] != (row_bytes, 1):
        packed = np.ascontiguousarray(packed)
    cdef const uint8_t[:, :, :] source = packed
    cdef uint8_t[:, ::1] scratch = np.empty((threads, TILE * n), dtype=np.uint8)
    used = used - first_tile
    for task in prange(heads * used, nogil=True, num_threads=threads, schedule="static"):
        tile = first_tile + task % used
        first = max(slot, tile * TILE)
        last = min(slot + tokens, (tile + 1) * TILE)
        write_tile(&target[task // used, tile, 0], first - tile * TILE,
                   &source[task // used, first - slot, 0], last - first, row_bytes, n, width,
                   values, &scratch[threadid(), 0])


def read_tiles(tiles, Py_ssize_t tokens, Py_ssize_t n, int width, str side):
    """Canonical rows (heads, tokens, row_bytes) of the first tokens of tiles."""
    cdef Py_ssize_t heads = tiles.shape[0]
    cdef Py_ssize_t row_bytes = (n * width + 7) // 8, head, tile, members, t
    cdef bint values = side == "value"
    if tiles.strides[2] != 1:
        raise ValueError("tiles must have their bytes side by side.")
    packed = np.empty((heads, tokens, row_bytes), dtype=np.uint8)
    cdef const uint8_t[:, :, :] source = tiles
    cdef uint8_t *target = <uint8_t *> address(packed)
    cdef uint8_t[::1] scratch = np.empty(TILE * n, dtype=np.uint8)
    with nogil:
        for head in range(heads):
            for tile in range((tokens + TILE - 1) // TILE):
                members = min(<Py_ssize_t> TILE, tokens - tile * TILE)
                unpack_tile(&source[head, tile, 0], members, n, width, values,
                            &scratch[0])
                for t in range(members):
                    pack_row(&scratch[t * n], n, width,
                             target + (head * tokens + tile * TILE + t) * row_bytes)
    return packed
