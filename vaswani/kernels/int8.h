/* Products with weights of eight bits: rows are rounded as they come, to 255 steps of their own size.

   The instruction multiplies unsigned by signed numbers, so rows are moved by 128, and the sums of the weights' columns
   take that back. */

#include <immintrin.h>

enum { BYTES = 4 /* of a row that are multiplied at a time */ };

static int64_t padded_depth(int64_t depth) { return (depth + BYTES - 1) / BYTES * BYTES; }

/* Round rows, among the threads of a parallel region. */
static void round_rows(const float *left, int64_t left_stride, int64_t rows, int64_t depth, struct rounded_rows rounded)
{
    int64_t stride = padded_depth(depth);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *numbers = left + row * left_stride;
        uint8_t *result = rounded.numbers + row * stride;
        float largest = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t at = 0; at < depth; at++) largest = fabsf(numbers[at]) > largest ? fabsf(numbers[at]) : largest;
        float factor = largest > 0 ? 127.5f / largest : 0; /* as torchao rounds */
#pragma omp simd
        for (int64_t at = 0; at < depth; at++) {
            float number = (numbers[at] * factor + 12582912.0f) - 12582912.0f; /* nearest integer */
            result[at] = (uint8_t)(int32_t)((number < 127 ? number : 127) + 128);
        }
        for (int64_t at = depth; at < stride; at++) result[at] = 128;
        rounded.scales[row] = largest / 127.5f;
    }
}

#define WITH_VNNI __attribute__((target("avx512f,avx512vnni")))

WITH_VNNI static inline __attribute__((always_inline)) void multiply_rounded_tile(
    int rows, const uint8_t *left, const float *left_scales, int64_t depth, const int8_t *panel, const float *scales,
    const int32_t *sums, const float *start, float *result, int64_t stride, const int8_t *ahead, int64_t ahead_step)
{
    __m512i total[TILE_ROWS][PANEL / LANES];
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < PANEL / LANES; part++) total[row][part] = _mm512_setzero_si512();
    for (int64_t at = 0; at < depth; at += BYTES, panel += BYTES * PANEL, ahead += ahead_step) {
        for (int64_t line = 0; line < ahead_step; line += 64) _mm_prefetch((const char *)ahead + line, _MM_HINT_T1);
        __m512i weight[PANEL / LANES];
        for (int part = 0; part < PANEL / LANES; part++) weight[part] = _mm512_loadu_si512(panel + part * 64);
        for (int row = 0; row < rows; row++) {
            int32_t four;
            memcpy(&four, left + row * depth + at, sizeof four);
            __m512i factor = _mm512_set1_epi32(four);
            for (int part = 0; part < PANEL / LANES; part++)
                total[row][part] = _mm512_dpbusd_epi32(total[row][part], factor, weight[part]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < PANEL / LANES; part++) {
            __m512i exact = _mm512_sub_epi32(total[row][part], _mm512_loadu_si512(sums + part * LANES));
            __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(scales + part * LANES), _mm512_set1_ps(left_scales[row]));
            __m512 value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), scale, _mm512_loadu_ps(start + part * LANES));
            _mm512_storeu_ps(result + row * stride + part * LANES, value);
        }
}

/* Multiply some rounded rows by one panel; see `multiply_panel`. */
WITH_VNNI static void multiply_rounded_panel(
    struct rounded_rows left, int64_t first_row, int64_t rows, struct product product, int64_t column, int64_t depth,
    int64_t columns, float *result, int64_t stride)
{
    float start[PANEL] = {0};
    if (product.bias) memcpy(start, product.bias + column, min(columns - column, PANEL) * sizeof(float));
    depth = padded_depth(depth);
    const int8_t *panel = product.rounded + column * depth;
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t ahead_step = (BYTES * PANEL + tiles - 1) / tiles;
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
        const uint8_t *numbers = left.numbers + (first_row + row) * depth;
        const int8_t *ahead = panel + depth * PANEL + row / TILE_ROWS * depth / BYTES * ahead_step;
#define TILE(ROWS) \
    multiply_rounded_tile( \
        ROWS, numbers, left.scales + first_row + row, depth, panel, product.scales + column, product.sums + column, \
        start, result + row * stride, stride, ahead, ahead_step)
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
