/* Products of float32 tokens: scores and value sums of exact tokens, and of those of an asymmetric
   code whose query or probabilities stay in floats. Everything is fused multiply-adds in a fixed
   order. */

#ifndef KVCODEC_FLOATS_H
#define KVCODEC_FLOATS_H

#include "simd.h"

/* What stays in registers: tokens times rows, or rows times vectors of channels. */
enum { ROWS_TOGETHER = 4, TOKENS_TOGETHER = LANES == 16 ? 4 : 1 };
enum { SUM_ROWS = LANES == 16 ? 4 : 2, CHANNEL_VECTORS = 4 };

/* Sums of 16 lanes are LANES at a time in SUMS vectors, added up as a tree of halves: the upper
   half of the lanes to the lower half until one is left. At each step two vectors become one, as
   long as there are two, so that the step is shared. */
#define SUMS (16 / LANES)
#define LOWER(i, h) ((i) / (h) * 2 * (h) + (i) % (h))
#define UPPER(i, h) (LOWER(i, h) + (h))
#if defined(__clang__) || __GNUC__ >= 12
#define BOTH(a, b, which, h) __builtin_shufflevector(a, b, LIST(which, h))
#else
#define BOTH(a, b, which, h) __builtin_shuffle(a, b, (vint){LIST(which, h)})
#endif
#define HALVES(h, of)                                                                     \
    if (left > 1) {                                                                       \
        left /= 2;                                                                        \
        for (int i = 0; i < left; i++)                                                    \
            v[i] = of(BOTH(v[2 * i], v[2 * i + 1], LOWER, h),                             \
                      BOTH(v[2 * i], v[2 * i + 1], UPPER, h));                            \
    } else {                                                                              \
        v[0] = of(v[0], PARTNERS(v[0], h));                                               \
    }
#if LANES == 16
#define ALL_HALVES(of) HALVES(8, of) HALVES(4, of) HALVES(2, of) HALVES(1, of)
#elif LANES == 8
#define ALL_HALVES(of) HALVES(4, of) HALVES(2, of) HALVES(1, of)
#else
#define ALL_HALVES(of) HALVES(2, of) HALVES(1, of)
#endif
#define SUM_OF(a, b) ((a) + (b))
#define INT_SUM_OF(a, b) ((vfloat)((vint)(a) + (vint)(b)))

/* Four numbers, such as those of four rows. */
typedef float vfour __attribute__((vector_size(16)));
typedef int32_t vfour_int __attribute__((vector_size(16)));

INLINE vfour four_where(vfour_int mask, vfour a, vfour b)
{
    return (vfour)((mask & (vfour_int)a) | (~mask & (vfour_int)b));
}

/* The lanes where `count` totals are. */
INLINE void store_totals(vfloat v, const int count, float *totals)
{
#if LANES == 16
    if (count == 4) {
        const __m512i lanes = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
        _mm_storeu_ps(totals, _mm512_castps512_ps128(_mm512_permutexvar_ps(lanes, (__m512)v)));
        return;
    }
#endif
    for (int i = 0; i < count; i++)
        totals[i] = v[i * (LANES / count)];
}

/* The sums of the lanes of `count` vectors, a power of two up to LANES. */
INLINE void lane_totals_of(const vfloat *x, const int count, float *totals)
{
    vfloat v[LANES];
    int left = count;
    for (int i = 0; i < count; i++)
        v[i] = x[i];
    ALL_HALVES(SUM_OF)
    store_totals(v[0], count, totals);
}

/* Totals of `count` sums. */
INLINE void totals_of(const vfloat (*sums)[SUMS], const int count, float *totals)
{
    vfloat v[LANES];
    for (int i = 0; i < count; i++)
#if LANES == 16
        v[i] = sums[i][0];
#elif LANES == 8
        v[i] = sums[i][0] + sums[i][1];
#else
        v[i] = (sums[i][0] + sums[i][2]) + (sums[i][1] + sums[i][3]);
#endif
    lane_totals_of(v, count, totals);
}

/* The largest lanes of `count` vectors, a power of two up to LANES. */
INLINE void largest_of(const vfloat *x, const int count, float *largest)
{
    vfloat v[LANES];
    int left = count;
    for (int i = 0; i < count; i++)
        v[i] = x[i];
    ALL_HALVES(LARGEST)
    store_totals(v[0], count, largest);
}

