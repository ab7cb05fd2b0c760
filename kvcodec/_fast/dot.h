/* Integer dot products of packed codes (laid out as lanes.h says) with int8 weights:

       sums[row][lane] = sum over the depth of level(code) * weight[row],

   exact in int32 and so the same on every processor. The codes of four elements of a lane are one
   dword; the weights of these elements are one dword of their row, broadcast; the rest is an
   instruction that multiplies bytes and sums four products a dword. A block of rows times columns
   (vectors side by side) keeps its sums in registers, and the bytes extracted from a vector serve
   all its rows.

   - AMX multiplies all rows of a task at once, if there are some (amx.h).
   - VNNI (vpdpbusd) multiplies unsigned by signed bytes: it takes level + 128, or a small code as
     it is. What that adds is taken off the sums: an offset times the sum of the weights. Weights
     that are not negative can be the unsigned operand instead, of levels that are looked up.
   - AVX-512 VBMI looks a byte up by six index bits (vpermb). Tables that do not depend on the bits
     around a code save most of the shifts and masks, and a table costs no more than none.
   - AVX2 alone sums pairs of products in int16. Those of small codes (4 bits or fewer) cannot
     overflow, nor can a number of them added up. For levels, the unsigned operand of vpmaddubsw is
     the weight if none is negative, else the magnitude of the level; each pair is widened at once.
   - NEON has signed dot products or, before ARMv8.2, long multiplications, with the same two cases.
   - SSE2 widens even and odd bytes to int16. It has no byte lookup and selects levels bit by bit.

   Where extraction is dear for many rows, or at all, the codes are first brought to 8 bits in a
   buffer in the first-level cache. */

#ifndef KVCODEC_DOT_H
#define KVCODEC_DOT_H

#include "fetch.h"
#include "lanes.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define DOT_WIDTH 64
#elif defined(__AVX2__)
#define DOT_WIDTH 32
#else
#define DOT_WIDTH 16
#endif

typedef uint8_t dot_bytes __attribute__((vector_size(DOT_WIDTH)));
typedef uint16_t dot_words __attribute__((vector_size(DOT_WIDTH)));
typedef int32_t dot_ints __attribute__((vector_size(DOT_WIDTH)));

/* What the bytes are that are multiplied: codes of up to 4 bits, or levels plus DOT_BIAS. */
enum { DOT_CODES, DOT_LEVELS, DOT_LEVELS_BY_NONNEGATIVE };

enum {
    DOT_SLICES = VECTOR_BYTES / DOT_WIDTH,
    DOT_BUFFER = 16384,
    DOT_BUFFER_SLICES = 4 * DOT_SLICES
};

typedef struct {
    const uint8_t *packed;
    Py_ssize_t chunk_bytes, slices, chunks;
    Fetch *fetch;
    const int8_t *weights;
    Py_ssize_t weights_stride, rows;
    Py_ssize_t right;      /* from the weights of a block's left columns to those of the right ones */
    const int32_t *weight_sums, *right_sums;
    int32_t offset;        /* of all bytes; what it adds is taken off */
    int adds;              /* whether the sums are added to what is there */
    int32_t *sums;
    Py_ssize_t sums_stride;
    dot_bytes table[16];
} dot_job;

LANES_INLINE dot_bytes dot_load(const uint8_t *p)
{
    dot_bytes v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* One step: sum += the four products in each dword.

   DOT_COLUMNS    columns of a block of four rows; what the registers hold
   DOT_PAIR       what a unit of a small code may add to an int16 sum; 0 if sums are int32
   DOT_EXPAND_AT  rows from which codes are brought to 8 bits first; 0 if that never helps */

#if DOT_WIDTH == 64 || defined(__AVXVNNI__)
#define DOT_COLUMNS (DOT_WIDTH / 16)
#define DOT_BIAS 128
#define DOT_PAIR 0
#define DOT_EXPAND_AT 0
typedef dot_ints dot_sum;

LANES_INLINE dot_sum dot_step(dot_sum sum, dot_bytes b, int32_t w, int kind)
{
#if DOT_WIDTH == 64
    const __m512i weights = _mm512_set1_epi32(w);
    if (kind == DOT_LEVELS_BY_NONNEGATIVE)
        return (dot_sum)_mm512_dpbusd_epi32((__m512i)sum, weights, (__m512i)b);
    return (dot_sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)b, weights);
#else
    (void)kind;
    return (dot_sum)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)b, _mm256_set1_epi32(w));
#endif
}

