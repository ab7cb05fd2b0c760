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

INLINE float largest_lane(vfloat v)
{
#if LANES == 16
    v = LARGEST(v, PARTNERS(v, 8));
#endif
#if LANES >= 8
    v = LARGEST(v, PARTNERS(v, 4));
#endif
    v = LARGEST(v, PARTNERS(v, 2));
    v = LARGEST(v, PARTNERS(v, 1));
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
    return LARGEST(LEAST(x * factor, every(limit)), every(-limit));
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

/* cap * tanh(s / cap), with tanh from exp(-2 |x|) - 1, which does not cancel. */
static inline void cap_scores(float *s, float cap)
{
    for (int i = 0; i < TILE_VECTORS; i++) {
        const vfloat x = load(s + i * LANES) / cap;
        const vint sign = (vint)x & (vint)every(-0.0f);
        const vfloat power = expm1_lanes((vfloat)((vint)x | (vint)every(-0.0f)) * 2.0f);
        const vfloat y = (-power / (power + 2.0f)) * cap;
        store(s + i * LANES, (vfloat)((vint)y ^ sign));
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
        top = LARGEST(top, x[i]);
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
        top = i ? LARGEST(top, w[i]) : w[0];
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
