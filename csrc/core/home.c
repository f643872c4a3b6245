#include "home.h"

#include <stdlib.h>

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
    *out = home;
    return VIKING_OK;
fail:
    if (home->address != NULL)
        viking_os_unmap(home->address, mapping_bytes(bytes));
    free(home);
    return status;
}

void viking_home_close(viking_home *home)
{
    if (home == NULL)
        return;
    if (!viking_os_forked()) {
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
    viking_parallel_copy((char *)home->address + offset, source, bytes, 0);
    return VIKING_OK;
}

viking_status viking_home_pin(viking_home *home, viking_backend *backend)
{
    if (home->pinned_by != NULL)
        return VIKING_OK;
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
    viking_status status = viking_home_unpin(home);
    viking_status inherited = viking_os_inherit(home->address, mapping_bytes(home->bytes), true);
    return status != VIKING_OK ? status : inherited;
}
