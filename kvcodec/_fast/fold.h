/* Groups of tokens or of channels that share a scale and a zero point (KIVI).

   The scales of a group of tokens are folded into the queries: q * scale is rounded to int8 again,
   and what the group's midpoints add is q . middle. Scales and midpoints are brought to float32
   once for all rows; four rows are read twice from the first-level cache, first for their largest
   products and their sums, then to be rounded, and share the steps across lanes. The scales of
   groups of channels lie token by token and are brought into rows of a tile's tokens, a group at a
   time in float32 and two neighbouring ones in bfloat16. */

#ifndef KVCODEC_FOLD_H
#define KVCODEC_FOLD_H

#include <float.h>

#include "floats.h"

/* As many bytes of codes are read in about the time in which a group is folded into a row, or a row's
   weights are rounded for a group. */
enum { FOLD_AS_BYTES = 448, ROUND_AS_BYTES = 224 };

/* Numbers up to a multiple of 16. */
INLINE Py_ssize_t filled_up(Py_ssize_t n) { return (n + 15) / 16 * 16; }

INLINE float stored_float(const void *stored, Py_ssize_t at, int bfloat16)
{
    uint32_t bits;
    float x;
    if (!bfloat16)
        return ((const float *)stored)[at];
    bits = (uint32_t)((const uint16_t *)stored)[at] << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* LANES floats from bfloat16. */
INLINE vfloat load_bfloat16(const uint16_t *x)
{
#if LANES == 16
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return (vfloat)_mm512_slli_epi32(bits, 16);
#elif defined(__AVX2__)
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    return (vfloat)_mm256_slli_epi32(bits, 16);
#else
    vint bits;
    for (int i = 0; i < LANES; i++)
        bits[i] = (int32_t)((uint32_t)x[i] << 16);
    return (vfloat)bits;
#endif
}

/* Scales, and midpoints half a code's range above zero points. */
INLINE void store_group(vfloat scale, vfloat zero_point, float half, float *scales, float *middles)
{
    store(scales, scale);
    store(middles, zero_point + half * scale);
}

/* scale[i] and middle[i] = zero_point[i] + half * scale[i] from float32 or bfloat16, filled up with
   zeros. */
static void load_group(const void *scales, const void *zero_points, Py_ssize_t at, Py_ssize_t n,
                       int bfloat16, float half, float *scale, float *middle)
{
    Py_ssize_t i = 0;
    if (bfloat16)
        for (; i + LANES <= n; i += LANES)
            store_group(load_bfloat16((const uint16_t *)scales + at + i),
                        load_bfloat16((const uint16_t *)zero_points + at + i), half, scale + i,
                        middle + i);
    else
        for (; i + LANES <= n; i += LANES)
            store_group(load((const float *)scales + at + i),
                        load((const float *)zero_points + at + i), half, scale + i, middle + i);
    for (; i < n; i++) {
        scale[i] = stored_float(scales, at + i, bfloat16);
        middle[i] = stored_float(zero_points, at + i, bfloat16) + half * scale[i];
    }
    for (; i < filled_up(n); i++)
        scale[i] = middle[i] = 0;
}

/* y = q * scale, its largest magnitude and q . middle in 16 lanes, for some rows that share the
   loads of the group. */
INLINE void multiply_group(const float *q, Py_ssize_t stride, const int rows, const float *scale,
                           const float *middle, Py_ssize_t n, float *y, vfour *largest,
                           vfour *product)
{
    vfloat sums[4][SUMS] = {{{0}}}, top[4] = {{0}};
    for (Py_ssize_t c = 0; c < n; c += 16)
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
    largest_of(top, rows, (float *)largest);
    totals_of((const vfloat (*)[SUMS])sums, rows, (float *)product);
}

/* levels = y / step to the nearest integers, zeros from n to the depth, and their sums. */
INLINE void round_group(const float *y, Py_ssize_t stride, const int rows, Py_ssize_t n,
                        Py_ssize_t depth, vfour inverse, int8_t *levels, int32_t *sums)
{
    vint total[4] = {{0}}, level[64 / LANES];
    Py_ssize_t c = 0;
    for (; c + 64 <= n; c += 64)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < 64 / LANES; i++)
                level[i] = nearest(load(y + r * stride + c + i * LANES) * inverse[r]);
            total[r] = store_64((uint8_t *)levels + r * depth + c, level, total[r]);
        }
    for (; c < n; c += LANES)
        for (int r = 0; r < rows; r++) {
            level[0] = nearest(load(y + r * stride + c) * inverse[r]);
            store_bytes((uint8_t *)levels + r * depth + c, level[0]);
            total[r] += level[0];
        }
    if (n < depth)
        for (int r = 0; r < rows; r++)
            memset(levels + r * depth + n, 0, depth - n);
    int_totals_of(total, rows, sums);
}

