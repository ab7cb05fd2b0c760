/* The few inner loops that compilers do not vectorize well by themselves.

   Everything is written with GCC's vector extensions, LANES floats wide, so that one source serves
   every instruction set; a float result never depends on LANES, because each lane does what the
   scalar formula says and sums across lanes follow the order of the reference. */

#ifndef KVCODEC_SIMD_H
#define KVCODEC_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef uint8_t vbyte __attribute__((vector_size(LANES)));

static inline vfloat load(const float *p) { vfloat v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, vfloat v) { memcpy(p, &v, sizeof v); }

/* Round to the nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits
   below the unit. Unlike rintf it needs no SSE4.1. */
static inline float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

static inline float bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

/* Butterflies of distance 1, 2, ..., LANES/2 stay inside a vector. A lane and its partner (the lane
   at distance h) give (a + b, a - b) = partner + (+-1) * own: the product is exact. */
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
#define SIGN(i, h) (((i) & (h)) ? -1.0f : 1.0f)

#if defined(__clang__) || __GNUC__ >= 12
#define PARTNERS(v, h) __builtin_shufflevector(v, v, LIST(PARTNER, h))
#else
#define PARTNERS(v, h) __builtin_shuffle(v, (vint){LIST(PARTNER, h)})
#endif
#define BUTTERFLY(v, h) (PARTNERS(v, h) + (v) * (vfloat){LIST(SIGN, h)})

static inline vfloat butterflies_inside(vfloat v)
{
    v = BUTTERFLY(v, 1);
    v = BUTTERFLY(v, 2);
#if LANES >= 8
    v = BUTTERFLY(v, 4);
#endif
#if LANES >= 16
    v = BUTTERFLY(v, 8);
#endif
    return v;
}

/* All butterflies of n = 2^k floats in place, without the factor 1/sqrt(n). */
static inline void butterflies(float *x, Py_ssize_t n)
{
    Py_ssize_t half = 1;
    if (n >= LANES) {
        for (Py_ssize_t i = 0; i < n; i += LANES)
            store(x + i, butterflies_inside(load(x + i)));
        half = LANES;
    }
    for (; half < n; half *= 2)
        for (Py_ssize_t i = 0; i < n; i += 2 * half)
            for (Py_ssize_t j = i; j < i + half; j++) {
                float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
}

/* codes[i] = how many boundaries lie below x[i] * inverse. */
static inline void count_boundaries(const float *x, Py_ssize_t n, float inverse,
                                    const float *boundaries, int count, uint8_t *codes)
{
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vfloat y = load(x + i) * inverse;
        vint total = {0};
        for (int j = 0; j < count; j++)
            total -= (vint)(y > boundaries[j]);
        vbyte bytes = __builtin_convertvector(total, vbyte);
        memcpy(codes + i, &bytes, LANES);
    }
    for (; i < n; i++) {
        float y = x[i] * inverse;
        int total = 0;
        for (int j = 0; j < count; j++)
            total += y > boundaries[j];
        codes[i] = (uint8_t)total;
    }
}

/* x = n ln 2 + r for x >= -87, with ln 2 in two parts and |r| < 0.35. */
static inline float reduce_ln2(float x, float *r)
{
    float n = round_even(x * 1.44269504f);
    *r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, x));
    return n;
}

/* (exp(r) - 1) / r by its Taylor polynomial of degree 6; exp(r) is then right to 6e-9. */
static inline float exp_slope(float r)
{
    float p = 1.0f / 5040.0f;
    p = fmaf(p, r, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    p = fmaf(p, r, 0.5f);
    return fmaf(p, r, 1.0f);
}

static inline float power_of_two(float n)
{
    return bits_to_float((uint32_t)((int32_t)n + 127) << 23);
}

/* exp(x) for x <= 0, the same bits on every processor; 0 below -87. */
static inline float exp_nonpositive(float x)
{
    float r, n = reduce_ln2(x < -87.0f ? -87.0f : x, &r);
    float result = fmaf(exp_slope(r), r, 1.0f) * power_of_two(n);
    return x < -87.0f ? 0.0f : result;
}

/* exp(x) - 1 for x <= 0, to full precision near 0. */
static inline float expm1_nonpositive(float x)
{
    float r, n = reduce_ln2(x < -87.0f ? -87.0f : x, &r);
    float power = power_of_two(n);
    return fmaf(power, exp_slope(r) * r, power - 1.0f);
}

#endif
