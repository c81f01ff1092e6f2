/* The decoder's step and the encoder, in single precision on a CPU, for `native_vaswani.py`.

   What this gains over a call of torch for each operation: no overhead between operations, weights that are read in
   the order in which they stand, attention over a beam's own ancestors only, and the best words found while their
   scores are still in registers. Threads are those of torch, which brings the OpenMP library that is linked here.

   Letters in comments: R rows, D width of a state, H heads, K and U widths of a key and a value, F inner width,
   V words, S source words, B sentences, Q queries of a sentence. Rows of a matrix product's result are padded to whole
   panels of its weight. */

#include "common.h"

enum {
    TILE_ROWS = 6,              /* a tile of a product's result is held in registers */
    TILE_VECS = LANES / 4,
    PANEL = TILE_VECS * LANES,  /* columns of a weight that stand together, row by row: a tile reads memory in order */
    DEPTH = 512,                /* rows of a panel that are taken at a time: they stay in the cache */
    ROW_BLOCK = 96,             /* rows of the left matrix that a thread takes at a time */
    WORD_BLOCK = 64,            /* words that are scored and ranked at a time, whole panels */
};

/* Mirrors of the structures in native_vaswani.py: every field has eight bytes. */

struct product {
    const float *weights, *bias; /* (columns / PANEL, depth, PANEL), and (columns) or null */
    const int8_t *rounded;       /* instead of `weights`: (columns / PANEL, depth / BYTES, PANEL, BYTES) */
    const float *scales;         /* (columns padded): what a unit of `rounded` is worth */
    const int32_t *sums;         /* (columns padded): 128 times the sum of each column of `rounded` */
};

struct rounded_rows {
    uint8_t *numbers; /* (rows, depth padded to BYTES) */
    float *scales;    /* (rows) */
};

struct norm {
    const float *weight, *bias;
};

struct layer {
    struct product own_input, own_output;       /* D -> queries, keys and values, H U -> D */
    struct norm own_norm;
    struct product source_query, source_output; /* a decoder's only, as everything with `source` */
    struct norm source_norm;
    struct product source_input;                /* D -> keys and values of the source */
    struct product inner, outer;                /* D -> F, F -> D */
    struct norm norm;
};

struct stack {
    int64_t layers, width, heads, key_width, value_width, inner_width, words;
    double scaling, epsilon, embedding_scale;
    const struct layer *layer;
    const float *embedding;         /* (V, D) */
    struct product output;          /* D -> V */
};

/* What belongs to one call: sentences, their caches, and room for what is computed. */
struct work {
    int64_t threads;
    int64_t source_width;         /* S, padded to a multiple of LANES */
    const int64_t *source_starts; /* (B + 1): where the words of a sentence begin among those of all */
    float *source_keys, *source_values; /* (layers, B, H, K, S padded), (layers, B, S padded, H U) */
    int64_t sentences, beams, slots; /* B, the largest Q, and the slots for which there is room in each sentence */
    float *keys, *values;         /* (layers, B, slots, H K), (layers, B, slots, H U) */
    const float *positions;       /* (slots, D) */
    int64_t *used, *lengths;      /* (B): slots in use, and words so far */
    int32_t *pasts, *old_pasts;   /* (B, Q, slots): the slots of each beam's own words; (Q, slots) */
    float *states, *products, *attended, *scores; /* (R, D), (R, widest), (R, H U), (threads, longest past or S) */
    struct rounded_rows rounded;  /* of the left side of a product with rounded weights */
};

static int64_t padded(int64_t columns) { return (columns + PANEL - 1) / PANEL * PANEL; }

#include "int8.h"

/* Matrix products */

