# What all chapters share: number formats, sums in a fixed order, and how many threads to start.

from functools import lru_cache

import numpy as np

from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_SIMPLE,
    PyBUF_STRIDES,
    PyBuffer_IsContiguous,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cython.parallel cimport prange, threadid
from libc.math cimport INFINITY, exp, fabsf, frexp, ldexp, log, signbit, sqrt
from libc.stdint cimport INT64_MAX, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from kvcodec import _backend
from kvcodec.reference._numbers import LARGEST_MAGNITUDE, store
from kvcodec.reference.fwht import factor_order, inverse_square_root, paley_matrix

cdef extern from "fetch.h" nogil:
    enum: LINE
    enum: DUE
    ctypedef struct Fetch:
        const uint8_t *streams[4]
        Py_ssize_t keys
        Py_ssize_t values
        Py_ssize_t keys_step
        Py_ssize_t values_step
        int left
        int due
        int rate
    void fetch_line(const void *p)
    void fetch_some(Fetch *fetch, int due)


cdef extern from "simd.h" nogil:
    float round_even(float x)
    float bits_to_float(uint32_t u)
    uint32_t float_to_bits(float f)
    float exp_nonpositive(float x)
    void multiply(const float *x, const float *factors, Py_ssize_t n, float *y)

cdef extern from "hadamard.h" nogil:
    void butterflies(const float *x, const float *diagonal, Py_ssize_t n, float factor, float *y)
    void butterflies_of_rows(const float *x, const float *diagonal, Py_ssize_t rows, Py_ssize_t n,
                             float factor, float *y)
    void transform_pieces(const float *x, const float *diagonal, Py_ssize_t m, Py_ssize_t power,
                          const float *signs, Py_ssize_t stride, float factor, float *scratch,
                          float *y)


cdef extern from "codes.h" nogil:
    double dot_8(const float *a, const float *b, Py_ssize_t n)
    uint32_t center_rows(const float *x, Py_ssize_t rows, Py_ssize_t n, const float *center,
                         float *shifted)
    void fetch(const float *x, Py_ssize_t n)
    bint are_bounded(const float *x, Py_ssize_t n, float bound)
    void add_tokens(const float *x, Py_ssize_t tokens, Py_ssize_t n, double *total)
    void magnitudes_of_rows(const float *x, Py_ssize_t rows, Py_ssize_t n, float *largest)
    void ranges_of_rows(const float *x, Py_ssize_t rows, Py_ssize_t n, float *least,
                        float *largest)
    void round_codes(const float *x, Py_ssize_t n, float zero, float inverse, int offset,
                     uint8_t *codes)
    ctypedef struct Cells:
        pass
    void make_cells(Cells *cells, const float *boundaries, int count, const int8_t *levels)
    void find_cells(const float *x, Py_ssize_t n, float inverse, const Cells *cells,
                    uint8_t *codes)
    void levels_of_cells(const uint8_t *codes, Py_ssize_t n, const Cells *cells, float *levels)
    float energy_of_cells(const uint8_t *codes, Py_ssize_t n, const Cells *cells)
    void pack_pairs(const uint8_t *codes, Py_ssize_t units, uint8_t *packed)
    void pack_quads(const uint8_t *codes, Py_ssize_t units, uint8_t *packed)
    void pack_octets(const uint8_t *codes, Py_ssize_t units, uint8_t *packed)


