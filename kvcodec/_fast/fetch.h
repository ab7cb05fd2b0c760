/* Fetching what is read next. One core keeps few requests of its own under way; the processor's
   prefetcher keeps more, but along each page of 4 KiB it runs only some lines ahead of where the
   page was last touched. So while two tiles of keys and of values are read, the four that follow
   are touched line by line in turn: each of the four pages progresses slowly enough for the
   prefetcher to have a line there before it is asked for. The touches are spread evenly over the
   products, which leave room for them, and over the softmax of the rows, during which memory would
   be idle. */

#ifndef KVCODEC_FETCH_H
#define KVCODEC_FETCH_H

#include <stdint.h>

enum { LINE = 64, STREAMS = 4 };

typedef struct {
    const uint8_t *tiles[STREAMS];    /* two tiles of keys, then two of values */
    Py_ssize_t keys, values;          /* where in them to fetch next */
    Py_ssize_t keys_end, values_end;  /* where to stop, however often a tile is read */
    float share[2];                   /* bytes of each tile of keys, of values for a byte read */
} Fetch;

static inline __attribute__((always_inline)) void fetch_line(const void *p)
{
    __builtin_prefetch(p, 0, 3);
}

/* The lines that begin in so many bytes of each tile of keys and of values. */
static inline __attribute__((always_inline)) void fetch_some(Fetch *fetch, int keys, int values)
{
    Py_ssize_t at = (fetch->keys + LINE - 1) & -LINE;
    fetch->keys += keys;
    for (; at < fetch->keys && at < fetch->keys_end; at += LINE) {
        fetch_line(fetch->tiles[0] + at);
        fetch_line(fetch->tiles[1] + at);
    }
    at = (fetch->values + LINE - 1) & -LINE;
    fetch->values += values;
    for (; at < fetch->values && at < fetch->values_end; at += LINE) {
        fetch_line(fetch->tiles[2] + at);
        fetch_line(fetch->tiles[3] + at);
    }
}

#endif
