/* Hadamard transforms: butterflies for Sylvester's matrices of order 2^k, and for orders m * 2^k
   Paley's matrix of order m across m pieces of 2^k.

   A row of up to eight vectors stays in registers for all of its butterflies. Across pieces the
   lanes are outputs: each is the sum over the pieces, one after the other, of a number of that piece
   with a sign, and a vector of outputs takes the same numbers of a piece, repeated where a piece is
   shorter than a vector. */

#ifndef KVCODEC_HADAMARD_H
#define KVCODEC_HADAMARD_H

#include "floats.h"

/* Butterflies of distance 1, 2, ..., LANES/2 stay inside a vector. A lane and its partner (the lane
   at distance h) give (a + b, a - b) = partner + (+-1) * own: the product is exact. */
#define SIGN(i, h) (((i) & (h)) ? -1.0f : 1.0f)
#define BUTTERFLY(v, h) MULTIPLY_ADD(v, ((vfloat){LIST(SIGN, h)}), PARTNERS(v, h))

/* Those of distances below `n`. */
INLINE vfloat butterflies_inside(vfloat v, Py_ssize_t n)
{
    if (n > 1)
        v = BUTTERFLY(v, 1);
    if (n > 2)
        v = BUTTERFLY(v, 2);
#if LANES >= 8
    if (n > 4)
        v = BUTTERFLY(v, 4);
#endif
#if LANES >= 16
    if (n > 8)
        v = BUTTERFLY(v, 8);
#endif
    return v;
}

/* Up to eight vectors are held in registers at a time: a row of 128 with 16 lanes. */
#define HELD (8 * LANES)

#define LOAD(i) \
    v[i] = load(x + (i) * LANES); \
    if (diagonal) \
        v[i] *= load(diagonal + (i) * LANES); \
    v[i] = butterflies_inside(v[i], LANES);
#define PAIR(i, h) { const vfloat a = v[i], b = v[(i) + (h)]; v[i] = a + b; v[(i) + (h)] = a - b; }
#define STORE(i) \
    if (first) { \
        const vfloat a = load(first + (i) * LANES); \
        store(first + (i) * LANES, (a + v[i]) * factor); \
        store(y + (i) * LANES, (a - v[i]) * factor); \
    } else \
        store(y + (i) * LANES, v[i] * factor);

/* A row of 1, 2, 4 or 8 vectors. With `first`, as many finished vectors that lie before these, one
   more distance is done. */
INLINE void butterflies_held(const float *x, const float *diagonal, const int vectors, float factor,
                             float *first, float *y)
{
    vfloat v[8];
    LOAD(0)
    if (vectors > 1) {
        LOAD(1) PAIR(0, 1)
    }
    if (vectors > 2) {
        LOAD(2) LOAD(3) PAIR(2, 1)
        PAIR(0, 2) PAIR(1, 2)
    }
    if (vectors > 4) {
        LOAD(4) LOAD(5) PAIR(4, 1) LOAD(6) LOAD(7) PAIR(6, 1)
        PAIR(4, 2) PAIR(5, 2)
        PAIR(0, 4) PAIR(1, 4) PAIR(2, 4) PAIR(3, 4)
    }
    STORE(0)
    if (vectors > 1) {
        STORE(1)
    }
    if (vectors > 2) {
        STORE(2) STORE(3)
    }
    if (vectors > 4) {
        STORE(4) STORE(5) STORE(6) STORE(7)
    }
}

#undef LOAD
#undef PAIR
#undef STORE

/* A row that fits the registers, n = vectors * LANES. */
INLINE void butterflies_of(const float *x, const float *diagonal, const int vectors, float factor,
                           float *y)
{
    if (diagonal)
        butterflies_held(x, diagonal, vectors, factor, NULL, y);
    else
        butterflies_held(x, NULL, vectors, factor, NULL, y);
}

/* A row that is shorter than a vector. */
static inline void short_butterflies(const float *x, const float *diagonal, Py_ssize_t n,
                                     float factor, float *y)
{
    for (Py_ssize_t i = 0; i < n; i++)
        y[i] = diagonal ? x[i] * diagonal[i] : x[i];
    for (Py_ssize_t half = 1; half < n; half *= 2)
        for (Py_ssize_t i = 0; i < n; i += 2 * half)
            for (Py_ssize_t j = i; j < i + half; j++) {
                float a = y[j], b = y[j + half];
                y[j] = a + b;
                y[j + half] = a - b;
            }
    for (Py_ssize_t i = 0; i < n; i++)
        y[i] *= factor;
}

