/* Stochastic rounding to bf16: the scalar oracle and the choice of an implementation.
 *
 * bf16 is the upper half of an fp32, so the distance from the bf16 below is the lower half, in units of 2^-16 of a
 * step. Adding 16 random bits carries into the upper half with exactly that probability. The bits come from a hash
 * instead of a generator: a generator has a state, and with it an order in which weights must be served and a history
 * that a resumed run must replay.
 *
 * The key enters twice, before and after the first round. A single offset would make the bits of two weights shifted
 * copies of one sequence. Two rounds instead of three leave neighbours visibly dependent.
 */
#include "round.h"

#include <string.h>

#include "../base/parallel.h"
#include "round_kernels.h"

#define GRAIN_ELEMENTS ((size_t)1 << 16)

uint32_t viking_round_bits(viking_round_key key, uint32_t index)
{
    uint32_t x = index + key.offset;
    x ^= x >> 17;
    x *= VIKING_ROUND_FIRST;
    x += key.inner;
    x ^= x >> 11;
    x *= VIKING_ROUND_SECOND;
    x ^= x >> 15;
    x *= VIKING_ROUND_THIRD;
    return x >> 16;
}

void viking_round_scalar(uint16_t *destination, const float *source, size_t count, viking_round_key key, uint32_t index)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, source + i, sizeof bits);
        uint32_t rounded = (bits + viking_round_bits(key, index + (uint32_t)i)) >> 16;
        destination[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? VIKING_ROUND_NAN : rounded);
    }
}

/* ---- choice ---- */

bool viking_round_available(viking_round_implementation implementation)
{
    switch (implementation) {
    case VIKING_ROUND_AUTO:
    case VIKING_ROUND_SCALAR:
        return true;
    case VIKING_ROUND_AVX2:
#if VIKING_ROUND_X86
        return __builtin_cpu_supports("avx2");
#else
        return false;
#endif
    }
    return false;
}

static viking_round_kernel *kernel_of(viking_round_implementation implementation)
{
#if VIKING_ROUND_X86
    if (implementation != VIKING_ROUND_SCALAR && viking_round_available(VIKING_ROUND_AVX2))
        return viking_round_avx2;
#else
    (void)implementation;
#endif
    return viking_round_scalar;
}

typedef struct round_job {
    viking_round_kernel *kernel;
    uint16_t *destination;
    const float *source;
    viking_round_key key;
} round_job;

static void round_range(void *context, size_t begin, size_t end)
{
    const round_job *job = context;
    job->kernel(job->destination + begin, job->source + begin, end - begin, job->key, (uint32_t)begin);
}

viking_status viking_round_to_bf16_by(viking_round_implementation implementation, uint16_t *destination,
                                      const float *source, size_t count, viking_round_key key, unsigned threads)
{
    if (!viking_round_available(implementation))
        return viking_status_fail(VIKING_ERROR_UNSUPPORTED,
                                  "this processor does not run implementation %d of the rounding to bf16",
                                  (int)implementation);
    if (count > SIZE_MAX / sizeof *source)
        return viking_status_fail(VIKING_ERROR_INVALID, "%zu elements do not fit in memory", count);
    uintptr_t from = (uintptr_t)source, to = (uintptr_t)destination;
    if (count && to < from + count * sizeof *source && from < to + count * sizeof *destination)
        return viking_status_fail(VIKING_ERROR_INVALID, "the rounding of %zu elements to bf16 overlaps its source",
                                  count);
    round_job job = {kernel_of(implementation), destination, source, key};
    viking_parallel_for(count, GRAIN_ELEMENTS, threads, round_range, &job);
    return VIKING_OK;
}

viking_status viking_round_to_bf16(uint16_t *destination, const float *source, size_t count, viking_round_key key,
                                   unsigned threads)
{
    return viking_round_to_bf16_by(VIKING_ROUND_AUTO, destination, source, count, key, threads);
}
