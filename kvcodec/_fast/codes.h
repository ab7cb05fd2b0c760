/* The steps of encoding, for rows that lie in the first-level cache.

   What is done to a row waits at some point for a sum or a maximum across its lanes, and for the
   divisions after it. So a step is done to some rows before the next one is, and the waits of one
   row are filled with the work of others: rows share the steps across lanes, and their scales are
   lanes of one vector. Codes become bytes four vectors at a time. */

#ifndef KVCODEC_CODES_H
#define KVCODEC_CODES_H

#include "floats.h"

/* Rows that share steps across lanes. */
enum { FEW = 4 };

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

/* shifted = x - center, and the sums of squares of both, for some rows. */
INLINE void shift_some(const float *x, const int rows, Py_ssize_t n, const float *center,
                       float *shifted, float *before, float *after)
{
    vfloat squares[2 * FEW] = {{0}};
    Py_ssize_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        const vfloat middle = load(center + c);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const vfloat a = load(x + r * n + c), b = a - middle;
            store(shifted + r * n + c, b);
            squares[r] = MULTIPLY_ADD(a, a, squares[r]);
            squares[rows + r] = MULTIPLY_ADD(b, b, squares[rows + r]);
        }
    }
    lane_totals_of(squares, rows, before);
    lane_totals_of(squares + rows, rows, after);
    for (; c < n; c++)
        for (int r = 0; r < rows; r++) {
            const float a = x[r * n + c], b = a - center[c];
            shifted[r * n + c] = b;
            before[r] += a * a;
            after[r] += b * b;
        }
}

/* shifted = x - center for up to 32 rows; returns a bit for each that it makes longer. Lengths are
   those in float64, but for rows whose lengths differ by more than float32 can be wrong: 2^-15 of
   them, and 2^-100 where squares are too small for it. */
static uint32_t center_rows(const float *x, Py_ssize_t rows, Py_ssize_t n, const float *center,
                            float *shifted)
{
    uint32_t longer = 0;
    float before[FEW], after[FEW];
    for (Py_ssize_t r = 0, some; r < rows; r += some) {
        some = rows - r >= FEW ? FEW : 1;
        if (some == FEW)
            shift_some(x + r * n, FEW, n, center, shifted + r * n, before, after);
        else
            shift_some(x + r * n, 1, n, center, shifted + r * n, before, after);
        for (Py_ssize_t i = 0; i < some; i++) {
            const float *row = x + (r + i) * n, *moved = shifted + (r + i) * n;
            const float more = after[i] - before[i];
            uint32_t is_longer = more > 0;
            if (!(fabsf(more) > (before[i] + after[i]) * 0x1p-14f + 0x1p-99f))
                is_longer = dot_8(moved, moved, n) > dot_8(row, row, n);
            longer |= is_longer << (r + i);
        }
    }
    return longer;
}

/* Asks for n floats that will be needed soon; they need not be in any array. */
static inline void fetch(const float *x, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i += 16)
        __builtin_prefetch(x + i, 0, 3);
}

/* Whether all numbers are below a bound of at least 2^100 in magnitude. They are looked at more
   closely where the sum of their squares is infinite or none. */
static int are_bounded(const float *x, Py_ssize_t n, float bound)
{
    enum { CHAINS = 2 * FEW };
    vfloat squares[CHAINS] = {{0}};
    float total;
    Py_ssize_t i = 0;
    for (; i + CHAINS * LANES <= n; i += CHAINS * LANES)
#pragma GCC unroll 8
        for (int j = 0; j < CHAINS; j++) {
            const vfloat v = load(x + i + j * LANES);
            squares[j] = MULTIPLY_ADD(v, v, squares[j]);
        }
    for (int j = 1; j < CHAINS; j++)
        squares[0] += squares[j];
    lane_totals_of(squares, 1, &total);
    if (!(total < INFINITY))
        i = 0;
    for (; i < n; i++)
        if (!(fabsf(x[i]) < bound))
            return 0;
    return 1;
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

/* The largest magnitudes of some rows. */
INLINE void magnitudes_of(const float *x, const int rows, Py_ssize_t n, float *largest)
{
    vfloat top[FEW] = {{0}};
    Py_ssize_t c = 0;
    for (; c + LANES <= n; c += LANES)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            top[r] = larger_magnitude(top[r], load(x + r * n + c));
    for (int r = 0; c < n && r < rows; r++)
        top[r] = larger_magnitude(top[r], load_some(x + r * n + c, n - c));
    largest_of(top, rows, largest);
}

static inline void magnitudes_of_rows(const float *x, Py_ssize_t rows, Py_ssize_t n,
                                      float *largest)
{
    Py_ssize_t r = 0;
    for (; r + FEW <= rows; r += FEW)
        magnitudes_of(x + r * n, FEW, n, largest + r);
    for (; r < rows; r++)
        magnitudes_of(x + r * n, 1, n, largest + r);
}

/* The least and the largest numbers of some rows of n >= 1. */
INLINE void ranges_of(const float *x, const int rows, Py_ssize_t n, float *least, float *largest)
{
    vfloat low[FEW], high[FEW];
    for (int r = 0; r < rows; r++) {
        const float *row = x + r * n;
        vfloat v = n < LANES ? load_some(row, n) : load(row + n - LANES);
        for (Py_ssize_t i = n; i < LANES; i++)
            v[i] = row[0];
        low[r] = high[r] = v;
    }
    for (Py_ssize_t c = 0; c + LANES <= n; c += LANES)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const vfloat v = load(x + r * n + c);
            low[r] = LEAST(low[r], v);
            high[r] = LARGEST(high[r], v);
        }
    for (int r = 0; r < rows; r++)
        low[r] = -low[r];
    largest_of(low, rows, least);
    largest_of(high, rows, largest);
    for (int r = 0; r < rows; r++)
        least[r] = -least[r];
}