/* The sums of the lanes of `count` vectors, a power of two up to LANES. */
INLINE void int_totals_of(const vint *x, const int count, int32_t *totals)
{
    vfloat v[LANES];
    int left = count;
    for (int i = 0; i < count; i++)
        v[i] = (vfloat)x[i];
    ALL_HALVES(INT_SUM_OF)
    store_totals(v[0], count, (float *)totals);
}

/* 64 integers from -128 to 127 as bytes; adds their sums, some each, to total. */
INLINE vint store_64(uint8_t *p, const vint *x, vint total)
{
    for (int i = 0; i < 64 / LANES; i += 4) {
        const vbytes bytes = narrow(x + i);
        memcpy(p + i * LANES, &bytes, sizeof bytes);
#if LANES == 16 && defined(__AVX512VNNI__)
        total = (vint)_mm512_dpbusd_epi32((__m512i)total, _mm512_set1_epi8(1), (__m512i)bytes);
#else
        total += (x[i] + x[i + 1]) + (x[i + 2] + x[i + 3]);
#endif
    }
    return total;
}

/* The larger magnitude of each lane of a, which has no sign, and b. */
INLINE vfloat larger_magnitude(vfloat a, vfloat b)
{
#if LANES == 16
    return (vfloat)_mm512_range_ps((__m512)a, (__m512)b, 0xB);
#else
    return LARGEST(a, (vfloat)((vint)b & 0x7fffffff));
#endif
}

INLINE float largest_lane(vfloat v)
{
    float largest;
    largest_of(&v, 1, &largest);
    return largest;
}

/* The first `count` floats, then zeros. */
INLINE vfloat load_some(const float *x, Py_ssize_t count)
{
    float all[LANES] = {0};
    for (Py_ssize_t i = 0; i < count && i < LANES; i++)
        all[i] = x[i];
    return load(all);
}

/* The first `count` floats, which may be a whole vector. */
INLINE vfloat load_up_to(const float *x, Py_ssize_t count)
{
    return count >= LANES ? load(x) : load_some(x, count);
}

INLINE void store_up_to(float *x, vfloat v, Py_ssize_t count)
{
    if (count >= LANES)
        store(x, v);
    else
        for (Py_ssize_t i = 0; i < count; i++)
            x[i] = v[i];
}

/* out[row * out_stride + token] = token . row in 16 lanes, for a block of both that share loads. */
INLINE void float_dots_of(const float *tokens, const int together, Py_ssize_t n, const float *rows,
                          Py_ssize_t stride, const int row_count, float *out,
                          Py_ssize_t out_stride)
{
    const Py_ssize_t whole = n / 16 * 16;
    vfloat sums[ROWS_TOGETHER * TOKENS_TOGETHER][SUMS], x[TOKENS_TOGETHER];
    float totals[ROWS_TOGETHER * TOKENS_TOGETHER];
    for (int i = 0; i < row_count * together; i++)  /* an initializer would clear it in memory */
        for (int part = 0; part < SUMS; part++)
            sums[i][part] = every(0);
    for (Py_ssize_t c = 0; c < whole; c += 16)
        for (int part = 0; part < SUMS; part++) {
            for (int t = 0; t < together; t++)
                x[t] = load(tokens + t * n + c + part * LANES);
            for (int r = 0; r < row_count; r++) {
                const vfloat y = load(rows + r * stride + c + part * LANES);
                for (int t = 0; t < together; t++)
                    sums[r * together + t][part] = fma_lanes(x[t], y,
                                                             sums[r * together + t][part]);
            }
        }
    for (Py_ssize_t c = whole; c < n; c += LANES)
        for (int r = 0; r < row_count; r++) {
            const vfloat y = load_some(rows + r * stride + c, n - c);
            for (int t = 0; t < together; t++) {
                vfloat *sum = &sums[r * together + t][(c - whole) / LANES];
                *sum = fma_lanes(load_some(tokens + t * n + c, n - c), y, *sum);
            }
        }
    totals_of(sums, row_count * together, totals);
    for (int r = 0; r < row_count; r++)
        for (int t = 0; t < together; t++)
            out[r * out_stride + t] = totals[r * together + t];
}

