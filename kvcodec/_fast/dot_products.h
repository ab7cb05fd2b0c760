/* Products of a tile of packed codes with rows of weights, by whatever multiplies fastest: AMX for
   many rows (amx.h), else the blocks of dot.h, which read codes from memory or, where extraction is
   dear, from a buffer in the first-level cache to which they were brought as bytes. */

#ifndef KVCODEC_DOT_PRODUCTS_H
#define KVCODEC_DOT_PRODUCTS_H

#include "dot.h"

/* The product of up to four neighboring groups of 16 lanes, of the tile's `stride_groups`, with
   rows of int8 weights (not -128), which are zeros from the depth to the end of its last chunk and
   whose sums are known if dot_needs_sums() says so. Every `span` groups, 1, 2 or 4, there begin
   weights of their own, `next_weights` bytes and `next_sums` sums after the last ones. The rows of
   `sums` are DOT_STRIDE apart. */
typedef struct {
    const uint8_t *packed;
    Py_ssize_t stride_groups, groups, chunks, span;
    const int8_t *weights;
    Py_ssize_t weights_stride, next_weights;
    const int32_t *weight_sums;
    Py_ssize_t next_sums;
    int32_t *sums;
} Product;

enum { DOT_STRIDE = TILE_TOKENS };

/* TASK_ROWS are the rows that are aimed for where there are many queries: a block of AMX, or as many
   as make up for what bringing a tile to bytes takes. */
#if defined(__AMX_INT8__) && DOT_WIDTH == 64
#include "amx.h"
enum { TASK_ROWS = AMX_ROWS };
#else
enum { TASK_ROWS = 32 };
static Py_ssize_t amx_begin(Py_ssize_t rows) { return (void)rows, 0; }
static void amx_end(Py_ssize_t tile_rows) { (void)tile_rows; }
#endif

/* Whether weights that are not negative are the unsigned operand: of AVX2, and of VNNI where levels
   are looked up. */
#define DOT_NONNEGATIVE (DOT_WIDTH == 64 || (DOT_WIDTH == 32 && DOT_PAIR))

static int dot_nonnegative(int bits, int nonnegative)
{
    return DOT_NONNEGATIVE && nonnegative && (bits < 8 || !DOT_BIAS);
}

static void dot_run(dot_job *job, int bits, int kind)
{
#define CALL_CODES(b) dot_all(job, b, DOT_CODES)
#define CALL_LEVELS(b) dot_all(job, b, DOT_LEVELS)
#define CALL_NONNEGATIVE(b) dot_all(job, b, DOT_LEVELS_BY_NONNEGATIVE)
    if (DOT_WIDTH < 64 && kind == DOT_CODES) {
        FOR_BITS(bits, CALL_CODES)
    } else if (DOT_NONNEGATIVE && kind == DOT_LEVELS_BY_NONNEGATIVE) {
        FOR_BITS(bits, CALL_NONNEGATIVE)
    } else if (DOT_LOOKUP) {
        FOR_BITS(bits, CALL_LEVELS)
    } else
        dot_all(job, 8, DOT_LEVELS);
#undef CALL_CODES
#undef CALL_LEVELS
#undef CALL_NONNEGATIVE
}

/* dot_run() by way of 8-bit codes. */
static void dot_run_expanded(dot_job *job, int bits, int kind)
{
    uint8_t buffer[DOT_BUFFER] __attribute__((aligned(64)));
    const int steps = chunk_elements(bits) / 4, vectors = chunk_vectors(bits);
    const Py_ssize_t slices = job->slices;
    for (Py_ssize_t slice = 0; slice < slices; slice += DOT_BUFFER_SLICES) {
        dot_job part = *job;
        part.packed = buffer;
        part.sums += slice * (DOT_WIDTH / 4);
        part.slices = slices - slice < DOT_BUFFER_SLICES ? slices - slice : DOT_BUFFER_SLICES;
        part.chunk_bytes = part.slices * DOT_WIDTH;
        part.fetch = NULL;
        const Py_ssize_t most = DOT_BUFFER / part.chunk_bytes / steps;
        for (Py_ssize_t first = 0; first < job->chunks; first += most) {
            const Py_ssize_t last = job->chunks - first < most ? job->chunks : first + most;
            part.chunks = (last - first) * steps;
            part.weights = job->weights + first * steps * 4;
            part.adds = first > 0;
            const uint8_t *packed = job->packed + first * job->chunk_bytes;
#define CALL(b, k) \
    dot_expand(packed, job->chunk_bytes, last - first, part.slices, b, k, job->table, buffer)
#define CALL_CODES(b) CALL(b, DOT_CODES)
#define CALL_LEVELS(b) CALL(b, DOT_LEVELS)
            if (DOT_WIDTH < 64 && kind == DOT_CODES) {
                FOR_BITS(bits, CALL_CODES)
            } else {
                FOR_BITS(bits, CALL_LEVELS)
            }
#undef CALL
#undef CALL_CODES
#undef CALL_LEVELS
            dot_run(&part, 8, kind);
        }
        job->packed += dot_offset(DOT_BUFFER_SLICES, vectors);
    }
}

