/* Matrix products with weights that stand in the order in which they are read, in single precision or quantised.

   What this gains over torch: a weight is packed once, not in every call, and is fetched while the panel before it is
   multiplied. For the few rows of a decoding step, which wait for memory, that is about twice as fast. So few rows read
   deep weights as fast where torch has them: then there is no copy that could be out of date. */

#include <immintrin.h>
#include <stdlib.h>

#include "product.h"
#include "quantised.h"

/* Columns of weights in place that are read at once: so many that a tile's sums stay in registers. While they are
   multiplied, the next ones are fetched. */
enum { IN_PLACE_COLUMNS = LANES / 4 };

static inline __attribute__((always_inline)) void multiply_tile(
    int rows, const float *left, int64_t left_stride, const float *panel, int64_t depth, const float *start,
    int64_t start_stride, float *result, int64_t stride, const float *ahead, int64_t ahead_step)
{
    vec total[TILE_ROWS][TILE_VECS];
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < TILE_VECS; part++)
            total[row][part] = *(const vec *)(start + row * start_stride + part * LANES);
    for (int64_t at = 0; at < depth; at++, panel += PANEL, ahead += ahead_step) {
        for (int64_t line = 0; line < ahead_step; line += LANES) __builtin_prefetch(ahead + line, 0, 2);
        vec weight[TILE_VECS];
        for (int part = 0; part < TILE_VECS; part++) weight[part] = *(const vec *)(panel + part * LANES);
        for (int row = 0; row < rows; row++) {
            float factor = left[row * left_stride + at];
            for (int part = 0; part < TILE_VECS; part++) total[row][part] += factor * weight[part];
        }
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < TILE_VECS; part++)
            *(vec *)(result + row * stride + part * LANES) = total[row][part];
}

/* Multiply some rows by one panel; `bias` may be null, `columns` is how many of it there are. */
static void multiply_panel(
    const float *left, int64_t left_stride, int64_t rows, const float *panel, int64_t depth, const float *bias,
    int64_t columns, float *result, int64_t stride)
{
    float start[PANEL] = {0};
    if (bias) memcpy(start, bias, min(columns, PANEL) * sizeof(float));
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t ahead_step = (PANEL + tiles - 1) / tiles; /* the tiles of this panel fetch the next one together */
    for (int64_t from = 0; from < depth; from += DEPTH) {
        int64_t some = min(depth - from, DEPTH);
        const float *weights = panel + from * PANEL, *ahead = weights + depth * PANEL;
        for (int64_t row = 0; row < rows; row += TILE_ROWS, ahead += some * ahead_step) {
            float *to = result + row * stride;
            const float *first = from ? to : start, *factors = left + row * left_stride + from;
            int64_t first_stride = from ? stride : 0;
#define TILE(ROWS) \
    multiply_tile(ROWS, factors, left_stride, weights, some, first, first_stride, to, stride, ahead, ahead_step)
            switch (rows - row) {
            case 1: TILE(1); break;
            case 2: TILE(2); break;
            case 3: TILE(3); break;
            case 4: TILE(4); break;
            case 5: TILE(5); break;
            default: TILE(TILE_ROWS);
            }
#undef TILE
        }
    }
}

static inline float sum_of(vec numbers)
{
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)numbers);
#else
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)numbers), _mm256_extractf128_ps((__m256)numbers, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#endif
}

/* Return the numbers of a row from `at` on, and zeros after its end. */
static inline vec rest_of(const float *row, int64_t at, int64_t depth)
{
    vec rest = {0};
    memcpy(&rest, row + at, (depth - at) * sizeof(float));
    return rest;
}

/* Multiply some rows by some columns that stand one after the other, each from its first number to its last. */
static inline __attribute__((always_inline)) void multiply_in_place_tile(
    int rows, int columns, const float *left, int64_t left_stride, const float *weights, int64_t depth,
    const float *bias, float *result, int64_t stride)
{
    vec total[TILE_ROWS][IN_PLACE_COLUMNS] = {0};
    int64_t at = 0;
    for (; at + LANES <= depth; at += LANES) {
        vec weight[IN_PLACE_COLUMNS];
        for (int column = 0; column < columns; column++) {
            const float *from = weights + column * depth + at;
            __builtin_prefetch(from + IN_PLACE_COLUMNS * depth, 0, 2);
            weight[column] = *(const vec *)from;
        }
        for (int row = 0; row < rows; row++) {
            vec factor = *(const vec *)(left + row * left_stride + at);
            for (int column = 0; column < columns; column++) total[row][column] += factor * weight[column];
        }
    }
    if (at < depth)
        for (int column = 0; column < columns; column++) {
            vec weight = rest_of(weights + column * depth, at, depth);
            for (int row = 0; row < rows; row++)
                total[row][column] += rest_of(left + row * left_stride, at, depth) * weight;
        }
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++)
            result[row * stride + column] = sum_of(total[row][column]) + (bias ? bias[column] : 0);
}

