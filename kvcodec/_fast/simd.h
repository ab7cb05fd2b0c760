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

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));

static inline vfloat load(const float *p) { vfloat v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, vfloat v) { memcpy(p, &v, sizeof v); }

/* What the vector extensions have no word for. MULTIPLY_ADD is for exact products only, where it
   does not matter whether they are rounded before the addition. */
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
#define BUTTERFLY(v, h) MULTIPLY_ADD(v, ((vfloat){LIST(SIGN, h)}), PARTNERS(v, h))

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

/* Eight vectors are held in registers at a time: a row of 128 with 16 lanes. */
#define HELD (8 * LANES)
#define PAIR(a, b) { vfloat sum = v##a + v##b; v##b = v##a - v##b; v##a = sum; }
#define LOAD(i) vfloat v##i = load(x + i * LANES); \
                if (signs) v##i *= load(signs + i * LANES); \
                v##i = butterflies_inside(v##i);
#define STORE(i) store(y + i * LANES, v##i * factor);
#define STORE_PAIR(i) { vfloat a = load(first + i * LANES); \
                        store(first + i * LANES, (a + v##i) * factor); \
                        store(y + i * LANES, (a - v##i) * factor); }

/* With `first`, the finished eight vectors that lie before these, one more distance is done. */
static inline void butterflies_held(const float *x, const float *signs, float factor, float *first,
                                    float *y)
{
    LOAD(0) LOAD(1) LOAD(2) LOAD(3) LOAD(4) LOAD(5) LOAD(6) LOAD(7)
    PAIR(0, 1) PAIR(2, 3) PAIR(4, 5) PAIR(6, 7)
    PAIR(0, 2) PAIR(1, 3) PAIR(4, 6) PAIR(5, 7)
    PAIR(0, 4) PAIR(1, 5) PAIR(2, 6) PAIR(3, 7)
    if (first) {
        STORE_PAIR(0) STORE_PAIR(1) STORE_PAIR(2) STORE_PAIR(3)
        STORE_PAIR(4) STORE_PAIR(5) STORE_PAIR(6) STORE_PAIR(7)
    } else {
        STORE(0) STORE(1) STORE(2) STORE(3) STORE(4) STORE(5) STORE(6) STORE(7)
    }
}

#undef PAIR
#undef LOAD
#undef STORE
#undef STORE_PAIR

/* Butterflies of rows that eight vectors are too many for, in place. */
static inline void short_butterflies(float *x, Py_ssize_t n)
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

/* y[i] = x[i] * factors[i]; y may be x. */
static inline void multiply(const float *x, const float *factors, Py_ssize_t n, float *y)
{
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store(y + i, load(x + i) * load(factors + i));
    for (; i < n; i++)
        y[i] = x[i] * factors[i];
}

/* y = factor * S x, or factor * S D x with signs D, for Sylvester's matrix S of order n = 2^k;
   y may be x. */
static inline void butterflies(const float *x, const float *signs, Py_ssize_t n, float factor,
                               float *y)
{
    if (n < HELD) {
        if (signs)
            multiply(x, signs, n, y);
        else if (x != y)
            memcpy(y, x, n * sizeof *y);
        short_butterflies(y, n);
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] *= factor;
        return;
    }
    if (n == HELD) {
        butterflies_held(x, signs, factor, NULL, y);
        return;
    }
    float last = n == 2 * HELD ? factor : 1.0f;
    for (Py_ssize_t i = 0; i < n; i += 2 * HELD) {
        const float *next = signs ? signs + i + HELD : NULL;
        butterflies_held(x + i, signs ? signs + i : NULL, 1.0f, NULL, y + i);
        butterflies_held(x + i + HELD, next, last, y + i, y + i + HELD);
    }
    for (Py_ssize_t half = 2 * HELD; half < n; half *= 2) {
        last = 2 * half == n ? factor : 1.0f;
        for (Py_ssize_t i = 0; i < n; i += 2 * half)
            for (Py_ssize_t j = i; j < i + half; j += LANES) {
                vfloat a = load(y + j), b = load(y + j + half);
                store(y + j, (a + b) * last);
                store(y + j + half, (a - b) * last);
            }
    }
}

/* The same for many rows: no calls between those that fit the registers. */
static inline void butterflies_of_rows(const float *x, const float *signs, Py_ssize_t rows,
                                       Py_ssize_t n, float factor, float *y)
{
    if (n == HELD)
        for (Py_ssize_t i = 0; i < rows * n; i += n)
            butterflies_held(x + i, signs, factor, NULL, y + i);
    else
        for (Py_ssize_t i = 0; i < rows * n; i += n)
            butterflies(x + i, signs, n, factor, y + i);
}

/* Sums in 8 lanes of float64, which are PARTS vectors. What is added is exact in float64. */
#define PARTS (16 / LANES)
typedef float vhalf __attribute__((vector_size(2 * LANES)));
typedef double vdouble __attribute__((vector_size(4 * LANES)));

static inline vhalf load_half(const float *p) { vhalf v; memcpy(&v, p, sizeof v); return v; }

static inline vdouble widen(vhalf v)
{
#if defined(__AVX512F__)
    return (vdouble)_mm512_cvtps_pd(v);  /* GCC 12 converts the halves apart */
#elif defined(__AVX2__)
    return (vdouble)_mm256_cvtps_pd(v);
#else
    return __builtin_convertvector(v, vdouble);
#endif
}

static inline double sum_of_8(const double *lane)
{
    double a = lane[0] + lane[4], b = lane[1] + lane[5];
    double c = lane[2] + lane[6], d = lane[3] + lane[7];
    return (a + c) + (b + d);
}

/* The sum of a[i] * b[i]. */
static inline double dot_8(const float *a, const float *b, Py_ssize_t n)
{
    vdouble part[PARTS] = {{0}};
    double lane[8];
    Py_ssize_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < PARTS; j++) {
            Py_ssize_t at = i + j * (LANES / 2);
            part[j] = MULTIPLY_ADD_DOUBLE(widen(load_half(a + at)), widen(load_half(b + at)),
                                          part[j]);
        }
    memcpy(lane, part, sizeof lane);
    for (; i < n; i++)
        lane[i % 8] += (double)a[i] * b[i];
    return sum_of_8(lane);
}

/* shifted = x - center; tells whether that is not longer than x. */
static inline int shift_row(const float *x, const float *center, Py_ssize_t n, float *shifted)
{
    vdouble before[PARTS] = {{0}}, after[PARTS] = {{0}};
    double lane[2][8];
    Py_ssize_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < PARTS; j++) {
            Py_ssize_t at = i + j * (LANES / 2);
            vhalf whole = load_half(x + at), rest = whole - load_half(center + at);
            vdouble a = widen(whole), b = widen(rest);
            memcpy(shifted + at, &rest, sizeof rest);
            before[j] = MULTIPLY_ADD_DOUBLE(a, a, before[j]);
            after[j] = MULTIPLY_ADD_DOUBLE(b, b, after[j]);
        }
    memcpy(lane[0], before, sizeof lane[0]);
    memcpy(lane[1], after, sizeof lane[1]);
    for (; i < n; i++) {
        shifted[i] = x[i] - center[i];
        lane[0][i % 8] += (double)x[i] * x[i];
        lane[1][i % 8] += (double)shifted[i] * shifted[i];
    }
    return sum_of_8(lane[1]) <= sum_of_8(lane[0]);
}

/* Asks for n floats that will be needed soon; they need not be in any array. */
static inline void fetch(const float *x, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i += 16)
        __builtin_prefetch(x + i, 0, 2);
}

