/* Groups of tokens or of channels that share a scale and a zero point (KIVI).

   The scales of a group of tokens are folded into the queries: q * scale is rounded to int8 again,
   and what the group's midpoints add is q . middle. Scales and midpoints are brought to float32
   once for all rows; four rows are read twice from the first-level cache, first for their largest
   products and their sums, then to be rounded, and share the steps across lanes. The scales of
   groups of channels lie token by token and are brought into rows of a tile's tokens, all groups at
   once. */

#ifndef KVCODEC_FOLD_H
#define KVCODEC_FOLD_H

#include <float.h>

#include "floats.h"

enum { FOLD_ROWS = 4 };

/* scale[i] and middle[i] = zero_point[i] + half * scale[i], as float32 or from bfloat16. */
static void load_group(const void *scales, const void *zero_points, Py_ssize_t at, Py_ssize_t n,
                       int bfloat16, float half, float *scale, float *middle)
{
    if (bfloat16) {
        widen_bfloat16((const uint16_t *)scales + at, n, scale);
        widen_bfloat16((const uint16_t *)zero_points + at, n, middle);
    } else {
        memcpy(scale, (const float *)scales + at, n * sizeof(float));
        memcpy(middle, (const float *)zero_points + at, n * sizeof(float));
    }
    for (Py_ssize_t i = 0; i < n; i++)
        middle[i] += half * scale[i];
}

/* y = q * scale, its largest magnitude and q . middle in 16 lanes, for some rows that share the
   loads of the group. */
INLINE void multiply_group(const float *q, Py_ssize_t stride, const int rows, const float *scale,
                           const float *middle, Py_ssize_t n, float *y, float *largest,
                           float *product)
{
    vfloat sums[FOLD_ROWS][SUMS] = {{{0}}}, top[FOLD_ROWS] = {{0}};
    const Py_ssize_t whole = n / 16 * 16;
    for (Py_ssize_t c = 0; c < whole; c += 16)
#pragma GCC unroll 4
        for (int part = 0; part < SUMS; part++) {
            const Py_ssize_t at = c + part * LANES;
            const vfloat s = load(scale + at), m = load(middle + at);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const vfloat x = load(q + r * stride + at), scaled = x * s;
                store(y + r * stride + at, scaled);
                top[r] = larger_magnitude(top[r], scaled);
                sums[r][part] += x * m;
            }
        }
    for (Py_ssize_t c = whole; c < n; c += LANES) {
        const int part = c % 16 / LANES;
        const vfloat s = load_some(scale + c, n - c), m = load_some(middle + c, n - c);
        for (int r = 0; r < rows; r++) {
            const vfloat x = load_some(q + r * stride + c, n - c), scaled = x * s;
            for (Py_ssize_t i = 0; i < n - c && i < LANES; i++)
                y[r * stride + c + i] = scaled[i];
            top[r] = larger_magnitude(top[r], scaled);
            sums[r][part] += x * m;
        }
    }
    largest_of(top, rows, largest);
    totals_of((const vfloat (*)[SUMS])sums, rows, product);
}

/* 64 numbers of a row as int8 levels; adds their sums, some each, to total. */
INLINE vint round_64(const float *y, float inverse, int8_t *levels, vint total)
{
    vint level[64 / LANES];
    for (int i = 0; i < 64 / LANES; i++)
        level[i] = nearest(load(y + i * LANES) * inverse);
    return store_64((uint8_t *)levels, level, total);
}

/* levels = y / step to the nearest integers, zeros from n to the depth, and their sums. */
INLINE void round_group(const float *y, Py_ssize_t stride, const int rows, Py_ssize_t n,
                        Py_ssize_t depth, const float *inverse, int8_t *levels, int32_t *sums)
{
    vint total[FOLD_ROWS] = {{0}};
    for (int r = 0; r < rows; r++, y += stride, levels += depth) {
        Py_ssize_t c = 0;
        for (; c + 64 <= n; c += 64)
            total[r] = round_64(y + c, inverse[r], levels + c, total[r]);
        for (; c + LANES <= n; c += LANES) {
            const vint level = nearest(load(y + c) * inverse[r]);
            store_bytes((uint8_t *)levels + c, level);
            total[r] += level;
        }
        for (; c < n; c += LANES) {
            const vint level = nearest(load_some(y + c, n - c) * inverse[r]);
            for (Py_ssize_t i = 0; i < n - c && i < LANES; i++)
                levels[c + i] = (int8_t)level[i];
            total[r] += level;
        }
        for (c = n; c < depth; c++)
            levels[c] = 0;
    }
    int_totals_of(total, rows, sums);
}