static inline __attribute__((always_inline)) void multiply_tile(
    int rows, const float *left, int64_t left_stride, const float *panel, int64_t depth, const float *start,
    int64_t start_stride, float *result, int64_t stride, const float *ahead, int64_t ahead_step)
{
    vec total[TILE_ROWS][TILE_VECS];
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < TILE_VECS; part++)
            total[row][part] = *(const vec *)(start + row * start_stride + part * LANES);
    for (int64_t at = 0; at < depth; at++, panel += PANEL, ahead += ahead_step) {
        for (int64_t line = 0; line < ahead_step; line += LANES) __builtin_prefetch(ahead + line, 0, 2);
        vec weight[TILE_VECS];
        for (int part = 0; part < TILE_VECS; part++) weight[part] = *(const vec *)(panel + part * LANES);
        for (int row = 0; row < rows; row++) {
            float factor = left[row * left_stride + at];
            for (int part = 0; part < TILE_VECS; part++) total[row][part] += factor * weight[part];
        }
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < TILE_VECS; part++)
            *(vec *)(result + row * stride + part * LANES) = total[row][part];
}

/* Multiply some rows by one panel; `bias` may be null, `columns` is how many of it there are. */
static void multiply_panel(
    const float *left, int64_t left_stride, int64_t rows, const float *panel, int64_t depth, const float *bias,
    int64_t columns, float *result, int64_t stride)
{
    float start[PANEL] = {0};
    if (bias) memcpy(start, bias, min(columns, PANEL) * sizeof(float));
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t ahead_step = (PANEL + tiles - 1) / tiles; /* the tiles of this panel fetch the next one together */
    for (int64_t from = 0; from < depth; from += DEPTH) {
        int64_t some = min(depth - from, DEPTH);
        const float *weights = panel + from * PANEL, *ahead = weights + depth * PANEL;
        for (int64_t row = 0; row < rows; row += TILE_ROWS, ahead += some * ahead_step) {
            float *to = result + row * stride;
            const float *first = from ? to : start, *factors = left + row * left_stride + from;
            int64_t first_stride = from ? stride : 0;
#define TILE(ROWS) \
    multiply_tile(ROWS, factors, left_stride, weights, some, first, first_stride, to, stride, ahead, ahead_step)
            switch (rows - row) {
            case 1: TILE(1); break;
            case 2: TILE(2); break;
            case 3: TILE(3); break;
            case 4: TILE(4); break;
            case 5: TILE(5); break;
            default: TILE(TILE_ROWS);
            }
#undef TILE
        }
    }
}

/* Prepare rows for products, among the threads of a parallel region. */
static void prepare(
    const struct work *work, struct product product, const float *left, int64_t left_stride, int64_t rows, int64_t depth)
{
    if (product.rounded) round_rows(left, left_stride, rows, depth, work->rounded);
}

/* Multiply prepared rows by one panel of a weight. */
static void multiply_columns(
    const struct work *work, struct product product, const float *left, int64_t left_stride, int64_t row, int64_t rows,
    int64_t column, int64_t depth, int64_t columns, float *result, int64_t stride)
{
    if (product.rounded)
        multiply_rounded_panel(work->rounded, row, rows, product, column, depth, columns, result, stride);
    else
        multiply_panel(
            left + row * left_stride, left_stride, rows, product.weights + column * depth, depth,
            product.bias ? product.bias + column : 0, columns - column, result, stride);
}

/* Multiply (rows, depth) by (depth, columns) among the threads of a parallel region. */
static void multiply(
    const struct work *work, const float *left, int64_t left_stride, int64_t rows, struct product product,
    int64_t depth, int64_t columns, float *result)
{
    int64_t stride = padded(columns);
    prepare(work, product, left, left_stride, rows, depth);
#pragma omp for collapse(2) schedule(static)
    for (int64_t column = 0; column < columns; column += PANEL)
        for (int64_t row = 0; row < rows; row += ROW_BLOCK)
            multiply_columns(
                work, product, left, left_stride, row, min(rows - row, ROW_BLOCK), column, depth, columns,
                result + row * stride + column, stride);
}