/* What comes of folding the scales of a group of tokens into all rows. */
typedef struct {
    int8_t *levels;         /* (rows, depth) */
    int32_t *sums;          /* (rows): of the levels */
    float *scale, *offset;  /* (lanes, rows): for each 16 tokens */
    Py_ssize_t lanes, next; /* so many 16 tokens, whose rows are so far apart */
} Folded;

INLINE void fold_some(const float *q, Py_ssize_t stride, const int rows, const float *scale,
                      const float *middle, Py_ssize_t n, Py_ssize_t depth, float *y,
                      Py_ssize_t row, const Folded *folded)
{
    vfour largest = {0}, product = {0}, step;
    multiply_group(q + row * stride, stride, rows, scale, middle, filled_up(n), y, &largest,
                   &product);
    step = largest / 127.0f;
    step = four_where((step > 0) & (step < FLT_MIN), (vfour){0} + FLT_MIN, step);
    round_group(y, stride, rows, filled_up(n), depth,
                four_where(step > 0, 1.0f / step, (vfour){0}), folded->levels + row * depth,
                folded->sums + row);
    for (Py_ssize_t i = 0; i < folded->lanes; i++) {
        memcpy(folded->scale + i * folded->next + row, &step, rows * sizeof(float));
        memcpy(folded->offset + i * folded->next + row, &product, rows * sizeof(float));
    }
}

/* Fold a group into rows of `q`, `stride` apart and filled up with zeros; y is room for four. Folded
   rows are `depth` apart and filled up with zeros. */
static void fold_rows(const float *q, Py_ssize_t stride, Py_ssize_t rows, const float *scale,
                      const float *middle, Py_ssize_t n, Py_ssize_t depth, float *y,
                      const Folded *folded)
{
    Py_ssize_t r = 0;
    for (; r + 4 <= rows; r += 4)
        fold_some(q, stride, 4, scale, middle, n, depth, y, r, folded);
    for (; r < rows; r++)
        fold_some(q, stride, 1, scale, middle, n, depth, y, r, folded);
}

#if LANES == 16
/* Where the numbers of a group lie, of tokens with so many groups. */
INLINE __m512i places_of_tokens(Py_ssize_t groups)
{
    const __m512i tokens = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_mullo_epi32(tokens, _mm512_set1_epi32((int)groups));
}

/* Those of 32 dwords that are at these places, taken modulo 32. */
INLINE __m512i dwords_at(const uint16_t *x, __m512i places)
{
    return _mm512_permutex2var_epi32(_mm512_loadu_si512(x), places, _mm512_loadu_si512(x + 32));
}
#elif defined(__AVX2__)
INLINE __m256i places_of_tokens(Py_ssize_t groups)
{
    const __m256i tokens = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    return _mm256_mullo_epi32(tokens, _mm256_set1_epi32((int)groups));
}
#endif

/* Two neighbouring groups, from the `first` on, of LANES tokens with bfloat16 numbers: in the lower
   and in the upper half of each lane. */