#elif DOT_WIDTH == 32
#define DOT_COLUMNS 2
#define DOT_BIAS 0
#define DOT_PAIR 254
#define DOT_EXPAND_AT 9
typedef dot_ints dot_sum;

LANES_INLINE dot_sum dot_step(dot_sum sum, dot_bytes b, int32_t w, int kind)
{
    const __m256i bytes = (__m256i)b, weights = _mm256_set1_epi32(w);
    __m256i pairs;
    if (kind == DOT_CODES)
        return (dot_sum)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(bytes, weights));
    if (kind == DOT_LEVELS)
        pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(weights, bytes));
    else
        pairs = _mm256_maddubs_epi16(weights, bytes);
    return sum + (dot_sum)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

#elif defined(__ARM_FEATURE_DOTPROD)
#define DOT_COLUMNS 4
#define DOT_BIAS 0
#define DOT_PAIR 0
#define DOT_EXPAND_AT 0
typedef dot_ints dot_sum;

LANES_INLINE dot_sum dot_step(dot_sum sum, dot_bytes b, int32_t w, int kind)
{
    (void)kind;
    return (dot_sum)vdotq_s32((int32x4_t)sum, (int8x16_t)b, vreinterpretq_s8_s32(vdupq_n_s32(w)));
}

#elif defined(__ARM_NEON) && defined(__aarch64__)
#define DOT_COLUMNS 2
#define DOT_BIAS 0
#define DOT_PAIR 127
#define DOT_EXPAND_AT 9
typedef struct { int32x4_t low, high; } dot_sum;    /* for small codes int16x8_t */

LANES_INLINE dot_sum dot_step(dot_sum sum, dot_bytes b, int32_t w, int kind)
{
    const int8x16_t bytes = (int8x16_t)b, weights = vreinterpretq_s8_s32(vdupq_n_s32(w));
    if (kind == DOT_CODES) {
        sum.low = (int32x4_t)vmlal_s8((int16x8_t)sum.low, vget_low_s8(bytes), vget_low_s8(weights));
        sum.high = (int32x4_t)vmlal_high_s8((int16x8_t)sum.high, bytes, weights);
    } else {
        sum.low = vpadalq_s16(sum.low, vmull_s8(vget_low_s8(bytes), vget_low_s8(weights)));
        sum.high = vpadalq_s16(sum.high, vmull_high_s8(bytes, weights));
    }
    return sum;
}

#elif defined(__SSE2__)
#define DOT_COLUMNS 2
#define DOT_BIAS 128
#define DOT_PAIR 0
#define DOT_EXPAND_AT 9
typedef dot_ints dot_sum;

LANES_INLINE dot_sum dot_step(dot_sum sum, dot_bytes b, int32_t w, int kind)
{
    const __m128i bytes = (__m128i)b, weights = _mm_set1_epi32(w);
    const __m128i even = _mm_madd_epi16(_mm_and_si128(bytes, _mm_set1_epi16(255)),
                                        _mm_srai_epi16(_mm_slli_epi16(weights, 8), 8));
    const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(bytes, 8), _mm_srai_epi16(weights, 8));
    (void)kind;
    return sum + (dot_sum)even + (dot_sum)odd;
}

#else
#define DOT_COLUMNS 2
#define DOT_BIAS 128
#define DOT_PAIR 0
#define DOT_EXPAND_AT 9
typedef dot_ints dot_sum;

LANES_INLINE dot_sum dot_step(dot_sum sum, dot_bytes b, int32_t w, int kind)
{
    int8_t weights[4];
    (void)kind;
    memcpy(weights, &w, 4);
    for (int i = 0; i < DOT_WIDTH; i++)
        sum[i / 4] += b[i] * weights[i % 4];
    return sum;
}
#endif

/* The int32 of each lane. */
LANES_INLINE dot_ints dot_total(dot_sum sum, int kind)
{
    (void)kind;
#if DOT_PAIR && DOT_WIDTH == 32
    if (kind == DOT_CODES)
        sum = (dot_sum)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
    return sum;
#elif DOT_PAIR
    if (kind == DOT_CODES) {
        sum.low = vpaddlq_s16((int16x8_t)sum.low);
        sum.high = vpaddlq_s16((int16x8_t)sum.high);
    }
    return (dot_ints)vpaddq_s32(sum.low, sum.high);
#else
    return sum;
#endif
}

/* The bytes of elements 4*s .. 4*s+3 of a chunk, from its vectors at p. Shifts are of 16-bit words,
   as x86 has none of bytes; what comes in from the other byte is masked or not looked at. */