/* Normalise the sum of states and a sub-layer's output, among the threads of a parallel region. */
static void add_and_normalise(
    const struct stack *stack, struct norm norm, int64_t rows, const float *output, float *states)
{
    int64_t width = stack->width, stride = padded(width);
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
        float factor = 1.0f / sqrtf(squares / width + (float)stack->epsilon);
#pragma omp simd
        for (int64_t at = 0; at < width; at++) state[at] = (state[at] - mean) * factor * norm.weight[at] + norm.bias[at];
    }
}

/* Attention of one row to source words, with keys (H, K, S padded) and values (S padded, H U). */
static void attend_to_source(
    const struct stack *stack, const float *query, const float *keys, const float *values, int64_t length,
    int64_t places, float *scores, float *attended)
{
    int64_t stride = stack->heads * stack->value_width;
    for (int64_t head = 0; head < stack->heads; head++) {
        for (int64_t from = 0; from < length; from += LANES) {
            vec total = {0};
            for (int64_t at = 0; at < stack->key_width; at++)
                total += query[at] * *(const vec *)(keys + at * places + from);
            *(vec *)(scores + from) = total * (float)stack->scaling;
        }
        softmax(scores, length);
        memset(attended, 0, stack->value_width * sizeof(float));
        for (int64_t place = 0; place < length; place++)
#pragma omp simd
            for (int64_t at = 0; at < stack->value_width; at++)
                attended[at] += scores[place] * values[place * stride + at];
        query += stack->key_width;
        keys += stack->key_width * places;
        values += stack->value_width;
        attended += stack->value_width;
    }
}

/* Attention of one row to the slots of its own past, with keys (slots, H K) and values (slots, H U). */
static void attend_to_past(
    const struct stack *stack, const float *query, const float *keys, const float *values, const int32_t *past,
    int64_t length, float *scores, float *attended)
{
    int64_t key_stride = stack->heads * stack->key_width, value_stride = stack->heads * stack->value_width;
    for (int64_t head = 0; head < stack->heads; head++) {
        for (int64_t place = 0; place < length; place++) {
            const float *key = keys + past[place] * key_stride;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t at = 0; at < stack->key_width; at++) sum += query[at] * key[at];
            scores[place] = sum * (float)stack->scaling;
        }
        softmax(scores, length);
        memset(attended, 0, stack->value_width * sizeof(float));
        for (int64_t place = 0; place < length; place++) {
            const float *value = values + past[place] * value_stride;
#pragma omp simd
            for (int64_t at = 0; at < stack->value_width; at++) attended[at] += scores[place] * value[at];
        }
        query += stack->key_width;
        keys += stack->key_width;
        values += stack->value_width;
        attended += stack->value_width;
    }
}

/* Parts of a layer, among the threads of a parallel region */

static void finish_attention(
    const struct stack *stack, struct work *work, struct product output, struct norm norm, int64_t rows)
{
    int64_t width = stack->heads * stack->value_width;
    multiply(work, work->attended, width, rows, output, width, stack->width, work->products);
    add_and_normalise(stack, norm, rows, work->products, work->states);
}

static void feed_forward(const struct stack *stack, struct work *work, const struct layer *layer, int64_t rows)
{
    int64_t stride = padded(stack->inner_width);
    float *inner = work->products, *outer = work->products + rows * stride;
    multiply(work, work->states, stack->width, rows, layer->inner, stack->width, stack->inner_width, inner);
#pragma omp for schedule(static)
    for (int64_t at = 0; at < rows * stride; at++) inner[at] = inner[at] < 0 ? 0 : inner[at];
    multiply(work, inner, stride, rows, layer->outer, stack->inner_width, stack->width, outer);
    add_and_normalise(stack, layer->norm, rows, outer, work->states);
}