/* total[c] += x[t][c], token by token; four at a time go over the totals once. */
static inline void add_tokens(const float *x, Py_ssize_t tokens, Py_ssize_t n, double *total)
{
    Py_ssize_t t = 0;
    for (; t < tokens; t += tokens - t >= 4 ? 4 : 1) {
        int many = tokens - t >= 4;
        const float *row = x + t * n;
        Py_ssize_t c = 0;
        for (; many && c + LANES / 2 <= n; c += LANES / 2) {
            vdouble sum;
            memcpy(&sum, total + c, sizeof sum);
            sum = sum + widen(load_half(row + c));
            sum = sum + widen(load_half(row + n + c));
            sum = sum + widen(load_half(row + 2 * n + c));
            sum = sum + widen(load_half(row + 3 * n + c));
            memcpy(total + c, &sum, sizeof sum);
        }
        for (; c < n; c++)
            for (int j = 0; j < (many ? 4 : 1); j++)
                total[c] += row[j * n + c];
    }
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

/* The least and the largest of n >= 1 floats. */
static inline void range_of(const float *x, Py_ssize_t n, float *low, float *high)
{
    float least = x[0], largest = x[0];
    Py_ssize_t i = 0;
    if (n >= LANES) {
        vfloat a = load(x), b = a;
        for (i = LANES; i + LANES <= n; i += LANES) {
            vfloat v = load(x + i);
            a = LEAST(a, v);
            b = LARGEST(b, v);
        }
#if LANES >= 16
        a = LEAST(a, PARTNERS(a, 8));
        b = LARGEST(b, PARTNERS(b, 8));
#endif
#if LANES >= 8
        a = LEAST(a, PARTNERS(a, 4));
        b = LARGEST(b, PARTNERS(b, 4));
#endif
        a = LEAST(a, PARTNERS(a, 2));
        b = LARGEST(b, PARTNERS(b, 2));
        a = LEAST(a, PARTNERS(a, 1));
        b = LARGEST(b, PARTNERS(b, 1));
        least = a[0];
        largest = b[0];
    }
    for (; i < n; i++) {
        least = x[i] < least ? x[i] : least;
        largest = x[i] > largest ? x[i] : largest;
    }
    *low = least;
    *high = largest;
}

/* The nearest whole numbers to (x[i] - zero) * inverse within [low, high], plus offset. */
static inline void round_codes(const float *x, Py_ssize_t n, float zero, float inverse, float low,
                               float high, int offset, uint8_t *codes)
{
    const vfloat none = {0};
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vfloat y = (load(x + i) - zero) * inverse;
        y = (y + 12582912.0f) - 12582912.0f;
        y = LARGEST(LEAST(y, none + high), none + low);
        store_bytes(codes + i, __builtin_convertvector(y, vint) + offset);
    }
    for (; i < n; i++) {
        float y = round_even((x[i] - zero) * inverse);
        y = y < high ? y : high;
        y = y > low ? y : low;
        codes[i] = (uint8_t)((int32_t)y + offset);
    }
}

