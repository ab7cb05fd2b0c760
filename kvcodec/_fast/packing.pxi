# Packed layouts. Rows are independent bit streams; a row of 2-, 4- or 8-bit codes (and padded
# 3-bit ones) is packed byte by byte from 8 / width neighbors, a dense row of 3-bit codes in units
# of eight codes and three bytes. Unpacking maps each code to its int8 level by a table of 2^width
# entries. Threads take rows.

cdef inline void pack_row(const uint8_t *codes, Py_ssize_t n, int width,
                          uint8_t *packed) noexcept nogil:
    cdef Py_ssize_t whole
    cdef uint32_t unit
    cdef int j
    if width == 8:
        memcpy(packed, codes, n)
    elif width == 4:
        whole = n // 2
        pack_pairs(codes, whole, packed)
        if n % 2:
            packed[whole] = codes[n - 1]
    elif width == 2:
        whole = n // 4
        pack_quads(codes, whole, packed)
        if n % 4:
            packed[whole] = 0
            for j in range(n % 4):
                packed[whole] |= codes[4 * whole + j] << 2 * j
    else:
        whole = n // 8
        pack_octets(codes, whole, packed)
        if n % 8:
            unit = 0
            for j in range(n % 8):
                unit |= <uint32_t> codes[8 * whole + j] << 3 * j
            for j in range((3 * (n % 8) + 7) // 8):
                packed[3 * whole + j] = unit >> 8 * j


cdef inline void pack_rows(const uint8_t *codes, Py_ssize_t rows, Py_ssize_t n, int width,
                           uint8_t *packed) noexcept nogil:
    cdef Py_ssize_t row, row_bytes = (n * width + 7) // 8
    if n % 8 == 0:  # rows end with a byte, so that together they are one long row
        n = n * rows
        rows = 1
    for row in range(rows):
        pack_row(codes + row * n, n, width, packed + row * row_bytes)


cdef inline void unpack_row(const uint8_t *packed, Py_ssize_t n, int width, const int8_t *levels,
                            int8_t *out) noexcept nogil:
    """out[i] = levels[code i]; levels has 2^width entries."""
    cdef Py_ssize_t i, whole
    cdef uint32_t unit
    cdef int j
    if width == 8:
        for i in range(n):
            out[i] = levels[packed[i]]
    elif width == 4:
        whole = n // 2
        for i in range(whole):
            out[2 * i] = levels[packed[i] & 15]
            out[2 * i + 1] = levels[packed[i] >> 4]
        if n % 2:
            out[n - 1] = levels[packed[whole] & 15]
    elif width == 2:
        whole = n // 4
        for i in range(whole):
            for j in range(4):
                out[4 * i + j] = levels[packed[i] >> 2 * j & 3]
        for j in range(n % 4):
            out[4 * whole + j] = levels[packed[whole] >> 2 * j & 3]
    else:
        whole = n // 8
        for i in range(whole):
            unit = packed[3 * i] | packed[3 * i + 1] << 8 | packed[3 * i + 2] << 16
            for j in range(8):
                out[8 * i + j] = levels[unit >> 3 * j & 7]
        if n % 8:
            unit = 0
            for j in range((3 * (n % 8) + 7) // 8):
                unit |= <uint32_t> packed[3 * whole + j] << 8 * j
            for j in range(n % 8):
                out[8 * whole + j] = levels[unit >> 3 * j & 7]


def pack(codes, int bits, str layout):
    """Pack the last axis of uint8 codes."""
    cdef int width = 4 if layout == "padded" else bits
    cdef Py_ssize_t n = codes.shape[codes.ndim - 1], rows = rows_of(codes), row
    cdef Py_ssize_t row_bytes = (n * width + 7) // 8
    cdef int threads = threads_for(rows * n)
    packed = np.empty(codes.shape[:-1] + (row_bytes,), dtype=np.uint8)
    cdef const uint8_t *source = <const uint8_t *> address(codes)
    cdef uint8_t *target = <uint8_t *> address(packed)
    for row in prange(rows, nogil=True, num_threads=threads, schedule="static"):
        pack_row(source + row * n, n, width, target + row * row_bytes)
    return packed


def unpack(packed, Py_ssize_t n, int bits, str layout):
    """Unpack the first n codes of each row."""
    cdef int width = 4 if layout == "padded" else bits
    cdef Py_ssize_t row_bytes = packed.shape[packed.ndim - 1], rows = rows_of(packed), row
    cdef int threads = threads_for(rows * n)
    codes = np.empty(packed.shape[:-1] + (n,), dtype=np.uint8)
    identity = (np.arange(1 << width, dtype=np.uint8) & ((1 << bits) - 1)).view(np.int8)
    cdef const int8_t *levels = <const int8_t *> address(identity)
    cdef const uint8_t *source = <const uint8_t *> address(packed)
    cdef int8_t *target = <int8_t *> address(codes)
    for row in prange(rows, nogil=True, num_threads=threads, schedule="static"):
        unpack_row(source + row * row_bytes, n, width, levels, target + row * n)
    return codes
