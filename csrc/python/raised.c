/* Taking the current exception down and putting it back.
 *
 * Python 3.12 has PyErr_GetRaisedException for this and deprecates the three-part way; the limited API of 3.11, which
 * one wheel for all versions is built against, has the three-part way only.
 */
#include "raised.h"

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#endif

PyObject *viking_raised_take(void)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (!type)
        return NULL;
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback)
        (void)PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
}

void viking_raised_restore(PyObject *exception)
{
    if (!exception)
        return;
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(exception)), exception, PyException_GetTraceback(exception));
}
