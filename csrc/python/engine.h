#ifndef VIKING_PYTHON_ENGINE_H
#define VIKING_PYTHON_ENGINE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../core/engine.h"

/* A call into the core of a viking._engine.Engine, without the GIL. The object stays, and closing it waits for the call;
 * so no Python code may run between begin and end. */
typedef struct viking_py_call {
    PyObject *object;
    viking_engine *engine;
    PyThreadState *thread;
    int announced;
} viking_py_call;

/* `announced`: 1 for a call that may take long, see viking_engine_announce; else 0. STATE once the engine is closed. */
viking_status viking_py_call_begin(PyObject *object, int announced, viking_py_call *out);
void viking_py_call_end(viking_py_call *call);

/* The stream that its framework works on at present. 0, or -1 with an exception set. */
int viking_py_engine_stream(PyObject *object, viking_stream *out);

/* acquire and release, letting go of the GIL where they may wait. */
viking_status viking_py_engine_acquire(PyObject *object, uint32_t weight, viking_stream stream, viking_acquired *out);
viking_status viking_py_engine_release(PyObject *object, uint64_t ticket, viking_stream stream);

#endif