/* Multiply some rows by up to PANEL columns where they stand. */
static void multiply_in_place(
    const float *left, int64_t left_stride, int64_t rows, const float *weights, int64_t depth, const float *bias,
    int64_t columns, float *result, int64_t stride)
{
    for (int64_t row = 0; row < rows; row++) memset(result + row * stride, 0, PANEL * sizeof(float));
    for (int64_t column = 0; column < columns;) {
        int some = columns - column < IN_PLACE_COLUMNS ? 1 : IN_PLACE_COLUMNS;
        const float *first = weights + column * depth, *start = bias ? bias + column : 0;
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            const float *factors = left + row * left_stride;
            float *to = result + row * stride + column;
#define TILE(ROWS) \
    some == 1 ? multiply_in_place_tile(ROWS, 1, factors, left_stride, first, depth, start, to, stride) \
              : multiply_in_place_tile(ROWS, IN_PLACE_COLUMNS, factors, left_stride, first, depth, start, to, stride)
            switch (rows - row) {
            case 1: TILE(1); break;
            case 2: TILE(2); break;
            case 3: TILE(3); break;
            case 4: TILE(4); break;
            case 5: TILE(5); break;
            default: TILE(TILE_ROWS);
            }
#undef TILE
        }
        column += some;
    }
}

void prepare_rows(
    const struct linear *linear, const float *left, int64_t left_stride, int64_t rows, struct quantised_rows quantised)
{
    if (linear->quantised) quantise_rows(left, left_stride, rows, linear->depth, quantised);
}

void multiply_columns(
    const struct linear *linear, const float *left, int64_t left_stride, struct quantised_rows quantised, int64_t row,
    int64_t rows, int64_t column, float *result, int64_t stride)
{
    CHECK(column % PANEL == 0 && column < linear->columns && linear->depth <= left_stride);
    if (linear->quantised)
        multiply_quantised_panel(quantised, row, rows, linear, column, result, stride);
    else if (linear->in_place)
        multiply_in_place(
            left + row * left_stride, left_stride, rows, linear->in_place + column * linear->depth, linear->depth,
            linear->bias ? linear->bias + column : 0, min(linear->columns - column, PANEL), result, stride);
    else
        multiply_panel(
            left + row * left_stride, left_stride, rows, linear->weights + column * linear->depth, linear->depth,
            linear->bias ? linear->bias + column : 0, linear->columns - column, result, stride);
}

void multiply(
    const struct linear *linear, const float *left, int64_t left_stride, int64_t rows, struct quantised_rows quantised,
    float *result)
{
    int64_t columns = linear->columns, stride = padded(columns);
    prepare_rows(linear, left, left_stride, rows, quantised);
#pragma omp for collapse(2) schedule(static)
    for (int64_t column = 0; column < columns; column += PANEL)
        for (int64_t row = 0; row < rows; row += ROW_BLOCK)
            multiply_columns(
                linear, left, left_stride, quantised, row, min(rows - row, ROW_BLOCK), column,
                result + row * stride + column, stride);
}

/* Apply a linear layer to (rows, depth): (rows, columns padded to whole panels). */
EXPORT int64_t linear_forward(
    int64_t threads, const struct linear *linear, int64_t rows, const float *inputs, int64_t stride, float *outputs)
{
    struct quantised_rows quantised = {0};
    if (linear->quantised) {
        quantised.numbers = allocate(rows, padded_depth(linear->depth));
        quantised.scales = allocate(rows, sizeof(float));
        if (!quantised.numbers || !quantised.scales) {
            free(quantised.numbers);
            free(quantised.scales);
            return fail(NO_MEMORY, rows, 0, 0);
        }
    }
#pragma omp parallel num_threads(threads)
    multiply(linear, inputs, stride, rows, quantised, outputs);
    free(quantised.numbers);
    free(quantised.scales);
    return NO_FAILURE;
}
