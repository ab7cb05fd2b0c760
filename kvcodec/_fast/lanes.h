/* Packed codes in lanes: the layout that the integer kernels read, and the ways into it and back.

   A tile holds 64 tokens. Its codes form a matrix of lanes times depth: for keys a lane is a token
   and the depth runs over the channels; for values a lane is a channel and the depth runs over the
   tokens. Sixteen lanes are a group. A vector of 64 bytes gives each lane of a group a dword of
   four bytes, so that an instruction that sums four products a dword sums along the depth and needs
   no sum across lanes.

   A chunk is the smallest piece of the depth: one vector with 32 / bits elements of each lane. Byte
   k of a lane, bits b*s .. b*s + b-1, holds element 4*s + k. 3-bit codes have chunks of 32
   elements in three vectors: the two lower bits of elements 0-15 and of elements 16-31, each like
   2-bit codes, and then the third bits, byte k, bit s for element 4*s + k.

   A tile is [chunk][group][vector]. Missing tokens, the channels that fill up the last group and
   the elements that fill up the last chunk are zeros. All shifts stay inside bytes, so the byte
   order of the processor does not matter. */

#ifndef KVCODEC_LANES_H
#define KVCODEC_LANES_H

#include <stdint.h>
#include <string.h>

enum { TILE_TOKENS = 64, GROUP_LANES = 16, KEY_GROUPS = 4, VECTOR_BYTES = 64 };

#define LANES_INLINE static inline __attribute__((always_inline))

static inline int chunk_elements(int bits) { return bits == 3 ? 32 : 32 / bits; }
static inline int chunk_vectors(int bits) { return bits == 3 ? 3 : 1; }

static inline Py_ssize_t chunks_of(Py_ssize_t depth, int bits)
{
    return (depth + chunk_elements(bits) - 1) / chunk_elements(bits);
}

static inline Py_ssize_t groups_of(Py_ssize_t lanes)
{
    return (lanes + GROUP_LANES - 1) / GROUP_LANES;
}

static inline Py_ssize_t key_tile_bytes(Py_ssize_t n, int bits)
{
    return chunks_of(n, bits) * chunk_vectors(bits) * KEY_GROUPS * VECTOR_BYTES;
}

static inline Py_ssize_t value_tile_bytes(Py_ssize_t n, int bits)
{
    return chunks_of(TILE_TOKENS, bits) * chunk_vectors(bits) * groups_of(n) * VECTOR_BYTES;
}

/* One lane of a chunk. Four elements are one word, `step` bytes after the last four; the words of
   the vectors are `next` bytes apart. */
LANES_INLINE void pack_lane(const uint8_t *codes, Py_ssize_t step, const int bits, uint8_t *words,
                            Py_ssize_t next)
{
    uint32_t code, word[3] = {0};
    for (int s = 0; s < chunk_elements(bits) / 4; s++) {
        memcpy(&code, codes + s * step, 4);
        if (bits == 3) {
            word[s / 4] |= (code & 0x03030303u) << 2 * (s % 4);
            word[2] |= (code >> 2 & 0x01010101u) << s;
        } else
            word[0] |= code << bits * s;
    }
    for (int v = 0; v < chunk_vectors(bits); v++)
        memcpy(words + v * next, &word[v], 4);
}

LANES_INLINE void unpack_lane(const uint8_t *words, Py_ssize_t next, const int bits, uint8_t *codes,
                              Py_ssize_t step)
{
    const uint32_t mask = bits == 8 ? 0xffffffffu : 0x01010101u * ((1u << bits) - 1);
    uint32_t code, word[3];
    for (int v = 0; v < chunk_vectors(bits); v++)
        memcpy(&word[v], words + v * next, 4);
    for (int s = 0; s < chunk_elements(bits) / 4; s++) {
        if (bits == 3)
            code = (word[s / 4] >> 2 * (s % 4) & 0x03030303u) | (word[2] >> s & 0x01010101u) << 2;
        else
            code = word[0] >> bits * s & mask;
        memcpy(codes + s * step, &code, 4);
    }
}

/* Work goes in pieces of 64 channels, so that the loops have constant lengths. A piece that is
   shorter, or missing, is filled up with zeros in `filled`. */
enum { PIECE = 64 };

