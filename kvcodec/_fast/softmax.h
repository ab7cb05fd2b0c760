/* What happens to the rows of a tile of 64 tokens between the two integer products: sums become
   scores, scores probabilities relative to a running maximum; weights.h makes integers of these.

   Each step goes once over the 64 numbers of a row, which a few registers hold, with
   one sum or maximum across lanes; rows do not depend on each other, so that the processor overlaps
   one row's reductions with the next one's arithmetic. The running maximum follows the scores only
   where it falls behind by more than SLACK: whatever it is cancels in the end, and a maximum that
   is seldom raised costs no mispredicted branch and no scaling of what was summed. As long as it
   stays, no score is needed: all factors of a row and its maximum are one slope and one offset, and
   a fused multiply-add leads from a token's scaled sum to the exponent of a power of two. */

#ifndef KVCODEC_SOFTMAX_H
#define KVCODEC_SOFTMAX_H

#include "fetch.h"
#include "floats.h"

/* A tile is 64 floats of one row: scores, then probabilities. */
enum { TILE_VECTORS = 64 / LANES };

/* Probabilities stay below exp(8), about 3,000, as long as |largest| < 2^27. From there on
   floats are 16 or more apart and the sum rounds: to `largest`, or to the float 16 above it, so that
   the bound is exp(16). */
#define SLACK 8.0f
#define LOG2_E 1.44269504f

/* Below it scores and their sums are far from the limits of float32. */
#define ORDINARY 1.8446744e19f

/* As many bytes of codes are read in about the time of all that is done with a row besides products;
   what is to be fetched in that time is asked for during its softmax. */
enum { ROW_AS_BYTES = 1024 };

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

INLINE vfloat magnitude(vfloat x) { return (vfloat)((vint)x & 0x7fffffff); }

/* x + center where the scale has no sign. */
INLINE vfloat add_center(vfloat x, vfloat signed_scale, float center)
{
#if LANES == 16
    const __mmask16 centered = ~_mm512_movepi32_mask((__m512i)signed_scale);
    return (vfloat)_mm512_mask_add_ps((__m512)x, centered, (__m512)x, _mm512_set1_ps(center));
#else
    const vint plain = (vint)signed_scale < 0;
    return (vfloat)((plain & (vint)x) | (~plain & (vint)(x + center)));
#endif
}

/* sums * |scale| * query_scale, plus `center` where the scale has no sign. */
INLINE vfloat product_of(const int32_t *sums, vfloat signed_scale, float query_scale, float center,
                         const int centered)
{
    vint sum;
    memcpy(&sum, sums, sizeof sum);
    const vfloat x = __builtin_convertvector(sum, vfloat) * magnitude(signed_scale) * query_scale;
    return centered ? add_center(x, signed_scale, center) : x;
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
        const vfloat signed_scale = load(scale + at);
        store(s + at, centered ? product_of(sums + at, signed_scale, query_scale, center, 1)
                               : product_of(sums + at, signed_scale, query_scale, 0, 0));
    }
}

