/* Tiles of trellis codes, and how they become tiles of 8-bit levels for the kernels of dot.h.

   In memory the rows of 64 tokens are interleaved: dword by dword for keys, so that a lane of a
   vector is a token; for values by fours byte by byte, so that a dword is four tokens. Windows that
   begin in one dword or byte and end in the next are cut out of both; before the first comes the
   last, as a row is a ring.

   - AVX-512 VBMI: vpmultishiftqb cuts eight windows out of a qword. For values vpermb first gives
     each of four tokens the two bytes that hold the windows of two channels. The table of the 128
     windows whose newest bit is 0 is two registers (vpermi2b); the newest bit negates.
   - AVX2 and NEON: windows by shifts and masks of 32-bit lanes. AVX2 looks up in eight tables of 16
     bytes and selects by three bits, NEON in two of 64.
   - Elsewhere the same windows, and the table in the first-level cache. */

#ifndef KVCODEC_TRELLIS_TILES_H
#define KVCODEC_TRELLIS_TILES_H

#include "dot.h"
#include "trellis.h"

static Py_ssize_t stream_tile_bytes(Py_ssize_t n, int bits, int values)
{
    const Py_ssize_t row_bytes = (n * bits + 7) / 8;
    return TILE_TOKENS * (values ? row_bytes : (row_bytes + 3) / 4 * 4);
}

#if DOT_WIDTH == 64

typedef struct { dot_bytes low, high; } Half_table;

/* table[w] of biased levels for 64 windows. The table is that of windows whose newest bit, the
   byte's sign, is 0; the others have the negative levels. */
INLINE dot_bytes look_up_windows(dot_bytes w, const Half_table *table)
{
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)w);
    const __m512i level = _mm512_permutex2var_epi8((__m512i)table->low, (__m512i)w,
                                                   (__m512i)table->high);
    return (dot_bytes)_mm512_mask_sub_epi8(level, negative, _mm512_setzero_si512(), level);
}

/* Where in a qword the windows of its eight bytes begin: keys have two lanes of 32 bits with four
   elements each, values four tokens of 16 bits with two channels each. */
#define KEY_STARTS(first, bits) _mm512_set1_epi64(0x2020202000000000 + \
    0x0101010101010101 * (first) + 0x0302010003020100 * (bits))
#define VALUE_STARTS(one, two) (0x3020100030201000 + \
    0x0000000001010101 * (one) + 0x0101010100000000 * (two))

INLINE void store_windows(uint8_t *out, __m512i starts, __m512i stream, const Half_table *table)
{
    const dot_bytes w = (dot_bytes)_mm512_multishift_epi64_epi8(starts, stream);
    const dot_bytes levels = look_up_windows(w, table);
    memcpy(out, &levels, sizeof levels);
}

/* The upper halves of the dwords of a, then the lower ones of b. */
INLINE __m512i middle(__m512i a, __m512i b)
{
    return _mm512_rol_epi32(_mm512_mask_blend_epi16(0x55555555, a, b), 16);
}

/* The chunks of four elements that end in a dword, at most `left`. `first` is where the first window
   of the first of them begins, relative to the dword; where a chunk begins before it, its windows
   are taken from the halves of two dwords. */
INLINE void key_chunks(__m512i before, __m512i now, const int bits, const int first,
                       const int count, const Half_table *table, uint8_t *out, Py_ssize_t left)
{
    const __m512i between = middle(before, now);
#pragma GCC unroll 4
    for (int c = 0; c < count && c < left; c++, out += KEY_GROUPS * VECTOR_BYTES) {
        const int start = first + 4 * bits * c;
        if (start < 0)
            store_windows(out, KEY_STARTS(16 + start, bits), between, table);
        else
            store_windows(out, KEY_STARTS(start, bits), now, table);
    }
}

/* A tile of keys as one of biased levels, in the order of memory. Chunks of 3-bit codes begin anew
   with every third dword. */
