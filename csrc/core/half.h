/* The bits of fp16 and bf16 beside those of fp32, in integer arithmetic: exact, and the same whatever the processor's
 * rounding and flush-to-zero modes. */
#ifndef VIKING_CORE_HALF_H
#define VIKING_CORE_HALF_H

#include <stdint.h>

/* The fp32 of the same value; exact, because fp32 holds every fp16. A NaN keeps its sign and its upper bits. */
static inline uint32_t viking_half_widen_fp16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = (half >> 10) & 0x1fu;
    uint32_t mantissa = half & 0x3ffu;
    if (exponent == 0x1f)
        return sign | 0x7f800000u | mantissa << 13;
    if (exponent == 0) {
        if (mantissa == 0)
            return sign;
        exponent = 1;
        while (!(mantissa & 0x400u)) { /* subnormal: shift the leading one into its place */
            mantissa <<= 1;
            exponent--;
        }
        mantissa &= 0x3ffu;
    }
    return sign | (exponent + 112u) << 23 | mantissa << 13; /* the biases are 127 and 15 */
}

/* To nearest, ties to even; beyond the largest fp16 infinity; NaN becomes a quiet one of the same sign. */
static inline uint16_t viking_half_round_to_fp16(uint32_t bits)
{
    uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x47800000u) /* 2^16 */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude >= 0x38800000u) /* 2^-14, the smallest normal one; a carry may run into infinity, as it should */
        return (uint16_t)(sign | (((magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10)));
    if (magnitude <= 0x33000000u) /* 2^-25: half of the smallest, which is a tie with zero */
        return (uint16_t)sign;
    uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u, shift = 126u - (magnitude >> 23);
    uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1u), half = 1u << (shift - 1u);
    return (uint16_t)(sign | (kept + (rest > half || (rest == half && (kept & 1u)))));
}

/* To nearest, ties to even. Not for NaN. */
static inline uint16_t viking_half_round_to_bf16(uint32_t bits)
{
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#endif
