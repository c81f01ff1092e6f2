/* The decoder's step for inference: all layers, and the best continuations, each in one call.

   What this gains over a call of torch for each operation: no overhead between operations, self-attention over a beam's
   own ancestors only, so that nothing is reordered, cross-attention whose keys and values the beams of a sequence
   share, and the best tokens found while their scores are still in the cache. */

#include <float.h>
#include <stdlib.h>

#include "ranking.h"
#include "stack.h"

/* Fill `cross_keys` and `cross_values` of each layer from an encoder's output (source tokens, D). */
EXPORT int64_t project_source(const struct stack *stack, struct workspace *work, const float *encoded)
{
    int64_t keys = key_columns(stack), values = value_columns(stack);
    int64_t rows = work->source_starts[work->sequences], places = work->sequences * work->source_width;
    if (fail_outside(BAD_SIZE, rows, 0, work->rows)) return BAD_SIZE;
#pragma omp parallel num_threads(threads_for(stack, work, rows))
    for (int64_t number = 0; number < stack->layers; number++) {
        multiply(&stack->layer[number].cross_input, encoded, stack->d_model, rows, work->quantised, work->products);
        store_source(
            stack, work, work->products, padded(keys + values), work->cross_keys + number * keys * places,
            work->cross_values + number * values * places);
    }
    return NO_FAILURE;
}

/* Attention of one row to the slots of its own past, with keys (slots, H K) and values (slots, H U). */
static void attend_to_past(
    const struct stack *stack, double scaling, const float *query, const float *keys, const float *values,
    const int32_t *past, int64_t length, float *scores, float *attended)
{
    int64_t key_stride = key_columns(stack), value_stride = value_columns(stack);
    for (int64_t head = 0; head < stack->heads; head++) {
        for (int64_t place = 0; place < length; place++) {
            const float *key = keys + past[place] * key_stride;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t at = 0; at < stack->d_k; at++) sum += query[at] * key[at];
            scores[place] = sum * (float)scaling;
        }
        softmax(scores, length);
        memset(attended, 0, stack->d_v * sizeof(float));
        for (int64_t place = 0; place < length; place++) {
            const float *value = values + past[place] * value_stride;
#pragma omp simd
            for (int64_t at = 0; at < stack->d_v; at++) attended[at] += scores[place] * value[at];
        }
        query += stack->d_k;
        keys += stack->d_k;
        values += stack->d_v;
        attended += stack->d_v;
    }
}

static int has_embedding(const struct stack *stack, int64_t token) { return token >= 0 && token < stack->embeddings; }

/* Look at what a step is told. A token that the output embedding knows, but not the embedding, was generated and is an
   error. One that neither knows can only pad a dead beam: it gets zeros, and `best_continuations` sees to it that the
   beam is dead. */
static int64_t check_step(
    const struct stack *stack, const struct workspace *work, int64_t sequences, int64_t beams, const int64_t *chosen,
    const int64_t *tokens, const int64_t *parents)
{
    if (fail_outside(BAD_SIZE, beams, 1, work->beams)) return BAD_SIZE;
    if (fail_outside(BAD_SIZE, sequences, 0, work->sequences)) return BAD_SIZE;
    if (fail_outside(BAD_SIZE, sequences * beams, 0, work->rows)) return BAD_SIZE;
    for (int64_t at = 0; at < sequences; at++) {
        if (fail_outside(BAD_SEQUENCE, chosen[at], 0, work->sequences - 1)) return BAD_SEQUENCE;
        if (fail_outside(BAD_SLOT, work->used[chosen[at]] + beams, 0, work->slots)) return BAD_SLOT;
        if (fail_outside(BAD_SLOT, work->lengths[chosen[at]], 0, work->slots - 1)) return BAD_SLOT;
        if (fail_outside(BAD_POSITION, work->lengths[chosen[at]], 0, work->encoded - 1)) return BAD_POSITION;
    }
    if (check_activations(stack)) return BAD_ACTIVATION;
    for (int64_t row = 0; row < sequences * beams; row++) {
        if (fail_outside(BAD_PARENT, parents[row], 0, work->previous_beams - 1)) return BAD_PARENT;
        if (tokens[row] >= stack->embeddings && tokens[row] < stack->output.columns)
            return fail(BAD_TOKEN, tokens[row], 0, stack->embeddings - 1);
    }
    return NO_FAILURE;
}

