/* The few inner loops that compilers do not vectorize well by themselves.

   Everything is written with GCC's vector extensions, LANES floats wide, so that one source serves
   every instruction set; a float result never depends on LANES, because each lane does what the
   scalar formula says and sums across lanes follow the order of the reference. */

#ifndef KVCODEC_SIMD_H
#define KVCODEC_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Codes are packed as whole words. */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvcodec's fast path is for little-endian processors"
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef int16_t vwords __attribute__((vector_size(4 * LANES)));
typedef int8_t vbytes __attribute__((vector_size(4 * LANES)));

static inline vfloat load(const float *p) { vfloat v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, vfloat v) { memcpy(p, &v, sizeof v); }

/* What the vector extensions have no word for. MULTIPLY_ADD is for exact products, where it does not
   matter whether they are rounded before the addition, and for estimates that decide nothing. */
#if defined(__AVX512F__)
#define LEAST(a, b) ((vfloat)_mm512_min_ps(a, b))
#define LARGEST(a, b) ((vfloat)_mm512_max_ps(a, b))
#define MULTIPLY_ADD(a, b, c) ((vfloat)_mm512_fmadd_ps(a, b, c))
#define MULTIPLY_ADD_DOUBLE(a, b, c) ((vdouble)_mm512_fmadd_pd(a, b, c))
#elif defined(__AVX2__) && defined(__FMA__)
#define LEAST(a, b) ((vfloat)_mm256_min_ps(a, b))
#define LARGEST(a, b) ((vfloat)_mm256_max_ps(a, b))
#define MULTIPLY_ADD(a, b, c) ((vfloat)_mm256_fmadd_ps(a, b, c))
#define MULTIPLY_ADD_DOUBLE(a, b, c) ((vdouble)_mm256_fmadd_pd(a, b, c))
#else
#if LANES == 4 && defined(__SSE2__)
#define LEAST(a, b) ((vfloat)_mm_min_ps(a, b))
#define LARGEST(a, b) ((vfloat)_mm_max_ps(a, b))
#else
#define LEAST(a, b) choose((a) < (b), a, b)
#define LARGEST(a, b) choose((a) > (b), a, b)
#endif
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#define MULTIPLY_ADD_DOUBLE(a, b, c) ((a) * (b) + (c))
static inline __attribute__((unused)) vfloat choose(vint mask, vfloat a, vfloat b)
{
    return (vfloat)((mask & (vint)a) | (~mask & (vint)b));
}
#endif

/* Round to the nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits
   below the unit. Unlike rintf it needs no SSE4.1. */
static inline float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

static inline float bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

/* A vector whose lane i is lane i ^ h of another. */
#define LIST4(f, h) f(0, h), f(1, h), f(2, h), f(3, h)
#define LIST8(f, h) LIST4(f, h), f(4, h), f(5, h), f(6, h), f(7, h)
#define LIST16(f, h) LIST8(f, h), f(8, h), f(9, h), f(10, h), f(11, h), f(12, h), f(13, h), \
                     f(14, h), f(15, h)
#if LANES == 16
#define LIST LIST16
#elif LANES == 8
#define LIST LIST8
#else
#define LIST LIST4
#endif
#define PARTNER(i, h) ((i) ^ (h))

#if defined(__clang__) || __GNUC__ >= 12
#define PARTNERS(v, h) __builtin_shufflevector(v, v, LIST(PARTNER, h))
#else
#define PARTNERS(v, h) __builtin_shuffle(v, (vint){LIST(PARTNER, h)})
#endif

/* y[i] = x[i] * factors[i]; y may be x. */
static inline void multiply(const float *x, const float *factors, Py_ssize_t n, float *y)
{
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store(y + i, load(x + i) * load(factors + i));
    for (; i < n; i++)
        y[i] = x[i] * factors[i];
}

/* The low bytes of the lanes, in order. */
static inline void store_bytes(uint8_t *p, vint v)
{
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
    __m256i low = (__m256i)(v & 255);
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
#elif LANES == 4 && defined(__SSE2__)
    __m128i words = _mm_packs_epi32((__m128i)(v & 255), (__m128i)(v & 255));
    int32_t bytes = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
    memcpy(p, &bytes, sizeof bytes);
#else
    for (int j = 0; j < LANES; j++)
        p[j] = (uint8_t)v[j];
#endif
}

/* Integers that fit into words, in an order that `narrow_words` undoes when it makes bytes of two
   such vectors. */
INLINE vwords narrow_ints(vint a, vint b)
{
#if LANES == 16
    return (vwords)_mm512_packs_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vwords)_mm256_packs_epi32((__m256i)a, (__m256i)b);
