/* Attention within the sequences of an unpadded batch, and its gradient.

   What this gains over torch: no padding, masks and copies, and no attention weights kept for backward, which forms them
   again from the logarithms of their sums. A row is a token; the tokens of all sequences stand one after the other. */

#include <omp.h>
#include <stdlib.h>

#include "attention.h"
#include "kernels.h"
#include "vectors.h"

enum { MOST_RESULTS = 4 }; /* that are added up together */

static int64_t longest(const int32_t *starts, int64_t sequences)
{
    int64_t most = 0;
    for (int64_t at = 0; at < sequences; at++) most = max(most, starts[at + 1] - starts[at]);
    return most;
}

/* Return 0 if cumulative lengths begin with 0, never fall, and end with the number of rows. */
static int64_t check_starts(const int32_t *starts, int64_t sequences, int64_t rows)
{
    if (fail_outside(BAD_LENGTHS, starts[0], 0, 0)) return BAD_LENGTHS;
    for (int64_t at = 0; at < sequences; at++)
        if (fail_outside(BAD_LENGTHS, starts[at + 1], starts[at], rows)) return BAD_LENGTHS;
    return fail_outside(BAD_LENGTHS, starts[sequences], rows, rows);
}

static int64_t check_unpadded(const struct unpadded *batch)
{
    int64_t failure = check_starts(batch->query_starts, batch->sequences, batch->queries);
    if (!failure) failure = check_starts(batch->key_starts, batch->sequences, batch->keys);
    for (int64_t at = 0; !failure && batch->is_causal && at <= batch->sequences; at++)
        failure = fail_outside(BAD_LENGTHS, batch->key_starts[at], batch->query_starts[at], batch->query_starts[at]);
    return failure;
}

/* Copy one head of some rows, transposed to (width, lanes), with zeros after the last row. */
static void transpose(struct rows from, int64_t length, int64_t width, float *to)
{
    int64_t lanes = lanes_for(length);
    memset(to, 0, width * lanes * sizeof(float));
    for (int64_t row = 0; row < length; row++)
        for (int64_t at = 0; at < width; at++) to[at * lanes + row] = from.first[row * from.stride + at];
}

/* Products of one row with the columns of a transposed matrix (width, lanes), up to column `length`. */
static void multiply_row(
    const float *row, const float *transposed, int64_t width, int64_t lanes, int64_t length, float *products)
{
    int64_t from = 0;
    for (; from + 2 * LANES <= lanes_for(length); from += 2 * LANES) {
        vec first = {0}, second = {0};
        for (int64_t at = 0; at < width; at++) {
            first += row[at] * *(const vec *)(transposed + at * lanes + from);
            second += row[at] * *(const vec *)(transposed + at * lanes + from + LANES);
        }
        *(vec *)(products + from) = first;
        *(vec *)(products + from + LANES) = second;
    }
    for (; from < length; from += LANES) {
        vec total = {0};
        for (int64_t at = 0; at < width; at++) total += row[at] * *(const vec *)(transposed + at * lanes + from);
        *(vec *)(products + from) = total;
    }
}

/* Add up some rows, each times its factor, for `results` columns of factors at a time: as many results, `width` wide. */
static inline __attribute__((always_inline)) void combine_rows(
    int results, struct rows rows, int64_t length, const float *factors, int64_t factor_stride, int64_t width,
    float *result, int64_t result_stride)
{
    int64_t at = 0;
    for (; at + 2 * LANES <= width; at += 2 * LANES) {
        vec total[MOST_RESULTS][2] = {0};
        for (int64_t row = 0; row < length; row++) {
            const float *values = rows.first + row * rows.stride + at, *factor = factors + row * factor_stride;
            for (int one = 0; one < results; one++)
                for (int half = 0; half < 2; half++)
                    total[one][half] += factor[one] * *(const vec *)(values + half * LANES);
        }
        for (int one = 0; one < results; one++)
            for (int half = 0; half < 2; half++)
                *(vec *)(result + one * result_stride + at + half * LANES) = total[one][half];
    }
    for (; at < width; at++)
        for (int one = 0; one < results; one++) {
            float sum = 0;
            for (int64_t row = 0; row < length; row++)
                sum += factors[row * factor_stride + one] * rows.first[row * rows.stride + at];
            result[one * result_stride + at] = sum;
        }
}

static struct rows part(struct rows rows, int64_t row, int64_t column)
{
    return (struct rows){rows.first + row * rows.stride + column, rows.stride};
}

/* Attend, and keep for each row and head the logarithm of the sum that divides its weights. */
EXPORT int64_t attention_forward(
    const struct unpadded *batch, const struct rows *queries, const struct rows *keys, const struct rows *values,
    const struct rows *attended, float *log_sums)
{
    int64_t failure = check_unpadded(batch);
    if (failure) return failure;
    int64_t lanes = lanes_for(longest(batch->key_starts, batch->sequences)), key_width = batch->d_k;
    int64_t value_width = batch->d_v, of_thread = (key_width + 1) * lanes;
    float *workspace = allocate(batch->threads, of_thread * sizeof(float));
    if (!workspace) return fail(NO_MEMORY, of_thread, 0, 0);
#pragma omp parallel num_threads(batch->threads)
    {
        float *transposed = workspace + omp_get_thread_num() * of_thread, *weights = transposed + key_width * lanes;
#pragma omp for collapse(2) schedule(dynamic, 4)
        for (int64_t sequence = 0; sequence < batch->sequences; sequence++)
            for (int64_t head = 0; head < batch->heads; head++) {
                int64_t first = batch->query_starts[sequence], end = batch->query_starts[sequence + 1];
                int64_t first_key = batch->key_starts[sequence];
                int64_t length = batch->key_starts[sequence + 1] - first_key;
                transpose(part(*keys, first_key, head * key_width), length, key_width, transposed);
                struct rows own_values = part(*values, first_key, head * value_width);
                for (int64_t row = first; row < end; row++) {
                    int64_t seen = batch->is_causal ? row - first + 1 : length;
                    multiply_row(
                        queries->first + row * queries->stride + head * key_width, transposed, key_width,
                        lanes_for(length), seen, weights);
                    for (int64_t at = 0; at < seen; at++) weights[at] *= (float)batch->scaling;
                    log_sums[row * batch->heads + head] = softmax(weights, seen);
                    combine_rows(
                        1, own_values, seen, weights, 1, value_width,
                        attended->first + row * attended->stride + head * value_width, 0);
                }
            }
    }
    free(workspace);
    return NO_FAILURE;
}