/* Append a token to each beam of some sequences, whose numbers are `chosen`: (chosen, Q) tokens, and the beams that
   they continue. Leaves the decoder's states in `states`. */
EXPORT int64_t decode_step(
    const struct stack *stack, struct workspace *work, int64_t sequences, int64_t beams, const int64_t *chosen,
    const int64_t *tokens, const int64_t *parents)
{
    int64_t failure = check_step(stack, work, sequences, beams, chosen, tokens, parents);
    if (failure) return failure;
    int64_t rows = sequences * beams, width = stack->d_model, keys = key_columns(stack);
    int64_t values = value_columns(stack), stride = padded(2 * keys + values);
    int64_t past_stride = work->slots * work->beams;
    for (int64_t row = 0; row < rows; row++) {
        int64_t sequence = chosen[row / beams], length = work->lengths[sequence];
        int32_t *pasts = work->pasts + sequence * past_stride;
        if (row % beams == 0) memcpy(work->old_pasts, pasts, past_stride * sizeof(int32_t));
        int32_t *past = pasts + row % beams * work->slots;
        memcpy(past, work->old_pasts + parents[row] * work->slots, length * sizeof(int32_t));
        past[length] = work->used[sequence] + row % beams;
        work->row_tokens[row] = tokens[row];
        float *state = work->states + row * width;
        const float *position = work->positions + length * width;
        if (has_embedding(stack, tokens[row])) {
            const float *embedding = stack->embedding + tokens[row] * width;
            for (int64_t at = 0; at < width; at++) state[at] = embedding[at] * (float)stack->embed_scale + position[at];
        } else
            memcpy(state, position, width * sizeof(float));
    }
    for (int64_t at = 0; at < sequences; at++) {
        work->lengths[chosen[at]]++;
        work->used[chosen[at]] += beams;
    }
    work->previous_beams = beams;
#pragma omp parallel num_threads(threads_for(stack, work, rows))
    {
        for (int64_t number = 0; number < stack->layers; number++) {
            const struct layer *layer = stack->layer + number;
            multiply(&layer->self_input, work->states, width, rows, work->quantised, work->products);
#pragma omp for schedule(static)
            for (int64_t at = 0; at < sequences; at++) {
                int64_t sequence = number * work->sequences + chosen[at];
                float *own_keys = work->self_keys + sequence * work->slots * keys;
                float *own_values = work->self_values + sequence * work->slots * values;
                const float *product = work->products + at * beams * stride;
                for (int64_t slot = work->used[chosen[at]] - beams; slot < work->used[chosen[at]]; slot++) {
                    CHECK(slot >= 0 && slot < work->slots);
                    memcpy(own_keys + slot * keys, product + keys, keys * sizeof(float));
                    memcpy(own_values + slot * values, product + 2 * keys, values * sizeof(float));
                    product += stride;
                }
            }
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) {
                int64_t sequence = chosen[row / beams], place = (number * work->sequences + sequence) * work->slots;
                attend_to_past(
                    stack, layer->self_scaling, work->products + row * stride, work->self_keys + place * keys,
                    work->self_values + place * values, work->pasts + sequence * past_stride + row % beams * work->slots,
                    work->lengths[sequence], scores_of_thread(work), work->attended + row * values);
            }
            finish_attention(stack, work, &layer->self_output, layer->self_norm, rows);

            multiply(&layer->cross_query, work->states, width, rows, work->quantised, work->products);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) {
                int64_t sequence = chosen[row / beams];
                int64_t place = (number * work->sequences + sequence) * work->source_width;
                attend_to_source(
                    stack, layer->cross_scaling, work->products + row * padded(keys), work->cross_keys + place * keys,
                    work->cross_values + place * values,
                    work->source_starts[sequence + 1] - work->source_starts[sequence], work->source_width,
                    scores_of_thread(work), work->attended + row * values);
            }
            finish_attention(stack, work, &layer->cross_output, layer->cross_norm, rows);
            feed_forward(stack, work, layer, rows);
        }
        finish_stack(stack, work, rows);
    }
    return NO_FAILURE;
}

