/* Label-smoothed cross-entropy and its gradient.

   What this gains over torch: the gradient takes the place of the logits, in two passes over them instead of several. */

#include "kernels.h"
#include "vectors.h"

/* Turn logits (rows, V) into the gradient of the sum of smoothed cross-entropies, in place, and give the loss of each
   row. The target has probability `other` at each token but the label, which has the rest. */
EXPORT int64_t smoothed_cross_entropy(
    int64_t threads, int64_t rows, int64_t tokens, float *logits, const int64_t *labels, double other, double *losses)
{
    double right = 1 - (tokens - 1) * other;
    for (int64_t row = 0; row < rows; row++)
        if (fail_outside(BAD_LABEL, labels[row], 0, tokens - 1)) return BAD_LABEL;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *logit = logits + row * tokens;
        float most = -INFINITY, total = 0, sum = 0;
#pragma omp simd reduction(max : most) reduction(+ : total)
        for (int64_t at = 0; at < tokens; at++) {
            most = logit[at] > most ? logit[at] : most;
            total += logit[at];
        }
        float label_logit = logit[labels[row]];
#pragma omp simd reduction(+ : sum)
        for (int64_t at = 0; at < tokens; at++) sum += logit[at] = exponential(logit[at] - most);
        float factor = 1 / sum, subtract = other;
#pragma omp simd
        for (int64_t at = 0; at < tokens; at++) logit[at] = logit[at] * factor - subtract;
        logit[labels[row]] += other - right;
        losses[row] = most + log(sum) - (right - other) * label_logit - other * total;
    }
    return NO_FAILURE;
}
