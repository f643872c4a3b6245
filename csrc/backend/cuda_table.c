/* The CUDA runtime is looked up when a device is opened, not linked: one wheel then works with every CUDA major, and
 * on machines without any. What torch has loaded comes first, because two runtimes in one process have two current
 * devices and two last errors, and a stream of one is of no use to the other. */
#include "cuda_table.h"

#include <stdio.h>
#include <string.h>

#include "../base/os.h"

const char *const viking_cuda_table_names[] = {
#ifdef _WIN32
    "cudart64_13.dll", "cudart64_12.dll", "cudart64_110.dll",
#else
    "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0",
#endif
    NULL};

/* A pointer to a function, of any type: ISO C has no conversion from what a library gives. */
static bool resolve(viking_library *library, const char *symbol, void *field, size_t field_bytes)
{
    void *address = viking_library_symbol(library, symbol);
    memcpy(field, &address, field_bytes);
    return address != NULL;
}

static viking_status fill(viking_library *library, const char *name, viking_cuda_table *out)
{
    const char *missing = NULL;
#define RESOLVE(function, result, parameters)                                                                          \
    if (!resolve(library, "cuda" #function, &out->call.function, sizeof out->call.function))                           \
        missing = "cuda" #function;
    VIKING_CUDA_FUNCTIONS(RESOLVE)
#undef RESOLVE
#define RESOLVE_IF_THERE(function, result, parameters)                                                                 \
    (void)resolve(library, "cuda" #function, &out->call.function, sizeof out->call.function);
    VIKING_CUDA_OPTIONAL_FUNCTIONS(RESOLVE_IF_THERE)
#undef RESOLVE_IF_THERE
    if (missing) {
        viking_library_close(library);
        return viking_status_fail(VIKING_ERROR_UNSUPPORTED,
                                  "'%s' has no function %s: it is not a CUDA runtime, or one older than 11; install "
                                  "the runtime of CUDA 12 or 13 (pip install nvidia-cuda-runtime)",
                                  name, missing);
    }
    void *anchor = NULL;
    memcpy(&anchor, &out->call.GetDeviceCount, sizeof anchor);
    viking_library_path(anchor, name, out->library, sizeof out->library);
    return VIKING_OK;
}

viking_status viking_cuda_table_open(const char *path, const char *const *names, viking_cuda_table *out)
{
    viking_library *library = NULL;
    if (path) {
        viking_status status = viking_library_open(path, false, &library);
        return status == VIKING_OK ? fill(library, path, out) : status;
    }
    for (int loaded_only = 1; loaded_only >= 0; loaded_only--) {
        for (const char *const *name = names; *name; name++)
            if (viking_library_open(*name, loaded_only, &library) == VIKING_OK)
                return fill(library, *name, out);
    }
    char tried[128] = "";
    for (const char *const *name = names; *name; name++) {
        size_t length = strlen(tried);
        snprintf(tried + length, sizeof tried - length, "%s%s", length ? ", " : "", *name);
    }
    return viking_status_fail(VIKING_ERROR_UNSUPPORTED,
                              "no CUDA runtime was found (tried %s): import a torch that was built for CUDA first, "
                              "install one (pip install nvidia-cuda-runtime), or use device 'cpu'",
                              tried);
}
