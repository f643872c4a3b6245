#include "error.h"

#include <string.h>

static PyObject *type_of(viking_status status)
{
    switch (status) {
    case VIKING_ERROR_INVALID:
    case VIKING_ERROR_BUDGET:
        return Py_NewRef(PyExc_ValueError);
    case VIKING_ERROR_NO_HOST_MEMORY:
        return Py_NewRef(PyExc_MemoryError);
    case VIKING_ERROR_NO_DEVICE_MEMORY: {
        PyObject *torch = PyImport_ImportModule("torch");
        PyObject *type = torch == NULL ? NULL : PyObject_GetAttrString(torch, "OutOfMemoryError");
        Py_XDECREF(torch);
        if (type != NULL)
            return type;
        PyErr_Clear();
        return Py_NewRef(PyExc_MemoryError);
    }
    case VIKING_OK:
    case VIKING_BUSY:
    case VIKING_ERROR_STATE:
    case VIKING_ERROR_UNSUPPORTED:
    case VIKING_ERROR_DEVICE:
    case VIKING_ERROR_SYSTEM:
        break;
    }
    return Py_NewRef(PyExc_RuntimeError);
}

PyObject *viking_py_raise(viking_status status)
{
    PyObject *message =
        PyUnicode_DecodeUTF8(viking_status_detail(), (Py_ssize_t)strlen(viking_status_detail()), "replace");
    PyObject *type = message == NULL ? NULL : type_of(status);
    if (type != NULL)
        PyErr_SetObject(type, message);
    Py_XDECREF(type);
    Py_XDECREF(message);
    return NULL;
}

PyObject *viking_py_done(viking_status status)
{
    return status == VIKING_OK ? Py_NewRef(Py_None) : viking_py_raise(status);
}
