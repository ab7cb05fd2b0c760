/* Products of float32 tokens: scores and value sums of exact tokens, and of packed ones whose query
   or probabilities stay in floats. Everything is fused multiply-adds in a fixed order. */

#ifndef KVCODEC_FLOATS_H
#define KVCODEC_FLOATS_H

#include "simd.h"

/* What stays in registers: rows that a token is multiplied with, vectors of channels. */
enum { ROWS_TOGETHER = 4, CHANNEL_VECTORS = LANES == 4 ? 8 : 64 / LANES };

/* Sums of 16 lanes are LANES at a time in SUMS vectors, added up as a tree of halves. */
#define SUMS (16 / LANES)
static inline float sum_of_vectors(const vfloat *sums)
{
#if LANES == 16
    vfloat v = sums[0];
    v += PARTNERS(v, 8);
#elif LANES == 8
    vfloat v = sums[0] + sums[1];
#else
    vfloat v = (sums[0] + sums[2]) + (sums[1] + sums[3]);
#endif
#if LANES > 4
    v += PARTNERS(v, 4);
#endif
    v += PARTNERS(v, 2);
    return v[0] + v[1];
}

/* out[i * out_stride] = token . rows[i] in 16 lanes, for `together` rows that share its loads. */
INLINE void float_dots_of(const float *token, const float *rows, Py_ssize_t stride,
                          const int together, Py_ssize_t n, float *out, Py_ssize_t out_stride)
{
    const Py_ssize_t whole = n / 16 * 16;
    vfloat sums[ROWS_TOGETHER][SUMS] = {0};
    for (Py_ssize_t c = 0; c < whole; c += 16)
        for (int part = 0; part < SUMS; part++) {
            const vfloat x = load(token + c + part * LANES);
            for (int i = 0; i < together; i++)
                sums[i][part] = fma_lanes(x, load(rows + i * stride + c + part * LANES),
                                          sums[i][part]);
        }
    for (int i = 0; i < together; i++) {
        if (whole < n) {
            float lane[16];
            memcpy(lane, sums[i], sizeof lane);
            for (Py_ssize_t c = whole; c < n; c++)
                lane[c - whole] = fmaf(token[c], rows[i * stride + c], lane[c - whole]);
            memcpy(sums[i], lane, sizeof lane);
        }
        out[i * out_stride] = sum_of_vectors(sums[i]);
    }
}

static inline void float_dots(const float *token, const float *rows, Py_ssize_t stride,
                            Py_ssize_t count, Py_ssize_t n, float *out, Py_ssize_t out_stride)
{
    Py_ssize_t r = 0;
    for (; r + ROWS_TOGETHER <= count; r += ROWS_TOGETHER)
        float_dots_of(token, rows + r * stride, stride, ROWS_TOGETHER, n, out + r * out_stride,
                      out_stride);
    for (; r < count; r++)
        float_dots_of(token, rows + r * stride, stride, 1, n, out + r * out_stride, out_stride);
}

/* sums[c] += weights[t] * tokens[t][c], token by token, for `vectors` vectors of channels. */
INLINE void add_scaled_channels(const float *tokens, Py_ssize_t count, Py_ssize_t n,
                                const float *weights, const int vectors, float *sums)
{
    vfloat total[CHANNEL_VECTORS];
    for (int i = 0; i < vectors; i++)
        total[i] = load(sums + i * LANES);
    for (Py_ssize_t t = 0; t < count; t++) {
        const vfloat weight = every(weights[t]);
        for (int i = 0; i < vectors; i++)
            total[i] = fma_lanes(weight, load(tokens + t * n + i * LANES), total[i]);
    }
    for (int i = 0; i < vectors; i++)
        store(sums + i * LANES, total[i]);
}

static inline void add_scaled_tokens(const float *tokens, Py_ssize_t count, Py_ssize_t n,
                                     const float *weights, float *sums)
{
    enum { STEP = CHANNEL_VECTORS * LANES };
    Py_ssize_t c = 0;
    for (; c + STEP <= n; c += STEP)
        add_scaled_channels(tokens + c, count, n, weights, CHANNEL_VECTORS, sums + c);
    for (; c + LANES <= n; c += LANES)
        add_scaled_channels(tokens + c, count, n, weights, 1, sums + c);
    for (; c < n; c++)
        for (Py_ssize_t t = 0; t < count; t++)
            sums[c] = fmaf(weights[t], tokens[t * n + c], sums[c]);
}

INLINE void widen_each(const uint16_t *x, const Py_ssize_t stride, Py_ssize_t count, float *out)
{
    uint32_t *bits = (uint32_t *)out;
    for (Py_ssize_t i = 0; i < count; i++)
        bits[i] = (uint32_t)x[i * stride] << 16;
}

/* out[i] = x[i * stride] from bfloat16; compilers load constant strides in vectors. */
static void widen_strided(const uint16_t *x, Py_ssize_t stride, Py_ssize_t count, float *out)
{
    switch (stride) {
    case 2: widen_each(x, 2, count, out); break;
    case 4: widen_each(x, 4, count, out); break;
    case 8: widen_each(x, 8, count, out); break;
    default: widen_each(x, stride, count, out);
    }
}

/* Codes below 16 to their levels in place; the table has 16 entries. */
static inline void look_up_levels(uint8_t *codes, Py_ssize_t n, const int8_t *table)
{
    typedef uint8_t bytes __attribute__((vector_size(16)));
    bytes levels, x;
    Py_ssize_t i = 0;
    memcpy(&levels, table, sizeof levels);
    for (; i + 16 <= n; i += 16) {
        memcpy(&x, codes + i, sizeof x);
#if defined(__SSSE3__)
        x = (bytes)_mm_shuffle_epi8((__m128i)levels, (__m128i)x);
#elif defined(__aarch64__)
        x = (bytes)vqtbl1q_u8((uint8x16_t)levels, (uint8x16_t)x);
#else
        for (int j = 0; j < 16; j++)
            x[j] = levels[x[j]];
#endif
        memcpy(codes + i, &x, sizeof x);
    }
    for (; i < n; i++)
        codes[i] = (uint8_t)table[codes[i]];
}

#endif
