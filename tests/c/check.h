/* The C tests' whole framework: CHECK stops the program at the first broken expectation, RUN names what runs. */
#ifndef VIKING_TESTS_CHECK_H
#define VIKING_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#include "base/status.h"

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s does not hold (last failure: %s)\n", __FILE__, __LINE__, #condition,            \
                    viking_status_detail());                                                                           \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Memory for a slab. Windows has no aligned_alloc, and its own memory of that kind is freed in its own way. */
#ifdef _WIN32
#include <malloc.h>
#define ALIGNED_ALLOC(alignment, bytes) _aligned_malloc(bytes, alignment)
#define ALIGNED_FREE(address) _aligned_free(address)
#else
#define ALIGNED_ALLOC(alignment, bytes) aligned_alloc(alignment, bytes)
#define ALIGNED_FREE(address) free(address)
#endif

#define CHECK_OK(expression) CHECK((expression) == VIKING_OK)

#define RUN(test)                                                                                                      \
    do {                                                                                                               \
        printf("   %s\n", #test);                                                                                      \
        fflush(stdout);                                                                                                \
        test();                                                                                                        \
    } while (0)

#endif
