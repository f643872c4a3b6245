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

#define CHECK_OK(expression) CHECK((expression) == VIKING_OK)

#define RUN(test)                                                                                                      \
    do {                                                                                                               \
        printf("   %s\n", #test);                                                                                      \
        fflush(stdout);                                                                                                \
        test();                                                                                                        \
    } while (0)

#endif
