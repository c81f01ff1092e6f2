/* Structures of attention in an unpadded batch. */

#ifndef VASWANI_ATTENTION_H
#define VASWANI_ATTENTION_H

#include <stdint.h>

/* One tensor of rows with heads side by side. */
struct rows {
    float *first;
    int64_t stride;
};

/* Sequences that stand one after the other. */
struct unpadded {
    int64_t threads, sequences, heads, d_k, d_v, is_causal;
    int64_t queries, keys; /* of all sequences */
    double scaling;
    const int32_t *query_starts, *key_starts; /* (sequences + 1) */
};

#endif
