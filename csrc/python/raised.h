/* The exception that is set at present, taken down to clean up or to wrap it, and put back. */
#ifndef VIKING_PYTHON_RAISED_H
#define VIKING_PYTHON_RAISED_H

#include <Python.h>

/* The exception as an object with its traceback (a new reference), and no exception set any more; NULL if none was. */
PyObject *viking_raised_take(void);

/* Set it again. Takes the reference; NULL is allowed and sets nothing. */
void viking_raised_restore(PyObject *exception);

#endif
