/* What happens to one row of a tile of 64 tokens between the two integer products: sums become
   scores, scores probabilities relative to the running maximum, probabilities integer weights.

   Each of the three steps goes once over the 64 numbers, which a few registers hold, with one sum
   or maximum across lanes; rows do not depend on each other, so that the processor overlaps one
   row's reductions with the next one's arithmetic. */

#ifndef KVCODEC_SOFTMAX_H
#define KVCODEC_SOFTMAX_H

#include "floats.h"

/* A tile is 64 floats of one row: scores, then probabilities. */
enum { TILE_VECTORS = 64 / LANES };

INLINE vfloat every(float x) { return x - (vfloat){0}; }

INLINE vfloat larger(vfloat a, vfloat b)
{
#if LANES == 16
    return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vfloat)_mm256_max_ps((__m256)a, (__m256)b);
#else
    const vint mask = a > b;
    return (vfloat)((mask & (vint)a) | (~mask & (vint)b));
#endif
}

INLINE vfloat smaller(vfloat a, vfloat b)
{
#if LANES == 16
    return (vfloat)_mm512_min_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vfloat)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return -larger(-a, -b);
#endif
}

INLINE float largest_lane(vfloat v)
{
#if LANES == 16
    v = larger(v, PARTNERS(v, 8));
#endif
#if LANES >= 8
    v = larger(v, PARTNERS(v, 4));
#endif
    v = larger(v, PARTNERS(v, 2));
    v = larger(v, PARTNERS(v, 1));
    return v[0];
}

/* Whether any lane of `a` is above b. */
INLINE int any_above(vfloat a, float b)
{
#if LANES == 16
    return _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(b), _CMP_GT_OQ) != 0;
#elif LANES == 8
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, _mm256_set1_ps(b), _CMP_GT_OQ)) != 0;
#else
    return largest_lane(a) > b;
#endif
}

/* Sum of a tile in 16 lanes. */
INLINE void add_tile(const vfloat *x, vfloat *sums)
{
    for (int i = 0; i < SUMS; i++)
        sums[i] += (x[i] + x[i + SUMS]) + (x[i + 2 * SUMS] + x[i + 3 * SUMS]);
}

INLINE vint nearest(vfloat x)
{
#if LANES == 16
    return (vint)_mm512_cvtps_epi32((__m512)x);
#elif LANES == 8
    return (vint)_mm256_cvtps_epi32((__m256)x);
#else
    const vfloat magic = every(12582912.0f);
    return __builtin_convertvector((x + magic) - magic, vint);
#endif
}

/* exp_nonpositive in all lanes. */
INLINE vfloat exp_lanes(vfloat x)
{
    const vfloat within = larger(x, every(-87.0f));
    const vint whole = nearest(within * 1.44269504f);
    const vfloat n = __builtin_convertvector(whole, vfloat);
    const vfloat r = fma_lanes(n, every(-1.42860677e-6f), fma_lanes(n, every(-0.693145752f), within));
    vfloat p = every(1.0f / 5040.0f);
    p = fma_lanes(p, r, every(1.0f / 720.0f));
    p = fma_lanes(p, r, every(1.0f / 120.0f));
    p = fma_lanes(p, r, every(1.0f / 24.0f));
    p = fma_lanes(p, r, every(1.0f / 6.0f));
    p = fma_lanes(p, r, every(0.5f));
    p = fma_lanes(p, r, every(1.0f));
    p = fma_lanes(p, r, every(1.0f));
    p *= (vfloat)((whole + 127) << 23);
    return (vfloat)((vint)p & (x >= every(-87.0f)));
}

/* sums * |scale| * query_scale, plus `center` where the scale has no sign. */
INLINE vfloat product_of(const int32_t *sums, const float *scale, float query_scale, float center,
                         const int centered)
{
    const vfloat signed_scale = load(scale);
    vint sum;
    memcpy(&sum, sums, sizeof sum);
    const vfloat x = __builtin_convertvector(sum, vfloat)
                   * (vfloat)((vint)signed_scale & 0x7fffffff) * query_scale;
    const vint plain = (vint)signed_scale < 0;
    return centered ? (vfloat)((plain & (vint)x) | (~plain & (vint)(x + center))) : x;
}

/* A score from a product: times a factor, and not beyond `limit` in magnitude. */
INLINE vfloat score_of(vfloat x, float factor, float limit)
{
    return larger(smaller(x * factor, every(limit)), every(-limit));
}

static inline void products_of_sums(const int32_t *sums, const float *scale, float query_scale,
                                    float center, int centered, float *s)
{
    for (int i = 0; i < TILE_VECTORS; i++) {
        const int at = i * LANES;
        store(s + at, centered ? product_of(sums + at, scale + at, query_scale, center, 1)
                               : product_of(sums + at, scale + at, query_scale, 0, 0));
    }
}