INLINE void expand_keys_of(const uint8_t *tile, Py_ssize_t n, const int bits,
                           const Half_table *table, uint8_t *out)
{
    const Py_ssize_t stride = KEY_GROUPS * VECTOR_BYTES, dwords = (n * bits + 31) / 32;
    const int used = (int)(n * bits % 32), period = bits == 3 ? 3 : 1;
    __m512i before[KEY_GROUPS];
    for (int g = 0; g < KEY_GROUPS; g++) {
        const uint8_t *last = tile + (dwords - 1) * stride + g * VECTOR_BYTES;
        before[g] = (__m512i)dot_load(last);
        if (used)
            before[g] = _mm512_or_si512(
                _mm512_slli_epi32(before[g], (unsigned)(32 - used)),
                _mm512_srli_epi32((__m512i)dot_load(last - stride), (unsigned)used));
    }
    Py_ssize_t left = n / 4;
    for (Py_ssize_t d = 0; d < dwords; d += period)
#pragma GCC unroll 3
        for (int phase = 0; phase < period; phase++) {
            const int first = bits != 3 ? bits - 8 : phase == 0 ? -5 : phase == 1 ? -13 : -9;
            const int count = bits != 3 ? 8 / bits : phase == 0 ? 2 : 3;
            if (d + phase >= dwords)
                break;
#pragma GCC unroll 4
            for (int g = 0; g < KEY_GROUPS; g++, tile += VECTOR_BYTES) {
                const __m512i now = (__m512i)dot_load(tile);
                key_chunks(before[g], now, bits, first, count, table, out + g * VECTOR_BYTES,
                           left);
                before[g] = now;
            }
            left -= count;
            out += count * stride;
        }
}

/* For the q-th qword of 16 channels: which bytes, of a stream of dwords of four tokens that begins
   one byte early, hold the windows of its two channels. A token gets two bytes. */
#define SLOT(byte) 4 * (byte), 4 * (byte) + 4, 4 * (byte) + 1, 4 * (byte) + 5, \
                   4 * (byte) + 2, 4 * (byte) + 6, 4 * (byte) + 3, 4 * (byte) + 7

/* The windows of 16 channels of four tokens. With 3 bits the fifth and the sixth of eight channels
   do not share two bytes, so that the latter are taken apart. */
INLINE void store_channels(uint8_t *out, __m512i stream, const int bits, const Half_table *table)
{
    const dot_bytes slots =
        bits == 2 ? (dot_bytes){SLOT(0), SLOT(0), SLOT(1), SLOT(1),
                                SLOT(2), SLOT(2), SLOT(3), SLOT(3)}
        : bits == 3 ? (dot_bytes){SLOT(0), SLOT(1), SLOT(1), SLOT(2),
                                  SLOT(3), SLOT(4), SLOT(4), SLOT(5)}
        : (dot_bytes){SLOT(0), SLOT(1), SLOT(2), SLOT(3), SLOT(4), SLOT(5), SLOT(6), SLOT(7)};
    const __m512i starts =
        bits == 2 ? _mm512_set4_epi64(VALUE_STARTS(6, 8), VALUE_STARTS(2, 4),
                                      VALUE_STARTS(6, 8), VALUE_STARTS(2, 4))
        : bits == 3 ? _mm512_set4_epi64(VALUE_STARTS(5, 8), VALUE_STARTS(7, 0),
                                        VALUE_STARTS(1, 4), VALUE_STARTS(3, 6))
        : _mm512_set1_epi64(VALUE_STARTS(4, 8));
    __m512i w = _mm512_multishift_epi64_epi8(
        starts, _mm512_permutexvar_epi8((__m512i)slots, stream));
    if (bits == 3) {
        const dot_bytes others = {SLOT(0), SLOT(0), SLOT(2), SLOT(0),
                                  SLOT(0), SLOT(0), SLOT(5), SLOT(0)};
        w = _mm512_mask_multishift_epi64_epi8(
            w, 0x00f0000000f00000, _mm512_set1_epi64(VALUE_STARTS(0, 2)),
            _mm512_permutexvar_epi8((__m512i)others, stream));
    }
    const dot_bytes levels = look_up_windows((dot_bytes)w, table);
    memcpy(out, &levels, sizeof levels);
}