/* y = factor * S x, or factor * S D x with a diagonal D, for Sylvester's matrix S of order n = 2^k;
   y may be x. */
static void butterflies(const float *x, const float *diagonal, Py_ssize_t n, float factor, float *y)
{
    if (n == HELD)
        butterflies_of(x, diagonal, 8, factor, y);
    else if (n == HELD / 2)
        butterflies_of(x, diagonal, 4, factor, y);
    else if (n == HELD / 4)
        butterflies_of(x, diagonal, 2, factor, y);
    else if (n == HELD / 8)
        butterflies_of(x, diagonal, 1, factor, y);
    else if (n < HELD)
        short_butterflies(x, diagonal, n, factor, y);
    if (n <= HELD)
        return;
    float last = n == 2 * HELD ? factor : 1.0f;
    for (Py_ssize_t i = 0; i < n; i += 2 * HELD) {
        butterflies_of(x + i, diagonal ? diagonal + i : NULL, 8, 1.0f, y + i);
        butterflies_held(x + i + HELD, diagonal ? diagonal + i + HELD : NULL, 8, last, y + i,
                         y + i + HELD);
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
static inline void butterflies_of_rows(const float *x, const float *diagonal, Py_ssize_t rows,
                                       Py_ssize_t n, float factor, float *y)
{
    if (n == HELD)
        for (Py_ssize_t i = 0; i < rows * n; i += n)
            butterflies_of(x + i, diagonal, 8, factor, y + i);
    else
        for (Py_ssize_t i = 0; i < rows * n; i += n)
            butterflies(x + i, diagonal, n, factor, y + i);
}

/* v at lanes first + i % period, for a period that is a power of two. */
INLINE vfloat repeat_lanes(vfloat v, Py_ssize_t first, Py_ssize_t period)
{
    const vint lane = {LIST(PARTNER, 0)};
    const vint from = (lane & (int32_t)(period - 1)) + (int32_t)first;
#if LANES == 16
    return (vfloat)_mm512_permutexvar_ps((__m512i)from, (__m512)v);
#elif defined(__AVX2__)
    return (vfloat)_mm256_permutevar8x32_ps((__m256)v, (__m256i)from);
#else
    vfloat out;
    for (int i = 0; i < LANES; i++)
        out[i] = v[from[i]];
    return out;
#endif
}

/* The transforms of pieces that are shorter than a vector, each repeated to fill one. */
static void transform_short_pieces(const float *x, const float *diagonal, Py_ssize_t n,
                                   Py_ssize_t power, float *pieces)
{
    for (Py_ssize_t i = 0; i < n; i += LANES) {
        vfloat v = load_up_to(x + i, n - i);
        if (diagonal)
            v *= load_up_to(diagonal + i, n - i);
        v = butterflies_inside(v, power);
        for (Py_ssize_t j = 0; j < LANES && i + j < n; j += power, pieces += LANES)
            store(pieces, repeat_lanes(v, j, power));
    }
}

/* Of an order n = m * power. The signs of the pieces, (m, n), have rows `stride` apart that are
   filled up to whole vectors; scratch holds n floats. */
enum { MOST_PIECES = 60 };

static void transform_pieces(const float *x, const float *diagonal, Py_ssize_t m, Py_ssize_t power,
                             const float *signs, Py_ssize_t stride, float factor, float *scratch,
                             float *y)
{
    const Py_ssize_t n = m * power, width = power < LANES ? LANES : power;
    float repeated[MOST_PIECES * LANES];
    if (power < LANES) {
        scratch = repeated;
        transform_short_pieces(x, diagonal, n, power, scratch);
    } else
        for (Py_ssize_t i = 0; i < n; i += power)
            butterflies(x + i, diagonal ? diagonal + i : NULL, power, 1, scratch + i);
    for (Py_ssize_t i = 0; i < n; i += LANES) {
        const float *piece = scratch + i % width;
        vfloat total = load(signs + i) * load(piece);
        for (Py_ssize_t j = 1; j < m; j++)
            total = MULTIPLY_ADD(load(signs + j * stride + i), load(piece + j * width), total);
        store_up_to(y + i, total * factor, n - i);
    }
}

#endif
