/* Integer dot products by AMX, which multiplies 16 rows of 64 bytes with 64 rows of 16 columns in
   one instruction: weights from the left and, as a chunk of 8-bit codes lies in memory just as a
   right-hand tile wants it, four elements of a lane a dword, bytes from the right. Narrower codes
   are brought to 8 bits in a buffer in the first-level cache, up to 256 elements before they are
   multiplied: a tile that is loaded right after it was written waits. With few rows the time is that
   of expanding and loading, so all rows of a task, up to 16 at a time, come for little more than
   one.

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
    AMX_PARTS = 4,         /* parts of so many elements that are kept as bytes */
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

/* Where sums begin: at zero, or at what cancels the bias of 8-bit codes. */
LANES_INLINE void amx_start_sums(const int32_t *weight_sums, Py_ssize_t rows, const int bits,
                                 const int groups)
{
    int32_t start[AMX_ROWS][GROUP_LANES] __attribute__((aligned(64)));
#define CLEAR(g, b) _tile_zero(g)
#define START(g, b) _tile_loadd(g, start, 64)
    if (bits < 8) {
        AMX_EACH(groups, CLEAR);
        return;
    }
    for (Py_ssize_t r = 0; r < rows; r++)
        for (int i = 0; i < GROUP_LANES; i++)
            start[r][i] = -DOT_BIAS * weight_sums[r];
    amx_written();
    AMX_EACH(groups, START);
#undef CLEAR
#undef START
}

LANES_INLINE void amx_load_sums(const int32_t *sums, Py_ssize_t stride, const int groups)
{
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
LANES_INLINE void amx_multiply(const int8_t *weights, Py_ssize_t stride, const uint8_t *bytes,
                               Py_ssize_t row_bytes, const int bits, const int groups)
{
    amx_written();
    _tile_loadd(4, weights, stride);
#define MULTIPLY(g, b) \
    do { \
        _tile_loadd(b, bytes + g * VECTOR_BYTES, row_bytes); \
        if (bits < 8) \
            _tile_dpbssd(g, 4, b); \
        else \
            _tile_dpbsud(g, 4, b); \
    } while (0)
    AMX_EACH(groups, MULTIPLY);
#undef MULTIPLY
}

/* A part of the depth from a chunk on as bytes, what is missing being zeros. Whole parts of 8-bit
   codes are taken where they are. */
LANES_INLINE const uint8_t *amx_bytes(const dot_job *job, Py_ssize_t first, const int bits,
                                      const int groups, uint8_t *buffer, Py_ssize_t *row_bytes)
{
    const int steps = chunk_elements(bits) / 4, vectors = chunk_vectors(bits);
    const int most = AMX_STEPS / steps;
    const int chunks = job->chunks - first < most ? (int)(job->chunks - first) : most;
    if (job->fetch) {
        const int bytes = groups * vectors * VECTOR_BYTES;
        for (int chunk = 0; chunk < chunks; chunk++)
            fetch_some(job->fetch, bytes * job->fetch->share[0], bytes * job->fetch->share[1]);
    }
    *row_bytes = job->chunk_bytes;
    if (bits == 8 && chunks == most)
        return job->packed + first * job->chunk_bytes;
    *row_bytes = groups * VECTOR_BYTES;
    dot_expand(job, first, first + chunks, bits, DOT_LEVELS, buffer);
    if (chunks < most)
        memset(buffer + chunks * steps * groups * VECTOR_BYTES, 0,
               (most - chunks) * steps * groups * VECTOR_BYTES);
    return buffer;
}

/* Up to 256 elements are brought to bytes and then multiplied with all rows. bits and groups are
   literals, here and in the callers. */
LANES_INLINE void amx_blocks(const dot_job *job, Py_ssize_t tile_rows, const int32_t *weight_sums,
                             const int bits, const int groups)
{
    uint8_t buffer[AMX_PARTS][AMX_PART_BYTES] __attribute__((aligned(64)));
    const uint8_t *bytes[AMX_PARTS];
    const Py_ssize_t part_chunks = AMX_ELEMENTS / chunk_elements(bits);
    Py_ssize_t row_bytes[AMX_PARTS], first = 0;
    while (first < job->chunks) {
        const int8_t *weights = job->weights + first * chunk_elements(bits);
        const int begins = first == 0;
        int parts = 0;
        for (; parts < AMX_PARTS && first < job->chunks; parts++, first += part_chunks)
            bytes[parts] = amx_bytes(job, first, bits, groups, buffer[parts], row_bytes + parts);
        for (Py_ssize_t row = 0; row + tile_rows <= job->rows; row += tile_rows) {
            int32_t *sums = job->sums + row * job->sums_stride;
            if (begins)
                amx_start_sums(weight_sums + row, tile_rows, bits, groups);
            else
                amx_load_sums(sums, job->sums_stride, groups);
            for (int part = 0; part < parts; part++)
                amx_multiply(weights + row * job->weights_stride + part * AMX_ELEMENTS,
                             job->weights_stride, bytes[part], row_bytes[part], bits, groups);
            amx_store_sums(sums, job->sums_stride, groups);
        }
    }
}

#undef AMX_EACH

/* The sums of whole blocks of rows; returns how many rows that is. */
static Py_ssize_t amx_run(const dot_job *job, Py_ssize_t tile_rows, const int32_t *weight_sums,
                          int bits)
{
    const Py_ssize_t rows = job->rows / tile_rows * tile_rows;
#define CALL(b) \
    switch (job->slices) { \
    case 1: amx_blocks(job, tile_rows, weight_sums, b, 1); break; \
    case 2: amx_blocks(job, tile_rows, weight_sums, b, 2); break; \
    case 3: amx_blocks(job, tile_rows, weight_sums, b, 3); break; \
    default: amx_blocks(job, tile_rows, weight_sums, b, 4); \
    }
    FOR_BITS(bits, CALL)
#undef CALL
    return rows;
}

#endif