cdef extern from "softmax.h" nogil:
    enum: ROW_AS_BYTES
    void widen_bfloat16(const uint16_t *x, Py_ssize_t count, float *out)
    void float_dots(const float *tokens, Py_ssize_t count, Py_ssize_t n, const float *rows,
                    Py_ssize_t stride, Py_ssize_t row_count, float *out, Py_ssize_t out_stride)
    void add_scaled_tokens(const float *tokens, Py_ssize_t count, Py_ssize_t n,
                           const float *weights, Py_ssize_t weights_stride, Py_ssize_t row_count,
                           float *sums, Py_ssize_t sums_stride)
    void products_of_sums(const int32_t *sums, const float *scale, float query_scale, float center,
                          bint centered, float *s)
    void scale_products(float *s, const float *scale, float center, bint centered)
    void finish_scores(float *s, float factor, float limit)
    void cap_scores(float *s, float cap)
    float probabilities_of_some(float *s, Py_ssize_t low, Py_ssize_t high, float factor,
                                float limit, float *largest, float *lanes)
    float probabilities_of_products(float *s, float factor, float limit, float *largest,
                                    float *lanes)
    void probabilities_of_sums(const int32_t *sums, const float *scale, const float *query_scale,
                               const float *center, const float *factor, float limit,
                               Py_ssize_t rows, Py_ssize_t low, Py_ssize_t high, float *largest,
                               float *lanes, float *p, float *ratio, Fetch *fetch)
    void center_dots(const int16_t *q, Py_ssize_t stride, Py_ssize_t rows, const int8_t *center,
                     Py_ssize_t n, int32_t *out)
    void products_of_groups(const int32_t *sums, const float *scale, const float *offset,
                            Py_ssize_t next, float *s)
    void probabilities_of_groups(const int32_t *sums, const float *scale, const float *offset,
                                 Py_ssize_t next, const float *factor, float limit,
                                 Py_ssize_t rows, Py_ssize_t low, Py_ssize_t high, float *largest,
                                 float *lanes, float *p, float *ratio, Fetch *fetch)


cdef extern from "weights.h" nogil:
    void digits_of_rows(const float *p, const float *scale, const float *middle, Py_ssize_t rows,
                        int bits, float least, int8_t *digits, int32_t *digit_sum, float *step,
                        float *offset)
    void add_scaled_sums(const int32_t *sums, int digits, Py_ssize_t rows, Py_ssize_t count,
                         Py_ssize_t size, const float *step, const float *offset, float *out,
                         Py_ssize_t stride)


cdef extern from "fold.h" nogil:
    enum: FOLD_AS_BYTES
    enum: ROUND_AS_BYTES
    ctypedef struct Folded:
        int8_t *levels
        int32_t *sums
        float *scale
        float *offset
        Py_ssize_t lanes
        Py_ssize_t next
    void load_group(const void *scales, const void *zero_points, Py_ssize_t at, Py_ssize_t n,
                    bint bfloat16, float half, float *scale, float *middle)
    void fold_rows(const float *q, Py_ssize_t stride, Py_ssize_t rows, const float *scale,
                   const float *middle, Py_ssize_t n, Py_ssize_t depth, float *y,
                   const Folded *folded)
    void load_channel_groups(const void *scales, const void *zero_points, Py_ssize_t at,
                             Py_ssize_t groups, Py_ssize_t tokens, bint bfloat16, float half,
                             float *scale, float *middle)


cdef enum:
    TOGETHER = 8               # vectors that take each step of encoding together


# A small call would take longer to find these than to use them.
cdef object ndarray = np.ndarray
cdef object empty = np.empty
cdef object float32 = np.dtype(np.float32)
cdef float LARGEST = LARGEST_MAGNITUDE


cdef int threads_for(Py_ssize_t elements):
    """Threads for a call: one where it would end before a second had started."""
    return _backend.num_threads() if elements >= _backend.PARALLEL_FROM else 1


cdef inline float round_scale(float scale, bint bfloat16) noexcept nogil:
    if scale <= 0:
        return 0
    if bfloat16:
        scale = bits_to_float((float_to_bits(scale) + 0xFFFFu) & 0xFFFF0000u)
    return scale if scale > <float>1.1754943508222875e-38 else <float>1.1754943508222875e-38


cdef inline float round_down_to_bfloat16(float x) noexcept nogil:
    cdef uint32_t bits = float_to_bits(x)
    return bits_to_float((bits + (0xFFFFu if bits >> 31 else 0u)) & 0xFFFF0000u)


cdef inline float reciprocal(float scale) noexcept nogil:
    return 1 / scale if scale > 0 else 0


