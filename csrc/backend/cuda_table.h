/* Where the CUDA runtime is, and its functions. */
#ifndef VIKING_BACKEND_CUDA_TABLE_H
#define VIKING_BACKEND_CUDA_TABLE_H

#include "../base/status.h"
#include "cuda_runtime.h"

typedef struct viking_cuda_table {
    viking_cuda_functions call;
    char library[512]; /* the file that the functions come from */
} viking_cuda_table;

/* The names under which a runtime is looked for, newest major first; ends with NULL. */
extern const char *const viking_cuda_table_names[];

/* Fill `out` from `path` if it is not NULL; else from the first of `names` that the process has loaded already; else
 * from the first that can be loaded. The library stays loaded until the process ends: it keeps state in threads that
 * are not ours. UNSUPPORTED where there is none, or where what there is lacks a function. */
viking_status viking_cuda_table_open(const char *path, const char *const *names, viking_cuda_table *out);

#endif
