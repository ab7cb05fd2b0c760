/* Trellis codes: Viterbi's algorithm for encoding, and the table look-up that decodes a row.

   Encoding is SIMD over states, LANES at a time, with all numbers integers. The 2^bits branches into
   the state s have the windows s << bits | t, whose oldest code t is what tells them apart. What is
   minimized is cost << bits | t: one minimum gives the cost and the branch, and of equal costs that
   of the lowest t. The cost of a branch, 2 level^2 - target level, is one multiply-add of pairs of
   int16, with the shift already in the constants. Branches with the same t come from every 2^bits-th
   state, in turn; after each step the costs are laid out so, by t. Costs need no normalization: the
   targets of a vector have a norm that its scale limits, so that the cost of a path stays below 2^30
   for the 1,024 elements that a vector may have. */

#ifndef KVCODEC_TRELLIS_H
#define KVCODEC_TRELLIS_H

#include "simd.h"

enum { WINDOWS = 256, FRACTION = 4, UNREACHABLE = 1 << 27 };

typedef struct {
    int bits;
    int32_t branch[WINDOWS];    /* by t, then by state: level << bits and, above, its square */
    int8_t levels[WINDOWS];
    uint8_t biased[WINDOWS];    /* level + 128, a code of 8 bits for the kernels of dot.h */
} Trellis;

static void make_trellis(Trellis *trellis, const int8_t *levels, int bits)
{
    const int states = WINDOWS >> bits;
    trellis->bits = bits;
    memcpy(trellis->levels, levels, WINDOWS);
    for (int w = 0; w < WINDOWS; w++) {
        const int32_t level = levels[w], t = w & ((1 << bits) - 1);
        trellis->biased[w] = (uint8_t)(level + 128);
        trellis->branch[t * states + (w >> bits)]
            = (int32_t)((uint32_t)(level * level) << 16 | (uint16_t)(level * (1 << bits)));
    }
}

