/* One instruction set per file: what convert.c chooses from. Private to convert*.c. */
#ifndef VIKING_CORE_CONVERT_KERNELS_H
#define VIKING_CORE_CONVERT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Not on Windows: gcc keeps 32-byte vectors on a stack that is aligned to 16 there (its bug 54412), and the other
 * compilers have no target attribute. */
#if defined(__GNUC__) && defined(__x86_64__) && !defined(_WIN32)
#define VIKING_CONVERT_X86 1
#else
#define VIKING_CONVERT_X86 0
#endif

/* Elements are read before the place they are converted to is written, in ascending order, so that a destination that
 * begins where the source begins is right. */
typedef void viking_convert_kernel(uint16_t *destination, const void *source, size_t count);

viking_convert_kernel viking_convert_scalar_fp32;
viking_convert_kernel viking_convert_scalar_fp16;

#if VIKING_CONVERT_X86
viking_convert_kernel viking_convert_avx2_fp32;
viking_convert_kernel viking_convert_avx2_fp16;
viking_convert_kernel viking_convert_avx512_fp32;
viking_convert_kernel viking_convert_avx512_fp16;
#endif

#endif
