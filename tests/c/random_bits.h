/* Bits at random, the same in every run, and the float that bits are. */
#ifndef VIKING_TESTS_RANDOM_BITS_H
#define VIKING_TESTS_RANDOM_BITS_H

#include <stdint.h>
#include <string.h>

static uint64_t random_state = 0x9e3779b97f4a7c15u;

static inline uint32_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 24);
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
