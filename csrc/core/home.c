#include "home.h"

#include <stdlib.h>
#include <string.h>

#include "../base/os.h"
#include "../base/parallel.h"

static size_t mapping_bytes(size_t bytes)
{
    size_t page = viking_os_page_bytes();
    return (bytes + page - 1) / page * page;
}

viking_status viking_home_open(size_t bytes, viking_home **out)
{
    if (bytes == 0)
        return viking_status_fail(VIKING_ERROR_INVALID, "a home needs at least one byte");
    viking_home *home = calloc(1, sizeof *home);
    if (home == NULL)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for a home of %zu bytes", bytes);
    home->bytes = bytes;
    viking_status status = viking_os_map(mapping_bytes(bytes), &home->address);
    if (status != VIKING_OK)
        goto fail;
    status = viking_os_inherit(home->address, mapping_bytes(bytes), false);
    if (status != VIKING_OK)
        goto fail;
    home->own = (viking_piece){.address = home->address, .bytes = mapping_bytes(bytes)};
    home->pieces = &home->own;
    home->piece_count = 1;
    *out = home;
    return VIKING_OK;
fail:
    if (home->address != NULL)
        viking_os_unmap(home->address, mapping_bytes(bytes));
    free(home);
    return status;
}

viking_status viking_home_over(const viking_piece *pieces, uint32_t count, size_t bytes, viking_home **out)
{
    size_t end = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (pieces[i].offset < end || pieces[i].offset > bytes || pieces[i].bytes > bytes - pieces[i].offset ||
            pieces[i].address == NULL)
            return viking_status_fail(VIKING_ERROR_INVALID,
                                      "piece %u (%zu bytes at offset %zu) lies outside a home of %zu bytes, or before "
                                      "the end of the one before",
                                      i, pieces[i].bytes, pieces[i].offset, bytes);
        end = pieces[i].offset + pieces[i].bytes;
    }
    if (count == 0)
        return viking_status_fail(VIKING_ERROR_INVALID, "a home needs at least one piece");
    viking_home *home = calloc(1, sizeof *home);
    viking_piece *copy = malloc(count * sizeof *copy);
    if (home == NULL || copy == NULL) {
        free(home);
        free(copy);
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no host memory for a home of %u pieces", count);
    }
    memcpy(copy, pieces, count * sizeof *copy);
    *home = (viking_home){.bytes = bytes, .pieces = copy, .piece_count = count};
    *out = home;
    return VIKING_OK;
}

void viking_home_close(viking_home *home)
{
    if (home == NULL)
        return;
    if (home->address == NULL) {
        free(home->pieces);
    } else if (!viking_os_forked()) {
        viking_home_unpin(home);
        viking_os_unmap(home->address, mapping_bytes(home->bytes));
    }
    free(home);
}

viking_status viking_home_fill(viking_home *home, size_t offset, const void *source, size_t bytes)
{
    if (offset > home->bytes || bytes > home->bytes - offset)
        return viking_status_fail(VIKING_ERROR_INVALID, "%zu bytes at offset %zu do not fit in a home of %zu bytes",
                                  bytes, offset, home->bytes);
    if (home->address == NULL)
        return viking_status_fail(VIKING_ERROR_UNSUPPORTED, "a home over borrowed memory cannot be filled");
    viking_parallel_copy((char *)home->address + offset, source, bytes, 0);
    return VIKING_OK;
}

void viking_home_read(const viking_home *home, size_t offset, void *out, size_t bytes, unsigned threads)
{
    for (uint32_t i = 0; i < home->piece_count; i++) {
        const viking_piece *piece = &home->pieces[i];
        size_t begin = offset > piece->offset ? offset : piece->offset;
        size_t end = piece->offset + piece->bytes;
        end = end < offset + bytes ? end : offset + bytes;
        if (begin < end)
            viking_parallel_copy((char *)out + (begin - offset), (const char *)piece->address + (begin - piece->offset),
                                 end - begin, threads);
    }
}

size_t viking_home_offset_of(const viking_home *home, const void *address)
{
    for (uint32_t i = 0; i < home->piece_count; i++) {
        const viking_piece *piece = &home->pieces[i];
        uintptr_t distance = (uintptr_t)address - (uintptr_t)piece->address;
        if (distance < piece->bytes)
            return piece->offset + distance;
    }
    return SIZE_MAX;
}

viking_status viking_home_pin(viking_home *home, viking_backend *backend)
{
    if (home->pinned_by != NULL)
        return VIKING_OK;
    if (home->address == NULL)
        return viking_status_fail(VIKING_ERROR_UNSUPPORTED, "a home over borrowed memory cannot be pinned");
    /* One registration: drivers take any size that one weight can have. */
    viking_status status = backend->operations->pin(backend, home->address, mapping_bytes(home->bytes));
    if (status == VIKING_OK)
        home->pinned_by = backend;
    return status;
}

viking_status viking_home_unpin(viking_home *home)
{
    viking_backend *backend = home->pinned_by;
    if (backend == NULL)
        return VIKING_OK;
    home->pinned_by = NULL;
    return backend->operations->unpin(backend, home->address);
}

size_t viking_home_locked_bytes(const viking_home *home)
{
    return home->pinned_by != NULL ? mapping_bytes(home->bytes) : 0;
}

viking_status viking_home_retire(viking_home *home)
{
    if (home->address == NULL)
        return VIKING_OK;
    viking_status status = viking_home_unpin(home);
    viking_status inherited = viking_os_inherit(home->address, mapping_bytes(home->bytes), true);
    return status != VIKING_OK ? status : inherited;
}