cdef inline float largest_magnitude(const float *x, Py_ssize_t n) noexcept nogil:
    """max |x_i|; non-negative floats are ordered like their bits, which vectorizes."""
    cdef const int32_t *bits = <const int32_t *> x
    cdef int32_t largest = 0, magnitude
    cdef Py_ssize_t i
    for i in range(n):
        magnitude = bits[i] & 0x7FFFFFFF
        largest = magnitude if magnitude > largest else largest
    return bits_to_float(largest)


cdef inline float sum_of_16(float *lane) noexcept nogil:
    """The tree of halves at the end of a sum in 16 lanes."""
    cdef int i
    for i in range(8):
        lane[i] = lane[i] + lane[i + 8]
    for i in range(4):
        lane[i] = lane[i] + lane[i + 4]
    return (lane[0] + lane[2]) + (lane[1] + lane[3])


cdef inline float load_scale(const void *stored, Py_ssize_t index, bint bfloat16) noexcept nogil:
    if bfloat16:
        return bits_to_float(<uint32_t> (<const uint16_t *> stored)[index] << 16)
    return (<const float *> stored)[index]


cdef inline void store_scale(void *stored, Py_ssize_t index, float scale,
                             bint bfloat16) noexcept nogil:
    if bfloat16:
        (<uint16_t *> stored)[index] = float_to_bits(scale) >> 16
    else:
        (<float *> stored)[index] = scale


cdef class Memory:
    """Memory of so many bytes on a cache line, for as long as the object lives."""
    cdef char *raw
    cdef char *start

    def __cinit__(self, Py_ssize_t size):
        self.raw = <char *> malloc(size + 64)
        if self.raw == NULL:
            raise MemoryError
        self.start = <char *> ((<size_t> self.raw + 63) // 64 * 64)

    def __dealloc__(self):
        free(self.raw)


cdef Py_ssize_t rows_of(x):
    """Rows of an array whose last axis is the vector."""
    return x.size // x.shape[-1] if x.shape[-1] else 0


cdef const void *address(x):
    """Where the elements of a NumPy array are; NULL for None and for an empty array."""
    cdef Py_buffer view
    if x is None or x.size == 0:
        return NULL
    PyObject_GetBuffer(x, &view, PyBUF_SIMPLE)
    PyBuffer_Release(&view)  # the caller keeps x, and with it the memory
    return view.buf


cdef inline char *take(char *base, Py_ssize_t *at, Py_ssize_t size) noexcept nogil:
    """The next array of a thread's scratch, on a cache line."""
    cdef char *address = base + at[0]
    at[0] += (size + 63) // 64 * 64
    return address


cdef char *aligned(uint8_t[::1] scratch, Py_ssize_t thread_bytes, Py_ssize_t thread) noexcept nogil:
    """The scratch of a thread, on a cache line."""
    cdef size_t base = (<size_t> &scratch[0] + 63) // 64 * 64
    return <char *> (base + thread * thread_bytes)


cdef float largest_from_the_end(const float *x, Py_ssize_t n) noexcept nogil:
    """max |x_i|, read backwards: what follows finds the start of x in the cache."""
    cdef Py_ssize_t part = 8192, i
    cdef float largest[2]
    largest[0] = 0
    for i in range((n + part - 1) // part - 1, -1, -1):
        largest[1] = largest_magnitude(x + i * part, part if (i + 1) * part < n else n - i * part)
        largest[0] = largest_magnitude(largest, 2)
    return largest[0]


cdef float largest_of_all(const float *x, Py_ssize_t size):
    """max |x_i|, NaN where there is one: NaNs have the largest bits of all."""
    cdef Py_ssize_t share
    cdef int threads = threads_for(size // 4), thread
    if threads == 1:
        return largest_from_the_end(x, size)
    share = size // threads
    cdef float[::1] largest = np.empty(threads, dtype=np.float32)
    for thread in prange(threads, nogil=True, num_threads=threads, schedule="static"):
        largest[thread] = largest_from_the_end(
            x + thread * share, share if thread < threads - 1 else size - thread * share)
    return largest_magnitude(&largest[0], threads)


def largest_magnitude_of(x):
    """max |x_i| of a float32 array, NaN where it holds one."""
    return largest_of_all(<const float *> address(x), x.size)
