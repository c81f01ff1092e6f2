/* Products with quantised weights: int8 with a scale for each column; rows are quantised as they come, each with a scale
   of its own, as torchao's Int8DynamicActivationInt8WeightConfig does.

   What this gains: a quarter of the memory to read, and four products in one instruction. Instructions multiply unsigned by signed numbers. VNNI adds four products up at once, so rows are moved by 128 there,
   and the sums of the weights' columns take that back. AVX2 adds up two, in sixteen bits, which that would overflow: it
   multiplies the weights' sizes by the row's numbers with the signs of both. */

#ifndef VASWANI_QUANTISED_H
#define VASWANI_QUANTISED_H

#include <immintrin.h>

enum {
    WIDE = 16, NARROW = 8, /* whole numbers of a register of AVX-512 and of AVX2 */
    NARROW_ROWS = 4, NARROW_PARTS = 2, /* a tile of AVX2's registers */
};

static int has_vnni(void) { return __builtin_cpu_supports("avx512vnni") != 0; }

/* Quantise rows, among the threads of a parallel region. */
static void quantise_rows(
    const float *left, int64_t left_stride, int64_t rows, int64_t depth, struct quantised_rows quantised)
{
    int64_t stride = padded_depth(depth);
    int32_t zero = has_vnni() ? 128 : 0;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *numbers = left + row * left_stride;
        uint8_t *result = quantised.numbers + row * stride;
        float largest = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t at = 0; at < depth; at++) largest = fabsf(numbers[at]) > largest ? fabsf(numbers[at]) : largest;
        float factor = largest > 0 ? 127.5f / largest : 0; /* as torchao does */
#pragma omp simd
        for (int64_t at = 0; at < depth; at++) {
            float number = (numbers[at] * factor + 12582912.0f) - 12582912.0f; /* nearest integer */
            number = number < 127 ? number : 127;
            result[at] = (uint8_t)((int32_t)(number > -127 ? number : -127) + zero);
        }
        for (int64_t at = depth; at < stride; at++) result[at] = zero;
        quantised.scales[row] = largest / 127.5f;
    }
}

/* Fetch a part of the next panel. */
static inline __attribute__((always_inline)) void fetch(const int8_t *ahead, int64_t bytes)
{
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
}

#define WITH_VNNI __attribute__((target("avx512f,avx512vnni")))

WITH_VNNI static inline __attribute__((always_inline)) void multiply_wide_tile(
    int rows, const uint8_t *left, const float *left_scales, int64_t depth, const int8_t *panel, const float *scales,
    const int32_t *sums, const float *start, float *result, int64_t stride, const int8_t *ahead, int64_t ahead_step)
{
    __m512i total[TILE_ROWS][PANEL / WIDE];
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < PANEL / WIDE; part++) total[row][part] = _mm512_setzero_si512();
    for (int64_t at = 0; at < depth; at += BYTES, panel += BYTES * PANEL, ahead += ahead_step) {
        fetch(ahead, ahead_step);
        __m512i weight[PANEL / WIDE];
        for (int part = 0; part < PANEL / WIDE; part++) weight[part] = _mm512_loadu_si512(panel + part * 64);
        for (int row = 0; row < rows; row++) {
            int32_t four;
            memcpy(&four, left + row * depth + at, sizeof four);
            __m512i factor = _mm512_set1_epi32(four);
            for (int part = 0; part < PANEL / WIDE; part++)
                total[row][part] = _mm512_dpbusd_epi32(total[row][part], factor, weight[part]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < PANEL / WIDE; part++) {
            __m512i exact = _mm512_sub_epi32(total[row][part], _mm512_loadu_si512(sums + part * WIDE));
            __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(scales + part * WIDE), _mm512_set1_ps(left_scales[row]));
            __m512 value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), scale, _mm512_loadu_ps(start + part * WIDE));
            _mm512_storeu_ps(result + row * stride + part * WIDE, value);
        }
}

