/* Sub-layers of encoder and decoder for inference, in single precision or quantised.

   What this gains over a call of torch for each operation: no overhead between operations, and attention without
   padding. Threads are those of torch, which brings the OpenMP library that is linked here. */

#include <omp.h>

#include "stack.h"

/* Normalise one row of states, of which the sum is known. */
static inline void normalise(int64_t width, struct norm norm, float sum, float *state)
{
    float mean = sum / width, squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t at = 0; at < width; at++) squares += (state[at] - mean) * (state[at] - mean);
    float factor = 1.0f / sqrtf(squares / width + (float)norm.eps);
#pragma omp simd
    for (int64_t at = 0; at < width; at++) state[at] = (state[at] - mean) * factor * norm.weight[at] + norm.bias[at];
}

/* Normalise the sum of states and a sub-layer's output, among the threads of a parallel region. */
static void add_and_normalise(int64_t width, struct norm norm, int64_t rows, const float *output, float *states)
{
    int64_t stride = padded(width);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *state = states + row * width;
        const float *add = output + row * stride;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t at = 0; at < width; at++) sum += state[at] += add[at];
        normalise(width, norm, sum, state);
    }
}

void finish_stack(const struct stack *stack, struct workspace *work, int64_t rows)
{
    int64_t width = stack->d_model;
    if (!stack->norm.weight) return;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *state = work->states + row * width, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t at = 0; at < width; at++) sum += state[at];
        normalise(width, stack->norm, sum, state);
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

int64_t check_activations(const struct stack *stack)
{
    for (const struct layer *layer = stack->layer; layer < stack->layer + stack->layers; layer++)
        if (fail_outside(BAD_ACTIVATION, layer->activation, 0, ACTIVATIONS - 1)) return BAD_ACTIVATION;
    return NO_FAILURE;
}

void finish_attention(
    const struct stack *stack, struct workspace *work, const struct linear *output, struct norm norm, int64_t rows)
{
    multiply(output, work->attended, value_columns(stack), rows, work->quantised, work->products);
    add_and_normalise(stack->d_model, norm, rows, work->products, work->states);
}

/* Apply x * sigmoid(x), with an exponential of numbers up to 0. */
static void apply_silu(float *numbers, int64_t count)
{
#pragma omp simd
    for (int64_t at = 0; at < count; at++) {
        float x = numbers[at], power = exponential(-fabsf(x));
        numbers[at] = x * (x < 0 ? power : 1) / (1 + power);
    }
}

/* Apply an activation to rows of numbers, among the threads of a parallel region. */
static void activate(int64_t activation, int64_t rows, int64_t columns, float *numbers)
{
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *some = numbers + row * columns;
        if (activation == SILU)
            apply_silu(some, columns);
        else
            for (int64_t at = 0; at < columns; at++) some[at] = some[at] < 0 ? 0 : some[at];
    }
}

void feed_forward(const struct stack *stack, struct workspace *work, const struct layer *layer, int64_t rows)
{
    int64_t stride = padded(layer->fc1.columns);
    float *inner = work->products, *outer = work->products + rows * stride;
    CHECK(layer->fc1.columns <= stack->d_ff && layer->fc2.depth == layer->fc1.columns);
    multiply(&layer->fc1, work->states, stack->d_model, rows, work->quantised, inner);
    activate(layer->activation, rows, stride, inner);
    multiply(&layer->fc2, inner, stride, rows, work->quantised, outer);
    add_and_normalise(stack->d_model, layer->norm, rows, outer, work->states);
}