INLINE vint pairs_of_groups(const uint16_t *x, Py_ssize_t groups, Py_ssize_t first)
{
#if LANES == 16
    /* Loads and permutes are faster than gathering. The usual 32 channels a group are two, four and
       eight groups at a head_dim of 64, 128 and 256, and pairs of these begin at even ones. */
    const __m512i places = _mm512_add_epi32(places_of_tokens(groups / 2),
                                            _mm512_set1_epi32((int)first / 2));
    if (groups == 2)
        return (vint)_mm512_loadu_si512(x);
    if (groups == 4)
        return (vint)dwords_at(x, places);
    if (groups == 8)  /* 32 dwords are those of eight tokens, so only half of the lanes count */
        return (vint)_mm512_inserti64x4(dwords_at(x, places),
                                        _mm512_castsi512_si256(dwords_at(x + 64, places)), 1);
    return (vint)_mm512_i32gather_epi32(places_of_tokens(groups), x + first, 2);
#elif defined(__AVX2__)
    return (vint)_mm256_i32gather_epi32((const int *)(x + first), places_of_tokens(groups), 2);
#else
    vint pairs;
    x += first;
    for (int t = 0; t < LANES; t++)
        pairs[t] = (int32_t)(x[t * groups] | (uint32_t)x[t * groups + 1] << 16);
    return pairs;
#endif
}

/* A group's float32 numbers of LANES tokens. */
INLINE vfloat numbers_of_group(const float *x, Py_ssize_t groups)
{
#if LANES == 16
    return (vfloat)_mm512_i32gather_ps(places_of_tokens(groups), x, 4);
#elif defined(__AVX2__)
    return (vfloat)_mm256_i32gather_ps(x, places_of_tokens(groups), 4);
#else
    vfloat numbers;
    for (int t = 0; t < LANES; t++)
        numbers[t] = x[t * groups];
    return numbers;
#endif
}

INLINE vfloat lower_bfloat16(vint pairs) { return (vfloat)(pairs << 16); }
INLINE vfloat upper_bfloat16(vint pairs) { return (vfloat)(pairs & (int32_t)0xffff0000); }

/* Scales and midpoints of LANES tokens, those of a group 64 apart from the next one's. */
INLINE void load_float_groups(const float *scales, const float *zero_points, Py_ssize_t groups,
                              float half, float *scale, float *middle)
{
    for (Py_ssize_t g = 0; g < groups; g++)
        store_group(numbers_of_group(scales + g, groups),
                    numbers_of_group(zero_points + g, groups), half, scale + g * 64,
                    middle + g * 64);
}

/* The same of bfloat16 numbers and two groups or more, of which the last of an odd number comes with
   the one before. */
INLINE void load_bfloat16_groups(const uint16_t *scales, const uint16_t *zero_points,
                                 Py_ssize_t groups, float half, float *scale, float *middle)
{
    for (Py_ssize_t g = 0; g < groups; g += 2) {
        const Py_ssize_t first = g + 1 < groups ? g : g - 1;
        const vint s = pairs_of_groups(scales, groups, first);
        const vint zero = pairs_of_groups(zero_points, groups, first);
        float *to = scale + first * 64, *to_middle = middle + first * 64;
        store_group(lower_bfloat16(s), lower_bfloat16(zero), half, to, to_middle);
        store_group(upper_bfloat16(s), upper_bfloat16(zero), half, to + 64, to_middle + 64);
    }
}

/* Scales and midpoints of a tile's tokens, those of a group side by side; missing tokens get zeros. */
static void load_channel_groups(const void *scales, const void *zero_points, Py_ssize_t at,
                                Py_ssize_t groups, Py_ssize_t tokens, int bfloat16, float half,
                                float *scale, float *middle)
{
    Py_ssize_t t = 0;
    if (groups == 1) {
        load_group(scales, zero_points, at, tokens, bfloat16, half, scale, middle);
        t = tokens;
    }
    for (; t + LANES <= tokens; t += LANES) {
        const Py_ssize_t from = (at + t) * groups;
        if (bfloat16)
            load_bfloat16_groups((const uint16_t *)scales + from,
                                 (const uint16_t *)zero_points + from, groups, half, scale + t,
                                 middle + t);
        else
            load_float_groups((const float *)scales + from, (const float *)zero_points + from,
                              groups, half, scale + t, middle + t);
    }
    for (; t < tokens; t++)
        for (Py_ssize_t g = 0; g < groups; g++) {
            const float s = stored_float(scales, (at + t) * groups + g, bfloat16);
            scale[g * 64 + t] = s;
            middle[g * 64 + t] = stored_float(zero_points, (at + t) * groups + g, bfloat16)
                               + half * s;
        }
    for (; t < 64; t++)
        for (Py_ssize_t g = 0; g < groups; g++)
            scale[g * 64 + t] = middle[g * 64 + t] = 0;
}

#endif
