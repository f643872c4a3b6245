/* Conversion to bf16 with AVX-512 F, BW and VL, 16 elements at a time, the rest under a mask.
 *
 * AVX512_BF16 has an instruction for this. It treats subnormals as zero, so it is not used.
 */
#include "convert_kernels.h"

#if VIKING_CONVERT_X86
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl")))

TARGET static inline __m256i convert_lanes(__m512i bits, __m512i nan_result)
{
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, nan_result));
}

/* Ones in the low `count` (< 16) places. */
static inline __mmask16 low_lanes(size_t count)
{
    return (__mmask16)((1u << count) - 1u);
}

TARGET void viking_convert_avx512_fp32(uint16_t *destination, const void *source, size_t count)
{
    const __m512i nan_result = _mm512_set1_epi32(0xffff);
    const unsigned char *bytes = source;
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512i bits = _mm512_loadu_si512(bytes + 4 * i);
        _mm256_storeu_si256((__m256i *)(void *)(destination + i), convert_lanes(bits, nan_result));
    }
    if (i < count) {
        __mmask16 lanes = low_lanes(count - i);
        __m512i bits = _mm512_maskz_loadu_epi32(lanes, bytes + 4 * i);
        _mm256_mask_storeu_epi16(destination + i, lanes, convert_lanes(bits, nan_result));
    }
}

TARGET void viking_convert_avx512_fp16(uint16_t *destination, const void *source, size_t count)
{
    const __m512i nan_result = _mm512_set1_epi32(0x7fc0);
    const unsigned char *bytes = source;
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)(bytes + 2 * i));
        __m512i bits = _mm512_castps_si512(_mm512_cvtph_ps(halves));
        _mm256_storeu_si256((__m256i *)(void *)(destination + i), convert_lanes(bits, nan_result));
    }
    if (i < count) {
        __mmask16 lanes = low_lanes(count - i);
        __m256i halves = _mm256_maskz_loadu_epi16(lanes, bytes + 2 * i);
        __m512i bits = _mm512_castps_si512(_mm512_cvtph_ps(halves));
        _mm256_mask_storeu_epi16(destination + i, lanes, convert_lanes(bits, nan_result));
    }
}
#endif