/* Boundaries of at most 16 cells for a search by halves: table[k] holds the 2^k boundaries that
   the k-th question can be about, infinity where there are fewer. And the level of each cell. */
typedef struct {
    int count, depth;
    float boundaries[16];
    float table[4][16];
    float levels[16];
} Cells;

static inline void make_cells(Cells *cells, const float *boundaries, int count,
                              const int8_t *levels)
{
    memset(cells, 0, sizeof *cells);
    cells->count = count;
    while (1 << cells->depth <= count)
        cells->depth++;
    for (int i = 0; i < 16; i++)
        cells->boundaries[i] = i < count ? boundaries[i] : INFINITY;
    for (int k = 0; k < cells->depth; k++)
        for (int i = 0; i < 1 << k; i++)
            cells->table[k][i] = cells->boundaries[((2 * i + 1) << (cells->depth - 1 - k)) - 1];
    for (int i = 0; i <= count; i++)
        cells->levels[i] = levels[i];
}

#if defined(__AVX512F__)
#define LOOK_UP_8(table, i) ((vfloat)_mm512_permutexvar_ps((__m512i)(i), load(table)))
#define LOOK_UP_16 LOOK_UP_8
#elif defined(__AVX2__)
#define LOOK_UP_8(table, i) ((vfloat)_mm256_permutevar8x32_ps(load(table), (__m256i)(i)))
#define LOOK_UP_16(table, i) ((vfloat)_mm256_blendv_ps( \
    LOOK_UP_8(table, i), LOOK_UP_8((table) + 8, i), (__m256)((i) << 28)))
