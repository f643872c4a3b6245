/* The conversions to 8-bit weights and back, for Python. */
#ifndef VIKING_PYTHON_QUANTIZE_H
#define VIKING_PYTHON_QUANTIZE_H

#include <Python.h>

/* Python: encode_8bit(source, format, codes, scales) -> float. METH_VARARGS. */
PyObject *viking_py_encode_8bit(PyObject *module, PyObject *args);

/* Python: decode_8bit(codes, scales, format, destination). METH_VARARGS. */
PyObject *viking_py_decode_8bit(PyObject *module, PyObject *args);

/* Python: row_with_nan(source) -> int | None. METH_O. */
PyObject *viking_py_row_with_nan(PyObject *module, PyObject *source);

#endif
