/* Products of packed codes (laid out as lanes.h says) with float32 weights:

       sums[row][lane] += sum over the depth of level(code) * weight[row].

   A vector holds the levels of one element in some lanes, a weight is broadcast, and a fused
   multiply-add does the rest: no sum goes across lanes, and no element is multiplied with a scale.
   (The scales of keys are left to the caller, those of values are in the weights.) A block of rows
   times columns (vectors side by side) keeps its sums in registers, and a level serves all its rows.
   Every CHAIN elements of the depth are one chain of multiply-adds, which starts at zero and is then
   added to the sum. So the bits of a result depend neither on the block nor on the vectors.

   - AVX-512 looks levels up as floats (vpermps) by the lowest four bits of a dword. A shift brings a
     code there; for codes of 2 bits the table is repeated, so that nothing is masked. With four rows
     these are two instructions of six that the processor has the same two ports for.
   - Elsewhere, and for the other widths, the levels of four elements are four signed bytes of a
     dword (dot_take), which are widened and converted. */

#ifndef KVCODEC_DOT_FLOATS_H
#define KVCODEC_DOT_FLOATS_H

#include "dot.h"
#include "simd.h"

enum { CHAIN = 32 };

typedef uint32_t vuint __attribute__((vector_size(4 * LANES)));

typedef struct {
    const uint8_t *packed;
    Py_ssize_t chunk_bytes, chunks, lanes;
    Fetch *fetch;
    const float *weights;
    Py_ssize_t weights_stride, rows;
    float *sums;
    Py_ssize_t sums_stride;
    float floats[16];
    dot_job bytes;              /* only its table */
} float_job;

/* Whether levels are looked up as floats. */
LANES_INLINE int looked_up(const int bits) { return LANES == 16 && (bits == 2 || bits == 4); }

LANES_INLINE void float_tables(float_job *job, const int8_t *levels, const int bits)
{
    int8_t level[16];
    for (int i = 0; i < 16; i++) {
        const int code = i & ((1 << bits) - 1);
        level[i] = levels ? levels[code] : code - (1 << (bits - 1));
        job->floats[i] = level[i];
    }
    if (bits < 8 && !looked_up(bits))
        dot_tables(&job->bytes, level, bits, 0);
}

/* The levels of elements 4*s .. 4*s+3 of a chunk, as signed bytes of a lane's dword. */
LANES_INLINE vint level_bytes(const uint8_t *p, int s, const int bits, const float_job *job)
{
    dot_bytes levels[sizeof(vint) / DOT_WIDTH];
    vint lanes;
    for (int i = 0; i < (int)sizeof lanes / DOT_WIDTH; i++)
        levels[i] = bits == 8 ? dot_load(p + i * DOT_WIDTH) ^ 128
                              : dot_take(p + i * DOT_WIDTH, s, bits, DOT_LEVELS, job->bytes.table);
    memcpy(&lanes, levels, sizeof lanes);
    return lanes;
}

/* The same as floats, element by element. */
LANES_INLINE void four_levels(const uint8_t *p, const int s, const int bits, const float_job *job,
                              vfloat *x)
{
#if LANES == 16
    if (looked_up(bits)) {
        vuint codes;
        memcpy(&codes, p, sizeof codes);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
            x[k] = (vfloat)_mm512_permutexvar_ps((__m512i)(codes >> (8 * k + bits * s)),
                                                 (__m512)load(job->floats));
        return;
    }
#endif
    const vint levels = level_bytes(p, s, bits, job);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
        x[k] = __builtin_convertvector((vint)((vuint)levels << (24 - 8 * k)) >> 24, vfloat);
}

/* Where the first vector of a slice lies in a chunk. */
LANES_INLINE Py_ssize_t float_offset(Py_ssize_t slice, int vectors)
{
    const Py_ssize_t lane = slice * LANES;
    return lane / GROUP_LANES * vectors * VECTOR_BYTES + lane % GROUP_LANES * 4;
}

