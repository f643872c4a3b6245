#ifndef VIKING_PYTHON_ENGINE_H
#define VIKING_PYTHON_ENGINE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../core/engine.h"

/* The engine of a viking._engine.Engine, borrowed; NULL with RuntimeError set once it is closed. The caller has
 * checked the type. */
viking_engine *viking_py_engine_of(PyObject *object);

/* The stream that its framework works on at present. 0, or -1 with an exception set. */
int viking_py_engine_stream(PyObject *object, viking_stream *out);

/* acquire and release, letting go of the GIL where they may wait. */
viking_status viking_py_engine_acquire(viking_engine *engine, uint32_t weight, viking_stream stream,
                                       viking_acquired *out);
viking_status viking_py_engine_release(viking_engine *engine, uint64_t ticket, viking_stream stream);

#endif
