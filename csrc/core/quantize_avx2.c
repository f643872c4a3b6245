/* Quantising with AVX2 and F16C, 8 elements at a time: quantize_scalar.c lane by lane, its lanes being these.
 *
 * The functions carry their target themselves, so that the file needs no compiler flag of its own and nothing else in
 * the library may use these instructions by accident. FMA is left out on purpose: it would round the sums otherwise.
 */
#include "quantize_kernels.h"

#if VIKING_QUANTIZE_X86
#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,f16c")))

TARGET static void widen(float *out, const void *source, viking_quantize_element kind, size_t count)
{
    const unsigned char *bytes = source;
    size_t i = 0;
    for (; kind != VIKING_QUANTIZE_FP32 && i + 8 <= count; i += 8) {
        __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)(bytes + 2 * i));
        __m256 wide = kind == VIKING_QUANTIZE_FP16
                          ? _mm256_cvtph_ps(halves)
                          : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
        _mm256_storeu_ps(out + i, wide);
    }
    viking_quantize_scalar.widen(out + i, bytes + (kind == VIKING_QUANTIZE_FP32 ? 4 : 2) * i, kind, count - i);
}

TARGET static inline __m256i magnitude_of(__m256i bits)
{
    return _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
}

TARGET static uint32_t amax(const float *block, size_t count, uint32_t largest, bool *nan)
{
    const __m256i infinity = _mm256_set1_epi32(0x7f800000);
    __m256i most = _mm256_setzero_si256(), bad = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256i magnitude = magnitude_of(_mm256_loadu_si256((const __m256i *)(const void *)(block + i)));
        bad = _mm256_or_si256(bad, _mm256_cmpgt_epi32(magnitude, infinity));
        __m256i finite = _mm256_cmpgt_epi32(infinity, magnitude);
        most = _mm256_max_epi32(most, _mm256_and_si256(magnitude, finite));
    }
    if (_mm256_movemask_epi8(bad))
        *nan = true;
    uint32_t lanes[8];
    _mm256_storeu_si256((__m256i *)(void *)lanes, most);
    for (int lane = 0; lane < 8; lane++)
        largest = lanes[lane] > largest ? lanes[lane] : largest;
    return viking_quantize_scalar.amax(block + i, count - i, largest, nan);
}

typedef struct sums {
    __m256d error[2], norm[2];
} sums;

TARGET static inline void load_sums(sums *to, const viking_quantize_sums *from)
{
    for (int half = 0; half < 2; half++) {
        to->error[half] = _mm256_loadu_pd(from->error + (size_t)4 * (size_t)half);
        to->norm[half] = _mm256_loadu_pd(from->norm + (size_t)4 * (size_t)half);
    }
}

TARGET static inline void store_sums(viking_quantize_sums *to, const sums *from)
{
    for (int half = 0; half < 2; half++) {
        _mm256_storeu_pd(to->error + (size_t)4 * (size_t)half, from->error[half]);
        _mm256_storeu_pd(to->norm + (size_t)4 * (size_t)half, from->norm[half]);
    }
}

TARGET static inline void add_half(sums *to, int half, __m128 x, __m128 back)
{
    __m256d wide = _mm256_cvtps_pd(x);
    __m256d error = _mm256_sub_pd(wide, _mm256_cvtps_pd(back));
    to->error[half] = _mm256_add_pd(to->error[half], _mm256_mul_pd(error, error));
    to->norm[half] = _mm256_add_pd(to->norm[half], _mm256_mul_pd(wide, wide));
}

/* Elements that are not finite count as 0, which adds nothing. */
TARGET static inline void add_errors(sums *to, __m256 x, __m256 back)
{
    __m256i magnitude = magnitude_of(_mm256_castps_si256(x));
    __m256 finite = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), magnitude));
    x = _mm256_and_ps(x, finite);
    back = _mm256_and_ps(back, finite);
    add_half(to, 0, _mm256_castps256_ps128(x), _mm256_castps256_ps128(back));
    add_half(to, 1, _mm256_extractf128_ps(x, 1), _mm256_extractf128_ps(back, 1));
}

