/* Stochastic rounding to bf16 with AVX2, 16 elements at a time. The function carries its target itself, so that nothing
 * else in the library may use these instructions by accident. */
#include "round_kernels.h"

#if VIKING_ROUND_X86
#include <immintrin.h>

#define TARGET __attribute__((target("avx2")))

typedef struct lanes_key {
    __m256i inner, first, second, third;
} lanes_key;

TARGET static inline __m256i random_lanes(__m256i x, const lanes_key *key)
{
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 17));
    x = _mm256_mullo_epi32(x, key->first);
    x = _mm256_add_epi32(x, key->inner);
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 11));
    x = _mm256_mullo_epi32(x, key->second);
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
    x = _mm256_mullo_epi32(x, key->third);
    return _mm256_srli_epi32(x, 16);
}

/* bf16 in the low half of each lane; the high half is 0. */
TARGET static inline __m256i round_lanes(const float *source, __m256i x, const lanes_key *key)
{
    __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)source);
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, random_lanes(x, key)), 16);
    __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32((int)VIKING_ROUND_NAN), is_nan);
}

TARGET void viking_round_avx2(uint16_t *destination, const float *source, size_t count, viking_round_key key,
                              uint32_t index)
{
    const lanes_key lanes = {_mm256_set1_epi32((int)key.inner), _mm256_set1_epi32((int)VIKING_ROUND_FIRST),
                             _mm256_set1_epi32((int)VIKING_ROUND_SECOND), _mm256_set1_epi32((int)VIKING_ROUND_THIRD)};
    const __m256i step = _mm256_set1_epi32(8);
    __m256i low_x =
        _mm256_add_epi32(_mm256_set1_epi32((int)(index + key.offset)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m256i high_x = _mm256_add_epi32(low_x, step);
        __m256i low = round_lanes(source + i, low_x, &lanes);
        __m256i high = round_lanes(source + i + 8, high_x, &lanes);
        /* The pack works within 128-bit halves, hence the permutation. */
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
        _mm256_storeu_si256((__m256i *)(void *)(destination + i), packed);
        low_x = _mm256_add_epi32(high_x, step);
    }
    viking_round_scalar(destination + i, source + i, count - i, key, index + (uint32_t)i);
}
#endif