#elif LANES == 4 && defined(__SSE2__)
    return (vwords)_mm_packs_epi32((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    return (vwords)vcombine_s16(vqmovn_s32((int32x4_t)a), vqmovn_s32((int32x4_t)b));
#else
    vwords words;
    for (int i = 0; i < 2 * LANES; i++)
        words[i] = (int16_t)(i < LANES ? a[i] : b[i - LANES]);
    return words;
#endif
}

INLINE vbytes narrow_words(vwords a, vwords b)
{
#if LANES == 16
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return (vbytes)_mm512_permutexvar_epi32(order, _mm512_packs_epi16((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
    const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
    return (vbytes)_mm256_permutevar8x32_epi32(_mm256_packs_epi16((__m256i)a, (__m256i)b), order);
#elif LANES == 4 && defined(__SSE2__)
    return (vbytes)_mm_packs_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    return (vbytes)vcombine_s8(vqmovn_s16((int16x8_t)a), vqmovn_s16((int16x8_t)b));
#else
    vbytes bytes;
    for (int i = 0; i < 4 * LANES; i++)
        bytes[i] = (int8_t)(i < 2 * LANES ? a[i] : b[i - 2 * LANES]);
    return bytes;
#endif
}

/* The integers of four vectors as bytes, in order. */
INLINE vbytes narrow(const vint *x)
{
    return narrow_words(narrow_ints(x[0], x[1]), narrow_ints(x[2], x[3]));
}

INLINE vfloat every(float x) { return x - (vfloat){0}; }

INLINE vfloat fma_lanes(vfloat a, vfloat b, vfloat c)
{
#if LANES == 16
    return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vfloat)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    vfloat out;
    for (int i = 0; i < LANES; i++)
        out[i] = fmaf(a[i], b[i], c[i]);
    return out;
#endif
}

/* The nearest integers, ties to even, for |x| < 2^22. */
INLINE vint nearest(vfloat x)
{
#if LANES == 16
    return (vint)_mm512_cvtps_epi32((__m512)x);
#elif LANES == 8
    return (vint)_mm256_cvtps_epi32((__m256)x);
#else
    return __builtin_convertvector((x + 12582912.0f) - 12582912.0f, vint);
#endif
}

/* The least integers that are not below x, for |x| < 2^31. */
INLINE vint round_up(vfloat x)
{
#if LANES == 16
    return (vint)_mm512_cvt_roundps_epi32((__m512)x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
#elif LANES == 8
    return (vint)_mm256_cvtps_epi32(_mm256_ceil_ps((__m256)x));
#else
    const vint whole = __builtin_convertvector(x, vint);
    return whole - (vint)(x > __builtin_convertvector(whole, vfloat));
#endif
}

/* x = n ln 2 + r with ln 2 in two parts; |r| < 0.35; returns 2^n. Both hold for x from -87 to 88;
   what comes of smaller x means nothing, so callers mask it or raise x to -87 first. */
INLINE vfloat reduce_ln2(vfloat x, vfloat *r)
{
    const vint whole = nearest(x * 1.44269504f);
    const vfloat n = __builtin_convertvector(whole, vfloat);
    *r = fma_lanes(n, every(-1.42860677e-6f), fma_lanes(n, every(-0.693145752f), x));
    return (vfloat)((whole + 127) << 23);
}

/* (exp(r) - 1) / r by its Taylor polynomial of degree 6; exp(r) is then right to 6e-9. */
INLINE vfloat exp_slope(vfloat r)
{
    vfloat p = every(1.0f / 5040.0f);
    p = fma_lanes(p, r, every(1.0f / 720.0f));
    p = fma_lanes(p, r, every(1.0f / 120.0f));
    p = fma_lanes(p, r, every(1.0f / 24.0f));
    p = fma_lanes(p, r, every(1.0f / 6.0f));
    p = fma_lanes(p, r, every(0.5f));
    return fma_lanes(p, r, every(1.0f));
}

/* exp(x) for x <= 88, the same bits on every processor; 0 below -87. */
INLINE vfloat exp_lanes(vfloat x)
{
    vfloat r;
    const vfloat power = reduce_ln2(x, &r);
    const vfloat y = fma_lanes(exp_slope(r), r, every(1.0f)) * power;
    return (vfloat)((vint)y & (x >= every(-87.0f)));
}

/* 2^x for x <= 100, the same bits on every processor; 0 below -125. 2^r for |r| <= 1/2 is the
   polynomial of degree 6 with the least relative error, 2e-9. */
INLINE vfloat exp2_lanes(vfloat x)
{
    const vfloat shifted = x + 12582912.0f;    /* the nearest integer is in its lowest bits */
    const vfloat r = x - (shifted - 12582912.0f);
    vfloat p = every(0.0001534581242594868f);
    p = fma_lanes(p, r, every(0.0013399930903688073f));
    p = fma_lanes(p, r, every(0.009618489071726799f));
    p = fma_lanes(p, r, every(0.05550328642129898f));
    p = fma_lanes(p, r, every(0.24022646248340607f));
    p = fma_lanes(p, r, every(0.6931471824645996f));
    p = fma_lanes(p, r, every(1.0f));
    return (vfloat)(((vint)p + ((vint)shifted << 23)) & (x >= every(-125.0f)));
}

/* exp(x) - 1 for x <= 0, to full precision near 0. */
INLINE vfloat expm1_lanes(vfloat x)
{
    vfloat r;
    const vfloat power = reduce_ln2(LARGEST(x, every(-87.0f)), &r);
    return fma_lanes(power, exp_slope(r) * r, power - 1.0f);
}

static inline float exp_nonpositive(float x) { return exp_lanes(every(x))[0]; }

#endif