/* Spread keys and values of all source words, which are columns of a product, over the sentences. */
static void store_source(
    const struct stack *stack, const struct work *work, const float *products, int64_t stride, float *source_keys,
    float *source_values)
{
    int64_t keys = stack->heads * stack->key_width, values = stack->heads * stack->value_width;
    int64_t places = work->source_width;
#pragma omp for schedule(static)
    for (int64_t sentence = 0; sentence < work->sentences; sentence++) {
        int64_t first = work->source_starts[sentence], length = work->source_starts[sentence + 1] - first;
        float *key = source_keys + sentence * keys * places, *value = source_values + sentence * values * places;
        memset(key, 0, keys * places * sizeof(float)); /* a vec of keys may reach beyond the last one */
        for (int64_t place = 0; place < length; place++) {
            const float *row = products + (first + place) * stride;
            for (int64_t at = 0; at < keys; at++) key[at * places + place] = row[at];
            memcpy(value + place * values, row + keys, values * sizeof(float));
        }
    }
}

static float *scores_of_thread(const struct work *work)
{
    return work->scores + omp_get_thread_num() * max(work->slots, work->source_width);
}

/* Return how many threads to use for some rows: waiting for another one costs as much as so many multiplications. */
static int threads_for(const struct stack *stack, const struct work *work, int64_t rows)
{
    return min(work->threads, 1 + rows * stack->width * stack->inner_width / (1 << 20));
}

/* What Python reads and calls */

const int64_t panel_columns = PANEL;

/* Apply an encoder's layers to `states`, in place. Keys and values of one layer after the other are `source_keys` and
   `source_values`. */
void encode(const struct stack *stack, struct work *work)
{
    int64_t keys = stack->heads * stack->key_width, values = stack->heads * stack->value_width;
    int64_t rows = work->source_starts[work->sentences], columns = 2 * keys + values, places = work->source_width;
#pragma omp parallel num_threads(threads_for(stack, work, rows))
    for (const struct layer *layer = stack->layer; layer < stack->layer + stack->layers; layer++) {
        multiply(work, work->states, stack->width, rows, layer->own_input, stack->width, columns, work->products);
        store_source(
            stack, work, work->products + keys, padded(columns), work->source_keys, work->source_values);
        for (int64_t sentence = 0; sentence < work->sentences; sentence++) {
            int64_t first = work->source_starts[sentence], end = work->source_starts[sentence + 1];
#pragma omp for schedule(static) nowait
            for (int64_t row = first; row < end; row++)
                attend_to_source(
                    stack, work->products + row * padded(columns), work->source_keys + sentence * keys * places,
                    work->source_values + sentence * values * places, end - first, places, scores_of_thread(work),
                    work->attended + row * values);
        }
#pragma omp barrier
        finish_attention(stack, work, layer->own_output, layer->own_norm, rows);
        feed_forward(stack, work, layer, rows);
    }
}

/* Fill `source_keys` and `source_values` of each layer from an encoder's output (source words, D). */
void prepare_source(const struct stack *stack, struct work *work, const float *encoded)
{
    int64_t keys = stack->heads * stack->key_width, values = stack->heads * stack->value_width;
    int64_t rows = work->source_starts[work->sentences], places = work->sentences * work->source_width;
#pragma omp parallel num_threads(threads_for(stack, work, rows))
    for (int64_t number = 0; number < stack->layers; number++) {
        multiply(
            work, encoded, stack->width, rows, stack->layer[number].source_input, stack->width, keys + values,
            work->products);
        store_source(
            stack, work, work->products, padded(keys + values), work->source_keys + number * keys * places,
            work->source_values + number * values * places);
    }
}

/* Append a word to each beam of some sentences, whose numbers are `chosen`: (chosen, Q) words, and the beams that
   they continue. Leaves the decoder's states in `states`. */
