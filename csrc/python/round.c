/* Stochastic rounding for Python: finds the memory, lets go of the GIL and rounds. Who is rounded when and with which
 * key is decided in Python, by viking.optim. */
#include "round.h"

#include <stdint.h>

#include "../core/round.h"
#include "dlpack.h"
#include "error.h"
#include "tensor.h"

/* The view of a contiguous tensor in ordinary memory with elements of `code` and `bits`. */
static int look(PyObject *tensor, uint8_t code, uint8_t bits, const char *what, viking_tensor_view *out)
{
    if (viking_tensor_view_of(tensor, VIKING_TENSOR_AUTO, out) < 0)
        return -1;
    bool host = out->device_type == VIKING_DLPACK_CPU || out->device_type == VIKING_DLPACK_CUDA_HOST;
    if (host && out->contiguous && out->code == code && out->bits == bits && out->lanes == 1)
        return 0;
    PyErr_Format(PyExc_ValueError, "round_to_bf16: the %s", what);
    return -1;
}

PyObject *viking_py_round_to_bf16(PyObject *module, PyObject *args)
{
    PyObject *destination = NULL, *source = NULL;
    unsigned long offset = 0, inner = 0;
    viking_tensor_view to, from;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOkk:round_to_bf16", &destination, &source, &offset, &inner) ||
        look(destination, VIKING_DLPACK_BFLOAT, 16, "destination must be a contiguous bf16 tensor on the CPU", &to) <
            0 ||
        look(source, VIKING_DLPACK_FLOAT, 32, "source must be a contiguous fp32 tensor on the CPU", &from) < 0)
        return NULL;
    if (from.bytes != 2 * to.bytes)
        return PyErr_Format(PyExc_ValueError, "round_to_bf16: %zu elements do not go into %zu", from.bytes / 4,
                            to.bytes / 2);
    viking_round_key key = {(uint32_t)offset, (uint32_t)inner};
    viking_status status;
    Py_BEGIN_ALLOW_THREADS
    status = viking_round_to_bf16(to.data, from.data, to.bytes / 2, key, 0);
    Py_END_ALLOW_THREADS
    if (status != VIKING_OK)
        return viking_py_raise(status);
    Py_RETURN_NONE;
}