INLINE void fold_some(const float *q, Py_ssize_t stride, const int rows, const float *scale,
                      const float *middle, Py_ssize_t n, Py_ssize_t depth, float *y,
                      int8_t *folded, float *folded_scale, int32_t *folded_sum, float *offset)
{
    float largest[FOLD_ROWS], inverse[FOLD_ROWS];
    multiply_group(q, stride, rows, scale, middle, n, y, largest, offset);
    for (int r = 0; r < rows; r++) {
        const float step = largest[r] / 127;
        folded_scale[r] = step > 0 && step < FLT_MIN ? FLT_MIN : step;
        inverse[r] = step > 0 ? 1 / folded_scale[r] : 0;
    }
    round_group(y, stride, rows, n, depth, inverse, folded, folded_sum);
}

/* All rows of `q`; they and those of y, room for four, are `stride` apart. Folded rows are `depth`
   apart and filled up with zeros. */
static void fold_rows(const float *q, Py_ssize_t stride, Py_ssize_t rows, const float *scale,
                      const float *middle, Py_ssize_t n, Py_ssize_t depth, float *y,
                      int8_t *folded, float *folded_scale, int32_t *folded_sum, float *offset)
{
    Py_ssize_t r = 0;
    for (; r + FOLD_ROWS <= rows; r += FOLD_ROWS)
        fold_some(q + r * stride, stride, FOLD_ROWS, scale, middle, n, depth, y,
                  folded + r * depth, folded_scale + r, folded_sum + r, offset + r);
    for (; r < rows; r++)
        fold_some(q + r * stride, stride, 1, scale, middle, n, depth, y, folded + r * depth,
                  folded_scale + r, folded_sum + r, offset + r);
}

/* out[g * 64 + t] = x[t * groups + g] for 16 tokens and four groups, from bfloat16. */
#if LANES == 16
INLINE void widen_quads(const uint16_t *x, float *out)
{
    const __m512i even = _mm512_set_epi16(61, 57, 53, 49, 45, 41, 37, 33, 29, 25, 21, 17, 13, 9, 5,
                                          1, 60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8,
                                          4, 0);
    const __m512i two = _mm512_set1_epi16(2);
    const __m512i low = _mm512_loadu_si512(x), high = _mm512_loadu_si512(x + 32);
    const __m512i groups[2] = {_mm512_permutex2var_epi16(low, even, high),
                               _mm512_permutex2var_epi16(low, _mm512_add_epi16(even, two), high)};
    for (int g = 0; g < 4; g++) {
        const __m256i words = g % 2 ? _mm512_extracti64x4_epi64(groups[g / 2], 1)
                                    : _mm512_castsi512_si256(groups[g / 2]);
        _mm512_storeu_si512(out + g * 64, _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
    }
}
#endif

/* Scales or zero points of a tile, those of a group side by side; missing tokens get zeros. */
static void load_channel_groups(const void *stored, Py_ssize_t at, Py_ssize_t groups,
                                Py_ssize_t tokens, int bfloat16, float *out)
{
    const uint16_t *x = (const uint16_t *)stored + at * groups;
    Py_ssize_t t = 0;
#if LANES == 16
    if (bfloat16 && groups == 4)
        for (; t + 16 <= tokens; t += 16)
            widen_quads(x + t * 4, out + t);
#endif
    if (bfloat16)
        for (; t < tokens; t++)
            for (Py_ssize_t g = 0; g < groups; g++) {
                const uint32_t bits = (uint32_t)x[t * groups + g] << 16;
                memcpy(out + g * 64 + t, &bits, sizeof bits);
            }
    else
        for (; t < tokens; t++)
            for (Py_ssize_t g = 0; g < groups; g++)
                out[g * 64 + t] = ((const float *)stored)[(at + t) * groups + g];
    for (; t < 64; t++)
        for (Py_ssize_t g = 0; g < groups; g++)
            out[g * 64 + t] = 0;
}

/* sums[row][c] += p[row] . (zero_point + half * scale) for `count` channels of one group. */
static void add_midpoints(const float *p, Py_ssize_t rows, const float *scale,
                          const float *zero_point, float half, float *sums, Py_ssize_t stride,
                          Py_ssize_t count)
{
    vfloat middle[64 / LANES];
    for (int i = 0; i < 64 / LANES; i++)
        middle[i] = load(zero_point + i * LANES) + load(scale + i * LANES) * half;
    for (Py_ssize_t r = 0; r < rows; r++, p += 64, sums += stride) {
        vfloat product[1][SUMS] = {{{0}}};
        float total;
        for (int i = 0; i < 64 / LANES; i++)
            product[0][i % SUMS] += load(p + i * LANES) * middle[i];
        totals_of((const vfloat (*)[SUMS])product, 1, &total);
        Py_ssize_t c = 0;
        for (; c + LANES <= count; c += LANES)
            store(sums + c, load(sums + c) + total);
        for (; c < count; c++)
            sums[c] += total;
    }
}

#endif