void decode(
    const struct stack *stack, struct work *work, int64_t sentences, int64_t queries, const int64_t *chosen,
    const int64_t *words, const int64_t *parents)
{
    int64_t rows = sentences * queries, keys = stack->heads * stack->key_width;
    int64_t values = stack->heads * stack->value_width, columns = 2 * keys + values;
    int64_t past_stride = work->slots * work->beams;
    for (int64_t row = 0; row < rows; row++) {
        int64_t sentence = chosen[row / queries], length = work->lengths[sentence];
        int32_t *pasts = work->pasts + sentence * past_stride;
        if (row % queries == 0) memcpy(work->old_pasts, pasts, past_stride * sizeof(int32_t));
        int32_t *past = pasts + row % queries * work->slots;
        memcpy(past, work->old_pasts + parents[row] * work->slots, length * sizeof(int32_t));
        past[length] = work->used[sentence] + row % queries;
        const float *embedding = stack->embedding + words[row] * stack->width;
        const float *position = work->positions + length * stack->width;
        for (int64_t at = 0; at < stack->width; at++)
            work->states[row * stack->width + at] = embedding[at] * (float)stack->embedding_scale + position[at];
    }
    for (int64_t at = 0; at < sentences; at++) {
        work->lengths[chosen[at]]++;
        work->used[chosen[at]] += queries;
    }
#pragma omp parallel num_threads(threads_for(stack, work, rows))
    for (int64_t number = 0; number < stack->layers; number++) {
        const struct layer *layer = stack->layer + number;
        multiply(work, work->states, stack->width, rows, layer->own_input, stack->width, columns, work->products);
#pragma omp for schedule(static)
        for (int64_t at = 0; at < sentences; at++) {
            int64_t sentence = number * work->sentences + chosen[at];
            float *own_keys = work->keys + sentence * work->slots * keys;
            float *own_values = work->values + sentence * work->slots * values;
            const float *product = work->products + at * queries * padded(columns);
            for (int64_t slot = work->used[chosen[at]] - queries; slot < work->used[chosen[at]]; slot++) {
                memcpy(own_keys + slot * keys, product + keys, keys * sizeof(float));
                memcpy(own_values + slot * values, product + 2 * keys, values * sizeof(float));
                product += padded(columns);
            }
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            int64_t sentence = chosen[row / queries], place = (number * work->sentences + sentence) * work->slots;
            attend_to_past(
                stack, work->products + row * padded(columns), work->keys + place * keys, work->values + place * values,
                work->pasts + sentence * past_stride + row % queries * work->slots, work->lengths[sentence],
                scores_of_thread(work), work->attended + row * values);
        }
        finish_attention(stack, work, layer->own_output, layer->own_norm, rows);

        multiply(work, work->states, stack->width, rows, layer->source_query, stack->width, keys, work->products);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            int64_t sentence = chosen[row / queries];
            int64_t place = (number * work->sentences + sentence) * work->source_width;
            attend_to_source(
                stack, work->products + row * padded(keys), work->source_keys + place * keys,
                work->source_values + place * values,
                work->source_starts[sentence + 1] - work->source_starts[sentence], work->source_width,
                scores_of_thread(work), work->attended + row * values);
        }
        finish_attention(stack, work, layer->source_output, layer->source_norm, rows);
        feed_forward(stack, work, layer, rows);
    }
}

/* Multiply some prepared rows of `states` by one block of the words' matrix: scores (rows, WORD_BLOCK). */
static void score_block(
    const struct stack *stack, const struct work *work, int64_t row, int64_t rows, int64_t word, float *scores)
{
    int64_t end = min(word + WORD_BLOCK, stack->words);
    for (int64_t column = word; column < end; column += PANEL)
        multiply_columns(
            work, stack->output, work->states, stack->width, row, rows, column, stack->width, stack->words,
            scores + column - word, WORD_BLOCK);
}

/* Score every word after each of the first rows of `states`; row i of the result is row places[i] of `scores`, with
   all words of the vocabulary. With `normalise`, scores are logarithms of probabilities. */