LANES_INLINE const uint8_t *piece_of(const uint8_t *codes, Py_ssize_t width, uint8_t *filled)
{
    if (width >= PIECE)
        return codes;
    memset(filled, 0, PIECE);
    if (width > 0)
        memcpy(filled, codes, width);
    return filled;
}

LANES_INLINE void store_piece(uint8_t *codes, const uint8_t *piece, Py_ssize_t width)
{
    if (width >= PIECE)
        memcpy(codes, piece, PIECE);    /* inline, unlike a copy of unknown length */
    else
        memcpy(codes, piece, width);
}

/* The lanes of a token are built in a row and then scattered to the vectors, or the other way. */
LANES_INLINE void pack_keys_of(const uint8_t *codes, Py_ssize_t stride, Py_ssize_t tokens,
                               Py_ssize_t n, const int bits, uint8_t *packed)
{
    const int elements = chunk_elements(bits), vectors = chunk_vectors(bits);
    const Py_ssize_t jump = KEY_GROUPS * vectors * VECTOR_BYTES;
    uint8_t filled[PIECE], words[PIECE];
    for (Py_ssize_t t = 0; t < TILE_TOKENS; t++) {
        uint8_t *lane = packed + t / GROUP_LANES * vectors * VECTOR_BYTES + t % GROUP_LANES * 4;
        for (Py_ssize_t c = 0; c < n; c += PIECE) {
            const Py_ssize_t chunks = chunks_of(n - c < PIECE ? n - c : PIECE, bits);
            const uint8_t *piece = piece_of(codes + t * stride + c, t < tokens ? n - c : 0, filled);
            for (int j = 0; j < PIECE / elements; j++)
                pack_lane(piece + j * elements, 4, bits, words + j * vectors * 4, 4);
            for (Py_ssize_t j = 0; j < chunks; j++, lane += jump)
                for (int v = 0; v < vectors; v++)
                    memcpy(lane + v * VECTOR_BYTES, words + (j * vectors + v) * 4, 4);
        }
    }
}

LANES_INLINE void unpack_keys_of(const uint8_t *packed, Py_ssize_t tokens, Py_ssize_t n,
                                 const int bits, uint8_t *codes, Py_ssize_t stride)
{
    const int elements = chunk_elements(bits), vectors = chunk_vectors(bits);
    const Py_ssize_t jump = KEY_GROUPS * vectors * VECTOR_BYTES;
    uint8_t piece[PIECE], words[PIECE] = {0};
    for (Py_ssize_t t = 0; t < tokens; t++) {
        const uint8_t *lane = packed + t / GROUP_LANES * vectors * VECTOR_BYTES
                            + t % GROUP_LANES * 4;
        for (Py_ssize_t c = 0; c < n; c += PIECE) {
            const Py_ssize_t width = n - c < PIECE ? n - c : PIECE, chunks = chunks_of(width, bits);
            for (Py_ssize_t j = 0; j < chunks; j++, lane += jump)
                for (int v = 0; v < vectors; v++)
                    memcpy(words + (j * vectors + v) * 4, lane + v * VECTOR_BYTES, 4);
            for (int j = 0; j < PIECE / elements; j++)
                unpack_lane(words + j * vectors * 4, 4, bits, piece + j * elements, 4);
            store_piece(codes + t * stride + c, piece, width);
        }
    }
}

/* The tokens 4*s + k of a chunk, for all s, are packed four channels a word; then the bytes of the
   rows k = 0 .. 3 are interleaved. */