INLINE void float_dots_of_rows(const float *tokens, const int together, Py_ssize_t n,
                               const float *rows, Py_ssize_t stride, Py_ssize_t row_count,
                               float *out, Py_ssize_t out_stride)
{
    Py_ssize_t r = 0;
    for (; r + ROWS_TOGETHER <= row_count; r += ROWS_TOGETHER)
        float_dots_of(tokens, together, n, rows + r * stride, stride, ROWS_TOGETHER,
                      out + r * out_stride, out_stride);
    for (; r < row_count; r++)
        float_dots_of(tokens, together, n, rows + r * stride, stride, 1, out + r * out_stride,
                      out_stride);
}

/* Products of tokens (count, n) with rows: out[row * out_stride + token]. */
static void float_dots(const float *tokens, Py_ssize_t count, Py_ssize_t n, const float *rows,
                       Py_ssize_t stride, Py_ssize_t row_count, float *out, Py_ssize_t out_stride)
{
    Py_ssize_t t = 0;
    for (; t + TOKENS_TOGETHER <= count; t += TOKENS_TOGETHER)
        float_dots_of_rows(tokens + t * n, TOKENS_TOGETHER, n, rows, stride, row_count, out + t,
                           out_stride);
    for (; t < count; t++)
        float_dots_of_rows(tokens + t * n, 1, n, rows, stride, row_count, out + t, out_stride);
}

/* sums[row][c] += weights[row][t] * tokens[t][c], token by token, for `vectors` vectors of channels
   of some rows that share the loads of the tokens. */
INLINE void add_scaled_channels(const float *tokens, Py_ssize_t count, Py_ssize_t n,
                                const float *weights, Py_ssize_t weights_stride,
                                const int row_count, const int vectors, float *sums,
                                Py_ssize_t sums_stride)
{
    vfloat total[SUM_ROWS][CHANNEL_VECTORS], x[CHANNEL_VECTORS];
    for (int r = 0; r < row_count; r++)
        for (int i = 0; i < vectors; i++)
            total[r][i] = load(sums + r * sums_stride + i * LANES);
    for (Py_ssize_t t = 0; t < count; t++) {
        for (int i = 0; i < vectors; i++)
            x[i] = load(tokens + t * n + i * LANES);
        for (int r = 0; r < row_count; r++) {
            const vfloat weight = every(weights[r * weights_stride + t]);
            for (int i = 0; i < vectors; i++)
                total[r][i] = fma_lanes(weight, x[i], total[r][i]);
        }
    }
    for (int r = 0; r < row_count; r++)
        for (int i = 0; i < vectors; i++)
            store(sums + r * sums_stride + i * LANES, total[r][i]);
}

INLINE void add_scaled_tokens_to(const float *tokens, Py_ssize_t count, Py_ssize_t n,
                                 const float *weights, Py_ssize_t weights_stride,
                                 const int row_count, float *sums, Py_ssize_t sums_stride)
{
    enum { STEP = CHANNEL_VECTORS * LANES };
    Py_ssize_t c = 0;
    for (; c + STEP <= n; c += STEP)
        add_scaled_channels(tokens + c, count, n, weights, weights_stride, row_count,
                            CHANNEL_VECTORS, sums + c, sums_stride);
    for (; c + LANES <= n; c += LANES)
        add_scaled_channels(tokens + c, count, n, weights, weights_stride, row_count, 1, sums + c,
                            sums_stride);
    for (; c < n; c++)
        for (int r = 0; r < row_count; r++) {
            float *sum = sums + r * sums_stride + c;
            for (Py_ssize_t t = 0; t < count; t++)
                *sum = fmaf(weights[r * weights_stride + t], tokens[t * n + c], *sum);
        }
}

static void add_scaled_tokens(const float *tokens, Py_ssize_t count, Py_ssize_t n,
                              const float *weights, Py_ssize_t weights_stride,
                              Py_ssize_t row_count, float *sums, Py_ssize_t sums_stride)
{
    Py_ssize_t r = 0;
    for (; r + SUM_ROWS <= row_count; r += SUM_ROWS)
        add_scaled_tokens_to(tokens, count, n, weights + r * weights_stride, weights_stride,
                             SUM_ROWS, sums + r * sums_stride, sums_stride);
    for (; r < row_count; r++)
        add_scaled_tokens_to(tokens, count, n, weights + r * weights_stride, weights_stride, 1,
                             sums + r * sums_stride, sums_stride);
}

static inline void widen_bfloat16(const uint16_t *x, Py_ssize_t count, float *out)
{
    uint32_t *bits = (uint32_t *)out;
    for (Py_ssize_t i = 0; i < count; i++)
        bits[i] = (uint32_t)x[i] << 16;
}

#endif
