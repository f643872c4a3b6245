/* Memory-bound work split over threads: copies and conversions of whole weights. */
#ifndef VIKING_BASE_PARALLEL_H
#define VIKING_BASE_PARALLEL_H

#include <stddef.h>

/* Call body(context, begin, end) so that the ranges cover [0, count) exactly once, each a multiple of `grain`
 * long except the last. Uses at most `threads` threads (0: one per processor, at most 8: more do not go faster
 * on memory-bound work), the caller among them; runs on the caller alone if no thread can be started.
 * Returns when all ranges are done. */
void viking_parallel_for(size_t count, size_t grain, unsigned threads,
                         void (*body)(void *context, size_t begin, size_t end), void *context);

/* memcpy over several threads; also the first touch of a fresh destination. */
void viking_parallel_copy(void *destination, const void *source, size_t bytes, unsigned threads);

#endif