/* Adds to whole vectors of `sums`. bits, rows and columns are literals, here and in the callers. */
LANES_INLINE void float_block(const float_job *job, Py_ssize_t row, Py_ssize_t slice,
                              const int bits, const int rows, const int columns, float *sums,
                              Py_ssize_t sums_stride)
{
    const int elements = chunk_elements(bits), vectors = chunk_vectors(bits);
    const uint8_t *packed = job->packed + float_offset(slice, vectors);
    const float *weights[4];
    Fetch *fetch = job->fetch;
    const int due = fetch ? columns * vectors * 4 * LANES / 16 * fetch->rate : 0;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        weights[r] = job->weights + (row + r) * job->weights_stride;
    for (Py_ssize_t chunk = 0; chunk < job->chunks;) {
        vfloat sum[4][4], x[4];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++)
                sum[r][c] = (vfloat){0};
        Py_ssize_t last = chunk + CHAIN / elements;
        for (last = last < job->chunks ? last : job->chunks; chunk < last; chunk++) {
            if (fetch)
                fetch_some(fetch, due);
#pragma GCC unroll 8
            for (int s = 0; s < elements / 4; s++)
#pragma GCC unroll 4
                for (int c = 0; c < columns; c++) {
                    four_levels(packed + float_offset(c, vectors), s, bits, job, x);
#pragma GCC unroll 4
                    for (int k = 0; k < 4; k++)
#pragma GCC unroll 4
                        for (int r = 0; r < rows; r++)
                            sum[r][c] = fma_lanes(
                                x[k], every(weights[r][chunk * elements + 4 * s + k]), sum[r][c]);
                }
            packed += job->chunk_bytes;
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                float *total = sums + r * sums_stride + c * LANES;
                store(total, load(total) + sum[r][c]);
            }
    }
}

LANES_INLINE void float_rows(const float_job *job, Py_ssize_t row, const int bits, const int rows,
                             const int columns)
{
    const Py_ssize_t slices = job->lanes / LANES, left = job->lanes % LANES;
    float *sums = job->sums + row * job->sums_stride, some[4][LANES] = {{0}};
    Py_ssize_t slice = 0;
    for (; slice + columns <= slices; slice += columns, sums += columns * LANES)
        float_block(job, row, slice, bits, rows, columns, sums, job->sums_stride);
    for (; slice * LANES < job->lanes; slice++, sums += LANES) {
        const int whole = slice < slices;
        for (int r = 0; !whole && r < rows; r++)
            memcpy(some[r], sums + r * job->sums_stride, left * sizeof(float));
        float_block(job, row, slice, bits, rows, 1, whole ? sums : some[0],
                    whole ? job->sums_stride : LANES);
        for (int r = 0; !whole && r < rows; r++)
            memcpy(sums + r * job->sums_stride, some[r], left * sizeof(float));
    }
}

LANES_INLINE void float_all(float_job *job, const int8_t *table, const int bits)
{
    Py_ssize_t row = 0;
    float_tables(job, table, bits);
    for (; row + 4 <= job->rows; row += 4, job->fetch = NULL)
        float_rows(job, row, bits, 4, 2);
    for (; row + 2 <= job->rows; row += 2, job->fetch = NULL)
        float_rows(job, row, bits, 2, 4);
    if (row < job->rows)
        float_rows(job, row, bits, 1, 4);
}

static void float_run(float_job *job, const int8_t *table, int bits)
{
#define CALL(b) float_all(job, table, b)
    FOR_BITS(bits, CALL)
#undef CALL
}

/* `lanes` lanes of a tile from its first on, times `rows` rows of weights, which are zeros from the
   depth to the end of its last chunk. Levels are those of dot_products, and so is `fetch`. */
static void float_lanes(const uint8_t *packed, Py_ssize_t stride_groups, Py_ssize_t lanes,
                        Py_ssize_t chunks, int bits, const int8_t *table, const float *weights,
                        Py_ssize_t weights_stride, Py_ssize_t rows, float *sums,
                        Py_ssize_t sums_stride, Fetch *fetch)
{
    float_job job;    /* no initializer, as in dot_product */
    job.packed = packed;
    job.chunk_bytes = stride_groups * chunk_vectors(bits) * VECTOR_BYTES;
    job.chunks = chunks;
    job.lanes = lanes;
    job.fetch = fetch;
    job.weights = weights;
    job.weights_stride = weights_stride;
    job.rows = rows;
    job.sums = sums;
    job.sums_stride = sums_stride;
    float_run(&job, table, bits);
}

#endif