static inline void ranges_of_rows(const float *x, Py_ssize_t rows, Py_ssize_t n, float *least,
                                  float *largest)
{
    Py_ssize_t r = 0;
    for (; r + FEW <= rows; r += FEW)
        ranges_of(x + r * n, FEW, n, least + r, largest + r);
    for (; r < rows; r++)
        ranges_of(x + r * n, 1, n, least + r, largest + r);
}

/* The nearest integers to (x[i] - zero) * inverse, plus offset. They need no clipping: a scale is
   not below what its rounding to float32 makes of the range divided by the steps, so that the
   product is less than half a step outside. */
INLINE void round_codes(const float *x, Py_ssize_t n, float zero, float inverse, int offset,
                        uint8_t *codes)
{
    enum { STEP = 4 * LANES };
    Py_ssize_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        vint y[4];
        for (int j = 0; j < 4; j++)
            y[j] = nearest((load(x + i + j * LANES) - zero) * inverse) + offset;
        for (int j = 0; j < 4; j++)
            y[j] = y[j] << 24 >> 24;  /* the low byte with its sign, which is what narrow takes */
        const vbytes bytes = narrow(y);
        memcpy(codes + i, &bytes, sizeof bytes);
    }
    for (; i + LANES <= n; i += LANES)
        store_bytes(codes + i, nearest((load(x + i) - zero) * inverse) + offset);
    for (; i < n; i++)
        codes[i] = (uint8_t)((int32_t)round_even((x[i] - zero) * inverse) + offset);
}

/* Boundaries of at most 16 cells, and the level of each. Boundaries lie halfway between levels, so
   that twice a boundary is an integer. */
typedef struct {
    int depth;
    int16_t table[15][2 * LANES];    /* what a vector of words is compared with */
    float levels[16], squares[16];
} Cells;

/* Which boundary is word j of table k: by cell, where words are looked up; by half of it, where that
   is done in halves of a vector; else the k-th in all of them. */
#if LANES == 16
#define BOUNDARY(k, j) ((j) + (1 << (k)) - 1)
#elif defined(__AVX2__)
#define BOUNDARY(k, j) ((j) % 8 * 2 + (1 << (k)) - 1)
#else
#define BOUNDARY(k, j) (k)
#endif

static inline void make_cells(Cells *cells, const float *boundaries, int count,
                              const int8_t *levels)
{
    int16_t doubled[16];
    memset(cells, 0, sizeof *cells);
    while (1 << cells->depth <= count)
        cells->depth++;
    for (int i = 0; i < 16; i++)
        doubled[i] = i < count ? (int16_t)(2 * boundaries[i]) : INT16_MAX;
    for (int k = 0; k < 15; k++)
        for (int j = 0; j < 2 * LANES; j++)
            cells->table[k][j] = BOUNDARY(k, j) < 15 ? doubled[BOUNDARY(k, j)] : INT16_MAX;
    for (int i = 0; i <= count; i++) {
        cells->levels[i] = levels[i];
        cells->squares[i] = cells->levels[i] * cells->levels[i];
    }
}

/* How many doubled boundaries lie below each y: where words can be looked up by halves, table[k]
   being for the question that decides about bit k. */
