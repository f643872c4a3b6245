/* fp32 to bf16, rounded stochastically: up with the probability that is the distance from below, so that the mean of
 * what is stored is what was computed. A weight then moves by updates smaller than half a bf16 step, which rounding to
 * nearest loses all of.
 *
 * The random bits are a function of a key and the element's index and of nothing else: no state, no order, no number of
 * threads. The same arithmetic in 32-bit integers is what a GPU does for weights that live there, bit for bit.
 *
 * All implementations give the same bits; the scalar one is the oracle.
 */
#ifndef VIKING_CORE_ROUND_H
#define VIKING_CORE_ROUND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/status.h"

/* What one rounding of one weight draws its bits from: a hash of the seed, the weight and the step. */
typedef struct viking_round_key {
    uint32_t offset; /* added to the index before mixing */
    uint32_t inner; /* added after the first round of the mixing */
} viking_round_key;

typedef enum viking_round_implementation {
    VIKING_ROUND_AUTO, /* the fastest that this processor runs */
    VIKING_ROUND_SCALAR,
    VIKING_ROUND_AVX2
} viking_round_implementation;

/* Whether this processor runs the implementation. */
bool viking_round_available(viking_round_implementation implementation);

/* The 16 random bits of an element; only the low 32 bits of the index count. */
uint32_t viking_round_bits(viking_round_key key, uint32_t index);

/* Round `count` elements, the first of which has the index 0, with at most `threads` threads (0: as
 * viking_parallel_for chooses). Values that bf16 holds stay what they are, infinities and the sign of zero among them;
 * every NaN becomes 0x7fc0. Values beyond the largest finite bf16 become it or infinity. An overlap of destination and
 * source is INVALID. */
viking_status viking_round_to_bf16(uint16_t *destination, const float *source, size_t count, viking_round_key key,
                                   unsigned threads);

/* The same by a given implementation; UNSUPPORTED where the processor lacks it. */
viking_status viking_round_to_bf16_by(viking_round_implementation implementation, uint16_t *destination,
                                      const float *source, size_t count, viking_round_key key, unsigned threads);

#endif