LANES_INLINE dot_bytes dot_right(dot_bytes b, int by) { return (dot_bytes)((dot_words)b >> by); }
LANES_INLINE dot_bytes dot_left(dot_bytes b, int by) { return (dot_bytes)((dot_words)b << by); }

#if DOT_WIDTH == 64
#define DOT_LOOKUP 1
#define DOT_8(i) i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7

/* The lower bits of a 3-bit code, and its third bit, within the index that dot_take() makes. */
static const int dot_code_at[8] = {0, 2, 4, 4, 0, 2, 2, 4};
static const int dot_third_at[8] = {2, 1, 2, 1, 4, 5, 4, 3};

LANES_INLINE void dot_tables(dot_job *job, const int8_t *levels, int bits, uint8_t bias)
{
    const dot_bytes index = {DOT_8(0), DOT_8(8), DOT_8(16), DOT_8(24),
                             DOT_8(32), DOT_8(40), DOT_8(48), DOT_8(56)};
    dot_bytes few = index - (uint8_t)(1 << (bits - 1));
    if (levels != NULL)
        few = (dot_bytes)_mm512_maskz_loadu_epi8((1ull << (1 << bits)) - 1, levels);
    const __m512i repeated = _mm512_shuffle_i32x4((__m512i)few, (__m512i)few, 0);
#define TABLE(codes) ((dot_bytes)_mm512_shuffle_epi8(repeated, (__m512i)(codes)) ^ bias)
    if (bits == 4)
        job->table[0] = TABLE(index & 15);
    if (bits == 2)
#pragma GCC unroll 8
        for (int s = 0; s < 3; s++)
            job->table[s] = TABLE(index >> 2 * s & 3);
    if (bits == 3)
#pragma GCC unroll 8
        for (int s = 0; s < 8; s++)
            job->table[s] = TABLE((index >> dot_code_at[s] & 3)
                                  | (index >> dot_third_at[s] & 1) << 2);
#undef TABLE
}

LANES_INLINE dot_bytes dot_select(uint8_t mask, dot_bytes one, dot_bytes zero)
{
    return (dot_bytes)_mm512_ternarylogic_epi32(_mm512_set1_epi8((char)mask), (__m512i)one,
                                                (__m512i)zero, 0xca);
}

LANES_INLINE dot_bytes dot_take(const uint8_t *p, int s, const int bits, int kind,
                                const dot_bytes *table)
{
    dot_bytes index = dot_load(p);
    (void)kind;
    if (bits == 8)
        return index;
    if (bits == 4) {
        index = s == 0 ? index : dot_right(index, 4);
        s = 0;
    }
    if (bits == 2 && s == 3) {
        index = dot_right(index, 2);
        s = 2;
    }
    if (bits == 3) {
        const uint8_t mask = 3 << 2 * (s % 4);
        const dot_bytes third = dot_load(p + 2 * VECTOR_BYTES);
        index = dot_load(p + s / 4 * VECTOR_BYTES);
        if (s == 0)
            index = dot_select(mask, index, dot_left(third, 2));
        else if (s == 7)
            index = dot_select(mask >> 2, dot_right(index, 2), dot_right(third, 4));
        else
            index = dot_select(mask, index, third);
        if (s == 3 || s == 6)
            index = dot_right(index, 2);
    }
    return (dot_bytes)_mm512_permutexvar_epi8((__m512i)index, (__m512i)table[s]);
}

#else

#if defined(__AVX2__) || (defined(__ARM_NEON) && defined(__aarch64__))
#define DOT_LOOKUP 1

LANES_INLINE dot_bytes dot_map(const dot_bytes *table, dot_bytes codes, int bits)
{
    (void)bits;
#if defined(__AVX2__)
    return (dot_bytes)_mm256_shuffle_epi8((__m256i)table[0], (__m256i)codes);
#else
    return (dot_bytes)vqtbl1q_u8((uint8x16_t)table[0], (uint8x16_t)codes);
#endif
}

LANES_INLINE void dot_tables(dot_job *job, const int8_t *levels, int bits, uint8_t bias)
{
    uint8_t table[DOT_WIDTH] = {0};
    for (int i = 0; i < DOT_WIDTH; i += 16)
        if (bits == 4)
            memcpy(table + i, levels, 16);
        else if (bits == 3)
            memcpy(table + i, levels, 8);
        else
            memcpy(table + i, levels, 4);
    job->table[0] = dot_load(table) ^ bias;
}

#else
#define DOT_LOOKUP 0

/* A tree of selections, one level for each bit of the code. At the leaves the table holds one
   level of a pair and what the other differs in. */
