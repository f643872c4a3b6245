/* The state of one import of the module: its types, and what it calls in the Python package. */
#ifndef VIKING_PYTHON_STATE_H
#define VIKING_PYTHON_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct viking_state {
    PyTypeObject *home_type;
    PyTypeObject *engine_type;
    PyTypeObject *linear_type;
    /* Of viking.nn.linear, looked up at the first forward: NULL before. */
    PyObject *linear_apply;
    PyObject *linear_views;
    PyObject *linear_repair;
    PyObject *linear_replaced;
    PyObject *linear_retrain;
    /* Interned attribute names of the hot path. */
    PyObject *name_version;
    PyObject *name_requires_grad;
    PyObject *name_weight;
    PyObject *name_bias;
} viking_state;

extern struct PyModuleDef viking_module_definition;

viking_state *viking_state_of_module(PyObject *module);
/* Of an instance of one of the module's own types; none of them can be subclassed. */
viking_state *viking_state_of(PyObject *self);

/* Makes the types; each file ends in the spec of its own. */
extern PyType_Spec viking_home_spec;
extern PyType_Spec viking_engine_spec;
extern PyType_Spec viking_linear_spec;

#endif
