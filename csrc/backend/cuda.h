/* The CUDA backend, over a runtime library that is found when the first device is opened. */
#ifndef VIKING_BACKEND_CUDA_H
#define VIKING_BACKEND_CUDA_H

#include "backend.h"

/* Open device `index`. The runtime is, in this order: the library `runtime_path` if not NULL; one the process has
 * loaded already (torch's); by soname, newest major first (13, 12, 11). UNSUPPORTED with a sentence that says what
 * to install where there is none or no such device. */
viking_status viking_cuda_open(int index, const char *runtime_path, viking_backend **out);

/* How many devices this process may open; UNSUPPORTED, with the reason, where there is no runtime, driver or device. */
viking_status viking_cuda_device_count(const char *runtime_path, int *out);

typedef struct viking_cuda_versions {
    int runtime; /* 13000 is CUDA 13.0 */
    int driver;
    char library[512]; /* where the runtime was found */
} viking_cuda_versions;

viking_status viking_cuda_versions_of(viking_backend *self, viking_cuda_versions *out);

/* The same without a device, for a report: the driver is 0 where there is none. UNSUPPORTED where there is no runtime. */
viking_status viking_cuda_find(const char *runtime_path, viking_cuda_versions *out);

#endif
