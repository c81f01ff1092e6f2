/* Matrix products with weights that stand in the order in which they are read. */

#ifndef VASWANI_PRODUCT_H
#define VASWANI_PRODUCT_H

#include "kernels.h"
#include "vectors.h"

enum {
    TILE_ROWS = 6,             /* a tile of a product's result is held in registers */
    TILE_VECS = LANES / 4,
    PANEL = TILE_VECS * LANES, /* columns of a weight that stand together, row by row: a tile reads memory in order */
    DEPTH = 512,               /* rows of a panel that are taken at a time: they stay in the cache */
    ROW_BLOCK = 96,            /* rows of the left matrix that a thread takes at a time */
    BYTES = 4,                 /* of a quantised row that are multiplied at a time */
};

/* A linear layer, or several with the same input. Mirrors of it and of other structures are in library.py. */
struct linear {
    const float *weights, *bias; /* (columns / PANEL, depth, PANEL), and (columns) or null */
    const int8_t *quantised;     /* instead of `weights`: (columns / PANEL, depth / BYTES, PANEL, BYTES) */
    const float *scales;         /* (columns padded): what a unit of `quantised` is worth */
    const int32_t *sums;         /* (columns padded): 128 times the sum of each column of `quantised` */
    const float *in_place;       /* instead of `weights`: (columns, depth), where torch has them */
    int64_t depth, columns;
};

/* Rows on the left side of a product with quantised weights. */
struct quantised_rows {
    uint8_t *numbers; /* (rows, depth padded to BYTES) */
    float *scales;    /* (rows) */
};

static inline int64_t padded(int64_t columns) { return (columns + PANEL - 1) / PANEL * PANEL; }
static inline int64_t padded_depth(int64_t depth) { return (depth + BYTES - 1) / BYTES * BYTES; }

/* Quantise rows if the weights are, among the threads of a parallel region. */
void prepare_rows(
    const struct linear *linear, const float *left, int64_t left_stride, int64_t rows, struct quantised_rows quantised);

/* Multiply some prepared rows, from `row` on, by the panel that begins at `column`. */
void multiply_columns(
    const struct linear *linear, const float *left, int64_t left_stride, struct quantised_rows quantised, int64_t row,
    int64_t rows, int64_t column, float *result, int64_t stride);

/* Multiply (rows, depth) by (depth, columns) among the threads of a parallel region; rows of the result are padded to
   whole panels. */
void multiply(
    const struct linear *linear, const float *left, int64_t left_stride, int64_t rows, struct quantised_rows quantised,
    float *result);

#endif
