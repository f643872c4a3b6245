/* What quantize.c chooses from, one instruction set per file. Private to quantize*.c.
 *
 * A row is worked on in blocks that stay in the first cache. Sums are kept in VIKING_QUANTIZE_LANES doubles, element i
 * of a row in lane i % LANES, so that every implementation adds in the same order. */
#ifndef VIKING_CORE_QUANTIZE_KERNELS_H
#define VIKING_CORE_QUANTIZE_KERNELS_H

#include "quantize.h"

/* Not on Windows: gcc keeps 32-byte vectors on a stack that is aligned to 16 there (its bug 54412), and the other
 * compilers have no target attribute. */
#if defined(__GNUC__) && defined(__x86_64__) && !defined(_WIN32)
#define VIKING_QUANTIZE_X86 1
#else
#define VIKING_QUANTIZE_X86 0
#endif

#define VIKING_QUANTIZE_LANES 8
#define VIKING_QUANTIZE_BLOCK 512 /* elements; a multiple of the lanes */

/* Added to a float below 2^22 and taken away again, it leaves the nearest whole number. */
#define VIKING_QUANTIZE_WHOLE 12582912.0f /* 1.5 * 2^23 */
#define VIKING_QUANTIZE_INT8_LARGEST 127.0f

/* An 8-bit float beside fp32: rounding keeps the upper bits of the mantissa and moves the exponent's bias. */
typedef struct viking_quantize_float8 {
    uint32_t shift; /* mantissa bits that go */
    uint32_t rebias; /* difference of the biases, in the place of the code's exponent */
    uint32_t largest; /* fp32 bits of the largest finite value */
    uint32_t smallest_normal; /* fp32 bits */
    float grid; /* a float whose last place is the code's smallest subnormal: adding it rounds to that grid */
} viking_quantize_float8;

extern const viking_quantize_float8 viking_quantize_e4m3fn, viking_quantize_e5m2;

typedef struct viking_quantize_sums {
    double error[VIKING_QUANTIZE_LANES]; /* of (x - x')^2 */
    double norm[VIKING_QUANTIZE_LANES]; /* of x^2 */
} viking_quantize_sums;

typedef struct viking_quantize_kernels {
    /* Elements to fp32. */
    void (*widen)(float *out, const void *source, viking_quantize_element kind, size_t count);
    /* The bits of the largest finite magnitude, at least `largest`; sets *nan where a NaN is met, else leaves it. */
    uint32_t (*amax)(const float *block, size_t count, uint32_t largest, bool *nan);
    void (*encode_float8)(uint8_t *codes, const float *block, size_t count, const viking_quantize_float8 *format,
                          float scale, viking_quantize_sums *sums);
    void (*encode_int8)(uint8_t *codes, const float *block, size_t count, float scale, viking_quantize_sums *sums);
} viking_quantize_kernels;

extern const viking_quantize_kernels viking_quantize_scalar;

#if VIKING_QUANTIZE_X86
extern const viking_quantize_kernels viking_quantize_avx2;
#endif

#endif