/* The same from products with levels, in place. */
static inline void scale_products(float *s, const float *scale, float center, int centered)
{
    for (int i = 0; i < TILE_VECTORS; i++) {
        const vfloat signed_scale = load(scale + i * LANES);
        const vfloat x = load(s + i * LANES) * magnitude(signed_scale);
        store(s + i * LANES, centered ? add_center(x, signed_scale, center) : x);
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

/* Raise the running maximum to the largest lane of `top` where that is far above it, and scale the
   sums; returns the factor, 1 where nothing is to be scaled. */
INLINE float raise_largest(vfloat top, float *largest, vfloat *sums)
{
    float highest, ratio;
    if (__builtin_expect(!any_above(top, *largest + SLACK), 1))
        return 1;
    highest = largest_lane(top);
    ratio = *largest > -INFINITY ? exp_nonpositive(*largest - highest) : 1;
    for (int i = 0; i < SUMS; i++)
        sums[i] *= ratio;
    *largest = highest;
    return ratio;
}

/* Scores to probabilities p relative to the running maximum `largest`; adds them to 16 sums. Where
   the maximum is raised, the sums are scaled; returns the factor, 1 where nothing is to be. */
INLINE float probabilities_of(vfloat *x, float *largest, float *lanes, float *p)
{
    vfloat top = x[0], sums[SUMS];
    float ratio;
    memcpy(sums, lanes, sizeof sums);
    for (int i = 1; i < TILE_VECTORS; i++)
        top = LARGEST(top, x[i]);
    ratio = raise_largest(top, largest, sums);
    for (int i = 0; i < TILE_VECTORS; i++) {
        x[i] = exp_lanes(x[i] - *largest);
        store(p + i * LANES, x[i]);
    }
    add_tile(x, sums);
    memcpy(lanes, sums, sizeof sums);
    return ratio;
}

#define LANE(i, h) (i)

/* Minus infinity where a token, the first of which has this number, is not low <= t < high. */
INLINE vfloat where_seen(vfloat x, Py_ssize_t number, Py_ssize_t low, Py_ssize_t high)
{
    const vint token = (vint){LIST(LANE, 0)} + (int32_t)number;
    const vint seen = (token >= (int32_t)low) & (token < (int32_t)high);
    return (vfloat)((seen & (vint)x) | (~seen & (vint)every(-INFINITY)));
}
#undef LANE

/* Products to probabilities where only the tokens low <= t < high of a tile are seen; the others get
   0, and vectors without any token that is seen cost nothing more. */
static float probabilities_of_some(float *s, Py_ssize_t low, Py_ssize_t high, float factor,
                                   float limit, float *largest, float *lanes)
{
    vfloat x[TILE_VECTORS], sums[SUMS], top = every(-INFINITY);
    const Py_ssize_t first = low / LANES, last = (high - 1) / LANES;
    float ratio;
    memcpy(sums, lanes, sizeof sums);
    for (Py_ssize_t i = first; i <= last; i++) {
        x[i] = score_of(load(s + i * LANES), factor, limit);
        x[i] = where_seen(x[i], i * LANES, low, high);
        top = LARGEST(top, x[i]);
    }
    ratio = raise_largest(top, largest, sums);
    for (int i = 0; i < TILE_VECTORS; i++) {
        x[i] = first <= i && i <= last ? exp_lanes(x[i] - *largest) : every(0);
        store(s + i * LANES, x[i]);
    }
    add_tile(x, sums);
    memcpy(lanes, sums, sizeof sums);
    return ratio;
}

static float probabilities_of_products(float *s, float factor, float limit, float *largest,
                                       float *lanes)
{
    vfloat x[TILE_VECTORS];
    for (int i = 0; i < TILE_VECTORS; i++)
        x[i] = score_of(load(s + i * LANES), factor, limit);
    return probabilities_of(x, largest, lanes, s);
}

/* A row by way of its scores, for the tiles that probabilities_of_rows leaves to it. */
static __attribute__((noinline)) float probabilities_of_row(
    const int32_t *sums, const float *scale, float query_scale, float center, int centered,
    float factor, float limit, Py_ssize_t low, Py_ssize_t high, float *largest, float *lanes,
    float *p)
{
    vfloat x[TILE_VECTORS];
    for (int i = 0; i < TILE_VECTORS; i++) {
        const int at = i * LANES;
        const vfloat signed_scale = load(scale + at);
        x[i] = centered ? product_of(sums + at, signed_scale, query_scale, center, 1)
                        : product_of(sums + at, signed_scale, query_scale, 0, 0);
        x[i] = where_seen(score_of(x[i], factor, limit), at, low, high);
    }
    return probabilities_of(x, largest, lanes, p);
}

/* Powers of two as probabilities, which are added to 16 sums. */
INLINE void add_powers(vfloat *x, float *lanes, float *p)
{
    vfloat sums[SUMS];
    for (int i = 0; i < TILE_VECTORS; i++) {
        x[i] = exp2_lanes(x[i]);
        store(p + i * LANES, x[i]);
    }
    memcpy(sums, lanes, sizeof sums);
    add_tile(x, sums);
    memcpy(lanes, sums, sizeof sums);
}

/* Where the maximum stays and nothing is near the limits of float32, one multiplication and
   addition makes an integer sum times its token's scale the exponent of a power of two. */
INLINE void probabilities_of_rows(const int32_t *sums, const float *scale, const float *query_scale,
                                  const float *center, const int centered, const float *factor,
                                  float limit, Py_ssize_t rows, Py_ssize_t low, Py_ssize_t high,
                                  const int masked, float *largest, float *lanes, float *p,
                                  float *ratio, Fetch *fetch)
{
    vfloat signed_scale[TILE_VECTORS];
    for (int i = 0; i < TILE_VECTORS; i++)
        signed_scale[i] = load(scale + i * LANES);
    for (Py_ssize_t r = 0; r < rows; r++, sums += 64, lanes += 16, p += 64) {
        const float power = factor[r] * LOG2_E, slope = query_scale[r] * power;
        const float from_center = centered ? center[r] * power : 0;
        const float plain = -(largest[r] * LOG2_E);
        vfloat x[TILE_VECTORS], top;
        if (fetch)
            fetch_some(fetch, ROW_AS_BYTES / 16 * fetch->rate);
        for (int i = 0; i < TILE_VECTORS; i++) {
            vint sum;
            memcpy(&sum, sums + i * LANES, sizeof sum);
            x[i] = fma_lanes(__builtin_convertvector(sum, vfloat) * magnitude(signed_scale[i]),
                             every(slope),
                             centered ? add_center(every(plain), signed_scale[i], from_center)
                                      : every(plain));
            if (masked)
                x[i] = where_seen(x[i], i * LANES, low, high);
            top = i ? LARGEST(top, x[i]) : x[0];
        }
        ratio[r] = 1;
        if (__builtin_expect(any_above(top, SLACK * LOG2_E)
                             || !(fabsf(plain) < ORDINARY && fabsf(from_center) < ORDINARY
                                  && fabsf(slope) < ORDINARY), 0)) {
            ratio[r] = probabilities_of_row(sums, scale, query_scale[r], centered ? center[r] : 0,
                                            centered, factor[r], limit, low, high, largest + r,
                                            lanes, p);
            continue;
        }
        add_powers(x, lanes, p);
    }
}

/* The same from integer sums, for all rows (64 apart) of a tile of which they see the tokens
   low <= t < high, the others getting 0; centers may be NULL. If `fetch` is not NULL, what it says
   is fetched meanwhile. */
static void probabilities_of_sums(const int32_t *sums, const float *scale, const float *query_scale,
                                  const float *center, const float *factor, float limit,
                                  Py_ssize_t rows, Py_ssize_t low, Py_ssize_t high, float *largest,
                                  float *lanes, float *p, float *ratio, Fetch *fetch)
{
#define CALL(centered, masked) \
    probabilities_of_rows(sums, scale, query_scale, center, centered, factor, limit, rows, low, \
                          high, masked, largest, lanes, p, ratio, fetch)
    if (low > 0 || high < 64)
        CALL(center != NULL, 1);
    else if (center)
        CALL(1, 0);
    else
        CALL(0, 0);
#undef CALL
}

/* Products from integer sums of a row where each 16 tokens have a scale and an offset, `next` numbers
   apart. */
static void products_of_groups(const int32_t *sums, const float *scale, const float *offset,
                               Py_ssize_t next, float *s)
{
    for (int i = 0; i < TILE_VECTORS; i++) {
        const Py_ssize_t at = i * LANES / 16 * next;
        vint sum;
        memcpy(&sum, sums + i * LANES, sizeof sum);
        store(s + i * LANES, __builtin_convertvector(sum, vfloat) * scale[at] + offset[at]);
    }
}

/* Probabilities of a row by way of its products, for the tiles that probabilities_of_groups leaves
   to it. */
static __attribute__((noinline)) float probabilities_of_group_row(
    const int32_t *sums, const float *scale, const float *offset, Py_ssize_t next, float factor,
    float limit, Py_ssize_t low, Py_ssize_t high, float *largest, float *lanes, float *p)
{
    products_of_groups(sums, scale, offset, next, p);
    return probabilities_of_some(p, low, high, factor, limit, largest, lanes);
}

/* Four rows, or fewer, of arrays that hold a number for each. */
INLINE vfour rows_from(const float *x, Py_ssize_t rows)
{
    vfour v = {0};
    for (int r = 0; r < 4; r++)
        if (r < rows)
            v[r] = x[r];
    return v;
}

/* What probabilities_of_rows does, where each 16 tokens have a scale and an offset instead; four rows
   share the arithmetic of their factors. */
INLINE void probabilities_of_four(const int32_t *sums, const float *scale, const float *offset,
                                  Py_ssize_t next, const float *factor, float limit,
                                  const Py_ssize_t rows, Py_ssize_t low, Py_ssize_t high,
                                  const int masked, float *largest, float *lanes, float *p,
                                  float *ratio, Fetch *fetch)
{
    const vfour power = rows_from(factor, rows) * LOG2_E;
    const vfour plain = -(rows_from(largest, rows) * LOG2_E);
    vfour slope[4], start[4];
    vfour_int ordinary = plain < ORDINARY & plain > -ORDINARY;
    for (int i = 0; i < 4; i++) {
        slope[i] = rows_from(scale + i * next, rows) * power;
        start[i] = rows_from(offset + i * next, rows) * power + plain;
        ordinary &= (slope[i] < ORDINARY) & (start[i] < ORDINARY) & (start[i] > -ORDINARY);
    }
    for (Py_ssize_t r = 0; r < rows; r++, sums += 64, lanes += 16, p += 64) {
        vfloat x[TILE_VECTORS], top;
        if (fetch)
            fetch_some(fetch, ROW_AS_BYTES / 16 * fetch->rate);
        for (int i = 0; i < TILE_VECTORS; i++) {
            vint sum;
            memcpy(&sum, sums + i * LANES, sizeof sum);
            x[i] = fma_lanes(__builtin_convertvector(sum, vfloat),
                             every(slope[i * LANES / 16][r]), every(start[i * LANES / 16][r]));
            if (masked)
                x[i] = where_seen(x[i], i * LANES, low, high);
            top = i ? LARGEST(top, x[i]) : x[0];
        }
        ratio[r] = 1;
        if (__builtin_expect(any_above(top, SLACK * LOG2_E) || !ordinary[r], 0))
            ratio[r] = probabilities_of_group_row(sums, scale + r, offset + r, next, factor[r],
                                                  limit, low, high, largest + r, lanes, p);
        else
            add_powers(x, lanes, p);
    }
}

static void probabilities_of_groups(const int32_t *sums, const float *scale, const float *offset,
                                    Py_ssize_t next, const float *factor, float limit,
                                    Py_ssize_t rows, Py_ssize_t low, Py_ssize_t high,
                                    float *largest, float *lanes, float *p, float *ratio,
                                    Fetch *fetch)
{
    const int masked = low > 0 || high < 64;
#define CALL(some, m) \
    probabilities_of_four(sums + r * 64, scale + r, offset + r, next, factor + r, limit, some, low, \
                          high, m, largest + r, lanes + r * 16, p + r * 64, ratio + r, fetch)
    for (Py_ssize_t r = 0; r < rows; r += 4)
        if (rows - r >= 4 && !masked)
            CALL(4, 0);
        else
            CALL(rows - r < 4 ? rows - r : 4, 1);
#undef CALL
}

/* Products of rows of 15-bit queries with a center in int8. */
static void center_dots(const int16_t *q, Py_ssize_t stride, Py_ssize_t rows, const int8_t *center,
                        Py_ssize_t n, int32_t *out)
{
    Py_ssize_t r = 0;
#if LANES == 16 && defined(__AVX512VNNI__)
    for (; r + 4 <= rows; r += 4) {
        __m512i sum[4] = {{0}};
        for (Py_ssize_t c = 0; c < n; c += 32) {
            const __mmask32 there = n - c >= 32 ? ~(__mmask32)0 : ((__mmask32)1 << (n - c)) - 1;
            const __m512i x = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(there, center + c));
            for (int i = 0; i < 4; i++)
                sum[i] = _mm512_dpwssd_epi32(
                    sum[i], x, _mm512_maskz_loadu_epi16(there, q + (r + i) * stride + c));
        }
        const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[0], sum[1]),
                                            _mm512_unpackhi_epi32(sum[0], sum[1]));
        const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[2], sum[3]),
                                            _mm512_unpackhi_epi32(sum[2], sum[3]));
        const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd),
                                             _mm512_unpackhi_epi64(ab, cd));
        const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all),
                                              _mm512_extracti64x4_epi64(all, 1));
        _mm_storeu_si128((__m128i *)(out + r), _mm_add_epi32(_mm256_castsi256_si128(half),
                                                             _mm256_extracti128_si256(half, 1)));
    }
#endif
    for (; r < rows; r++) {
        int32_t total = 0;
        for (Py_ssize_t c = 0; c < n; c++)
            total += (int32_t)q[r * stride + c] * center[c];
        out[r] = total;
    }
}

#endif
