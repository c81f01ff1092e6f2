/* What Python asks of a library before it uses it: how it was built, and how its structures are laid out.

   What this gains: a library of another build is refused, instead of reading pointers where there are sizes. Failures
   and memory are here too, so that every kernel reports and asks in the same way. */

#include <stdio.h>
#include <stdlib.h>

#include "attention.h"
#include "kernels.h"
#include "product.h"
#include "residual.h"
#include "stack.h"

enum { ABI_VERSION = 2, CACHE_LINE = 64 };

/* Failures */

static _Thread_local int64_t failed[4];

int64_t fail(enum failure code, int64_t value, int64_t low, int64_t high)
{
    failed[0] = code, failed[1] = value, failed[2] = low, failed[3] = high;
    return code;
}

/* Give the code, the value and the range of this thread's last failure. */
EXPORT void last_failure(int64_t details[4])
{
    for (int at = 0; at < 4; at++) details[at] = failed[at];
}

void check_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "%s:%d: %s does not hold\n", file, line, condition);
    abort();
}

/* Memory */

static _Thread_local int64_t allocations_left = -1;

/* Let an allocation of this thread fail, for tests: after `successes` further ones. -1 means none. */
EXPORT void fail_allocation(int64_t successes) { allocations_left = successes; }

void *allocate(int64_t count, int64_t size)
{
    int64_t bytes;
    if (allocations_left >= 0 && allocations_left-- == 0) return NULL;
    if (count < 0 || size < 0 || __builtin_mul_overflow(count, size, &bytes)) return NULL;
    if (__builtin_add_overflow(bytes, CACHE_LINE, &bytes)) return NULL;
    return aligned_alloc(CACHE_LINE, bytes / CACHE_LINE * CACHE_LINE);
}

/* The layout of structures */

struct entry {
    const char *name;
    int64_t value;
};

#define SIZE(STRUCTURE) {#STRUCTURE, sizeof(struct STRUCTURE)}
#define FIELD(STRUCTURE, NAME) {#STRUCTURE "." #NAME, offsetof(struct STRUCTURE, NAME)}

static const struct entry layout[] = {
    {"ABI_VERSION", ABI_VERSION},
    {"LANES", LANES},
    {"PANEL", PANEL},
    {"BYTES", BYTES},
#ifdef __AVX512F__
    {"INSTRUCTIONS", 512},
#else
    {"INSTRUCTIONS", 2},
#endif
    SIZE(linear), FIELD(linear, weights), FIELD(linear, bias), FIELD(linear, quantised), FIELD(linear, scales),
    FIELD(linear, sums), FIELD(linear, in_place), FIELD(linear, depth), FIELD(linear, columns),
    SIZE(quantised_rows), FIELD(quantised_rows, numbers), FIELD(quantised_rows, scales),
    SIZE(norm), FIELD(norm, weight), FIELD(norm, bias), FIELD(norm, eps),
    SIZE(layer), FIELD(layer, self_input), FIELD(layer, self_output), FIELD(layer, self_norm),
    FIELD(layer, self_scaling), FIELD(layer, cross_query), FIELD(layer, cross_input), FIELD(layer, cross_output),
    FIELD(layer, cross_norm), FIELD(layer, cross_scaling), FIELD(layer, fc1), FIELD(layer, fc2), FIELD(layer, activation),
    FIELD(layer, norm),
    SIZE(stack), FIELD(stack, layers), FIELD(stack, d_model), FIELD(stack, heads), FIELD(stack, d_k),
    FIELD(stack, d_v), FIELD(stack, d_ff), FIELD(stack, embeddings), FIELD(stack, embed_scale), FIELD(stack, layer),
    FIELD(stack, embedding), FIELD(stack, output), FIELD(stack, norm),
    SIZE(workspace), FIELD(workspace, threads), FIELD(workspace, rows), FIELD(workspace, sequences),
    FIELD(workspace, beams), FIELD(workspace, slots), FIELD(workspace, previous_beams),
    FIELD(workspace, source_width), FIELD(workspace, source_starts), FIELD(workspace, cross_keys),
    FIELD(workspace, cross_values), FIELD(workspace, self_keys), FIELD(workspace, self_values),
    FIELD(workspace, positions), FIELD(workspace, encoded), FIELD(workspace, used), FIELD(workspace, lengths), FIELD(workspace, pasts),
    FIELD(workspace, old_pasts), FIELD(workspace, row_tokens), FIELD(workspace, states), FIELD(workspace, products),
    FIELD(workspace, attended), FIELD(workspace, scores), FIELD(workspace, quantised),
    SIZE(rows), FIELD(rows, first), FIELD(rows, stride),
    SIZE(unpadded), FIELD(unpadded, threads), FIELD(unpadded, sequences), FIELD(unpadded, heads),
    FIELD(unpadded, d_k), FIELD(unpadded, d_v), FIELD(unpadded, is_causal), FIELD(unpadded, queries),
    FIELD(unpadded, keys), FIELD(unpadded, scaling), FIELD(unpadded, query_starts), FIELD(unpadded, key_starts),
    SIZE(residual), FIELD(residual, threads), FIELD(residual, rows), FIELD(residual, width),
    FIELD(residual, row_seed), FIELD(residual, seed), FIELD(residual, threshold), FIELD(residual, scale),
    FIELD(residual, eps), FIELD(residual, weight), FIELD(residual, bias),
    {NULL, 0},
};

/* Return names and values of what Python must know as it is here, up to an entry without a name. */
EXPORT const struct entry *library_layout(void) { return layout; }
