/* The best scores of a row, in the order of a sorted list. */

#ifndef VASWANI_RANKING_H
#define VASWANI_RANKING_H

#include "vectors.h"

enum { TOKEN_BLOCK = 64 }; /* tokens that are scored and ranked at a time, whole panels */

/* What is known of a row: its best tokens, their scores, the largest score, and the sum of exp(score - largest). */
struct ranking {
    float *best;
    int64_t *tokens;
    float *largest, *sum;
};

static inline void clear_ranking(struct ranking ranking, int64_t count)
{
    for (int64_t place = 0; place < count; place++) {
        ranking.best[place] = -INFINITY;
        ranking.tokens[place] = 0;
    }
}

static inline void insert_score(struct ranking ranking, int64_t count, float score, int64_t token)
{
    int64_t place = count - 1;
    for (; place > 0 && ranking.best[place - 1] < score; place--) {
        ranking.best[place] = ranking.best[place - 1];
        ranking.tokens[place] = ranking.tokens[place - 1];
    }
    ranking.best[place] = score;
    ranking.tokens[place] = token;
}

/* Find the best of some scores; `largest` is the largest of them. */
static inline void insert_scores(
    struct ranking ranking, int64_t count, const float *scores, int64_t first_token, int64_t tokens, float largest)
{
    if (largest <= ranking.best[count - 1]) return;
    for (int64_t at = 0; at < tokens; at++)
        if (scores[at] > ranking.best[count - 1]) insert_score(ranking, count, scores[at], first_token + at);
}

#endif