void score_words(
    const struct stack *stack, const struct work *work, int64_t rows, const int64_t *places, int64_t normalise,
    float *scores)
{
    int64_t words = stack->words;
#pragma omp parallel num_threads(work->threads)
    {
        prepare(work, stack->output, work->states, stack->width, rows, stack->width);
#pragma omp for schedule(static)
        for (int64_t word = 0; word < words; word += WORD_BLOCK)
            for (int64_t row = 0; row < rows; row += ROW_BLOCK) {
                float block[ROW_BLOCK * WORD_BLOCK];
                int64_t some = min(rows - row, ROW_BLOCK);
                score_block(stack, work, row, some, word, block);
                for (int64_t one = 0; one < some; one++)
                    memcpy(
                        scores + places[row + one] * words + word, block + one * WORD_BLOCK,
                        min(words - word, WORD_BLOCK) * sizeof(float));
            }
        if (normalise) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) {
                float *score = scores + places[row] * words, largest = largest_of(score, words);
                float total = largest + logf(sum_of_exponentials(score, words, largest));
#pragma omp simd
                for (int64_t at = 0; at < words; at++) score[at] -= total;
            }
        }
    }
}

/* What is known of a row: its best words, their scores, the largest score, and the sum of exp(score - largest). */
struct ranking {
    float *best;
    int64_t *words;
    float *largest, *sum;
};

static void insert(struct ranking ranking, int64_t count, float score, int64_t word)
{
    int64_t place = count - 1;
    for (; place > 0 && ranking.best[place - 1] < score; place--) {
        ranking.best[place] = ranking.best[place - 1];
        ranking.words[place] = ranking.words[place - 1];
    }
    ranking.best[place] = score;
    ranking.words[place] = word;
}

/* Find the best of some scores; `largest` is the largest of them. */
static void insert_all(
    struct ranking ranking, int64_t count, const float *scores, int64_t first_word, int64_t words, float largest)
{
    if (largest <= ranking.best[count - 1]) return;
    for (int64_t at = 0; at < words; at++)
        if (scores[at] > ranking.best[count - 1]) insert(ranking, count, scores[at], first_word + at);
}

static void clear(struct ranking ranking, int64_t count)
{
    for (int64_t place = 0; place < count; place++) {
        ranking.best[place] = -INFINITY;
        ranking.words[place] = 0;
    }
}

/* Find the `count` largest of each row of scores (any, words) whose place is given: (rows, count). */
void rank_scores(
    int64_t threads, int64_t rows, int64_t words, const int64_t *places, const float *scores, int64_t count,
    float *best, int64_t *best_words)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        struct ranking ranking = {best + row * count, best_words + row * count, 0, 0};
        const float *score = scores + places[row] * words;
        clear(ranking, count);
        for (int64_t word = 0; word < words; word += WORD_BLOCK) {
            int64_t some = min(words - word, WORD_BLOCK);
            insert_all(ranking, count, score + word, word, some, largest_of(score + word, some));
        }
    }
}

static void raise_largest(struct ranking ranking, float largest)
{
    if (!(largest > *ranking.largest)) return;
    *ranking.sum *= exponential(*ranking.largest - largest);
    *ranking.largest = largest;
}

/* Find the `count` most probable words after each of the first rows of `states`. Each thread ranks a share of all
   words in its part of (threads, rows, count) and (threads, rows); the answer is in the first part. */
