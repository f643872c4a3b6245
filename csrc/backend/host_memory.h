/* The host backend's books: what of the "device" is allocated and which host ranges are pinned. */
#ifndef VIKING_BACKEND_HOST_MEMORY_H
#define VIKING_BACKEND_HOST_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "../base/status.h"

typedef struct viking_host_block viking_host_block;

/* Zero, but for the limits, is empty. No locks: whoever owns it has one. */
typedef struct viking_host_memory {
    uint64_t total_bytes; /* of the device */
    uint64_t pin_limit_bytes; /* 0: none */
    uint64_t allocated_bytes;
    uint64_t pinned_bytes;
    viking_host_block *allocations;
    viking_host_block *pins;
} viking_host_memory;

/* As `allocate`, `release`, `pin` and `unpin` of backend.h. */
viking_status viking_host_memory_allocate(viking_host_memory *memory, size_t bytes, void **out);
void viking_host_memory_release(viking_host_memory *memory, const void *address);
viking_status viking_host_memory_pin(viking_host_memory *memory, void *address, size_t bytes);
viking_status viking_host_memory_unpin(viking_host_memory *memory, const void *address);

/* Free what is still allocated and forget what is still pinned. */
void viking_host_memory_free(viking_host_memory *memory);

#endif
