#include "gate.h"

viking_status viking_gate_open(viking_gate *gate)
{
    atomic_init(&gate->shut, false);
    atomic_init(&gate->inside, 0);
    gate->lock = NULL;
    gate->left = NULL;
    viking_status status = viking_mutex_open(&gate->lock);
    return status == VIKING_OK ? viking_condition_open(&gate->left) : status;
}

void viking_gate_close(viking_gate *gate)
{
    viking_condition_close(gate->left);
    viking_mutex_close(gate->lock);
    gate->left = NULL;
    gate->lock = NULL;
}

bool viking_gate_enter(viking_gate *gate)
{
    /* Counted before the look at `shut`: either this thread sees that it is shut, or who shuts it sees this thread. */
    atomic_fetch_add(&gate->inside, 1);
    if (!atomic_load(&gate->shut))
        return true;
    viking_gate_leave(gate);
    return false;
}

void viking_gate_leave(viking_gate *gate)
{
    if (atomic_fetch_sub(&gate->inside, 1) > 1 || !atomic_load(&gate->shut))
        return;
    viking_mutex_lock(gate->lock);
    viking_condition_broadcast(gate->left);
    viking_mutex_unlock(gate->lock);
}

bool viking_gate_shut(viking_gate *gate)
{
    return !atomic_exchange(&gate->shut, true);
}

void viking_gate_await(viking_gate *gate)
{
    if (viking_os_forked())
        return;
    viking_mutex_lock(gate->lock);
    while (atomic_load(&gate->inside) > 0)
        viking_condition_wait(gate->left, gate->lock);
    viking_mutex_unlock(gate->lock);
}