/* A tile of values as one of biased levels. */
INLINE void expand_values_of(const uint8_t *tile, Py_ssize_t n, const int bits,
                             const Half_table *table, uint8_t *out)
{
    const Py_ssize_t row_bytes = (n * bits + 7) / 8, groups = groups_of(n);
    const int used = (int)(n * bits % 8);
    for (int t = 0; t < TILE_TOKENS; t += 4, tile += 4 * row_bytes) {
        uint32_t before, older;
        memcpy(&before, tile + 4 * (row_bytes - 1), 4);
        if (used) {
            memcpy(&older, tile + 4 * (row_bytes - 2), 4);
            before = (before << (8 - used) & 0x01010101u * (0xffu << (8 - used) & 0xff))
                   | (older >> used & 0x01010101u * (0xffu >> used));
        }
        for (Py_ssize_t g = 0; g < groups; g++, out += VECTOR_BYTES) {
            const Py_ssize_t at = 8 * bits * g - 4, rest = 4 * row_bytes - at;
            const int needed = 8 * bits + 4 < rest ? 8 * bits + 4 : (int)rest;
            const __mmask64 mask = (1ull << needed) - 1;
            __m512i stream;
            if (g == 0)
                stream = _mm512_alignr_epi32(_mm512_maskz_loadu_epi8(mask >> 4, tile),
                                             _mm512_set1_epi32((int)before), 15);
            else
                stream = _mm512_maskz_loadu_epi8(mask, tile + at);
            store_channels(out, stream, bits, table);
        }
    }
}

/* A tile of interleaved rows as a tile of 8-bit codes, level + 128; the lanes that fill up the last
   group of values hold anything. */
static void expand_stream_tile(const uint8_t *tile, Py_ssize_t n, int values,
                               const Trellis *trellis, uint8_t *out)
{
    const Half_table table = {dot_load(trellis->biased), dot_load(trellis->biased + 64)};
#define CALL(bits) \
    if (values) \
        expand_values_of(tile, n, bits, &table, out); \
    else \
        expand_keys_of(tile, n, bits, &table, out)
    switch (trellis->bits) {
    case 2: CALL(2); break;
    case 3: CALL(3); break;
    default: CALL(4);
    }
#undef CALL
}

#else

/* out[i] = the windows of a chunk of four elements, for 16 lanes of 32 bits. Byte j begins at bit
   start + bits * j of the lane in now, and before bit 0 it has the bits of before. */
INLINE void chunk_windows(const uint32_t *before, const uint32_t *now, const int start,
                          const int bits, uint8_t *out)
{
    const int first = start < 0 ? start + 16 : start;
    uint32_t windows[GROUP_LANES];
    for (int i = 0; i < GROUP_LANES; i++) {
        const uint32_t stream = start < 0 ? before[i] >> 16 | now[i] << 16 : now[i];
        windows[i] = (stream >> first & 255) | (stream >> (first + bits) & 255) << 8
                   | (stream >> (first + 2 * bits) & 255) << 16
                   | (stream >> (first + 3 * bits)) << 24;
    }
    memcpy(out, windows, sizeof windows);
}

INLINE void key_windows(const uint8_t *tile, Py_ssize_t n, const int bits, uint8_t *out)
{
    const Py_ssize_t stride = TILE_TOKENS * 4, dwords = (n * bits + 31) / 32;
    const int used = (int)(n * bits % 32);
    uint32_t older[GROUP_LANES], before[GROUP_LANES], now[GROUP_LANES];
    for (int g = 0; g < KEY_GROUPS; g++) {
        const uint8_t *p = tile + g * VECTOR_BYTES;
        uint8_t *to = out + g * VECTOR_BYTES;
        memcpy(before, p + (dwords - 1) * stride, sizeof before);
        if (used) {
            memcpy(older, p + (dwords - 2) * stride, sizeof older);
            for (int i = 0; i < GROUP_LANES; i++)
                before[i] = before[i] << (32 - used) | older[i] >> used;
        }
        Py_ssize_t left = n / 4;
        for (Py_ssize_t d = 0; d < dwords; d++, p += stride) {
            const int first = bits != 3 ? bits - 8 : d % 3 == 0 ? -5 : d % 3 == 1 ? -13 : -9;
            const int count = bits != 3 ? 8 / bits : d % 3 == 0 ? 2 : 3;
            memcpy(now, p, sizeof now);
            for (int c = 0; c < count && left > 0; c++, left--) {
                chunk_windows(before, now, first + 4 * bits * c, bits, to);
                to += KEY_GROUPS * VECTOR_BYTES;
            }
            memcpy(before, now, sizeof before);
        }
    }
}

/* The windows of `count` channels, up to eight, in `bits` dwords of four tokens behind `before`. */
INLINE uint32_t channel_windows(const uint8_t *tile, uint32_t before, const int count,
                                const int bits, uint8_t *out)
{
    uint32_t rows[5] = {before}, windows[8];
    memcpy(rows + 1, tile, (count * bits + 7) / 8 * 4);
#pragma GCC unroll 8
    for (int c = 0; c < count; c++) {
        /* Ends at this bit, 1 to 8, of the dword's bytes. */
        const int at = ((c + 1) * bits - 1) / 8, end = (c + 1) * bits - 8 * at;
        windows[c] = (rows[at] >> end & 0x01010101u * (0xffu >> end))
                   | (rows[at + 1] << (8 - end) & 0x01010101u * (0xffu << (8 - end) & 0xff));
    }
    memcpy(out, windows, count * 4);
    return rows[bits];
}

