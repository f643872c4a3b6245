/* One instruction set per file: what round.c chooses from. Private to round*.c. */
#ifndef VIKING_CORE_ROUND_KERNELS_H
#define VIKING_CORE_ROUND_KERNELS_H

#include "round.h"

/* Not on Windows: gcc keeps 32-byte vectors on a stack that is aligned to 16 there (its bug 54412), and the other
 * compilers have no target attribute. */
#if defined(__GNUC__) && defined(__x86_64__) && !defined(_WIN32)
#define VIKING_ROUND_X86 1
#else
#define VIKING_ROUND_X86 0
#endif

/* Multipliers and shifts (17, 11, 15) of a 32-bit mixing function with three rounds (C. Wellons, "Prospecting for hash
 * functions", 2018); of its last shift only the high half would show, which needs none. */
#define VIKING_ROUND_FIRST 0xed5ad4bbu
#define VIKING_ROUND_SECOND 0xac4c1b51u
#define VIKING_ROUND_THIRD 0x31848babu

#define VIKING_ROUND_NAN 0x7fc0u

/* `index` is that of the first element. */
typedef void viking_round_kernel(uint16_t *destination, const float *source, size_t count, viking_round_key key,
                                 uint32_t index);

viking_round_kernel viking_round_scalar;

#if VIKING_ROUND_X86
viking_round_kernel viking_round_avx2;
#endif

#endif
