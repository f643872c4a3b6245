/* Conversion to bf16: the scalar oracle and the choice of an implementation.
 *
 * bf16 is the upper half of an fp32, so rounding is integer arithmetic on the bits: add just under half a unit of the
 * last place that stays, plus one if that place is odd, and cut. A carry runs from the mantissa into the exponent and
 * from the largest finite value into infinity, which is what rounding should do. Integer arithmetic also ignores
 * flush-to-zero modes; the processor's own conversion instructions (AVX512_BF16) do not and lose subnormals.
 */
#include "convert.h"

#include <string.h>

#include "../base/parallel.h"
#include "convert_kernels.h"
#include "half.h"

#if VIKING_CONVERT_X86
#include <cpuid.h>
#endif

#define FP32_NAN_RESULT 0xffffu
#define FP16_NAN_RESULT 0x7fc0u

/* A quarter of a megabyte of fp32: threads are not worth starting for less. */
#define GRAIN_ELEMENTS ((size_t)1 << 16)

void viking_convert_scalar_fp32(uint16_t *destination, const void *source, size_t count)
{
    const unsigned char *bytes = source;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, bytes + 4 * i, sizeof bits);
        uint16_t result =
            (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)FP32_NAN_RESULT : viking_half_round_to_bf16(bits);
        memcpy(destination + i, &result, sizeof result);
    }
}

void viking_convert_scalar_fp16(uint16_t *destination, const void *source, size_t count)
{
    const unsigned char *bytes = source;
    for (size_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, bytes + 2 * i, sizeof half);
        uint16_t result = (half & 0x7fffu) > 0x7c00u ? (uint16_t)FP16_NAN_RESULT
                                                     : viking_half_round_to_bf16(viking_half_widen_fp16(half));
        memcpy(destination + i, &result, sizeof result);
    }
}

/* ---- choice ---- */

#if VIKING_CONVERT_X86
/* Older compilers' __builtin_cpu_supports does not know it. That the system saves its registers follows from AVX2. */
static bool has_f16c(void)
{
    unsigned eax, ebx, ecx = 0, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

bool viking_convert_available(viking_convert_implementation implementation)
{
    switch (implementation) {
    case VIKING_CONVERT_AUTO:
    case VIKING_CONVERT_SCALAR:
        return true;
    case VIKING_CONVERT_AVX2:
#if VIKING_CONVERT_X86
        return __builtin_cpu_supports("avx2") && has_f16c();
#else
        return false;
#endif
    case VIKING_CONVERT_AVX512:
#if VIKING_CONVERT_X86
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl");
#else
        return false;
#endif
    }
    return false;
}

static viking_convert_kernel *kernel_of(viking_convert_implementation implementation, viking_convert_source kind)
{
    bool wide = kind == VIKING_CONVERT_FP32;
#if VIKING_CONVERT_X86
    if (implementation == VIKING_CONVERT_AUTO)
        implementation = viking_convert_available(VIKING_CONVERT_AVX512) ? VIKING_CONVERT_AVX512
                         : viking_convert_available(VIKING_CONVERT_AVX2) ? VIKING_CONVERT_AVX2
                                                                         : VIKING_CONVERT_SCALAR;
    if (implementation == VIKING_CONVERT_AVX512)
        return wide ? viking_convert_avx512_fp32 : viking_convert_avx512_fp16;
    if (implementation == VIKING_CONVERT_AVX2)
        return wide ? viking_convert_avx2_fp32 : viking_convert_avx2_fp16;
#else
    (void)implementation;
#endif
    return wide ? viking_convert_scalar_fp32 : viking_convert_scalar_fp16;
}

typedef struct convert_job {
    viking_convert_kernel *kernel;
    uint16_t *destination;
    const unsigned char *source;
    size_t element_bytes;
} convert_job;

static void convert_range(void *context, size_t begin, size_t end)
{
    const convert_job *job = context;
    job->kernel(job->destination + begin, job->source + begin * job->element_bytes, end - begin);
}

viking_status viking_convert_to_bf16_by(viking_convert_implementation implementation, uint16_t *destination,
                                        const void *source, viking_convert_source kind, size_t count, unsigned threads)
{
    if (kind != VIKING_CONVERT_FP32 && kind != VIKING_CONVERT_FP16)
        return viking_status_fail(VIKING_ERROR_INVALID, "unknown source kind %d for a conversion to bf16", (int)kind);
    if (!viking_convert_available(implementation))
        return viking_status_fail(VIKING_ERROR_UNSUPPORTED,
                                  "this processor does not run implementation %d of the conversion to bf16",
                                  (int)implementation);
    size_t element_bytes = kind == VIKING_CONVERT_FP32 ? 4 : 2;
    if (count > SIZE_MAX / 4)
        return viking_status_fail(VIKING_ERROR_INVALID, "%zu elements do not fit in memory", count);

    uintptr_t from = (uintptr_t)source, to = (uintptr_t)destination;
    if (from == to) {
        /* In place, another thread's output would land in this thread's input, unless both have the same pace. */
        if (element_bytes != sizeof *destination)
            threads = 1;
    } else if (to < from + count * element_bytes && from < to + count * sizeof *destination) {
        return viking_status_fail(VIKING_ERROR_INVALID, "the conversion of %zu elements to bf16 overlaps its source",
                                  count);
    }

    convert_job job = {kernel_of(implementation, kind), destination, source, element_bytes};
    viking_parallel_for(count, GRAIN_ELEMENTS, threads, convert_range, &job);
    return VIKING_OK;
}

viking_status viking_convert_to_bf16(uint16_t *destination, const void *source, viking_convert_source kind,
                                     size_t count, unsigned threads)
{
    return viking_convert_to_bf16_by(VIKING_CONVERT_AUTO, destination, source, kind, count, threads);
}
