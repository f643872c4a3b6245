/* Conversion to bf16 with AVX2 and F16C, 16 elements at a time.
 *
 * The functions carry their target themselves, so that the file needs no compiler flag of its own and nothing else in
 * the library may use these instructions by accident.
 */
#include "convert_kernels.h"

#if VIKING_CONVERT_X86
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,f16c")))

/* fp32 bits to bf16 in the low half of each lane, NaN not yet seen to; the high half is 0. */
TARGET static inline __m256i round_lanes(__m256i bits)
{
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
}

TARGET static inline __m256i is_nan(__m256i bits)
{
    __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    return _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
}

TARGET static inline __m256i convert_fp32(__m256i bits)
{
    /* A mask of ones, shifted, is the 0xffff that a NaN becomes. */
    return _mm256_or_si256(round_lanes(bits), _mm256_srli_epi32(is_nan(bits), 16));
}

TARGET static inline __m256i convert_fp16(__m128i halves)
{
    __m256i bits = _mm256_castps_si256(_mm256_cvtph_ps(halves));
    return _mm256_blendv_epi8(round_lanes(bits), _mm256_set1_epi32(0x7fc0), is_nan(bits));
}

/* Two results of 8 lanes to 16 adjacent elements; the pack works within 128-bit halves, hence the permutation. */
TARGET static inline void store_pair(uint16_t *destination, __m256i low, __m256i high)
{
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm256_storeu_si256((__m256i *)(void *)destination, packed);
}

TARGET void viking_convert_avx2_fp32(uint16_t *destination, const void *source, size_t count)
{
    const unsigned char *bytes = source;
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)(bytes + 4 * i));
        __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(bytes + 4 * i + 32));
        store_pair(destination + i, convert_fp32(low), convert_fp32(high));
    }
    viking_convert_scalar_fp32(destination + i, bytes + 4 * i, count - i);
}

TARGET void viking_convert_avx2_fp16(uint16_t *destination, const void *source, size_t count)
{
    const unsigned char *bytes = source;
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m128i low = _mm_loadu_si128((const __m128i *)(const void *)(bytes + 2 * i));
        __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(bytes + 2 * i + 16));
        store_pair(destination + i, convert_fp16(low), convert_fp16(high));
    }
    viking_convert_scalar_fp16(destination + i, bytes + 2 * i, count - i);
}
#endif
