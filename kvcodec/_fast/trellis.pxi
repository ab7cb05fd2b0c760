# Trellis codes. Viterbi's algorithm for a row at a time, SIMD over its states (trellis.h), and the
# scale before and after it as in lloyd_max.pxi. Threads take rows. For attention a tile of streams
# becomes one of 8-bit levels (trellis_tiles.h), which the kernels of 8-bit codes multiply.

cdef extern from "trellis.h" nogil:
    enum:
        WINDOWS
    ctypedef struct Trellis:
        const uint8_t *biased
    void make_trellis(Trellis *trellis, const int8_t *levels, int bits)
    void ring_codes(const float *x, Py_ssize_t n, float inverse, const Trellis *trellis,
                    int16_t *target, uint8_t *oldest, uint8_t *codes, float *y)
    void levels_of_codes(const uint8_t *codes, Py_ssize_t n, int bits, const int8_t *levels,
                         int8_t *out)
    void trellis_row_levels(const uint8_t *packed, Py_ssize_t n, int bits, const uint8_t *table,
                            uint8_t *out)

cdef extern from "trellis_tiles.h" nogil:
    Py_ssize_t stream_tile_bytes(Py_ssize_t n, int bits, bint values)
    void expand_stream_tile(const uint8_t *tile, Py_ssize_t n, bint values,
                            const Trellis *trellis, uint8_t *out)


cdef struct TrellisPlan:
    Trellis trellis
    int bits
    double step
    int scale_rule


cdef void make_trellis_plan(TrellisPlan *plan, levels, double step, int bits, str scale_rule):
    make_trellis(&plan.trellis, <const int8_t *> address(levels), bits)
    plan.bits = bits
    plan.step = step
    plan.scale_rule = SCALE_RULES[scale_rule]


cdef struct TrellisScratch:
    float *y                   # (n)
    int16_t *target            # (2 * n)
    uint8_t *oldest            # (n, states)


cdef Py_ssize_t carve_trellis(char *base, Py_ssize_t at, Py_ssize_t n, int bits,
                              TrellisScratch *scratch) noexcept nogil:
    """Lay scratch out from base + at; returns where it ends."""
    scratch.y = <float *> take(base, &at, n * 4)
    scratch.target = <int16_t *> take(base, &at, 4 * n)
    scratch.oldest = <uint8_t *> take(base, &at, n * (WINDOWS >> bits))
    return at


cdef inline float trellis_row(const float *x, Py_ssize_t n, const TrellisPlan *plan,
                              bint bfloat16, const TrellisScratch *scratch,
                              uint8_t *codes) noexcept nogil:
    """Write the codes of one vector and return its scale."""
    cdef double norm = sqrt(dot_8(x, x, n))
    cdef float scale = round_scale(<float> (norm * plan.step), bfloat16)
    ring_codes(x, n, reciprocal(scale), &plan.trellis, scratch.target, scratch.oldest, codes,
               NULL if plan.scale_rule == NORM else scratch.y)
    if plan.scale_rule != NORM:
        scale = round_scale(fitted_scale(x, scratch.y, n, norm, plan.scale_rule), bfloat16)
    return scale


def quantize_trellis(x, levels, double step, int bits, str scale_rule, str scale_dtype):
    """Codes and scales of the vectors along the last axis."""
    cdef Py_ssize_t n = x.shape[x.ndim - 1], rows = rows_of(x), row
    cdef bint bfloat16 = scale_dtype == "bfloat16"
    cdef int threads = threads_for(rows * n), thread
    cdef TrellisPlan plan
    cdef TrellisScratch unused
    make_trellis_plan(&plan, levels, step, bits, scale_rule)
    cdef Py_ssize_t thread_bytes = carve_trellis(NULL, 0, n, bits, &unused)
    cdef Memory memory = Memory(threads * thread_bytes)
    cdef Memory room = Memory(threads * sizeof(TrellisScratch))
    cdef TrellisScratch *scratch = <TrellisScratch *> room.start
    for thread in range(threads):
        carve_trellis(memory.start + thread * thread_bytes, 0, n, bits, scratch + thread)
    codes = np.empty(x.shape, dtype=np.uint8)
    scale = np.empty(x.shape[:-1], dtype=np.float32)
    cdef const float *source = <const float *> address(x)
    cdef uint8_t *target = <uint8_t *> address(codes)
    cdef float *scales = <float *> address(scale)
    for row in prange(rows, nogil=True, num_threads=threads, schedule="static"):
        scales[row] = trellis_row(source + row * n, n, &plan, bfloat16, scratch + threadid(),
                                  target + row * n)
    return codes, scale[()]


def dequantize_trellis(codes, levels, scale, int bits):
    """levels[window] times scale."""
    cdef Py_ssize_t n = codes.shape[codes.ndim - 1], rows = rows_of(codes), row
    cdef int threads = threads_for(rows * n)
    found = np.empty(codes.shape, dtype=np.int8)
    cdef const uint8_t *source = <const uint8_t *> address(codes)
    cdef const int8_t *table = <const int8_t *> address(levels)
    cdef int8_t *target = <int8_t *> address(found)
    for row in prange(rows, nogil=True, num_threads=threads, schedule="static"):
        levels_of_codes(source + row * n, n, bits, table, target + row * n)
    return dequantize_symmetric(found, scale)
