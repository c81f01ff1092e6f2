/* A hash of all bytes of some tensors, by which a change of any of them is noticed.

   What this gains: copies of weights are kept as long as the weights are the same, whatever may have changed them, and
   that is found out about as fast as memory can be read.

   Each stripe of 64 bytes is eight words w, which are mixed with keys of their place: an accumulator adds the product of
   the two halves of w ^ key, and its neighbour adds w itself, so that no change of a single word is lost. Accumulators
   are scrambled after each block of stripes. The keys come from a secret number and the stripe's place, so what happens
   to cancel out (flipped signs, doubled numbers, exchanged rows) cannot be known beforehand. Every tensor is cut into
   chunks with seeds of their own, which threads take in any order. */

#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum {
    STRIPE = 64,       /* bytes: two registers of four words */
    STRIPES = 16,      /* of a block, each with other keys */
    BLOCK = STRIPES * STRIPE,
    CHUNK = 256 * BLOCK,
    REGISTERS = STRIPE / 32,
};

static const uint64_t ODD = 0x9e3779b97f4a7c15u, MULTIPLIER = 0xd6e8feb86659fd93u;

/* Mix all bits of a number, one to one. */
static uint64_t mixed(uint64_t bits)
{
    bits = (bits ^ bits >> 32) * MULTIPLIER;
    bits = (bits ^ bits >> 32) * MULTIPLIER;
    return bits ^ bits >> 32;
}

/* Multiply to 128 bits, and fold both halves. */
static uint64_t folded(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline __m256i load(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

static inline __attribute__((always_inline)) void add_stripe(
    __m256i total[REGISTERS], const uint8_t *bytes, const uint64_t *keys)
{
    for (int part = 0; part < REGISTERS; part++) {
        __m256i words = load(bytes + 32 * part), keyed = _mm256_xor_si256(words, load(keys + 4 * part));
        __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        __m256i neighbours = _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
        total[part] = _mm256_add_epi64(_mm256_add_epi64(total[part], product), neighbours);
    }
}

/* Mix each accumulator, one to one: (a ^ a >> 47 ^ key) times an odd number of 32 bits. */
static inline __attribute__((always_inline)) void scramble(__m256i total[REGISTERS], const uint64_t *keys)
{
    __m256i odd = _mm256_set1_epi64x(0x9e3779b1u);
    for (int part = 0; part < REGISTERS; part++) {
        __m256i bits = _mm256_xor_si256(total[part], _mm256_srli_epi64(total[part], 47));
        bits = _mm256_xor_si256(bits, load(keys + 4 * part));
        __m256i low = _mm256_mul_epu32(bits, odd), high = _mm256_mul_epu32(_mm256_srli_epi64(bits, 32), odd);
        total[part] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    }
}

static uint64_t hash_chunk(const uint8_t *bytes, int64_t length, const uint64_t *keys, uint64_t seed)
{
    __m256i total[REGISTERS];
    uint64_t start[2 * STRIPE / 8];
    for (int at = 0; at < STRIPE / 8; at++) start[at] = mixed(seed + at * ODD);
    for (int part = 0; part < REGISTERS; part++) total[part] = load(start + 4 * part);
    int64_t at = 0;
    for (; at + BLOCK <= length; at += BLOCK) {
        for (int stripe = 0; stripe < STRIPES; stripe++) {
            __builtin_prefetch(bytes + at + stripe * STRIPE + 2 * BLOCK, 0, 2);
            add_stripe(total, bytes + at + stripe * STRIPE, keys + stripe);
        }
        scramble(total, keys + STRIPES);
    }
    for (int stripe = 0; at + STRIPE <= length; at += STRIPE, stripe++) add_stripe(total, bytes + at, keys + stripe);
    if (at < length) {
        uint8_t last[STRIPE] = {0};
        memcpy(last, bytes + at, length - at);
        scramble(total, keys + STRIPES);
        add_stripe(total, last, keys + STRIPES);
    }
    uint64_t hash = mixed(seed ^ (uint64_t)length * ODD);
    for (int part = 0; part < REGISTERS; part++) _mm256_storeu_si256((__m256i *)(start + 4 * part), total[part]);
    for (int word = 0; word < STRIPE / 8; word += 2)
        hash = mixed(hash + folded(start[word] ^ keys[word], start[word + 1] ^ keys[word + 1])) ^ start[word];
    return mixed(hash);
}

/* Return a hash of some tensors, each of so many bytes, with a secret number. It does not depend on threads. */
EXPORT uint64_t fingerprint(
    int64_t threads, uint64_t secret, int64_t tensors, const uint8_t *const *bytes, const int64_t *sizes)
{
    uint64_t keys[STRIPES + STRIPE / 8], all = 0;
    for (int at = 0; at < STRIPES + STRIPE / 8; at++) keys[at] = mixed(secret + (at + 1) * ODD);
#pragma omp parallel num_threads(threads) reduction(+ : all)
    for (int64_t tensor = 0; tensor < tensors; tensor++) {
        uint64_t seed = mixed(secret ^ mixed(tensor * ODD + sizes[tensor]));
        int64_t chunks = sizes[tensor] / CHUNK + 1;
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            int64_t from = chunk * CHUNK, left = sizes[tensor] - from;
            all += hash_chunk(bytes[tensor] + from, left < CHUNK ? left : CHUNK, keys, mixed(seed + chunk * ODD));
        }
    }
    return all;
}
