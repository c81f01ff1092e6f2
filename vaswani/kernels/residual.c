/* The residual connection: dropout, sum and layer normalisation in one pass.

   What this gains over torch: five passes over memory become one each way, and no mask of dropout is kept. */

#include <omp.h>
#include <stdlib.h>

#include "kernels.h"
#include "residual.h"
#include "vectors.h"

/* Mix the bits of a number, as the last step of MurmurHash3 does. */
static inline uint32_t scrambled(uint32_t bits)
{
    bits = (bits ^ bits >> 16) * 0x85ebca6bu;
    bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
    return bits ^ bits >> 16;
}

/* Write what dropout multiplies a row by. It is drawn by place, so that backward draws what forward drew. */
static void draw_dropout(const struct residual *residual, int64_t row, float *factors)
{
    uint32_t row_bits = scrambled(residual->row_seed ^ (uint32_t)row);
    uint32_t seed = residual->seed, threshold = residual->threshold, width = residual->width;
    float scale = residual->scale;
#pragma omp simd
    for (uint32_t at = 0; at < width; at++) {
        uint32_t bits = scrambled(scrambled(row_bits ^ at * 0x9e3779b1u) ^ seed);
        factors[at] = bits < threshold ? 0 : scale;
    }
}

/* Normalise states + dropout(update), and keep for each row what backward needs: the normalised row before weight and
   bias, and the factor that normalised it. */
EXPORT int64_t residual_forward(
    const struct residual *residual, const float *states, const float *update, float *output, float *normal,
    float *factors)
{
    int64_t width = residual->width;
#pragma omp parallel for num_threads(residual->threads) schedule(static)
    for (int64_t row = 0; row < residual->rows; row++) {
        const float *state = states + row * width, *change = update + row * width;
        const float *weight = residual->weight, *bias = residual->bias;
        float *unit = normal + row * width, *result = output + row * width;
        float sum = 0, squares = 0;
        draw_dropout(residual, row, unit);
#pragma omp simd reduction(+ : sum)
        for (int64_t at = 0; at < width; at++) sum += unit[at] = state[at] + unit[at] * change[at];
        float mean = sum / width;
#pragma omp simd reduction(+ : squares)
        for (int64_t at = 0; at < width; at++) squares += (unit[at] - mean) * (unit[at] - mean);
        float factor = factors[row] = 1 / sqrtf(squares / width + residual->eps);
#pragma omp simd
        for (int64_t at = 0; at < width; at++) {
            unit[at] = (unit[at] - mean) * factor;
            result[at] = unit[at] * weight[at] + bias[at];
        }
    }
    return NO_FAILURE;
}

/* Form the gradients of states, update, weight and bias from that of the output; the last two must begin with 0. */
EXPORT int64_t residual_backward(
    const struct residual *residual, const float *normal, const float *factors, const float *output_grad,
    float *states_grad, float *update_grad, float *weight_grad, float *bias_grad)
{
    int64_t width = residual->width;
    float *parts = allocate(residual->threads, 2 * width * sizeof(float)); /* of each thread: weight's and bias's */
    if (!parts) return fail(NO_MEMORY, width, 0, 0);
    memset(parts, 0, residual->threads * 2 * width * sizeof(float));
#pragma omp parallel num_threads(residual->threads)
    {
        float *own_weight_grad = parts + omp_get_thread_num() * 2 * width, *own_bias_grad = own_weight_grad + width;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < residual->rows; row++) {
            const float *unit = normal + row * width, *grad = output_grad + row * width, *weight = residual->weight;
            float *to_state = states_grad + row * width, *to_update = update_grad + row * width;
            float mean = 0, slope = 0, factor = factors[row];
#pragma omp simd reduction(+ : mean, slope)
            for (int64_t at = 0; at < width; at++) {
                float weighted = grad[at] * weight[at];
                mean += weighted;
                slope += weighted * unit[at];
                own_weight_grad[at] += grad[at] * unit[at];
                own_bias_grad[at] += grad[at];
            }
            mean /= width, slope /= width;
            draw_dropout(residual, row, to_update);
#pragma omp simd
            for (int64_t at = 0; at < width; at++) {
                to_state[at] = (grad[at] * weight[at] - mean - unit[at] * slope) * factor;
                to_update[at] *= to_state[at];
            }
        }
    }
    for (int64_t thread = 0; thread < residual->threads; thread++)
        for (int64_t at = 0; at < width; at++) {
            weight_grad[at] += parts[2 * thread * width + at];
            bias_grad[at] += parts[(2 * thread + 1) * width + at];
        }
    free(parts);
    return NO_FAILURE;
}