/* Whether the sums of weights are looked at. */
static inline int dot_needs_sums(int bits, int nonnegative)
{
    return DOT_WIDTH < 64 || !dot_nonnegative(bits, nonnegative);
}

/* The rows of some products from one on, by vectors. */
static void dot_vectors(const Product *products, Py_ssize_t count, Py_ssize_t first, Py_ssize_t rows,
                        int bits, const int8_t *table, int nonnegative, Fetch *fetch)
{
    dot_job job;    /* no initializer: it would clear the tables each time */
    const int mapped = bits < 8 && (table != NULL || DOT_WIDTH == 64);
    const int kind = bits < 8 && !mapped ? DOT_CODES
                   : dot_nonnegative(bits, nonnegative) ? DOT_LEVELS_BY_NONNEGATIVE : DOT_LEVELS;
    const int expanded = bits < 8 && ((DOT_EXPAND_AT && rows - first >= DOT_EXPAND_AT)
                                      || (mapped && !DOT_LOOKUP));
    const int vectors = chunk_vectors(bits);
    job.offset = kind == DOT_CODES ? 1 << (bits - 1) : DOT_BIAS;
    job.adds = 0;
    job.rows = rows - first;
    job.sums_stride = DOT_STRIDE;
    if (mapped)
        dot_tables(&job, table, bits, kind == DOT_LEVELS_BY_NONNEGATIVE ? 0 : DOT_BIAS);
    for (const Product *product = products; product < products + count; product++) {
        const int halved = DOT_HALVES(bits) && product->groups == 4 && product->span == 2
                        && job.rows < 8;
        const Py_ssize_t span = halved ? 4 : product->span;
        job.chunk_bytes = product->stride_groups * vectors * VECTOR_BYTES;
        job.chunks = product->chunks;
        job.weights = product->weights + first * product->weights_stride;
        job.weight_sums = product->weight_sums + first;
        job.right_sums = job.weight_sums + product->next_sums;
        job.weights_stride = product->weights_stride;
        job.right = halved ? product->next_weights : 0;
        for (Py_ssize_t g = 0; g < product->groups; g += span) {
            const Py_ssize_t groups = product->groups - g < span ? product->groups - g : span;
            job.packed = product->packed + g * vectors * VECTOR_BYTES;
            job.slices = groups * DOT_SLICES;
            job.sums = product->sums + first * DOT_STRIDE + g * GROUP_LANES;
            job.fetch = fetch;
            if (expanded)
                dot_run_expanded(&job, bits, kind);
            else
                dot_run(&job, bits, kind);
            job.weights += product->next_weights;
            job.weight_sums += product->next_sums;
        }
    }
}

/* Some products with `rows` rows each. The levels of codes of up to 4 bits are those of `table`,
   -127 to 127, or else code - half; of 8-bit codes they are code - 128. The caller knows whether no
   weight is negative, and what amx_begin returned, or 0. If `fetch` is not NULL, what it says is
   fetched meanwhile, but not where vectors other than AMX's take codes that were brought to 8 bits. */
static void dot_products(const Product *products, Py_ssize_t count, int bits, const int8_t *table,
                         int nonnegative, Py_ssize_t rows, Fetch *fetch, Py_ssize_t tile_rows)
{
    Py_ssize_t done = 0;
#if defined(__AMX_INT8__) && DOT_WIDTH == 64
    if (tile_rows && rows >= (bits == 8 ? AMX_ROWS_FROM_8_BITS : AMX_ROWS_FROM)) {
        done = rows / tile_rows * tile_rows;
        amx_run(products, count, bits, table, done, fetch, tile_rows);
        fetch = NULL;
    }
#else
    (void)tile_rows;
#endif
    if (done < rows)
        dot_vectors(products, count, done, rows, bits, table, nonnegative, fetch);
}

#endif
