# KIVI's asymmetric codes. For groups of tokens a lane is a channel: the minimum and maximum of all
# channels are kept side by side while the tokens of the group pass by, then the group is coded in
# a second pass. Groups of channels are rows that share the steps across lanes (codes.h), and the
# scales of some tokens are found together. Threads take groups of tokens, or tokens.

cdef inline void group_range(float low, float high, int bits, bint bfloat16, float *scale,
                             float *zero_point) noexcept nogil:
    """Scale and zero point of a group from its least and its largest member."""
    cdef float zero = (round_down_to_bfloat16(low) if bfloat16 else low) + 0
    cdef float steps = 1 if low == high else (1 << bits) - 1
    zero_point[0] = zero
    scale[0] = round_scale((high - zero) / steps, bfloat16)


cdef inline uint8_t asymmetric_code(float x, float zero_point, float inverse,
                                    float largest) noexcept nogil:
    cdef float y = round_even((x - zero_point) * inverse)
    y = y if y < largest else largest
    y = y if y > 0 else 0
    return <uint8_t> <int32_t> y


cdef inline void asymmetric_tokens(const float *x, Py_ssize_t tokens, Py_ssize_t n, int bits,
                                   bint bfloat16, float *scale, float *zero_point, float *inverse,
                                   uint8_t *codes) noexcept nogil:
    """Code one group of tokens by channel; inverse is scratch for n floats."""
    cdef float largest = (1 << bits) - 1
    cdef Py_ssize_t t, c
    cdef float value
    for c in range(n):
        zero_point[c] = x[c]
        scale[c] = x[c]
    for t in range(1, tokens):
        for c in range(n):
            value = x[t * n + c]
            zero_point[c] = value if value < zero_point[c] else zero_point[c]
            scale[c] = value if value > scale[c] else scale[c]
    for c in range(n):
        group_range(zero_point[c], scale[c], bits, bfloat16, &scale[c], &zero_point[c])
        inverse[c] = reciprocal(scale[c])
    for t in range(tokens):
        for c in range(n):
            codes[t * n + c] = asymmetric_code(x[t * n + c], zero_point[c], inverse[c], largest)


cdef inline void asymmetric_channels(const float *x, Py_ssize_t rows, Py_ssize_t n, int bits,
                                     Py_ssize_t group_size, bint bfloat16, float *scale,
                                     float *zero_point, float *inverse,
                                     uint8_t *codes) noexcept nogil:
    """Code some tokens by groups of channels; inverse is scratch for a float for each group."""
    cdef Py_ssize_t whole = n // group_size, rest = n % group_size
    cdef Py_ssize_t groups = whole + (rest > 0), row, group, start
    for row in range(rows):
        ranges_of_rows(x + row * n, whole, group_size, zero_point + row * groups,
                       scale + row * groups)
        if rest:
            group = row * groups + whole
            ranges_of_rows(x + (row + 1) * n - rest, 1, rest, zero_point + group, scale + group)
    for group in range(rows * groups):
        group_range(zero_point[group], scale[group], bits, bfloat16, &scale[group],
                    &zero_point[group])
        inverse[group] = reciprocal(scale[group])
    for row in range(rows):
        for group in range(row * groups, (row + 1) * groups):
            start = row * n + (group - row * groups) * group_size
            round_codes(x + start, min(group_size, (row + 1) * n - start), zero_point[group],
                        inverse[group], 0, codes + start)


def quantize_asymmetric(x, int bits, Py_ssize_t group_size, str axis, str scale_dtype):
    """Codes, scale and zero point of x (..., tokens, channels)."""
    cdef Py_ssize_t tokens = x.shape[x.ndim - 2], n = x.shape[x.ndim - 1]
    cdef Py_ssize_t outer = x.size // (tokens * n) if tokens * n else 0
    cdef bint by_token = axis == "token", bfloat16 = scale_dtype == "bfloat16"
    cdef Py_ssize_t length = tokens if by_token else n
    cdef Py_ssize_t groups = (length + group_size - 1) // group_size
    cdef Py_ssize_t task, tasks = outer * (groups if by_token else tokens), first, members
    cdef int threads = threads_for(outer * tokens * n)
    shape = x.shape[:-2] + ((groups, n) if by_token else (tokens, groups))
    codes = np.empty(x.shape, dtype=np.uint8)
    scale = np.empty(shape, dtype=np.float32)
    zero_point = np.empty(shape, dtype=np.float32)
    cdef float[:, ::1] inverse = np.empty((threads, n), dtype=np.float32)
    cdef const float *source = <const float *> address(x)
    cdef uint8_t *target = <uint8_t *> address(codes)
    cdef float *scales = <float *> address(scale)
    cdef float *zeros = <float *> address(zero_point)
    for task in prange(tasks, nogil=True, num_threads=threads, schedule="static"):
        if by_token:
            first = task // groups * tokens + task % groups * group_size
            members = tokens - task % groups * group_size
            members = group_size if members > group_size else members
            asymmetric_tokens(source + first * n, members, n, bits, bfloat16, scales + task * n,
                              zeros + task * n, &inverse[threadid(), 0], target + first * n)
        else:
            asymmetric_channels(source + task * n, 1, n, bits, group_size, bfloat16,
                                scales + task * groups, zeros + task * groups,
                                &inverse[threadid(), 0], target + task * n)
    return codes, scale, zero_point


def dequantize_asymmetric(codes, scale, zero_point, Py_ssize_t group_size, str axis):
    """zero_point + code * scale."""
    cdef Py_ssize_t tokens = codes.shape[codes.ndim - 2], n = codes.shape[codes.ndim - 1]
    cdef Py_ssize_t rows = rows_of(codes), row, c, at
    cdef bint by_token = axis == "token"
    cdef Py_ssize_t length = tokens if by_token else n
    cdef Py_ssize_t groups = (length + group_size - 1) // group_size
    cdef int threads = threads_for(rows * n)
    out = np.empty(codes.shape, dtype=np.float32)
    cdef const uint8_t *source = <const uint8_t *> address(codes)
    cdef const float *scales = <const float *> address(scale)
    cdef const float *zeros = <const float *> address(zero_point)
    cdef float *target = <float *> address(out)
    for row in prange(rows, nogil=True, num_threads=threads, schedule="static"):
        for c in range(n):
            if by_token:
                at = (row // tokens * groups + row % tokens // group_size) * n + c
            else:
                at = row * groups + c // group_size
            target[row * n + c] = zeros[at] + source[row * n + c] * scales[at]
    return out
