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

/* The Homes that it keeps alive: dict, borrowed. */
PyObject *viking_py_engine_homes(PyObject *object);

/* A weight's number; those that no weight can have are not cut down to one that a weight has. 0, or -1 with an exception
 * set. */
int viking_py_engine_weight(PyObject *number, uint32_t *out);
/* A method that hands one weight to the core, which may wait. */
PyObject *viking_py_engine_for_weight(PyObject *object, PyObject *argument,
                                      viking_status (*function)(viking_engine *, uint32_t));

/* acquire and release, letting go of the GIL where they may wait. */
viking_status viking_py_engine_acquire(PyObject *object, uint32_t weight, viking_stream stream, viking_acquired *out);
viking_status viking_py_engine_release(PyObject *object, uint64_t ticket, viking_stream stream);

/* trained.c: methods of the type for trained weights and their gradients. */
extern const char viking_py_set_trained_doc[], viking_py_forget_trained_doc[], viking_py_expect_step_doc[],
    viking_py_download_doc[], viking_py_download_await_doc[], viking_py_download_release_doc[],
    viking_py_pin_home_doc[], viking_py_unpin_home_doc[];
PyObject *viking_py_set_trained(PyObject *object, PyObject *args);
PyObject *viking_py_forget_trained(PyObject *object, PyObject *unused);
PyObject *viking_py_expect_step(PyObject *object, PyObject *weight);
PyObject *viking_py_download(PyObject *object, PyObject *args);
PyObject *viking_py_download_await(PyObject *object, PyObject *ticket);
PyObject *viking_py_download_release(PyObject *object, PyObject *ticket);
PyObject *viking_py_pin_home(PyObject *object, PyObject *home);
PyObject *viking_py_unpin_home(PyObject *object, PyObject *home);

#endif
