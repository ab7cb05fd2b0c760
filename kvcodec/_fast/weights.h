/* Before and after the second integer product of a tile of 64 tokens: probabilities times the scales
   of values are rounded to integers, and integer sums are scaled and added up.

   As many rows are rounded at a time as the registers hold, and share the steps across lanes. Where
   groups of channels have scales and midpoints of their own (KIVI), rows are rounded for each group;
   a row's probabilities are multiplied with the midpoints at the same time, and the product is added
   to all channels of the group with their sums. */

#ifndef KVCODEC_WEIGHTS_H
#define KVCODEC_WEIGHTS_H

#include "softmax.h"

enum { DIGIT_ROWS = LANES == 16 ? 4 : 1 };

/* Weights p * scale of some rows (64 apart) as integers of 7 bits, or of two 7-bit digits, relative
   to the largest of the row; a step is what 1 stands for, 0 if the largest is below `least`. The
   lower digits are `next_rows` rows after the upper ones, and so are their sums, unless they are not
   asked for. Where there are midpoints, offset = p . middle in 16 lanes. */
INLINE void digits_of(const float *p, const float *scale, const float *middle, const int rows,
                      const int bits, float least, int8_t *digits, Py_ssize_t next_rows,
                      int32_t *digit_sum, float *step, float *offset)
{
    vfloat w[DIGIT_ROWS][TILE_VECTORS], top[DIGIT_ROWS], product[DIGIT_ROWS][SUMS];
    vint lower[DIGIT_ROWS], upper[DIGIT_ROWS];
    vfour largest = {0};
    const float most = (float)((1 << bits) - 1);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < TILE_VECTORS; i++) {
            const vfloat x = load(p + r * 64 + i * LANES);
            w[r][i] = x * load(scale + i * LANES);
            top[r] = i ? LARGEST(top[r], w[r][i]) : w[r][0];
            if (middle) {
                const vfloat y = x * load(middle + i * LANES);
                product[r][i % SUMS] = i < SUMS ? y : product[r][i % SUMS] + y;
            }
        }
    if (middle)
        totals_of((const vfloat (*)[SUMS])product, rows, offset);
    largest_of(top, rows, (float *)&largest);
    const vfour_int any = largest >= least;
    const vfour inverse = (vfour)(any & (vfour_int)(most / largest));
    const vfour steps = (vfour)(any & (vfour_int)(largest / most));
    memcpy(step, &steps, rows * sizeof(float));
    for (int r = 0; r < rows; r++) {
        vint digit[TILE_VECTORS], next[TILE_VECTORS];
        for (int i = 0; i < TILE_VECTORS; i++) {
            next[i] = nearest(w[r][i] * inverse[r]);
            digit[i] = next[i] >> 7;
            if (bits > 7)
                next[i] &= 127;
        }
        if (bits > 7)
            upper[r] = store_64((uint8_t *)digits + r * 64, digit, (vint){0});
        lower[r] = store_64((uint8_t *)digits + (bits > 7 ? next_rows + r : r) * 64, next,
                            (vint){0});
    }
    if (!digit_sum)
        return;
    int_totals_of(lower, rows, digit_sum + (bits > 7 ? next_rows : 0));
    if (bits > 7)
        int_totals_of(upper, rows, digit_sum);
}

/* For all rows. Where weights have two digits, the lower ones and their sums follow those of all
   rows. Without midpoints there are no offsets. */
static void digits_of_rows(const float *p, const float *scale, const float *middle,
                           Py_ssize_t rows, int bits, float least, int8_t *digits,
                           int32_t *digit_sum, float *step, float *offset)
{
    Py_ssize_t r = 0;
#define CALL(m, some, b) \
    digits_of(p + r * 64, scale, m, some, b, least, digits + r * 64, rows, \
              digit_sum ? digit_sum + r : NULL, \
              step + r, offset + r)
#define CALL_BITS(some, b) \
    do { \
        if (middle) \
            CALL(middle, some, b); \
        else \
            CALL(NULL, some, b); \
    } while (0)
    for (; r + DIGIT_ROWS <= rows; r += DIGIT_ROWS)
        if (bits > 7) {
            CALL_BITS(DIGIT_ROWS, 14);
        } else {
            CALL_BITS(DIGIT_ROWS, 7);
        }
    for (; r < rows; r++)
        if (bits > 7) {
            CALL_BITS(1, 14);
        } else {
            CALL_BITS(1, 7);
        }
#undef CALL
#undef CALL_BITS
}

/* out += step * sums, and then + offset unless it is NULL, for `count` channels of all rows. Every
   `size` channels have steps and offsets of their own; two digits a weight lie as above. */
INLINE void add_scaled_sums_of(const int32_t *sums, const int digits, Py_ssize_t rows,
                               Py_ssize_t count, Py_ssize_t size, const float *step,
                               const float *offset, float *out, Py_ssize_t stride)
{
    for (Py_ssize_t r = 0; r < rows; r++, sums += 64, out += stride) {
        const int32_t *low = sums + rows * 64;
        for (Py_ssize_t first = 0, at = r; first < count; first += size, at += rows) {
            const Py_ssize_t end = first + size < count ? first + size : count;
            const float factor = step[at], more = offset ? offset[at] : 0;
            Py_ssize_t c = first;
            for (; c + LANES <= end; c += LANES) {
                vint sum, other;
                memcpy(&sum, sums + c, sizeof sum);
                if (digits == 2) {
                    memcpy(&other, low + c, sizeof other);
                    sum = sum * 128 + other;
                }
                const vfloat x = load(out + c) + __builtin_convertvector(sum, vfloat) * factor;
                store(out + c, offset ? x + more : x);
            }
            for (; c < end; c++) {
                out[c] += (float)(digits == 2 ? sums[c] * 128 + low[c] : sums[c]) * factor;
                if (offset)
                    out[c] += more;
            }
        }
    }
}

static void add_scaled_sums(const int32_t *sums, int digits, Py_ssize_t rows, Py_ssize_t count,
                            Py_ssize_t size, const float *step, const float *offset, float *out,
                            Py_ssize_t stride)
{
#define CALL(d, n, s, o) add_scaled_sums_of(sums, d, rows, n, s, step, o, out, stride)
    if (digits == 1 && count == 64 && size >= 64 && !offset)
        CALL(1, 64, 64, NULL);
    else if (count == 64 && size >= 64 && !offset)
        CALL(2, 64, 64, NULL);
    else if (digits == 1 && count == 64 && size == 32 && offset)
        CALL(1, 64, 32, offset);
    else
        CALL(digits, count, size, offset);
#undef CALL
}

#endif
