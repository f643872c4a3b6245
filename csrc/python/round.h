/* Python: round_to_bf16(destination, source, offset, inner). */
#ifndef VIKING_PYTHON_ROUND_H
#define VIKING_PYTHON_ROUND_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Round the fp32 elements of `source` stochastically into the bf16 elements of `destination` (METH_VARARGS): tensors of
 * one size in ordinary memory, contiguous; `offset` and `inner` are the key (core/round.h), ints below 2^32. Returns
 * None. Raises ValueError for tensors of another kind. The GIL is released meanwhile. */
PyObject *viking_py_round_to_bf16(PyObject *module, PyObject *args);

#endif