/* Multiply some prepared rows of `states` by one block of the output embedding: scores (rows, TOKEN_BLOCK). */
static void score_block(
    const struct stack *stack, const struct workspace *work, int64_t row, int64_t rows, int64_t token, float *scores)
{
    int64_t end = min(token + TOKEN_BLOCK, stack->output.columns);
    for (int64_t column = token; column < end; column += PANEL)
        multiply_columns(
            &stack->output, work->states, stack->d_model, work->quantised, row, rows, column, scores + column - token,
            TOKEN_BLOCK);
}

/* Score every token after each of the first rows of `states`; row i of the result is row places[i] of `scores`
   (all_places, V). With `normalise`, scores are logarithms of probabilities. */
EXPORT int64_t score_tokens(
    const struct stack *stack, const struct workspace *work, int64_t rows, int64_t all_places, const int64_t *places,
    int64_t normalise, float *scores)
{
    int64_t tokens = stack->output.columns;
    if (fail_outside(BAD_SIZE, rows, 0, work->rows)) return BAD_SIZE;
    for (int64_t row = 0; row < rows; row++)
        if (fail_outside(BAD_ROW, places[row], 0, all_places - 1)) return BAD_ROW;
#pragma omp parallel num_threads(work->threads)
    {
        prepare_rows(&stack->output, work->states, stack->d_model, rows, work->quantised);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < tokens; token += TOKEN_BLOCK)
            for (int64_t row = 0; row < rows; row += ROW_BLOCK) {
                float block[ROW_BLOCK * TOKEN_BLOCK];
                int64_t some = min(rows - row, ROW_BLOCK);
                score_block(stack, work, row, some, token, block);
                for (int64_t one = 0; one < some; one++)
                    memcpy(
                        scores + places[row + one] * tokens + token, block + one * TOKEN_BLOCK,
                        min(tokens - token, TOKEN_BLOCK) * sizeof(float));
            }
        if (normalise) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) {
                float *score = scores + places[row] * tokens, largest = largest_of(score, tokens);
                float total = largest + logf(sum_of_exponentials(score, tokens, largest));
#pragma omp simd
                for (int64_t at = 0; at < tokens; at++) score[at] -= total;
            }
        }
    }
    return NO_FAILURE;
}

static void raise_largest(struct ranking ranking, float largest)
{
    if (!(largest > *ranking.largest)) return;
    *ranking.sum *= exponential(*ranking.largest - largest);
    *ranking.largest = largest;
}

/* Return the ranking of one row, or of one row in one thread's share. */
static struct ranking ranking_at(struct ranking all, int64_t count, int64_t at)
{
    return (struct ranking){all.best + at * count, all.tokens + at * count, all.largest + at, all.sum + at};
}

/* Find the `count` most probable tokens after each of the first rows of `states`. Each thread ranks a share of all
   tokens in its part of (shares, rows, count); the answer is in the first part. The probabilities of the tokens that
   are `left_out` are no part of the sum. */
