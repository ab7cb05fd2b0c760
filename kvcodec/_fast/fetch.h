/* Fetching what is read next. One core keeps few requests of its own under way; the processor's
   prefetcher keeps more, but along each page of 4 KiB it runs only some lines ahead of where the
   page was last touched. So while some tiles of keys and of values are read, both halves of as many
   tiles that follow are touched line by line in turn: each of these four streams goes through
   pages of its own, slowly enough for the prefetcher to have a line there before it is asked for.
   The touches are spread evenly over the products, which leave room for them, and over the softmax
   of the rows, during which memory would be idle. */

#ifndef KVCODEC_FETCH_H
#define KVCODEC_FETCH_H

#include <stdint.h>

/* A touch is due when so much came together. */
enum { LINE = 64, STREAMS = 4, DUE = 1 << 16 };

typedef struct {
    const uint8_t *streams[STREAMS];       /* both halves of the keys, then of the values */
    Py_ssize_t keys, keys_step;            /* where in them to touch next */
    Py_ssize_t values, values_step;
    int left;                              /* touches, however often a tile is read */
    int due;                               /* of the next one, minus DUE */
    int rate;                              /* what 16 bytes that are read add to it */
} Fetch;

static inline __attribute__((always_inline)) void fetch_line(const void *p)
{
    __builtin_prefetch(p, 0, 3);
}

static inline __attribute__((always_inline)) void fetch_some(Fetch *fetch, int due)
{
    for (fetch->due += due; fetch->due >= 0; fetch->due -= DUE) {
        if (fetch->left <= 0)
            continue;
        fetch_line(fetch->streams[0] + fetch->keys);
        fetch_line(fetch->streams[1] + fetch->keys);
        fetch_line(fetch->streams[2] + fetch->values);
        fetch_line(fetch->streams[3] + fetch->values);
        fetch->keys += fetch->keys_step;
        fetch->values += fetch->values_step;
        fetch->left--;
    }
}

#endif