INLINE vint load_ints(const int32_t *p) { vint v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_ints(int32_t *p, vint v) { memcpy(p, &v, sizeof v); }

/* The sum of the two products of int16 in each lane. */
INLINE vint multiply_pairs(vint a, vint b)
{
#if LANES == 16 && defined(__AVX512BW__)
    return (vint)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif LANES == 8 && defined(__AVX2__)
    return (vint)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif LANES == 4 && defined(__SSE2__)
    return (vint)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

INLINE vint least_ints(vint a, vint b)
{
#if LANES == 16
    return (vint)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif LANES == 8 && defined(__AVX2__)
    return (vint)_mm256_min_epi32((__m256i)a, (__m256i)b);
#else
    const vint mask = a < b;
    return (a & mask) | (b & ~mask);
#endif
}

/* What the branches with the oldest code t come from: the costs of the states j << bits | t, | t.
   They repeat after `row` states, a vector or more. */
enum { MOST_STATES = 64, MOST_ROW = 16 };

INLINE void lay_by_oldest(const int32_t *cost, const int bits, int32_t (*into)[MOST_ROW])
{
    const int states = WINDOWS >> bits, each = states >> bits;
#if LANES == 16
    const vint lane = {LIST16(PARTNER, 0)}, first = load_ints(cost);
    const vint from = (lane % each) << bits;
#pragma GCC unroll 16
    for (int t = 0; t < 1 << bits; t++) {
        __m512i costs;
        if (states == 16)
            costs = _mm512_permutexvar_epi32((__m512i)(from | t), (__m512i)first);
        else
            costs = _mm512_permutex2var_epi32((__m512i)first, (__m512i)(from | t),
                                              (__m512i)load_ints(cost + 16));
        if (states == 64)
            costs = _mm512_mask_blend_epi32(
                0xff00, costs, _mm512_permutex2var_epi32((__m512i)load_ints(cost + 32),
                                                         (__m512i)(from | t),
                                                         (__m512i)load_ints(cost + 48)));
        store_ints(into[t], (vint)costs | t);
    }
#else
    const int row = each < LANES ? LANES : each;
#pragma GCC unroll 16
    for (int t = 0; t < 1 << bits; t++)
        for (int j = 0; j < row; j++)
            into[t][j] = cost[(j % each) << bits | t] | t;
#endif
}

/* The windows of the cheapest path; with state >= 0 it begins and ends there. `oldest` is scratch
   for n times the number of states. */
INLINE void best_path_of(const int16_t *target, Py_ssize_t n, const Trellis *trellis,
                         const int bits, int state, uint8_t *oldest, uint8_t *window)
{
    const int states = WINDOWS >> bits, each = states >> bits, row = each < LANES ? LANES : each;
    const int32_t *branch = trellis->branch;
    int32_t cost[MOST_STATES], into[1 << bits][MOST_ROW];
    for (int s = 0; s < states; s++)
        cost[s] = state < 0 || s == state ? 0 : UNREACHABLE;
    for (Py_ssize_t i = 0; i < n; i++) {
        const int32_t pair = (int32_t)((uint32_t)(FRACTION / 2) << (16 + bits)
                                       | (uint16_t)-target[i]);
        const vint x = (vint){0} + pair;
        lay_by_oldest(cost, bits, into);
#pragma GCC unroll 16
        for (int s = 0; s < states; s += LANES) {
            vint best = load_ints(into[0] + s % row) + multiply_pairs(load_ints(branch + s), x);
#pragma GCC unroll 16
            for (int t = 1; t < 1 << bits; t++)
                best = least_ints(best, load_ints(into[t] + s % row)
                                      + multiply_pairs(load_ints(branch + t * states + s), x));
            store_bytes(oldest + i * states + s, best & ((1 << bits) - 1));
            store_ints(cost + s, best & -(1 << bits));
        }
    }
    if (state < 0) {
        state = 0;
        for (int s = 1; s < states; s++)
            state = cost[s] < cost[state] ? s : state;
    }
    for (Py_ssize_t i = n; i-- > 0;) {
        window[i] = (uint8_t)(state << bits | oldest[i * states + state]);
        state = window[i] & (states - 1);
    }
}

static void best_path(const int16_t *target, Py_ssize_t n, const Trellis *trellis, int state,
                      uint8_t *oldest, uint8_t *window)
{
    if (trellis->bits == 2)
        best_path_of(target, n, trellis, 2, state, oldest, window);
    else if (trellis->bits == 3)
        best_path_of(target, n, trellis, 3, state, oldest, window);
    else
        best_path_of(target, n, trellis, 4, state, oldest, window);
}

/* target[i] = x[i] in quarters of a level, twice over: the ring from any element on. */
static void find_targets(const float *x, Py_ssize_t n, float inverse, int16_t *target)
{
    for (Py_ssize_t i = 0; i < n; i++)
        target[i] = (int16_t)round_even(x[i] * inverse * FRACTION);
    memcpy(target + n, target, n * sizeof *target);
}

/* The codes of a closed path; y, unless NULL, gets their levels. */
static void ring_codes(const float *x, Py_ssize_t n, float inverse, const Trellis *trellis,
                       int16_t *target, uint8_t *oldest, uint8_t *codes, float *y)
{
    const Py_ssize_t half = n / 2;
    const int states = WINDOWS >> trellis->bits;
    find_targets(x, n, inverse, target);
    best_path(target + half, n, trellis, -1, oldest, codes);
    best_path(target, n, trellis, codes[n - half] & (states - 1), oldest, codes);
    for (Py_ssize_t i = 0; y && i < n; i++)
        y[i] = trellis->levels[codes[i]];
    for (Py_ssize_t i = 0; i < n; i++)
        codes[i] >>= 8 - trellis->bits;
}

/* out[i] = levels[window of element i] of a ring of codes. */
static void levels_of_codes(const uint8_t *codes, Py_ssize_t n, int bits, const int8_t *levels,
                            int8_t *out)
{
    unsigned window = 0;
    for (Py_ssize_t i = n - 8 / bits; i < n; i++)
        window = window >> bits | (unsigned)codes[i] << (8 - bits);
    for (Py_ssize_t i = 0; i < n; i++) {
        window = window >> bits | (unsigned)codes[i] << (8 - bits);
        out[i] = levels[window];
    }
}

/* out[i] = table[window of element i] of a row of n * bits bits, which is a ring. */
INLINE void windows_of(const uint8_t *packed, Py_ssize_t n, const int bits, const uint8_t *table,
                       uint8_t *out)
{
    const Py_ssize_t row_bytes = (n * bits + 7) / 8;
    const int used = (int)(n * bits % 8);
    unsigned before = packed[row_bytes - 1];
    if (used)
        before = before << (8 - used) | packed[row_bytes - 2] >> used;
    uint64_t stream = before & 255;
    for (Py_ssize_t i = 0; i < n; i += 8, packed += bits, out += 8) {
        const int count = n - i < 8 ? (int)(n - i) : 8, bytes = (count * bits + 7) / 8;
        for (int j = 0; j < bytes; j++)
            stream |= (uint64_t)packed[j] << (8 + 8 * j);
        for (int j = 0; j < count; j++)
            out[j] = table[stream >> bits * (j + 1) & 255];
        stream >>= 8 * bits;
    }
}

static void trellis_row_levels(const uint8_t *packed, Py_ssize_t n, int bits, const uint8_t *table,
                               uint8_t *out)
{
    if (bits == 2)
        windows_of(packed, n, 2, table, out);
    else if (bits == 3)
        windows_of(packed, n, 3, table, out);
    else
        windows_of(packed, n, 4, table, out);
}

#endif
