# The scratch of attention. All that a thread needs for a task lies in one piece of memory: queries
# in the forms that products take, a tile's scores and weights, and the running softmax.

cdef enum:
    DEPTH = 64                 # rows of integers are filled up to whole chunks of any width


cdef struct Options:
    double scale
    float softcap              # 0 for none
    bint integer_query
    int probability_bits       # 0 for floating point


cdef struct Sums:
    # Running softmax of the rows over some tokens; what it weighs is scaled like exp(-largest).
    float *largest             # (rows): maximum of the scores
    double *sum                # (rows): sum of the probabilities
    float *lanes               # (rows, 16): the same while tiles are added, in 16 lanes
    float *values              # (accumulators, rows, n)


cdef struct Work:
    # Scratch of one thread; rows is the most query rows of a task, n the largest head_dim, sets the
    # most groups that lie together in a tile.
    Py_ssize_t rows
    Py_ssize_t n
    Py_ssize_t depth           # n up to a multiple of DEPTH
    float *query               # (rows, n): without its power of two
    float *rotated             # (rows, depth): weighted and rotated like the keys
    float *factor              # (rows): turns products into scores
    int8_t *rounded            # (rows, depth)
    float *rounded_scale       # (rows)
    int32_t *rounded_sum       # (rows)
    int16_t *center_query      # (rows, n)
    float *center_query_scale  # (rows)
    uint8_t *tile              # a tile that had to be laid out
    uint8_t *codes             # (TILE, n)
    float *tokens              # (TILE, n): exact or dequantized
    float *scale               # (TILE): of the tokens of a tile, the sign telling what is centered
    float *scores              # (rows, TILE): products, then probabilities
    float *center              # (rows): products with the center of the tile
    int32_t *center_sum        # (rows): the same as integers
    float *ratio               # (rows): what the sums so far are to be multiplied with
    bint in_sums               # whether the products are to be taken from the sums
    int32_t *sums              # (n in pieces of TILE, 2 * rows, TILE): of a tile
    float *channel_scales      # (2 * n, TILE): scales, then midpoints of groups of channels
    int8_t *digits             # (sets, 2 * rows, TILE): rounded weights, first their upper 7 bits
    int32_t *digit_sum         # (sets, 2 * rows)
    float *step                # (sets, rows): of the rounded weights
    float *midpoints           # (sets, rows): weights times midpoints
    float *row                 # (n)
    float *middle              # (n): midpoints of a group
    float *products            # (4, depth): of rows with the scales of a group
    int8_t *folded             # (4, rows, depth): query times the scales of a group
    int32_t *folded_sum        # (4, rows)
    float *folded_scale        # (4, rows): for each GROUP tokens
    float *offset              # (4, rows): query times midpoints
    Sums part
    Sums total
    Py_ssize_t tile_rows       # for dot_products
    Product *piece             # products with pieces of the channels of a tile of values
    Py_ssize_t low             # tokens of the tile that some row sees: low <= t < high
    Py_ssize_t high
    Fetch fetch


cdef inline Py_ssize_t pieces_of(Py_ssize_t n) noexcept nogil:
    """Channels are summed TILE at a time."""
    return max(<Py_ssize_t> 1, (n + TILE - 1) // TILE)


cdef void carve_sums(char *base, Py_ssize_t *at, Sums *sums, Py_ssize_t rows, Py_ssize_t n,
                     Py_ssize_t accumulators) noexcept nogil:
    sums.largest = <float *> take(base, at, rows * 4)
    sums.sum = <double *> take(base, at, rows * 8)
    sums.lanes = <float *> take(base, at, rows * 16 * 4)
    sums.values = <float *> take(base, at, accumulators * rows * n * 4)


cdef Py_ssize_t carve(char *base, Work *work, Py_ssize_t rows, Py_ssize_t n,
                      Py_ssize_t accumulators) noexcept nogil:
    """Lay the arrays of a thread's scratch out from base; returns the bytes they need."""
    cdef Py_ssize_t at = 0, depth = (n + DEPTH - 1) // DEPTH * DEPTH, sets = depth // GROUP
    work.rows = rows
    work.n = n
    work.depth = depth
    work.tile_rows = 0
    memset(&work.fetch, 0, sizeof(Fetch))
    work.query = <float *> take(base, &at, rows * n * 4)
    work.rotated = <float *> take(base, &at, rows * depth * 4)
    work.factor = <float *> take(base, &at, rows * 4)
    work.rounded = <int8_t *> take(base, &at, rows * depth)
    work.rounded_scale = <float *> take(base, &at, rows * 4)
    work.rounded_sum = <int32_t *> take(base, &at, rows * 4)
    work.center_query = <int16_t *> take(base, &at, rows * n * 2)
    work.center_query_scale = <float *> take(base, &at, rows * 4)
    work.tile = <uint8_t *> take(base, &at, TILE * depth)
    work.codes = <uint8_t *> take(base, &at, TILE * n)
    work.tokens = <float *> take(base, &at, TILE * n * 4)
    work.scale = <float *> take(base, &at, TILE * 4)
    work.scores = <float *> take(base, &at, rows * TILE * 4)
    work.center = <float *> take(base, &at, rows * 4)
    work.center_sum = <int32_t *> take(base, &at, rows * 4)
    work.ratio = <float *> take(base, &at, rows * 4)
    work.sums = <int32_t *> take(base, &at, pieces_of(n) * 2 * rows * TILE * 4)
    work.piece = <Product *> take(base, &at, pieces_of(n) * sizeof(Product))
    work.channel_scales = <float *> take(base, &at, 2 * n * TILE * 4)
    work.digits = <int8_t *> take(base, &at, sets * 2 * rows * TILE)
    work.digit_sum = <int32_t *> take(base, &at, sets * 2 * rows * 4)
    work.step = <float *> take(base, &at, sets * rows * 4)
    work.midpoints = <float *> take(base, &at, sets * rows * 4)
    work.row = <float *> take(base, &at, n * 4)
    work.middle = <float *> take(base, &at, n * 4)
    work.products = <float *> take(base, &at, 4 * depth * 4)
    work.folded = <int8_t *> take(base, &at, 4 * rows * depth)
    work.folded_sum = <int32_t *> take(base, &at, 4 * rows * 4)
    work.folded_scale = <float *> take(base, &at, 4 * rows * 4)
    work.offset = <float *> take(base, &at, 4 * rows * 4)
    carve_sums(base, &at, &work.part, rows, n, 1)
    carve_sums(base, &at, &work.total, rows, n, accumulators)
    return at