LANES_INLINE dot_bytes dot_map(const dot_bytes *table, dot_bytes codes, int bits)
{
    dot_bytes level[8], other = (dot_bytes)((codes & 1) == 1);
#pragma GCC unroll 8
    for (int i = 0; i < 1 << (bits - 1); i++)
        level[i] = table[2 * i] ^ (table[2 * i + 1] & other);
#pragma GCC unroll 8
    for (int bit = 1; bit < bits; bit++) {
        other = (dot_bytes)((codes & (uint8_t)(1 << bit)) == (uint8_t)(1 << bit));
#pragma GCC unroll 8
        for (int i = 0; i < 1 << (bits - 1 - bit); i++)
            level[i] = level[2 * i] ^ ((level[2 * i] ^ level[2 * i + 1]) & other);
    }
    return level[0];
}

LANES_INLINE void dot_tables(dot_job *job, const int8_t *levels, int bits, uint8_t bias)
{
    for (int i = 0; i < 1 << bits; i++) {
        const uint8_t byte = i % 2 ? levels[i] ^ levels[i - 1] : levels[i] ^ bias;
        job->table[i] = (dot_bytes){0} + byte;
    }
}
#endif

LANES_INLINE dot_bytes dot_take(const uint8_t *p, int s, const int bits, int kind,
                                const dot_bytes *table)
{
    dot_bytes codes = dot_load(p);
    if (bits == 8)
        return kind == DOT_CODES || DOT_BIAS ? codes : codes ^ 128;
    if (bits == 4)
        codes = s == 0 ? codes & 15 : codes >> 4;
    if (bits == 2)
        codes = dot_right(codes, 2 * s) & 3;
    if (bits == 3) {
        const dot_bytes third = dot_load(p + 2 * VECTOR_BYTES);
        codes = dot_right(dot_load(p + s / 4 * VECTOR_BYTES), 2 * (s % 4)) & 3;
        codes |= (s < 2 ? dot_left(third, 2 - s) : dot_right(third, s - 2)) & 4;
    }
    return kind == DOT_CODES ? codes : dot_map(table, codes, bits);
}
#endif

/* Whether the columns of a block can have weights of their own on the left and on the right. */
#define DOT_HALVES(bits) (DOT_WIDTH == 64 && (bits) != 3)

/* Where the first vector of a slice lies in a chunk. */
LANES_INLINE Py_ssize_t dot_offset(Py_ssize_t slice, int vectors)
{
    return slice / DOT_SLICES * vectors * VECTOR_BYTES + slice % DOT_SLICES * DOT_WIDTH;
}

/* bits, kind, rows, columns and halved are literals, here and in the callers. */
LANES_INLINE void dot_block(const dot_job *job, Py_ssize_t row, Py_ssize_t slice, const int bits,
                            const int kind, const int rows, const int columns, const int halved)
{
    const int steps = chunk_elements(bits) / 4, vectors = chunk_vectors(bits);
    const int narrow = DOT_PAIR != 0 && kind == DOT_CODES;
    const int most = narrow ? DOT_PAIR * (bits == 8 ? 15 : (1 << bits) - 1) : 1;
    const Py_ssize_t limit = 32767 / most / steps;
    const Py_ssize_t stride = job->weights_stride, chunk_bytes = job->chunk_bytes;
    const uint8_t *packed = job->packed + dot_offset(slice, vectors);
    Fetch *fetch = job->fetch;
    const int due = fetch ? columns * vectors * DOT_WIDTH / 16 * fetch->rate : 0;
    const int8_t *weights = job->weights + row * stride, *right = weights + job->right;
    Py_ssize_t left = job->chunks;
    int adds = job->adds;

    do {
        dot_sum sum[8][DOT_COLUMNS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                sum[r][c] = (dot_sum){0};
        Py_ssize_t count = narrow && left > limit ? limit : left;
        left -= count;
        for (; count > 0; count--) {
            if (fetch)
                fetch_some(fetch, due);
#pragma GCC unroll 8
            for (int s = 0; s < steps; s++)
#pragma GCC unroll 8
                for (int c = 0; c < columns; c++) {
                    const dot_bytes bytes = dot_take(packed + dot_offset(c, vectors), s, bits, kind,
                                                     job->table);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        const int8_t *side = halved && 2 * c >= columns ? right : weights;
                        int32_t w;
                        memcpy(&w, side + r * stride + 4 * s, 4);
                        sum[r][c] = dot_step(sum[r][c], bytes, w, kind);
                    }
                }
            packed += chunk_bytes;
            weights += 4 * steps;
            right += 4 * steps;
        }
        int32_t *sums = job->sums + row * job->sums_stride + slice * (DOT_WIDTH / 4);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++, sums += job->sums_stride) {
            const int32_t offset = DOT_WIDTH == 64 ? DOT_BIAS : job->offset;
            dot_ints more = {0}, right_more = {0};
            if (kind != DOT_LEVELS_BY_NONNEGATIVE)
                more = (more + job->weight_sums[row + r]) * offset;
            if (kind != DOT_LEVELS_BY_NONNEGATIVE && halved)
                right_more = (right_more + job->right_sums[row + r]) * offset;
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++) {
                dot_ints before, total = dot_total(sum[r][c], kind);
                memcpy(&before, sums + c * (DOT_WIDTH / 4), sizeof before);
                if (adds)
                    total += before;
                else if (kind != DOT_LEVELS_BY_NONNEGATIVE)
                    total -= halved && 2 * c >= columns ? right_more : more;
                memcpy(sums + c * (DOT_WIDTH / 4), &total, sizeof total);
            }
        }
        adds = 1;
    } while (narrow && left > 0);
}

