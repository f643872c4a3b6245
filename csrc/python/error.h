/* The one place where a status becomes a Python exception. */
#ifndef VIKING_PYTHON_ERROR_H
#define VIKING_PYTHON_ERROR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../base/status.h"

/* Raise for a failure with this thread's sentence; always NULL. Call it with the GIL, after the failing call and
 * before any other one into the core.
 *
 *     INVALID, BUDGET                       ValueError
 *     NO_HOST_MEMORY                        MemoryError
 *     NO_DEVICE_MEMORY                      torch.OutOfMemoryError, so that a trainer's own handler sees it
 *     STATE, UNSUPPORTED, DEVICE, SYSTEM    RuntimeError
 */
PyObject *viking_py_raise(viking_status status);

/* None, or the same. */
PyObject *viking_py_done(viking_status status);

#endif
