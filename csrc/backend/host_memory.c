/* Device memory comes from malloc and not from the system's maps, so that a memory checker sees what runs over its
 * end. Pinning does nothing but keep the rules of a real device: whole pages, no page twice, and a limit. */
#include "host_memory.h"

#include <stdlib.h>

#include "../base/os.h"

/* cudaMalloc promises at least this. */
#define DEVICE_ALIGNMENT 256u

struct viking_host_block {
    viking_host_block *next;
    void *address; /* what the caller holds */
    void *owned; /* what malloc returned; NULL for a pin */
    size_t bytes;
};

static viking_status add_block(viking_host_block **list, void *address, void *owned, size_t bytes)
{
    viking_host_block *made = malloc(sizeof *made);
    if (!made)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "host backend: no memory left to note %zu bytes", bytes);
    *made = (viking_host_block){.next = *list, .address = address, .owned = owned, .bytes = bytes};
    *list = made;
    return VIKING_OK;
}

/* Forget the block at `address`, and free what it owns. Returns its size; 0 if there is none. */
static size_t drop_block(viking_host_block **list, const void *address)
{
    for (; *list; list = &(*list)->next) {
        viking_host_block *found = *list;
        if (found->address == address) {
            size_t bytes = found->bytes;
            *list = found->next;
            free(found->owned);
            free(found);
            return bytes;
        }
    }
    return 0;
}

viking_status viking_host_memory_allocate(viking_host_memory *memory, size_t bytes, void **out)
{
    uint64_t free_bytes = memory->total_bytes - memory->allocated_bytes;
    if (bytes == 0)
        return viking_status_fail(VIKING_ERROR_INVALID, "host backend: cannot allocate 0 bytes");
    if (bytes > free_bytes || bytes > SIZE_MAX - DEVICE_ALIGNMENT)
        return viking_status_fail(VIKING_ERROR_NO_DEVICE_MEMORY,
                                  "host backend: cannot allocate %zu bytes: %llu of %llu are free", bytes,
                                  (unsigned long long)free_bytes, (unsigned long long)memory->total_bytes);
    char *owned = malloc(bytes + DEVICE_ALIGNMENT);
    if (!owned)
        return viking_status_fail(VIKING_ERROR_NO_DEVICE_MEMORY,
                                  "host backend: cannot allocate %zu bytes: the machine has no memory left", bytes);
    char *address = owned + (DEVICE_ALIGNMENT - (uintptr_t)owned % DEVICE_ALIGNMENT);
    viking_status status = add_block(&memory->allocations, address, owned, bytes);
    if (status != VIKING_OK) {
        free(owned);
        return status;
    }
    memory->allocated_bytes += bytes;
    *out = address;
    return VIKING_OK;
}

void viking_host_memory_release(viking_host_memory *memory, const void *address)
{
    memory->allocated_bytes -= drop_block(&memory->allocations, address);
}

viking_status viking_host_memory_pin(viking_host_memory *memory, void *address, size_t bytes)
{
    uintptr_t begin = (uintptr_t)address;
    if (bytes == 0 || begin % viking_os_page_bytes() != 0 || bytes > UINTPTR_MAX - begin)
        return viking_status_fail(VIKING_ERROR_INVALID,
                                  "host backend: cannot pin %zu bytes at %p: the range must begin on a page of %zu "
                                  "bytes and must not be empty",
                                  bytes, address, viking_os_page_bytes());
    for (const viking_host_block *other = memory->pins; other; other = other->next) {
        uintptr_t other_begin = (uintptr_t)other->address;
        if (begin < other_begin + other->bytes && other_begin < begin + bytes)
            return viking_status_fail(VIKING_ERROR_STATE,
                                      "host backend: cannot pin %zu bytes at %p: %zu bytes at %p are pinned already",
                                      bytes, address, other->bytes, other->address);
    }
    uint64_t limit = memory->pin_limit_bytes;
    if (limit && (memory->pinned_bytes >= limit || bytes > limit - memory->pinned_bytes))
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY,
                                  "host backend: cannot pin %zu bytes: %llu are pinned and the limit is %llu", bytes,
                                  (unsigned long long)memory->pinned_bytes, (unsigned long long)limit);
    viking_status status = add_block(&memory->pins, address, NULL, bytes);
    if (status == VIKING_OK)
        memory->pinned_bytes += bytes;
    return status;
}

viking_status viking_host_memory_unpin(viking_host_memory *memory, const void *address)
{
    size_t bytes = drop_block(&memory->pins, address);
    if (bytes == 0)
        return viking_status_fail(VIKING_ERROR_INVALID, "host backend: nothing is pinned at %p", address);
    memory->pinned_bytes -= bytes;
    return VIKING_OK;
}

void viking_host_memory_free(viking_host_memory *memory)
{
    while (memory->allocations)
        drop_block(&memory->allocations, memory->allocations->address);
    while (memory->pins)
        drop_block(&memory->pins, memory->pins->address);
    memory->allocated_bytes = memory->pinned_bytes = 0;
}