LANES_INLINE void dot_rows(const dot_job *job, Py_ssize_t row, const int bits, const int kind,
                           const int rows, const int columns)
{
    Py_ssize_t slice = 0;
    for (; slice + columns <= job->slices; slice += columns)
        dot_block(job, row, slice, bits, kind, rows, columns, 0);
    if (DOT_SLICES % columns != 0) {
        for (; columns > 2 && slice + 2 <= job->slices; slice += 2)
            dot_block(job, row, slice, bits, kind, rows, 2, 0);
        for (; slice < job->slices; slice++)
            dot_block(job, row, slice, bits, kind, rows, 1, 0);
    }
}

/* Both halves of a block that takes all slices. */
LANES_INLINE void dot_halves(dot_job *job, const int bits, const int kind)
{
    _Static_assert(DOT_WIDTH < 64 || DOT_COLUMNS == 4 * DOT_SLICES, "a block is a product");
    Py_ssize_t row = 0;
    for (; row + 4 <= job->rows; row += 4, job->fetch = NULL)
        dot_block(job, row, 0, bits, kind, 4, DOT_COLUMNS, 1);
    for (; row + 2 <= job->rows; row += 2, job->fetch = NULL)
        dot_block(job, row, 0, bits, kind, 2, DOT_COLUMNS, 1);
    if (row < job->rows)
        dot_block(job, row, 0, bits, kind, 1, DOT_COLUMNS, 1);
}

LANES_INLINE void dot_all(dot_job *job, const int bits, const int kind)
{
    /* With three vectors and many tables a block of 3-bit codes needs more registers. */
    const int columns = bits == 3 && DOT_COLUMNS > 2 ? 2 : DOT_COLUMNS;
    Py_ssize_t row = 0;
    if (DOT_HALVES(bits) && job->right) {
        dot_halves(job, bits, kind);
        return;
    }
    for (; !DOT_EXPAND_AT && row + 8 <= job->rows; row += 8, job->fetch = NULL)
        dot_rows(job, row, bits, kind, 8, DOT_COLUMNS / 2);
    for (; row + 4 <= job->rows; row += 4, job->fetch = NULL)
        dot_rows(job, row, bits, kind, 4, columns);
    for (; row + 2 <= job->rows; row += 2, job->fetch = NULL)
        dot_rows(job, row, bits, kind, 2, DOT_COLUMNS);
    if (row < job->rows)
        dot_rows(job, row, bits, kind, 1, DOT_COLUMNS);
}

/* Some chunks as a tile of 8-bit codes (small codes as they are). */
LANES_INLINE void dot_expand(const uint8_t *packed, Py_ssize_t chunk_bytes, Py_ssize_t chunks,
                             const Py_ssize_t slices, const int bits, const int kind,
                             const dot_bytes *table, uint8_t *buffer)
{
    const int steps = chunk_elements(bits) / 4, vectors = chunk_vectors(bits);
    for (; chunks > 0; chunks--, packed += chunk_bytes, buffer += steps * slices * DOT_WIDTH)
#pragma GCC unroll 4
        for (Py_ssize_t i = 0; i < slices; i++)
#pragma GCC unroll 8
            for (int s = 0; s < steps; s++) {
                dot_bytes bytes = dot_take(packed + dot_offset(i, vectors), s, bits, kind, table);
                if (kind != DOT_CODES && !DOT_BIAS)
                    bytes ^= 128;
                memcpy(buffer + (s * slices + i) * DOT_WIDTH, &bytes, DOT_WIDTH);
            }
}

#endif
