/* Vectors of registers, and functions of rows of numbers.

   What this gains: loops over whole registers, and an exponential that the compiler puts into such loops. */

#ifndef VASWANI_VECTORS_H
#define VASWANI_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Numbers of a register: a wider vector would live in memory. */
#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t lanes_for(int64_t length) { return (length + LANES - 1) / LANES * LANES; }

/* Return exp(x) for x up to 0; below -87 that of -87. The nearest integer to x / ln 2 is taken from the bits of a number
   in which it stands last, so that a NaN is nothing special. */
static inline float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x;
    union { float number; uint32_t bits; } shifted = {x * 1.44269504f + 12582912.0f}, scale;
    float power = shifted.number - 12582912.0f;
    float rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
    float value = 1.9875691500e-4f;
    value = value * rest + 1.3981999507e-3f;
    value = value * rest + 8.3334519073e-3f;
    value = value * rest + 4.1665795894e-2f;
    value = value * rest + 1.6666665459e-1f;
    value = value * rest + 5.0000001201e-1f;
    value = value * rest * rest + rest + 1.0f;
    scale.bits = (shifted.bits + 127) << 23;
    return value * scale.number;
}

/* Return the largest of some scores. */
static inline float largest_of(const float *scores, int64_t length)
{
    float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (int64_t at = 0; at < length; at++) largest = scores[at] > largest ? scores[at] : largest;
    return largest;
}

/* Return the sum of exp(score - subtract). */
static inline float sum_of_exponentials(const float *scores, int64_t length, float subtract)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t at = 0; at < length; at++) sum += exponential(scores[at] - subtract);
    return sum;
}

/* Turn scores into probabilities, and return the logarithm of the sum that divided them; 0 for no scores. */
static inline float softmax(float *scores, int64_t length)
{
    if (length == 0) return 0;
    float largest = largest_of(scores, length), sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t at = 0; at < length; at++) sum += scores[at] = exponential(scores[at] - largest);
    float factor = 1 / sum;
#pragma omp simd
    for (int64_t at = 0; at < length; at++) scores[at] *= factor;
    return largest + logf(sum);
}

#endif
