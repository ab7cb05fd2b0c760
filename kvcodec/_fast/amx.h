/* Integer dot products by AMX, which multiplies 16 rows of 64 bytes with 64 rows of 16 columns in
   one instruction: weights from the left and, as a chunk of 8-bit codes lies in memory just as a
   right-hand tile wants it, four elements of a lane a dword, bytes from the right. Narrower codes
   are brought to 8 bits in a buffer in the first-level cache. A tile that is loaded right after it
   was written waits: so each part of 64 elements is multiplied after the next one was expanded. With
   few rows the time is that of expanding and of an instruction's 16 cycles, so all rows of a task, up
   to 16 at a time, come for little more than one; more rows take up to 256 elements in turn.

   A thread configures its tiles for a number of rows (amx_begin) before it multiplies and releases
   them at the end (amx_end). */

#ifndef KVCODEC_AMX_H
#define KVCODEC_AMX_H

enum {
    /* For fewer rows vpdpbusd takes no longer; 8-bit codes need no expansion, so that it pays later,
       for they are read from memory at the same time. */
    AMX_ROWS_FROM = 5,
    AMX_ROWS_FROM_8_BITS = 9,
    AMX_ROWS = 16,
    AMX_STEPS = 16,        /* dwords of a row of weights, rows of a right-hand tile */
    AMX_ELEMENTS = 4 * AMX_STEPS,
    AMX_PARTS = 4,         /* parts of so many elements that blocks of rows take in turn */
    AMX_PART_BYTES = AMX_STEPS * 4 * VECTOR_BYTES
};

/* Configure this thread's tiles; returns the rows of a block, or 0 where tiles are not used. */
static Py_ssize_t amx_begin(Py_ssize_t rows)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    if (rows < AMX_ROWS_FROM)
        return 0;
    const Py_ssize_t blocks = (rows + AMX_ROWS - 1) / AMX_ROWS;
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = i < 5 ? rows / blocks : AMX_STEPS;
    }
    /* All 64 bytes are read, which the intrinsic does not say. */
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
    return rows / blocks;
}

static void amx_end(Py_ssize_t tile_rows)
{
    if (tile_rows)
        _tile_release();
}

/* Tiles 0 to 3 are sums of four groups, 4 is weights, 5 and 6 are codes. */
#define AMX_EACH(groups, call) \
    do { \
        call(0, 5); \
        if (groups > 1) call(1, 6); \
        if (groups > 2) call(2, 5); \
        if (groups > 3) call(3, 6); \
    } while (0)

/* The compiler does not know what memory the loads of tiles read. */
LANES_INLINE void amx_written(void) { __asm__ volatile("" ::: "memory"); }

/* The sums of some rows begin at what cancels the bias of 8-bit codes. */
LANES_INLINE void amx_start_sums(const Product *product, Py_ssize_t first, Py_ssize_t rows,
                                 const int groups)
{
    const int32_t *weight_sums = product->weight_sums + first;
    int32_t *sums = product->sums + first * DOT_STRIDE;
    for (int g = 0; g < groups; g++, sums += GROUP_LANES) {
        for (Py_ssize_t r = 0; r < rows; r++) {
            const int32_t start = -DOT_BIAS * weight_sums[r];
            for (int i = 0; i < GROUP_LANES; i++)
                sums[r * DOT_STRIDE + i] = start;
        }
        if (((g + 1) & (product->span - 1)) == 0)
            weight_sums += product->next_sums;
    }
}

LANES_INLINE void amx_clear_sums(const int groups)
{
#define CLEAR(g, b) _tile_zero(g)
    AMX_EACH(groups, CLEAR);
#undef CLEAR
}

LANES_INLINE void amx_load_sums(const int32_t *sums, Py_ssize_t stride, const int groups)
{
    amx_written();
#define LOAD(g, b) _tile_loadd(g, sums + g * GROUP_LANES, stride * 4)
    AMX_EACH(groups, LOAD);
#undef LOAD
}