LANES_INLINE void pack_values_of(const uint8_t *codes, Py_ssize_t stride, Py_ssize_t tokens,
                                 Py_ssize_t n, const int bits, uint8_t *packed)
{
    const int elements = chunk_elements(bits), vectors = chunk_vectors(bits);
    const Py_ssize_t jump = groups_of(n) * vectors * VECTOR_BYTES;
    uint8_t rows[TILE_TOKENS][PIECE], words[3][4][PIECE], lanes[PIECE][4];
    for (Py_ssize_t c = 0; c < n; c += PIECE) {
        const Py_ssize_t groups = groups_of(n - c < PIECE ? n - c : PIECE);
        uint8_t *at = packed + c / GROUP_LANES * vectors * VECTOR_BYTES;
        for (Py_ssize_t t = 0; t < TILE_TOKENS; t++) {
            const Py_ssize_t width = t < tokens ? n - c : 0;
            const uint8_t *piece = piece_of(codes + t * stride + c, width, rows[t]);
            if (piece != rows[t])
                memcpy(rows[t], piece, PIECE);
        }
        for (int t = 0; t < TILE_TOKENS; t += elements, at += jump) {
            for (int k = 0; k < 4; k++)
                for (int j = 0; j < PIECE; j += 4)
                    pack_lane(&rows[t + k][j], 4 * PIECE, bits, &words[0][k][j], 4 * PIECE);
            for (int v = 0; v < vectors; v++) {
                for (int j = 0; j < PIECE; j++)
                    for (int k = 0; k < 4; k++)
                        lanes[j][k] = words[v][k][j];
                for (Py_ssize_t g = 0; g < groups; g++)
                    memcpy(at + (g * vectors + v) * VECTOR_BYTES, lanes[g * GROUP_LANES],
                           VECTOR_BYTES);
            }
        }
    }
}

LANES_INLINE void unpack_values_of(const uint8_t *packed, Py_ssize_t tokens, Py_ssize_t n,
                                   const int bits, uint8_t *codes, Py_ssize_t stride)
{
    const int elements = chunk_elements(bits), vectors = chunk_vectors(bits);
    const Py_ssize_t jump = groups_of(n) * vectors * VECTOR_BYTES;
    uint8_t rows[TILE_TOKENS][PIECE], words[3][4][PIECE], lanes[PIECE][4] = {{0}};
    for (Py_ssize_t c = 0; c < n; c += PIECE) {
        const Py_ssize_t width = n - c < PIECE ? n - c : PIECE, groups = groups_of(width);
        const uint8_t *at = packed + c / GROUP_LANES * vectors * VECTOR_BYTES;
        for (int t = 0; t < TILE_TOKENS; t += elements, at += jump) {
            for (int v = 0; v < vectors; v++) {
                for (Py_ssize_t g = 0; g < groups; g++)
                    memcpy(lanes[g * GROUP_LANES], at + (g * vectors + v) * VECTOR_BYTES,
                           VECTOR_BYTES);
                for (int j = 0; j < PIECE; j++)
                    for (int k = 0; k < 4; k++)
                        words[v][k][j] = lanes[j][k];
            }
            for (int k = 0; k < 4; k++)
                for (int j = 0; j < PIECE; j += 4)
                    unpack_lane(&words[0][k][j], 4 * PIECE, bits, &rows[t + k][j], 4 * PIECE);
        }
        for (Py_ssize_t t = 0; t < tokens; t++)
            store_piece(codes + t * stride + c, rows[t], width);
    }
}

/* The number of bits becomes a literal. */
#define FOR_BITS(bits, call) \
    switch (bits) { \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    default: call(8); \
    }

/* Codes are (tokens, n) with rows `stride` bytes apart; tokens <= 64. */
static void pack_keys(const uint8_t *codes, Py_ssize_t stride, Py_ssize_t tokens, Py_ssize_t n,
                      int bits, uint8_t *packed)
{
#define CALL(b) pack_keys_of(codes, stride, tokens, n, b, packed)
    FOR_BITS(bits, CALL)
#undef CALL
}

static void unpack_keys(const uint8_t *packed, Py_ssize_t tokens, Py_ssize_t n, int bits,
                        uint8_t *codes, Py_ssize_t stride)
{
#define CALL(b) unpack_keys_of(packed, tokens, n, b, codes, stride)
    FOR_BITS(bits, CALL)
#undef CALL
}

static void pack_values(const uint8_t *codes, Py_ssize_t stride, Py_ssize_t tokens, Py_ssize_t n,
                        int bits, uint8_t *packed)
{
#define CALL(b) pack_values_of(codes, stride, tokens, n, b, packed)
    FOR_BITS(bits, CALL)
#undef CALL
}

static void unpack_values(const uint8_t *packed, Py_ssize_t tokens, Py_ssize_t n, int bits,
                          uint8_t *codes, Py_ssize_t stride)
{
#define CALL(b) unpack_values_of(packed, tokens, n, b, codes, stride)
    FOR_BITS(bits, CALL)
#undef CALL
}

#endif
