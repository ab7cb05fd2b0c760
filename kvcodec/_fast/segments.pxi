# Segments as plain C. A segment's tokens lie in two arrays, or in the pages of two Blocks; either
# way a kernel goes through units, stretches of tokens that lie in one array per side. Spans are
# where running softmaxes begin anew: at token numbers that are multiples of 1,024, with the next
# unit where tokens lie in pages.

from kvcodec import blocks as _blocks

cdef enum:
    SPLIT = 1024               # tokens under one running softmax

if _blocks.TILE != TILE:
    raise ImportError("segments.pxi and blocks.py must agree about the size of a tile.")


cdef struct Place:
    # Where a unit lies: in which page, as which of how many.
    int page
    int inside
    int units


cdef struct Part:
    # A segment: both sides, what each query sees, and which accumulator its values go to. The
    # sides are arrays, or what the pages of a Blocks have in common, pages being NULL for arrays.
    Side keys
    Side values
    const Side *key_pages
    const Side *value_pages
    const Place *key_places    # of each unit
    const Place *value_places
    const int64_t *first       # of each unit of pages, the number of its first token
    const int64_t *count       # of each unit, its tokens
    Py_ssize_t units
    int64_t number             # of the first token of an array
    Py_ssize_t kv_heads
    const int64_t *start
    const int64_t *stop
    Py_ssize_t accumulator


cdef struct Span:
    # Tokens of a segment under one running softmax: some units, or a stretch of an array.
    Py_ssize_t part
    Py_ssize_t first_unit
    Py_ssize_t last_unit
    int64_t start
    int64_t stop


cdef struct Unit:
    # A stretch of tokens that lies in one array per side: where, and the number of its first.
    const Side *keys
    const Side *values
    Py_ssize_t key_head        # of the array, (batch, kv_heads) or (kv_heads, units)
    Py_ssize_t value_head
    int64_t number
    int64_t tokens


cdef inline Unit unit_of(const Part *part, Py_ssize_t head, Py_ssize_t kv_head,
                         Py_ssize_t index) noexcept nogil:
    """The index-th unit, for a head among those of all batch rows and within its own."""
    cdef Unit unit
    cdef Place place
    if part.key_pages == NULL:
        unit.keys = &part.keys
        unit.values = &part.values
        unit.key_head = unit.value_head = head
        unit.number = 0
        unit.tokens = part.keys.tokens
    else:
        place = part.key_places[index]
        unit.keys = part.key_pages + place.page
        unit.key_head = kv_head * place.units + place.inside
        place = part.value_places[index]
        unit.values = part.value_pages + place.page
        unit.value_head = kv_head * place.units + place.inside
        unit.number = part.first[index]
        unit.tokens = part.count[index]
    return unit


LEVEL = __name__               # tables of the SIMD levels point to plans of their own


cdef class PageTable:
    """The pages of a Blocks as plain C; the Blocks drops it when its pages change."""
    cdef Side *sides
    cdef Place *places
    cdef CodecPlan plan
    cdef list pages

    def __cinit__(self, blocks):
        cdef Py_ssize_t i, unit = 0
        cdef Place place
        self.pages = list(blocks.pages)
        if blocks.codec is not None:
            self.plan = plan_for(blocks.codec, blocks.head_dim)
        self.sides = <Side *> malloc(max(1, len(self.pages)) * sizeof(Side))
        self.places = <Place *> malloc(max(1, blocks.room) * sizeof(Place))
        if self.sides == NULL or self.places == NULL:
            raise MemoryError
        for i in range(len(self.pages)):
            self.sides[i] = side_of_page(self.pages[i], self.plan, blocks.head_dim)
            place.page, place.units = i, _blocks.units_of(self.pages[i])
            for place.inside in range(place.units):
                self.places[unit] = place
                unit += 1

    def __dealloc__(self):
        free(self.sides)
        free(self.places)


cdef PageTable pages_of(x, Side *side, list keep):
    """The pages of a Blocks; fills what all of them have in common."""
    cdef dict tables = x.tables
    cdef PageTable table = tables.get(LEVEL)
    if table is None:
        table = tables[LEVEL] = PageTable(x)
    memset(side, 0, sizeof(Side))
    side.n = x.head_dim
    if table.plan is not None:
        weights = x.weights
        keep += (table, weights)
        side.plan = &table.plan.plan
        side.weights = <const float *> address(weights)
    else:
        keep.append(table)
    return table


cdef Part part_of(segment, list keep):
    """A segment as plain C; its accumulator is not set."""
    cdef Part part
    keys, values, start, stop, number = segment
    if isinstance(keys, _blocks.Blocks):
        part = paged_part(keys, values, keep)
    else:
        part = array_part(keys, values, number, keep)
    part.start = <const int64_t *> address(start)
    part.stop = <const int64_t *> address(stop)
    return part


cdef Part array_part(keys, values, int64_t number, list keep):
    """Tokens in two arrays, the first of this number; what queries see is not set."""
    cdef Part part
    memset(&part, 0, sizeof(Part))
    part.keys = side_of(keys, keep)
    part.values = side_of(values, keep)
    part.kv_heads = part.keys.heads
    part.number = number
    part.units = 1
    if part.keys.tokens != part.values.tokens:
        raise ValueError("segments must have keys and values of the same tokens.")
    return part


cdef Part paged_part(keys, values, list keep):
    """Tokens in the pages of two Blocks; what queries see is not set.

    Without tokens they are taken for arrays, empty ones.
    """
    cdef Part part
    memset(&part, 0, sizeof(Part))
    part.kv_heads = keys.heads
    part.keys.n, part.values.n = keys.head_dim, values.head_dim
    part.units = keys.units
    if not isinstance(values, _blocks.Blocks) or part.units != values.units:
        raise ValueError("segments must have keys and values of the same tokens.")
    if part.units == 0:
        return part
    cdef PageTable key_table = pages_of(keys, &part.keys, keep)
    cdef PageTable value_table = pages_of(values, &part.values, keep)
    part.key_pages, part.key_places = key_table.sides, key_table.places
    part.value_pages, part.value_places = value_table.sides, value_table.places
    first, count = keys.first, keys.count
    keep += (first, count)
    part.first = <const int64_t *> address(first)
    part.count = <const int64_t *> address(count)
    return part


cdef Py_ssize_t most_spans(const Part *part) noexcept nogil:
    return part.units if part.key_pages != NULL else part.keys.tokens // SPLIT + 2


cdef Py_ssize_t cut_part(const Part *part, Py_ssize_t index, Span *spans) noexcept nogil:
    """Cut a segment into spans at token numbers that are multiples of SPLIT."""
    cdef Py_ssize_t count = 0, unit
    cdef int64_t at = 0, tokens = part.keys.tokens
    cdef Span *span
    if part.key_pages == NULL:
        while at < tokens:
            span = spans + count
            span.part = index
            span.first_unit, span.last_unit = 0, 1
            span.start = at
            at = min(((part.number + at) // SPLIT + 1) * SPLIT - part.number, tokens)
            span.stop = at
            count += 1
        return count
    for unit in range(part.units):
        at = part.first[unit]
        if count and spans[count - 1].start // SPLIT == at // SPLIT:
            span = spans + count - 1
            span.last_unit = unit + 1
        else:
            span = spans + count
            span.part = index
            span.first_unit, span.last_unit = unit, unit + 1
            span.start = at
            count += 1
        span.stop = at + part.count[unit]
    return count