static void rank_tokens(
    const struct stack *stack, const struct workspace *work, int64_t rows, int64_t count, int64_t shares,
    int64_t left_out, const int64_t *left_out_tokens, struct ranking rankings)
{
    int64_t tokens = stack->output.columns, blocks = (tokens + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    prepare_rows(&stack->output, work->states, stack->d_model, rows, work->quantised);
#pragma omp parallel for num_threads(shares) schedule(static)
    for (int64_t share = 0; share < shares; share++) {
        for (int64_t at = share * rows; at < (share + 1) * rows; at++) {
            clear_ranking(ranking_at(rankings, count, at), count);
            rankings.largest[at] = -INFINITY;
            rankings.sum[at] = 0;
        }
        for (int64_t number = blocks * share / shares; number < blocks * (share + 1) / shares; number++) {
            int64_t first_token = number * TOKEN_BLOCK;
            for (int64_t row = 0; row < rows; row += ROW_BLOCK) {
                float block[ROW_BLOCK * TOKEN_BLOCK];
                int64_t some = min(rows - row, ROW_BLOCK);
                score_block(stack, work, row, some, first_token, block);
                for (int64_t one = 0; one < some; one++) {
                    struct ranking ranking = ranking_at(rankings, count, share * rows + row + one);
                    float *scores = block + one * TOKEN_BLOCK;
                    for (int64_t at = tokens - first_token; at < TOKEN_BLOCK; at++) scores[at] = -INFINITY;
                    for (int64_t at = 0; at < left_out; at++) {
                        int64_t place = left_out_tokens[at] - first_token;
                        /* A finite number: the differences of a block without any other token stay defined. */
                        if (place >= 0 && place < min(tokens - first_token, TOKEN_BLOCK)) scores[place] = -FLT_MAX;
                    }
                    float largest = largest_of(scores, TOKEN_BLOCK);
                    raise_largest(ranking, largest);
                    *ranking.sum += sum_of_exponentials(scores, TOKEN_BLOCK, *ranking.largest);
                    insert_scores(ranking, count, scores, first_token, TOKEN_BLOCK, largest);
                }
            }
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        struct ranking all = ranking_at(rankings, count, row);
        for (int64_t share = 1; share < shares; share++) {
            struct ranking other = ranking_at(rankings, count, share * rows + row);
            raise_largest(all, *other.largest);
            *all.sum += *other.sum * exponential(*other.largest - *all.largest);
            for (int64_t place = 0; place < count && other.best[place] > all.best[count - 1]; place++)
                insert_score(all, count, other.best[place], other.tokens[place]);
        }
        float total = *all.largest + logf(*all.sum);
        for (int64_t place = 0; place < count; place++) all.best[place] -= total;
    }
}

/* Find the `count` best continuations of each sequence by one token: the sums of the beams' scores (sequences, Q) and
   the tokens' logarithms of probabilities, the beams and the tokens, each (sequences, count), best first. Of the
   `banned` tokens none is taken; with `renormalise`, the probabilities of the others add up to 1. Where there are no
   more, the sum is minus infinity. */
EXPORT int64_t best_continuations(
    const struct stack *stack, const struct workspace *work, int64_t sequences, int64_t beams, int64_t count,
    const double *scores, int64_t banned, const int64_t *banned_tokens, int64_t renormalise, double *sums,
    int64_t *parents, int64_t *tokens)
{
    int64_t rows = sequences * beams, blocks = (stack->output.columns + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    int64_t of_row = count + banned, shares = max(min(work->threads, blocks), 1), all;
    if (fail_outside(BAD_SIZE, count, 1, INT64_MAX - banned)) return BAD_SIZE;
    if (fail_outside(BAD_SIZE, rows, 0, work->rows)) return BAD_SIZE;
    for (int64_t row = 0; row < rows; row++)
        if (scores[row] > -INFINITY && !has_embedding(stack, work->row_tokens[row]))
            return fail(BAD_TOKEN, work->row_tokens[row], 0, stack->embeddings - 1);
    if (__builtin_mul_overflow(shares * rows, of_row, &all)) return fail(NO_MEMORY, of_row, 0, 0);
    struct ranking rankings = {
        allocate(all, sizeof(float)), allocate(all, sizeof(int64_t)), allocate(shares * rows, sizeof(float)),
        allocate(shares * rows, sizeof(float))};
    int64_t failure = NO_FAILURE;
    if (!rankings.best || !rankings.tokens || !rankings.largest || !rankings.sum) {
        failure = fail(NO_MEMORY, all, 0, 0);
        goto end;
    }
    rank_tokens(stack, work, rows, of_row, shares, renormalise ? banned : 0, banned_tokens, rankings);
    for (int64_t row = 0; row < rows; row++) {
        double *sum = sums + row / beams * count;
        int64_t *parent = parents + row / beams * count, *token = tokens + row / beams * count;
        struct ranking ranking = ranking_at(rankings, of_row, row);
        if (row % beams == 0)
            for (int64_t place = 0; place < count; place++) {
                sum[place] = -INFINITY;
                parent[place] = token[place] = 0;
            }
        for (int64_t rank = 0; rank < of_row && scores[row] + ranking.best[rank] > sum[count - 1]; rank++) {
            int64_t is_banned = 0;
            for (int64_t at = 0; at < banned; at++) is_banned |= ranking.tokens[rank] == banned_tokens[at];
            if (is_banned) continue;
            int64_t place = count - 1;
            for (; place > 0 && sum[place - 1] < scores[row] + ranking.best[rank]; place--) {
                sum[place] = sum[place - 1];
                parent[place] = parent[place - 1];
                token[place] = token[place - 1];
            }
            sum[place] = scores[row] + ranking.best[rank];
            parent[place] = row % beams;
            token[place] = ranking.tokens[rank];
        }
    }
end:
    free(rankings.best);
    free(rankings.tokens);
    free(rankings.largest);
    free(rankings.sum);
    return failure;
}