static void rank_words(
    const struct stack *stack, const struct work *work, int64_t rows, int64_t count, float *best, int64_t *words,
    float *largest, float *sums)
{
    int64_t blocks = (stack->words + WORD_BLOCK - 1) / WORD_BLOCK, shares = min(work->threads, blocks);
#define RANKING(AT) ((struct ranking){best + (AT) * count, words + (AT) * count, largest + (AT), sums + (AT)})
    prepare(work, stack->output, work->states, stack->width, rows, stack->width);
#pragma omp parallel for num_threads(shares) schedule(static)
    for (int64_t share = 0; share < shares; share++) {
        for (int64_t at = share * rows; at < (share + 1) * rows; at++) {
            clear(RANKING(at), count);
            largest[at] = -INFINITY;
            sums[at] = 0;
        }
        for (int64_t number = blocks * share / shares; number < blocks * (share + 1) / shares; number++) {
            int64_t first_word = number * WORD_BLOCK;
            for (int64_t row = 0; row < rows; row += ROW_BLOCK) {
                float block[ROW_BLOCK * WORD_BLOCK];
                int64_t some = min(rows - row, ROW_BLOCK);
                score_block(stack, work, row, some, first_word, block);
                for (int64_t one = 0; one < some; one++) {
                    struct ranking ranking = RANKING(share * rows + row + one);
                    float *scores = block + one * WORD_BLOCK;
                    for (int64_t at = stack->words - first_word; at < WORD_BLOCK; at++) scores[at] = -INFINITY;
                    float largest_here = largest_of(scores, WORD_BLOCK);
                    raise_largest(ranking, largest_here);
                    *ranking.sum += sum_of_exponentials(scores, WORD_BLOCK, *ranking.largest);
                    insert_all(ranking, count, scores, first_word, WORD_BLOCK, largest_here);
                }
            }
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        struct ranking all = RANKING(row);
        for (int64_t share = 1; share < shares; share++) {
            struct ranking other = RANKING(share * rows + row);
            raise_largest(all, *other.largest);
            *all.sum += *other.sum * exponential(*other.largest - *all.largest);
            for (int64_t place = 0; place < count && other.best[place] > all.best[count - 1]; place++)
                insert(all, count, other.best[place], other.words[place]);
        }
        float total = *all.largest + logf(*all.sum);
        for (int64_t place = 0; place < count; place++) all.best[place] -= total;
    }
#undef RANKING
}

/* Find the `count` best continuations of each sentence by one word: the sums of the beams' scores (sentences, Q) and the
   words' logarithms of probabilities, the beams and the words, each (sentences, count), best first. Of the `banned`
   words none is taken. Where there are no more, the sum is minus infinity. `best`, `best_words`, `largest` and
   `largest_sums` are room for `rank_words`. */
void rank_continuations(
    const struct stack *stack, const struct work *work, int64_t sentences, int64_t queries, int64_t count,
    const double *scores, int64_t banned, const int64_t *banned_words, float *best, int64_t *best_words, float *largest,
    float *largest_sums, double *sums, int64_t *beams, int64_t *words)
{
    int64_t of_row = count + banned;
    rank_words(stack, work, sentences * queries, of_row, best, best_words, largest, largest_sums);
    for (int64_t sentence = 0; sentence < sentences; sentence++, sums += count, beams += count, words += count) {
        for (int64_t place = 0; place < count; place++) {
            sums[place] = -INFINITY;
            beams[place] = words[place] = 0;
        }
        for (int64_t beam = 0; beam < queries; beam++, scores++, best += of_row, best_words += of_row)
            for (int64_t rank = 0; rank < of_row && *scores + best[rank] > sums[count - 1]; rank++) {
                int64_t word = best_words[rank], is_banned = 0;
                for (int64_t at = 0; at < banned; at++) is_banned |= word == banned_words[at];
                if (is_banned) continue;
                int64_t place = count - 1;
                for (; place > 0 && sums[place - 1] < *scores + best[rank]; place--) {
                    sums[place] = sums[place - 1];
                    beams[place] = beams[place - 1];
                    words[place] = words[place - 1];
                }
                sums[place] = *scores + best[rank];
                beams[place] = beam;
                words[place] = word;
            }
    }
}

/* Return a number that changes with any single number of the given tensors. */
uint64_t fingerprint(int64_t threads, int64_t tensors, const uint32_t *const *numbers, const int64_t *sizes)
{
    uint64_t all = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(+ : all)
    for (int64_t tensor = 0; tensor < tensors; tensor++) {
        const uint32_t *number = numbers[tensor];
        uint32_t sum = 0, size = sizes[tensor];
#pragma omp simd reduction(+ : sum)
        for (uint32_t at = 0; at < size; at++) sum += number[at] * (2 * at + 1);
        all += (uint64_t)sum * (uint64_t)(2 * tensor + 1);
    }
    return all;
}
