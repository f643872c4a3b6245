#ifndef VIKING_PYTHON_HOME_H
#define VIKING_PYTHON_HOME_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../core/home.h"

/* The home of a viking._engine.Home, borrowed. The caller has checked the type. */
viking_home *viking_py_home_of(PyObject *object);

/* Python: trim() gives free host memory back to the system. METH_NOARGS. */
PyObject *viking_py_trim(PyObject *module, PyObject *unused);
/* Python: file_ranges() -> list of (begin, end), host_memory() -> (available, total). METH_NOARGS. */
PyObject *viking_py_file_ranges(PyObject *module, PyObject *unused);
PyObject *viking_py_host_memory(PyObject *module, PyObject *unused);

#endif