static inline void finish_scores(float *s, float factor, float limit)
{
    for (int i = 0; i < TILE_VECTORS; i++)
        store(s + i * LANES, score_of(load(s + i * LANES), factor, limit));
}

/* Scores to probabilities p relative to the larger of their maximum and `largest`, which is
   returned; adds them to 16 sums, after scaling these. The maximum is only looked for where some
   score is larger. */
INLINE float probabilities_of(vfloat *x, float largest, float *lanes, float *p)
{
    vfloat top = x[0], sums[SUMS];
    memcpy(sums, lanes, sizeof sums);
    for (int i = 1; i < TILE_VECTORS; i++)
        top = larger(top, x[i]);
    if (any_above(top, largest)) {
        const float highest = largest_lane(top), ratio = exp_nonpositive(largest - highest);
        for (int i = 0; i < SUMS; i++)
            sums[i] *= ratio;
        largest = highest;
    }
    for (int i = 0; i < TILE_VECTORS; i++) {
        x[i] = exp_lanes(x[i] - largest);
        store(p + i * LANES, x[i]);
    }
    add_tile(x, sums);
    memcpy(lanes, sums, sizeof sums);
    return largest;
}

static float probabilities_of_scores(float *s, float largest, float *lanes)
{
    vfloat x[TILE_VECTORS];
    for (int i = 0; i < TILE_VECTORS; i++)
        x[i] = load(s + i * LANES);
    return probabilities_of(x, largest, lanes, s);
}

static float probabilities_of_products(float *s, float factor, float limit, float largest,
                                       float *lanes)
{
    vfloat x[TILE_VECTORS];
    for (int i = 0; i < TILE_VECTORS; i++)
        x[i] = score_of(load(s + i * LANES), factor, limit);
    return probabilities_of(x, largest, lanes, s);
}

INLINE float probabilities_of_sums(const int32_t *sums, const float *scale, float query_scale,
                                   float center, const int centered, float factor, float limit,
                                   float largest, float *lanes, float *p)
{
    vfloat x[TILE_VECTORS];
    for (int i = 0; i < TILE_VECTORS; i++)
        x[i] = score_of(product_of(sums + i * LANES, scale + i * LANES, query_scale, center,
                                   centered), factor, limit);
    return probabilities_of(x, largest, lanes, p);
}

static float probabilities_of_centered_sums(const int32_t *sums, const float *scale,
                                            float query_scale, float center, float factor,
                                            float limit, float largest, float *lanes, float *p)
{
    return probabilities_of_sums(sums, scale, query_scale, center, 1, factor, limit, largest,
                                 lanes, p);
}

static float probabilities_of_plain_sums(const int32_t *sums, const float *scale,
                                         float query_scale, float factor, float limit,
                                         float largest, float *lanes, float *p)
{
    return probabilities_of_sums(sums, scale, query_scale, 0, 0, factor, limit, largest, lanes, p);
}

INLINE int32_t sum_of_ints(vint v)
{
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++)
        total += v[i];
    return total;
#endif
}

/* Weights p * scale as integers of 7 bits, or of two 7-bit digits, relative to the largest; writes
   their sums too. Returns what 1 stands for, 0 if the largest is below `least`. */
INLINE float digits_of(const float *p, const float *scale, const int bits, float least,
                       int8_t *high, int8_t *low, int32_t *high_sum, int32_t *low_sum)
{
    vfloat w[TILE_VECTORS], top = {0};
    vint lower = {0}, upper = {0};
    for (int i = 0; i < TILE_VECTORS; i++) {
        w[i] = load(p + i * LANES) * load(scale + i * LANES);
        top = i ? larger(top, w[i]) : w[0];
    }
    const float largest = largest_lane(top), most = (float)((1 << bits) - 1);
    const int any = largest >= least;
    const float inverse = any ? most / largest : 0;
    for (int i = 0; i < TILE_VECTORS; i++) {
        vint u = nearest(w[i] * inverse);
        if (bits > 7) {
            const vint digit = u >> 7;
            store_bytes((uint8_t *)high + i * LANES, digit);
            upper += digit;
            u &= 127;
        }
        store_bytes((uint8_t *)low + i * LANES, u);
        lower += u;
    }
    *low_sum = sum_of_ints(lower);
    if (bits > 7)
        *high_sum = sum_of_ints(upper);
    return any ? largest / most : 0;
}

static float one_digit(const float *p, const float *scale, int bits, float least, int8_t *low,
                       int32_t *low_sum)
{
    return digits_of(p, scale, bits, least, NULL, low, NULL, low_sum);
}

static float two_digits(const float *p, const float *scale, int bits, float least, int8_t *high,
                        int8_t *low, int32_t *high_sum, int32_t *low_sum)
{
    return digits_of(p, scale, bits, least, high, low, high_sum, low_sum);
}

#endif
