/* The encoder for inference: all layers in one call.

   What this gains over torch: only real tokens are computed, no padding, no masks, and no overhead between
   operations. */

#include "stack.h"

/* Apply an encoder's layers to `states`, in place. Keys and values of one layer after the other are `cross_keys` and
   `cross_values`. */
EXPORT int64_t encode(const struct stack *stack, struct workspace *work)
{
    int64_t keys = key_columns(stack), values = value_columns(stack), width = work->source_width;
    int64_t rows = work->source_starts[work->sequences], stride = padded(2 * keys + values);
    if (fail_outside(BAD_SIZE, rows, 0, work->rows)) return BAD_SIZE;
    if (check_activations(stack)) return BAD_ACTIVATION;
#pragma omp parallel num_threads(threads_for(stack, work, rows))
    {
        for (const struct layer *layer = stack->layer; layer < stack->layer + stack->layers; layer++) {
            multiply(&layer->self_input, work->states, stack->d_model, rows, work->quantised, work->products);
            store_source(stack, work, work->products + keys, stride, work->cross_keys, work->cross_values);
            for (int64_t sequence = 0; sequence < work->sequences; sequence++) {
                int64_t first = work->source_starts[sequence], end = work->source_starts[sequence + 1];
#pragma omp for schedule(static) nowait
                for (int64_t row = first; row < end; row++)
                    attend_to_source(
                        stack, layer->self_scaling, work->products + row * stride,
                        work->cross_keys + sequence * keys * width, work->cross_values + sequence * values * width,
                        end - first, width, scores_of_thread(work), work->attended + row * values);
            }
#pragma omp barrier
            finish_attention(stack, work, &layer->self_output, layer->self_norm, rows);
            feed_forward(stack, work, layer, rows);
        }
        finish_stack(stack, work, rows);
    }
    return NO_FAILURE;
}
