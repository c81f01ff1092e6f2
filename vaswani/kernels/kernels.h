/* What every kernel needs: what is exported, how failures are reported, and how memory is asked for.

   A kernel returns 0, or the code of a failure, whose details `last_failure` gives. It looks at everything that could
   lead it out of bounds before it writes anything. */

#ifndef VASWANI_KERNELS_H
#define VASWANI_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Debug builds assert bounds inside kernels too. */
#ifdef VASWANI_CHECKS
#define CHECK(CONDITION) ((CONDITION) ? (void)0 : check_failed(#CONDITION, __FILE__, __LINE__))
#else
#define CHECK(CONDITION) ((void)0)
#endif

void check_failed(const char *condition, const char *file, int line);

/* Mirrors of the codes in library.py. */
enum failure {
    NO_FAILURE, NO_MEMORY, BAD_SIZE, BAD_TOKEN, BAD_PARENT, BAD_SEQUENCE, BAD_SLOT, BAD_ROW, BAD_LABEL, BAD_LENGTHS,
    BAD_POSITION, BAD_ACTIVATION
};

/* Remember a failure of this thread, for `last_failure`: a value that is not from `low` to `high`. */
int64_t fail(enum failure code, int64_t value, int64_t low, int64_t high);

/* Return 0 if a value is from `low` to `high`. */
static inline int64_t fail_outside(enum failure code, int64_t value, int64_t low, int64_t high)
{
    return value < low || value > high ? fail(code, value, low, high) : NO_FAILURE;
}

/* Return memory for `count` things of some size, which `free` gives back, or null. Aligned to cache lines. */
void *allocate(int64_t count, int64_t size);

#endif
