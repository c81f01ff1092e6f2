/* A stack of layers, the workspace of one call, and the sub-layers that encoder and decoder share.

   Letters in comments: R rows, D d_model, H heads, K d_k, U d_v, V tokens of the vocabulary, S source positions,
   B sequences, Q beams of a sequence. */

#ifndef VASWANI_STACK_H
#define VASWANI_STACK_H

#include "product.h"

struct norm {
    const float *weight, *bias;
    double eps;
};

/* Mirrors of the numbers in weights.py. */
enum activation { RELU, SILU, ACTIVATIONS };

struct layer {
    struct linear self_input, self_output; /* D -> queries, keys and values; H U -> D */
    struct norm self_norm;
    double self_scaling;
    struct linear cross_query, cross_input, cross_output; /* a decoder's only: D -> queries; D -> keys and values */
    struct norm cross_norm;
    double cross_scaling;
    struct linear fc1, fc2; /* each layer may have another d_ff */
    int64_t activation;     /* between them */
    struct norm norm;
};

struct stack {
    int64_t layers, d_model, heads, d_k, d_v;
    int64_t d_ff;       /* the largest */
    int64_t embeddings; /* rows of `embedding` */
    double embed_scale;
    const struct layer *layer;
    const float *embedding; /* (embeddings, D) */
    struct linear output;   /* the output embedding, D -> V */
    struct norm norm;       /* after the last layer; without weights there is none */
};

/* What belongs to one call: sequences, their caches, and memory for what is computed. */
struct workspace {
    int64_t threads;
    int64_t rows;                    /* R, for which there is memory */
    int64_t sequences, beams, slots; /* B, Q, and the slots of each sequence for which there is memory */
    int64_t previous_beams;          /* beams of a sequence in the last step */
    int64_t source_width;            /* S, padded to a multiple of LANES */
    const int64_t *source_starts;    /* (B + 1): where each sequence begins among the source tokens of all */
    float *cross_keys, *cross_values; /* (layers, B, H, K, S padded), (layers, B, S padded, H U) */
    float *self_keys, *self_values;  /* (layers, B, slots, H K), (layers, B, slots, H U) */
    const float *positions;          /* (encoded, D) */
    int64_t encoded;                 /* positions: a table has only so many */
    int64_t *used, *lengths;         /* (B): slots in use, and tokens so far */
    int32_t *pasts, *old_pasts;      /* (B, Q, slots): the slots of each beam's own tokens; (Q, slots) */
    int64_t *row_tokens;             /* (R): the last token of each beam */
    float *states, *products, *attended, *scores; /* (R, D), (R, widest), (R, H U), (threads, slots or S) */
    struct quantised_rows quantised;
};

static inline int64_t key_columns(const struct stack *stack) { return stack->heads * stack->d_k; }
static inline int64_t value_columns(const struct stack *stack) { return stack->heads * stack->d_v; }

/* Return how many threads to use for some rows: waiting for another one costs as much as so many multiplications. */
static inline int threads_for(const struct stack *stack, const struct workspace *work, int64_t rows)
{
    return min(work->threads, 1 + rows * stack->d_model * stack->d_ff / (1 << 20));
}

/* Return this thread's part of `scores`. */
float *scores_of_thread(const struct workspace *work);

/* Attention of one row to source positions, with keys (H, K, S padded) and values (S padded, H U). */
void attend_to_source(
    const struct stack *stack, double scaling, const float *query, const float *keys, const float *values,
    int64_t length, int64_t width, float *scores, float *attended);

/* Spread keys and values of all source tokens, which are columns of a product, over the sequences; among the threads of
   a parallel region, as the functions below. */
void store_source(
    const struct stack *stack, const struct workspace *work, const float *products, int64_t stride, float *keys,
    float *values);

/* Project what was attended to, add it to the states and normalise the sum. */
void finish_attention(
    const struct stack *stack, struct workspace *work, const struct linear *output, struct norm norm, int64_t rows);

/* Look at which activation each layer has. */
int64_t check_activations(const struct stack *stack);

void feed_forward(const struct stack *stack, struct workspace *work, const struct layer *layer, int64_t rows);

/* Normalise the states after the last layer, where the stack has a norm for that. */
void finish_stack(const struct stack *stack, struct workspace *work, int64_t rows);

#endif