/* Form the gradients of queries, keys and values from that of what was attended to. */
EXPORT int64_t attention_backward(
    const struct unpadded *batch, const struct rows *queries, const struct rows *keys, const struct rows *values,
    const struct rows *attended, const float *log_sums, const struct rows *attended_grad, const struct rows *query_grad,
    const struct rows *key_grad, const struct rows *value_grad)
{
    int64_t failure = check_unpadded(batch);
    if (failure) return failure;
    int64_t lanes = lanes_for(longest(batch->key_starts, batch->sequences));
    int64_t most_rows = longest(batch->query_starts, batch->sequences);
    int64_t key_width = batch->d_k, value_width = batch->d_v, of_thread;
    if (__builtin_mul_overflow(key_width + value_width + 2 * most_rows, lanes, &of_thread))
        return fail(NO_MEMORY, most_rows, 0, 0);
    float *workspace = allocate(batch->threads, of_thread * sizeof(float));
    if (!workspace) return fail(NO_MEMORY, of_thread, 0, 0);
#pragma omp parallel num_threads(batch->threads)
    {
        float *keys_transposed = workspace + omp_get_thread_num() * of_thread;
        float *values_transposed = keys_transposed + key_width * lanes;
        float *weights = values_transposed + value_width * lanes, *grads = weights + most_rows * lanes;
#pragma omp for collapse(2) schedule(dynamic, 4)
        for (int64_t sequence = 0; sequence < batch->sequences; sequence++)
            for (int64_t head = 0; head < batch->heads; head++) {
                int64_t first = batch->query_starts[sequence], rows = batch->query_starts[sequence + 1] - first;
                int64_t first_key = batch->key_starts[sequence];
                int64_t length = batch->key_starts[sequence + 1] - first_key, own_lanes = lanes_for(length);
                struct rows own_keys = part(*keys, first_key, head * key_width);
                struct rows own_queries = part(*queries, first, head * key_width);
                struct rows own_grads = part(*attended_grad, first, head * value_width);
                transpose(own_keys, length, key_width, keys_transposed);
                transpose(part(*values, first_key, head * value_width), length, value_width, values_transposed);
                for (int64_t row = 0; row < rows; row++) {
                    int64_t seen = batch->is_causal ? row + 1 : length;
                    float *weight = weights + row * own_lanes, *grad = grads + row * own_lanes;
                    const float *output_grad = own_grads.first + row * own_grads.stride;
                    const float *output = attended->first + (first + row) * attended->stride + head * value_width;
                    float log_sum = log_sums[(first + row) * batch->heads + head], mean = 0;
                    multiply_row(
                        own_queries.first + row * own_queries.stride, keys_transposed, key_width, own_lanes, seen, weight);
                    multiply_row(output_grad, values_transposed, value_width, own_lanes, seen, grad);
#pragma omp simd reduction(+ : mean)
                    for (int64_t at = 0; at < value_width; at++) mean += output[at] * output_grad[at];
#pragma omp simd
                    for (int64_t at = 0; at < seen; at++) {
                        weight[at] = exponential(weight[at] * (float)batch->scaling - log_sum);
                        grad[at] = weight[at] * (grad[at] - mean) * (float)batch->scaling;
                    }
                    for (int64_t at = seen; at < lanes_for(seen); at++) weight[at] = grad[at] = 0;
                    combine_rows(
                        1, own_keys, seen, grad, 1, key_width,
                        query_grad->first + (first + row) * query_grad->stride + head * key_width, 0);
                }
                for (int64_t key = 0; key < length; key += MOST_RESULTS) {
                    int64_t before = batch->is_causal ? min(key, rows) : 0; /* rows that do not see it */
                    const float *grad = grads + before * own_lanes + key, *weight = weights + before * own_lanes + key;
                    float *to_key = key_grad->first + (first_key + key) * key_grad->stride + head * key_width;
                    float *to_value = value_grad->first + (first_key + key) * value_grad->stride + head * value_width;
                    struct rows seeing = part(own_queries, before, 0), seeing_grads = part(own_grads, before, 0);
#define COMBINE(RESULTS) \
    combine_rows(RESULTS, seeing, rows - before, grad, own_lanes, key_width, to_key, key_grad->stride); \
    combine_rows(RESULTS, seeing_grads, rows - before, weight, own_lanes, value_width, to_value, value_grad->stride)
                    switch (length - key) {
                    case 1: COMBINE(1); break;
                    case 2: COMBINE(2); break;
                    case 3: COMBINE(3); break;
                    default: COMBINE(MOST_RESULTS);
                    }
#undef COMBINE
                }
            }
    }
    free(workspace);
    return NO_FAILURE;
}
