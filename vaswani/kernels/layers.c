/* Sub-layers of encoder and decoder for inference, in single precision or quantised.

   What this gains over a call of torch for each operation: no overhead between operations, and attention without
   padding. Threads are those of torch, which brings the OpenMP library that is linked here. */

#include <omp.h>

#include "stack.h"

/* Normalise the sum of states and a sub-layer's output, among the threads of a parallel region. */
static void add_and_normalise(int64_t width, struct norm norm, int64_t rows, const float *output, float *states)
{
    int64_t stride = padded(width);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *state = states + row * width;
        const float *add = output + row * stride;
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t at = 0; at < width; at++) sum += state[at] += add[at];
        float mean = sum / width;
#pragma omp simd reduction(+ : squares)
        for (int64_t at = 0; at < width; at++) squares += (state[at] - mean) * (state[at] - mean);
        float factor = 1.0f / sqrtf(squares / width + (float)norm.eps);
#pragma omp simd
        for (int64_t at = 0; at < width; at++) state[at] = (state[at] - mean) * factor * norm.weight[at] + norm.bias[at];
    }
}

float *scores_of_thread(const struct workspace *work)
{
    CHECK(omp_get_thread_num() < work->threads);
    return work->scores + omp_get_thread_num() * max(work->slots, work->source_width);
}

void attend_to_source(
    const struct stack *stack, double scaling, const float *query, const float *keys, const float *values,
    int64_t length, int64_t width, float *scores, float *attended)
{
    int64_t stride = value_columns(stack);
    CHECK(length >= 0 && lanes_for(length) <= width);
    for (int64_t head = 0; head < stack->heads; head++) {
        for (int64_t from = 0; from < length; from += LANES) {
            vec total = {0};
            for (int64_t at = 0; at < stack->d_k; at++) total += query[at] * *(const vec *)(keys + at * width + from);
            *(vec *)(scores + from) = total * (float)scaling;
        }
        softmax(scores, length);
        memset(attended, 0, stack->d_v * sizeof(float));
        for (int64_t place = 0; place < length; place++)
#pragma omp simd
            for (int64_t at = 0; at < stack->d_v; at++) attended[at] += scores[place] * values[place * stride + at];
        query += stack->d_k;
        keys += stack->d_k * width;
        values += stack->d_v;
        attended += stack->d_v;
    }
}

void store_source(
    const struct stack *stack, const struct workspace *work, const float *products, int64_t stride, float *keys,
    float *values)
{
    int64_t key_width = key_columns(stack), value_width = value_columns(stack), width = work->source_width;
    if (width == 0) return; /* no sequence has a token, and there is no memory for any */
#pragma omp for schedule(static)
    for (int64_t sequence = 0; sequence < work->sequences; sequence++) {
        int64_t first = work->source_starts[sequence], length = work->source_starts[sequence + 1] - first;
        float *key = keys + sequence * key_width * width, *value = values + sequence * value_width * width;
        CHECK(length >= 0 && length <= width);
        memset(key, 0, key_width * width * sizeof(float)); /* a vec of keys may reach beyond the last one */
        for (int64_t place = 0; place < length; place++) {
            const float *row = products + (first + place) * stride;
            for (int64_t at = 0; at < key_width; at++) key[at * width + place] = row[at];
            memcpy(value + place * value_width, row + key_width, value_width * sizeof(float));
        }
    }
}

void finish_attention(
    const struct stack *stack, struct workspace *work, const struct linear *output, struct norm norm, int64_t rows)
{
    multiply(output, work->attended, value_columns(stack), rows, work->quantised, work->products);
    add_and_normalise(stack->d_model, norm, rows, work->products, work->states);
}

void feed_forward(const struct stack *stack, struct workspace *work, const struct layer *layer, int64_t rows)
{
    int64_t stride = padded(layer->fc1.columns);
    float *inner = work->products, *outer = work->products + rows * stride;
    CHECK(layer->fc1.columns <= stack->d_ff && layer->fc2.depth == layer->fc1.columns);
    multiply(&layer->fc1, work->states, stack->d_model, rows, work->quantised, inner);
#pragma omp for schedule(static)
    for (int64_t at = 0; at < rows * stride; at++) inner[at] = inner[at] < 0 ? 0 : inner[at];
    multiply(&layer->fc2, inner, stride, rows, work->quantised, outer);
    add_and_normalise(stack->d_model, layer->norm, rows, outer, work->states);
}