INLINE vwords search(vwords y, const Cells *cells, const int depth)
{
#if LANES == 16
    __m512i cell = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int k = depth - 1; k >= 0; k--) {
        const __m512i limits = _mm512_permutexvar_epi16(cell, _mm512_loadu_si512(cells->table[k]));
        cell = _mm512_mask_add_epi16(cell, _mm512_cmpgt_epi16_mask((__m512i)y, limits), cell,
                                     _mm512_set1_epi16((int16_t)(1 << k)));
    }
    return (vwords)cell;
#elif defined(__AVX2__)
    /* The bytes of word i of a table are 2 * i and 2 * i + 1. */
    __m256i bytes = _mm256_set1_epi16(0x0100), above = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int k = depth - 1; k >= 0; k--) {
        const __m256i table = _mm256_loadu_si256((const __m256i *)cells->table[k]);
        above = _mm256_cmpgt_epi16((__m256i)y, _mm256_shuffle_epi8(table, bytes));
        if (k > 0)
            bytes = _mm256_add_epi16(
                bytes, _mm256_and_si256(above, _mm256_set1_epi16((int16_t)(0x0101 << k))));
    }
    return (vwords)_mm256_sub_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), above);
#else
    vwords cell = {0};
    for (int j = 0; j < (1 << depth) - 1; j++) {
        vwords limits;
        memcpy(&limits, cells->table[j], sizeof limits);
        cell -= (vwords)(y > limits);
    }
    return cell;
#endif
}

/* The cells of four vectors of numbers times inverse: for integers b, y > b where the next integer is. */
INLINE vbytes find_four(const float *x, float inverse, const Cells *cells, const int depth)
{
    vint y[4];
    for (int j = 0; j < 4; j++) {
        const vfloat half = load(x + j * LANES) * inverse;
        y[j] = round_up(half + half);
    }
    return narrow_words(search(narrow_ints(y[0], y[1]), cells, depth),
                        search(narrow_ints(y[2], y[3]), cells, depth));
}

INLINE void find_cells_at(const float *x, Py_ssize_t n, float inverse, const Cells *cells,
                          const int depth, uint8_t *codes)
{
    enum { STEP = 4 * LANES };
    Py_ssize_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        const vbytes bytes = find_four(x + i, inverse, cells, depth);
        memcpy(codes + i, &bytes, sizeof bytes);
    }
    if (i < n) {
        float rest[STEP] = {0};
        memcpy(rest, x + i, (n - i) * sizeof *x);
        const vbytes bytes = find_four(rest, inverse, cells, depth);
        memcpy(codes + i, &bytes, n - i);
    }
}

/* codes[i] = how many boundaries lie below x[i] * inverse. A loop for each depth, so that the
   tables stay in registers. */
static inline void find_cells(const float *x, Py_ssize_t n, float inverse, const Cells *cells,
                              uint8_t *codes)
{
    if (cells->depth == 4)
        find_cells_at(x, n, inverse, cells, 4, codes);
    else if (cells->depth == 3)
        find_cells_at(x, n, inverse, cells, 3, codes);
    else
        find_cells_at(x, n, inverse, cells, 2, codes);
}

#if LANES == 16
#define CELLS_AT(p) ((vint)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define LOOK_UP(table, i) ((vfloat)_mm512_permutexvar_ps((__m512i)(i), (__m512)load(table)))
#elif defined(__AVX2__)
#define CELLS_AT(p) ((vint)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define LOOK_UP_8(table, i) _mm256_permutevar8x32_ps((__m256)load(table), (__m256i)(i))
#define LOOK_UP(table, i) ((vfloat)_mm256_blendv_ps( \
    LOOK_UP_8(table, i), LOOK_UP_8((table) + 8, i), (__m256)((i) << 28)))
#endif

/* The level of each code. */
static inline void levels_of_cells(const uint8_t *codes, Py_ssize_t n, const Cells *cells,
                                   float *levels)
{
    Py_ssize_t i = 0;
#if defined(LOOK_UP)
    for (; i + LANES <= n; i += LANES) {
        const vint cell = CELLS_AT(codes + i);
        store(levels + i, LOOK_UP(cells->levels, cell));
    }
#endif
    for (; i < n; i++)
        levels[i] = cells->levels[codes[i]];
}

/* The sum of the squares of the levels, exact in any order for up to 1,040 of them. */
static inline float energy_of_cells(const uint8_t *codes, Py_ssize_t n, const Cells *cells)
{
    float total = 0;
    Py_ssize_t i = 0;
#if defined(LOOK_UP)
    vfloat sum = {0};
    for (; i + LANES <= n; i += LANES) {
        const vint cell = CELLS_AT(codes + i);
        sum += LOOK_UP(cells->squares, cell);
    }
    lane_totals_of(&sum, 1, &total);
#endif
    for (; i < n; i++)
        total += cells->squares[codes[i]];
    return total;
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

#endif