INLINE void value_windows(const uint8_t *tile, Py_ssize_t n, const int bits, uint8_t *out)
{
    const Py_ssize_t row_bytes = (n * bits + 7) / 8, row_out = groups_of(n) * VECTOR_BYTES;
    const int used = (int)(n * bits % 8);
    for (int t = 0; t < TILE_TOKENS; t += 4, tile += 4 * row_bytes, out += row_out) {
        uint32_t before, older;
        memcpy(&before, tile + 4 * (row_bytes - 1), 4);
        if (used) {
            memcpy(&older, tile + 4 * (row_bytes - 2), 4);
            before = (before << (8 - used) & 0x01010101u * (0xffu << (8 - used) & 0xff))
                   | (older >> used & 0x01010101u * (0xffu >> used));
        }
        memset(out + 4 * n, 0, row_out - 4 * n);
        Py_ssize_t c = 0;
        for (; c + 8 <= n; c += 8)
            before = channel_windows(tile + c / 2 * bits, before, 8, bits, out + 4 * c);
        if (c < n)
            channel_windows(tile + c / 2 * bits, before, 4, bits, out + 4 * c);
    }
}

/* Each window to its biased level, in place; `count` is a multiple of DOT_WIDTH. */
INLINE void map_windows(uint8_t *bytes, Py_ssize_t count, const Trellis *trellis)
{
#if DOT_WIDTH == 32 || (defined(__ARM_NEON) && defined(__aarch64__))
#if DOT_WIDTH == 32
    __m256i table[8];
    for (int i = 0; i < 8; i++)
        table[i] = _mm256_broadcastsi128_si256(
            _mm_loadu_si128((const __m128i *)(trellis->biased + 16 * i)));
#else
    uint8x16x4_t low, high;
    memcpy(&low, trellis->biased, sizeof low);
    memcpy(&high, trellis->biased + 64, sizeof high);
#endif
    for (Py_ssize_t i = 0; i < count; i += DOT_WIDTH) {
        const dot_bytes w = dot_load(bytes + i);
        const dot_bytes negative = (dot_bytes)(w > 127);
#if DOT_WIDTH == 32
        const __m256i nibble = _mm256_and_si256((__m256i)w, _mm256_set1_epi8(15));
        __m256i level[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            level[j] = _mm256_shuffle_epi8(table[j], nibble);
#pragma GCC unroll 3
        for (int bit = 4; bit < 7; bit++)
#pragma GCC unroll 4
            for (int j = 0; j < 64 >> bit; j++)
                level[j] = _mm256_blendv_epi8(level[2 * j], level[2 * j + 1],
                                              _mm256_slli_epi16((__m256i)w, 7 - bit));
        const dot_bytes found = (dot_bytes)level[0];
#else
        const uint8x16_t index = vandq_u8((uint8x16_t)w, vdupq_n_u8(127));
        const dot_bytes found = (dot_bytes)vqtbx4q_u8(vqtbl4q_u8(low, index), high,
                                                      vsubq_u8(index, vdupq_n_u8(64)));
#endif
        const dot_bytes signed_levels = (found ^ negative) - negative;
        memcpy(bytes + i, &signed_levels, DOT_WIDTH);
    }
#else
    for (Py_ssize_t i = 0; i < count; i++)
        bytes[i] = trellis->biased[bytes[i]];
#endif
}

/* A tile of interleaved rows as a tile of 8-bit codes, level + 128; the lanes that fill up the last
   group of values hold anything. */
static void expand_stream_tile(const uint8_t *tile, Py_ssize_t n, int values,
                               const Trellis *trellis, uint8_t *out)
{
#define CALL(bits) \
    if (values) \
        value_windows(tile, n, bits, out); \
    else \
        key_windows(tile, n, bits, out)
    switch (trellis->bits) {
    case 2: CALL(2); break;
    case 3: CALL(3); break;
    default: CALL(4);
    }
#undef CALL
    map_windows(out, values ? TILE_TOKENS / 4 * groups_of(n) * VECTOR_BYTES : TILE_TOKENS * n,
                trellis);
}
#endif

#endif
