/* The planner for Python: what `python -m viking.plan` and the tests call. */
#ifndef VIKING_PYTHON_PLANNING_H
#define VIKING_PYTHON_PLANNING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* plan(bytes, uses, budget_bytes, link_bytes_per_second, latency_ns=8000, compute_scales=None) -> dict
 *
 * bytes: a sequence of sizes, multiples of 256; uses: a sequence of (weight, begin, end, kind, compute_ns), begin and
 * end in ticks. The plan has passed the checker. The dict holds
 *     offsets, resident                          per weight
 *     ring_bytes, resident_bytes, slab_bytes, fetched_bytes, smallest_budget
 *     fetches                                    [(weight, need, after or None)]
 *     period_ns, compute_ns, stall_ns, link_ns   of the steady state
 *     computes, copies                           [(begin_ns, end_ns, weight, index of the use or fetch)]
 *     planning_seconds                           what finding the map and the fetch list took
 */
PyObject *viking_py_plan(PyObject *module, PyObject *args, PyObject *kwargs);

#endif
