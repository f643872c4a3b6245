/* fp32 and fp16 to bf16, rounded to nearest, ties to even.
 *
 * The bits are those of torch's `.to(torch.bfloat16)` on a CPU: subnormals are kept whatever the processor's
 * flush-to-zero mode, finite values beyond the largest bf16 become infinity, the sign of zero is kept. Every NaN
 * becomes 0xffff from fp32 and 0x7fc0 from fp16, as torch's vector code writes them (torch's scalar code, which it
 * uses for strided tensors and without AVX2, writes 0x7fc0 for both).
 *
 * All implementations give the same bits; the scalar one is the oracle.
 */
#ifndef VIKING_CORE_CONVERT_H
#define VIKING_CORE_CONVERT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/status.h"

typedef enum viking_convert_source { VIKING_CONVERT_FP32, VIKING_CONVERT_FP16 } viking_convert_source;

typedef enum viking_convert_implementation {
    VIKING_CONVERT_AUTO, /* the fastest that this processor runs */
    VIKING_CONVERT_SCALAR,
    VIKING_CONVERT_AVX2, /* AVX2 and F16C */
    VIKING_CONVERT_AVX512 /* AVX-512 F, BW and VL */
} viking_convert_implementation;

/* Whether this processor runs the implementation. */
bool viking_convert_available(viking_convert_implementation implementation);

/* Convert `count` elements with at most `threads` threads (0: as viking_parallel_for chooses). No alignment is needed
 * beyond 2 bytes for the destination. The destination may be the source itself (fp32 then uses one thread); any other
 * overlap is INVALID, as is an unknown kind. */
viking_status viking_convert_to_bf16(uint16_t *destination, const void *source, viking_convert_source kind,
                                     size_t count, unsigned threads);

/* The same by a given implementation; UNSUPPORTED where the processor lacks it. */
viking_status viking_convert_to_bf16_by(viking_convert_implementation implementation, uint16_t *destination,
                                        const void *source, viking_convert_source kind, size_t count, unsigned threads);

#endif
