/* The largest numbers of rows.

   What this gains over torch.topk: one pass over each row, which skips blocks that hold nothing large enough. */

#include "kernels.h"
#include "ranking.h"

/* Find the `count` largest of some rows, whose numbers are `rows`, of scores (all_rows, columns): (chosen, count),
   largest first. Where there are not so many, or NaN, the value is minus infinity and the column 0. */
EXPORT int64_t top_k_rows(
    int64_t threads, int64_t all_rows, int64_t columns, const float *scores, int64_t chosen, const int64_t *rows,
    int64_t count, float *values, int64_t *places)
{
    if (fail_outside(BAD_SIZE, count, 1, INT64_MAX)) return BAD_SIZE;
    for (int64_t at = 0; at < chosen; at++)
        if (fail_outside(BAD_ROW, rows[at], 0, all_rows - 1)) return BAD_ROW;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t at = 0; at < chosen; at++) {
        struct ranking ranking = {values + at * count, places + at * count, 0, 0};
        const float *row = scores + rows[at] * columns;
        clear_ranking(ranking, count);
        for (int64_t first = 0; first < columns; first += TOKEN_BLOCK) {
            int64_t some = min(columns - first, TOKEN_BLOCK);
            insert_scores(ranking, count, row + first, first, some, largest_of(row + first, some));
        }
    }
    return NO_FAILURE;
}