/* The low bytes of 8 lanes to 8 adjacent bytes. */
TARGET static inline void store_bytes(uint8_t *codes, __m256i lanes)
{
    const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                                         -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i bytes = _mm256_shuffle_epi8(lanes, low);
    int first = _mm_cvtsi128_si32(_mm256_castsi256_si128(bytes));
    int second = _mm_cvtsi128_si32(_mm256_extracti128_si256(bytes, 1));
    memcpy(codes, &first, 4);
    memcpy(codes + 4, &second, 4);
}

TARGET static void encode_float8(uint8_t *codes, const float *block, size_t count, const viking_quantize_float8 *format,
                                 float scale, viking_quantize_sums *into)
{
    const __m256 scales = _mm256_set1_ps(scale), grid = _mm256_set1_ps(format->grid);
    const __m128i shift = _mm_cvtsi32_si128((int)format->shift);
    const __m256i below_half = _mm256_set1_epi32((1 << (format->shift - 1)) - 1), one = _mm256_set1_epi32(1);
    sums total;
    load_sums(&total, into);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 x = _mm256_loadu_ps(block + i);
        __m256i bits = _mm256_castps_si256(_mm256_div_ps(x, scales)), magnitude = magnitude_of(bits);
        __m256i sign = _mm256_andnot_si256(_mm256_set1_epi32(0x7fffffff), bits);
        __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
        magnitude = _mm256_min_epi32(magnitude, _mm256_set1_epi32((int)format->largest));

        __m256 on_grid = _mm256_add_ps(_mm256_castsi256_ps(magnitude), grid);
        __m256i low_code = _mm256_sub_epi32(_mm256_castps_si256(on_grid), _mm256_castps_si256(grid));
        __m256i low_value = _mm256_castps_si256(_mm256_sub_ps(on_grid, grid));
        __m256i odd = _mm256_and_si256(_mm256_srl_epi32(magnitude, shift), one);
        __m256i kept = _mm256_srl_epi32(_mm256_add_epi32(_mm256_add_epi32(magnitude, below_half), odd), shift);
        __m256i code = _mm256_sub_epi32(kept, _mm256_set1_epi32((int)format->rebias));
        __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)format->smallest_normal), magnitude);
        code = _mm256_blendv_epi8(code, low_code, low);
        code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), nan);
        __m256i value = _mm256_blendv_epi8(_mm256_sll_epi32(kept, shift), low_value, low);

        store_bytes(codes + i, _mm256_or_si256(code, _mm256_srli_epi32(sign, 24)));
        add_errors(&total, x, _mm256_mul_ps(_mm256_castsi256_ps(_mm256_or_si256(value, sign)), scales));
    }
    store_sums(into, &total);
    viking_quantize_scalar.encode_float8(codes + i, block + i, count - i, format, scale, into);
}

TARGET static void encode_int8(uint8_t *codes, const float *block, size_t count, float scale,
                               viking_quantize_sums *into)
{
    const __m256 scales = _mm256_set1_ps(scale), whole = _mm256_set1_ps(VIKING_QUANTIZE_WHOLE);
    const __m256 most = _mm256_set1_ps(VIKING_QUANTIZE_INT8_LARGEST);
    const __m256 least = _mm256_set1_ps(-VIKING_QUANTIZE_INT8_LARGEST);
    sums total;
    load_sums(&total, into);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 x = _mm256_loadu_ps(block + i);
        __m256 y = _mm256_max_ps(_mm256_min_ps(_mm256_div_ps(x, scales), most), least);
        __m256 rounded = _mm256_add_ps(y, whole);
        store_bytes(codes + i, _mm256_castps_si256(rounded));
        add_errors(&total, x, _mm256_mul_ps(_mm256_sub_ps(rounded, whole), scales));
    }
    store_sums(into, &total);
    viking_quantize_scalar.encode_int8(codes + i, block + i, count - i, scale, into);
}

const viking_quantize_kernels viking_quantize_avx2 = {widen, amax, encode_float8, encode_int8};
#endif