LANES_INLINE void amx_store_sums(int32_t *sums, Py_ssize_t stride, const int groups)
{
#define STORE(g, b) _tile_stored(g, sums + g * GROUP_LANES, stride * 4)
    AMX_EACH(groups, STORE);
#undef STORE
}

/* The sums in tiles += 64 elements of a block of rows times bytes. */
LANES_INLINE void amx_multiply(const Product *product, const int8_t *weights,
                               const uint8_t *bytes, Py_ssize_t row_bytes, const int bits,
                               const int groups)
{
    amx_written();
#define MULTIPLY(g, b) \
    do { \
        if ((g & (product->span - 1)) == 0) { \
            _tile_loadd(4, weights, product->weights_stride); \
            weights += product->next_weights; \
        } \
        _tile_loadd(b, bytes + g * VECTOR_BYTES, row_bytes); \
        if (bits < 8) \
            _tile_dpbssd(g, 4, b); \
        else \
            _tile_dpbsud(g, 4, b); \
    } while (0)
    AMX_EACH(groups, MULTIPLY);
#undef MULTIPLY
}

/* Some of the depth of a product as bytes, in parts of AMX_ELEMENTS. */
typedef struct {
    const Product *product;
    Py_ssize_t first;      /* chunk */
    int parts, begins, ends;
    const uint8_t *bytes[AMX_PARTS];
    Py_ssize_t row_bytes[AMX_PARTS];
} amx_piece;

/* A part from a chunk on, what is missing being zeros. Whole parts of 8-bit codes are taken where
   they are. */
LANES_INLINE const uint8_t *amx_bytes(const Product *product, Py_ssize_t first, const int bits,
                                      const int groups, const dot_bytes *table, Fetch *fetch,
                                      uint8_t *buffer, Py_ssize_t *row_bytes)
{
    const int steps = chunk_elements(bits) / 4, vectors = chunk_vectors(bits);
    const int most = AMX_STEPS / steps;
    const int chunks = product->chunks - first < most ? (int)(product->chunks - first) : most;
    const Py_ssize_t chunk_bytes = product->stride_groups * vectors * VECTOR_BYTES;
    const uint8_t *packed = product->packed + first * chunk_bytes;
    for (int chunk = 0; fetch && chunk < chunks; chunk++)
        fetch_some(fetch, groups * vectors * VECTOR_BYTES / 16 * fetch->rate);
    *row_bytes = chunk_bytes;
    if (bits == 8 && chunks == most)
        return packed;
    *row_bytes = groups * VECTOR_BYTES;
    dot_expand(packed, chunk_bytes, chunks, groups, bits, DOT_LEVELS, table, buffer);
    if (chunks < most)
        memset(buffer + chunks * steps * groups * VECTOR_BYTES, 0,
               (most - chunks) * steps * groups * VECTOR_BYTES);
    return buffer;
}

/* bits and groups are literals, here and in the callers. */
LANES_INLINE void amx_expand(amx_piece *piece, const int bits, const int groups,
                             const dot_bytes *tables, Fetch *fetch,
                             uint8_t (*buffer)[AMX_PART_BYTES])
{
    const Py_ssize_t part_chunks = AMX_ELEMENTS / chunk_elements(bits);
    dot_bytes table[8];    /* a copy, which what is written to the buffer cannot change */
    for (int i = 0; i < 8 && bits < 8; i++)
        table[i] = tables[i];
    for (int part = 0; part < piece->parts; part++)
        piece->bytes[part] = amx_bytes(piece->product, piece->first + part * part_chunks, bits,
                                       groups, table, fetch, buffer[part],
                                       piece->row_bytes + part);
}