static inline __attribute__((always_inline)) void multiply_narrow_tile(
    int rows, const uint8_t *left, const float *left_scales, int64_t depth, const int8_t *panel, const float *scales,
    const float *start, float *result, int64_t stride, const int8_t *ahead, int64_t ahead_step)
{
    __m256i total[NARROW_ROWS][NARROW_PARTS], ones = _mm256_set1_epi16(1);
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < NARROW_PARTS; part++) total[row][part] = _mm256_setzero_si256();
    for (int64_t at = 0; at < depth; at += BYTES, panel += BYTES * PANEL, ahead += ahead_step) {
        fetch(ahead, ahead_step);
        __m256i weight[NARROW_PARTS], size[NARROW_PARTS];
        for (int part = 0; part < NARROW_PARTS; part++) {
            weight[part] = _mm256_loadu_si256((const __m256i *)(panel + part * BYTES * NARROW));
            size[part] = _mm256_abs_epi8(weight[part]);
        }
        for (int row = 0; row < rows; row++) {
            int32_t four;
            memcpy(&four, left + row * depth + at, sizeof four);
            __m256i factor = _mm256_set1_epi32(four);
            for (int part = 0; part < NARROW_PARTS; part++) {
                __m256i pairs = _mm256_maddubs_epi16(size[part], _mm256_sign_epi8(factor, weight[part]));
                total[row][part] = _mm256_add_epi32(total[row][part], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < NARROW_PARTS; part++) {
            int64_t at = part * NARROW;
            __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(scales + at), _mm256_set1_ps(left_scales[row]));
            __m256 value = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total[row][part]), scale, _mm256_loadu_ps(start + at));
            _mm256_storeu_ps(result + row * stride + at, value);
        }
}

WITH_VNNI static void multiply_wide_panel(
    const uint8_t *left, const float *left_scales, int64_t rows, int64_t depth, const int8_t *panel,
    const float *scales, const int32_t *sums, const float *start, float *result, int64_t stride)
{
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t ahead_step = (BYTES * PANEL + tiles - 1) / tiles;
    const int8_t *ahead = panel + depth * PANEL;
    for (int64_t row = 0; row < rows; row += TILE_ROWS, ahead += depth / BYTES * ahead_step) {
#define TILE(ROWS) \
    multiply_wide_tile( \
        ROWS, left + row * depth, left_scales + row, depth, panel, scales, sums, start, result + row * stride, stride, \
        ahead, ahead_step)
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

static void multiply_narrow_panel(
    const uint8_t *left, const float *left_scales, int64_t rows, int64_t depth, const int8_t *panel,
    const float *scales, const float *start, float *result, int64_t stride)
{
    int64_t columns = NARROW_PARTS * NARROW, tiles = (rows + NARROW_ROWS - 1) / NARROW_ROWS * (PANEL / columns);
    int64_t ahead_step = (BYTES * PANEL + tiles - 1) / tiles;
    const int8_t *ahead = panel + depth * PANEL;
    for (int64_t row = 0; row < rows; row += NARROW_ROWS)
        for (int64_t column = 0; column < PANEL; column += columns, ahead += depth / BYTES * ahead_step) {
#define TILE(ROWS) \
    multiply_narrow_tile( \
        ROWS, left + row * depth, left_scales + row, depth, panel + column * BYTES, scales + column, start + column, \
        result + row * stride + column, stride, ahead, ahead_step)
            switch (rows - row) {
            case 1: TILE(1); break;
            case 2: TILE(2); break;
            case 3: TILE(3); break;
            default: TILE(NARROW_ROWS);
            }
#undef TILE
        }
}

/* Multiply some quantised rows by one panel; see `multiply_panel`. */
static void multiply_quantised_panel(
    struct quantised_rows left, int64_t first_row, int64_t rows, const struct linear *linear, int64_t column,
    float *result, int64_t stride)
{
    float start[PANEL] = {0};
    if (linear->bias) memcpy(start, linear->bias + column, min(linear->columns - column, PANEL) * sizeof(float));
    int64_t depth = padded_depth(linear->depth);
    const uint8_t *numbers = left.numbers + first_row * depth;
    const float *left_scales = left.scales + first_row, *scales = linear->scales + column;
    const int8_t *panel = linear->quantised + column * depth;
    if (has_vnni())
        multiply_wide_panel(
            numbers, left_scales, rows, depth, panel, scales, linear->sums + column, start, result, stride);
    else
        multiply_narrow_panel(numbers, left_scales, rows, depth, panel, scales, start, result, stride);
}

#endif
