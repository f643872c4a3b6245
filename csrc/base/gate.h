/* A gate through which threads come and go, and that is shut once: whoever shuts it waits until all have left, and may
 * then free what is behind it. Coming and going costs an atomic addition each. */
#ifndef VIKING_BASE_GATE_H
#define VIKING_BASE_GATE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "os.h"

typedef struct viking_gate {
    atomic_bool shut;
    atomic_int inside;
    viking_mutex *lock;
    viking_condition *left;
} viking_gate;

/* An open gate. Zeroed memory is none: nobody may enter it, but it may be closed. */
viking_status viking_gate_open(viking_gate *gate);
/* Nobody may come here any more, not even to leave. */
void viking_gate_close(viking_gate *gate);

/* False once it is shut: then there is nothing to leave. */
bool viking_gate_enter(viking_gate *gate);
void viking_gate_leave(viking_gate *gate);

/* Nobody enters from here on. False if it was shut before. */
bool viking_gate_shut(viking_gate *gate);
/* Wait, after shutting it, until everybody has left. A forked child waits for nobody: the threads are not there. */
void viking_gate_await(viking_gate *gate);

#endif
