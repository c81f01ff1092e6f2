/* Structure of the residual connection. */

#ifndef VASWANI_RESIDUAL_H
#define VASWANI_RESIDUAL_H

#include <stdint.h>

struct residual {
    int64_t threads, rows, width;
    uint32_t row_seed, seed, threshold; /* a number is dropped if its bits are below the threshold */
    float scale, eps;
    const float *weight, *bias;
};

#endif