/* The sums of a single block of rows stay in the tiles from one piece of a product to the next. */
LANES_INLINE void amx_multiply_rows(const amx_piece *piece, Py_ssize_t rows, Py_ssize_t tile_rows,
                                    const int bits, const int groups)
{
    const Product *product = piece->product;
    const int8_t *weights = product->weights + piece->first * chunk_elements(bits);
    for (Py_ssize_t row = 0; row < rows; row += tile_rows) {
        int32_t *sums = product->sums + row * DOT_STRIDE;
        if (piece->begins && bits == 8)
            amx_start_sums(product, row, tile_rows, groups);
        if (piece->begins && bits < 8)
            amx_clear_sums(groups);
        else if (piece->begins || rows > tile_rows)
            amx_load_sums(sums, DOT_STRIDE, groups);
        for (int part = 0; part < piece->parts; part++)
            amx_multiply(product, weights + row * product->weights_stride + part * AMX_ELEMENTS,
                         piece->bytes[part], piece->row_bytes[part], bits, groups);
        if (piece->ends || rows > tile_rows)
            amx_store_sums(sums, DOT_STRIDE, groups);
    }
}

#undef AMX_EACH

#define FOR_GROUPS(groups, b, call) \
    switch (groups) { \
    case 1: call(b, 1); break; \
    case 2: call(b, 2); break; \
    case 3: call(b, 3); break; \
    default: call(b, 4); \
    }

static void amx_expand_piece(amx_piece *piece, int bits, const dot_bytes *tables, Fetch *fetch,
                             uint8_t (*buffer)[AMX_PART_BYTES])
{
#define CALL(b, g) amx_expand(piece, b, g, tables, fetch, buffer)
#define CALL_GROUPS(b) FOR_GROUPS(piece->product->groups, b, CALL)
    FOR_BITS(bits, CALL_GROUPS)
#undef CALL
#undef CALL_GROUPS
}

static void amx_multiply_piece(const amx_piece *piece, int bits, Py_ssize_t rows,
                               Py_ssize_t tile_rows)
{
#define CALL(b, g) amx_multiply_rows(piece, rows, tile_rows, b, g)
#define CALL_GROUPS(b) FOR_GROUPS(piece->product->groups, b, CALL)
    FOR_BITS(bits, CALL_GROUPS)
#undef CALL
#undef CALL_GROUPS
}

#undef FOR_GROUPS

/* Products with `rows` rows, whole blocks of tile_rows. A single block goes part by part: each is
   multiplied after the next one was brought to bytes, so that its bytes have left the processor's
   store buffer. With more blocks all of them take several parts in turn. */
static void amx_run(const Product *products, Py_ssize_t count, int bits, const int8_t *levels,
                    Py_ssize_t rows, Fetch *fetch, Py_ssize_t tile_rows)
{
    uint8_t buffer[AMX_PARTS][AMX_PART_BYTES] __attribute__((aligned(64)));
    amx_piece pieces[2], *piece = pieces, *before = NULL;
    dot_job job;
    const Py_ssize_t part_chunks = AMX_ELEMENTS / chunk_elements(bits);
    const int single = rows == tile_rows, most = single ? 1 : AMX_PARTS;
    if (bits < 8)
        dot_tables(&job, levels, bits, 0);
    for (const Product *product = products; product < products + count; product++)
        for (Py_ssize_t first = 0; first < product->chunks; first += most * part_chunks) {
            const Py_ssize_t left = (product->chunks - first + part_chunks - 1) / part_chunks;
            piece->product = product;
            piece->first = first;
            piece->parts = left < most ? (int)left : most;
            piece->begins = first == 0;
            piece->ends = left <= most;
            amx_expand_piece(piece, bits, job.table, fetch, buffer + (piece - pieces));
            if (!single) {
                amx_multiply_piece(piece, bits, rows, tile_rows);
                continue;
            }
            if (before)
                amx_multiply_piece(before, bits, rows, tile_rows);
            before = piece;
            piece = pieces + (piece == pieces);
        }
    if (before)
        amx_multiply_piece(before, bits, rows, tile_rows);
}

#endif