#endif

/* How many boundaries lie below each y. */
static inline vint search(vfloat y, const Cells *cells, int depth)
{
    vint cell = {0};
#if defined(LOOK_UP_8)
    for (int k = 0; k < depth; k++)
        cell = cell + cell - (vint)(y > LOOK_UP_8(cells->table[k], cell));
#else
    for (int j = 0; j < (1 << depth) - 1; j++)
        cell -= (vint)(y > cells->boundaries[j]);
#endif
    return cell;
}

static inline void store_levels(float *levels, vint cell, const Cells *cells)
{
#if defined(LOOK_UP_16)
    store(levels, LOOK_UP_16(cells->levels, cell));
#else
    for (int j = 0; j < LANES; j++)
        levels[j] = cells->levels[cell[j]];
#endif
}

/* codes[i] = how many boundaries lie below x[i] * inverse; levels[i] = its level, unless NULL. */
static inline __attribute__((always_inline)) void find_cells_at(
    const float *x, Py_ssize_t n, float inverse, const Cells *cells, int depth, uint8_t *codes,
    float *levels)
{
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vint cell = search(load(x + i) * inverse, cells, depth);
        store_bytes(codes + i, cell);
        if (levels)
            store_levels(levels + i, cell, cells);
    }
    for (; i < n; i++) {
        float y = x[i] * inverse;
        int cell = 0;
        for (int j = 0; j < cells->count; j++)
            cell += y > cells->boundaries[j];
        codes[i] = (uint8_t)cell;
        if (levels)
            levels[i] = cells->levels[cell];
    }
}

/* A loop for each depth, so that the tables stay in registers. */
static inline void find_cells(const float *x, Py_ssize_t n, float inverse, const Cells *cells,
                              uint8_t *codes, float *levels)
{
    if (cells->depth == 4)
        find_cells_at(x, n, inverse, cells, 4, codes, levels);
    else if (cells->depth == 3)
        find_cells_at(x, n, inverse, cells, 3, codes, levels);
    else
        find_cells_at(x, n, inverse, cells, cells->depth, codes, levels);
}

/* Whole units of 2 or 4 codes to a byte, and of 8 codes to 3 bytes. */
static inline void pack_pairs(const uint8_t *restrict codes, Py_ssize_t units,
                              uint8_t *restrict packed)
{
    for (Py_ssize_t i = 0; i < units; i++) {
        uint16_t unit;
        memcpy(&unit, codes + 2 * i, sizeof unit);
        packed[i] = (uint8_t)(unit | unit >> 4);
    }
}

static inline void pack_quads(const uint8_t *restrict codes, Py_ssize_t units,
                              uint8_t *restrict packed)
{
    for (Py_ssize_t i = 0; i < units; i++) {
        uint32_t unit;
        memcpy(&unit, codes + 4 * i, sizeof unit);
        packed[i] = (uint8_t)(unit | unit >> 6 | unit >> 12 | unit >> 18);
    }
}

static inline void pack_octets(const uint8_t *restrict codes, Py_ssize_t units,
                               uint8_t *restrict packed)
{
    for (Py_ssize_t i = 0; i < units; i++) {
        uint64_t unit;
        memcpy(&unit, codes + 8 * i, sizeof unit);
        unit = (unit | unit >> 5) & 0x003F003F003F003F;
        unit = (unit | unit >> 10) & 0x00000FFF00000FFF;
        unit = unit | unit >> 20;
        memcpy(packed + 3 * i, &unit, 3);
    }
}

#define INLINE static inline __attribute__((always_inline))

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
