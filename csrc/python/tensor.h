/* Reaching the memory of a tensor from C.
 *
 * The engine moves bytes and never links against torch, so it asks each tensor where its bytes are, in one of three
 * ways: through the C function table that torch's type offers (torch 2.10 and later), through the tensor's Python
 * methods (torch before that), and through a DLPack capsule (arrays of other libraries).
 */
#ifndef VIKING_PYTHON_TENSOR_H
#define VIKING_PYTHON_TENSOR_H

#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#define VIKING_TENSOR_MOST_DIMENSIONS 8

typedef enum viking_tensor_access {
    VIKING_TENSOR_AUTO, /* the first of those below that the object offers */
    VIKING_TENSOR_EXCHANGE, /* type(tensor).__dlpack_c_exchange_api__ */
    VIKING_TENSOR_INTS, /* data_ptr(), element_size(), shape, stride(), dtype, device */
    VIKING_TENSOR_CAPSULE /* __dlpack__() */
} viking_tensor_access;

/* Types and devices are DLPack's numbers (dlpack.h). */
typedef struct viking_tensor_view {
    void *data; /* of the first element */
    int32_t device_type;
    int32_t device_id;
    uint8_t code;
    uint8_t bits; /* per lane */
    uint16_t lanes;
    int32_t ndim;
    int64_t shape[VIKING_TENSOR_MOST_DIMENSIONS];
    int64_t strides[VIKING_TENSOR_MOST_DIMENSIONS]; /* in elements, none negative */
    size_t bytes; /* from the first element to the end of the last one; 0 for an empty tensor */
    bool contiguous; /* in row-major order */
} viking_tensor_view;

/* Look at `tensor`. Returns 0, or -1 with a Python exception set: TypeError for what is no tensor or does not offer
 * the forced way, ValueError for a tensor without memory of its own (a wrapper subclass, a fake, meta or sparse tensor:
 * the sentence names its type and what to do) and for one that a view cannot describe.
 *
 * The view owns nothing: the address holds as long as the caller holds the tensor and nobody replaces its memory.
 * Reads nothing of the memory; a stream that still writes it is the caller's affair. GIL held. */
int viking_tensor_view_of(PyObject *tensor, viking_tensor_access access, viking_tensor_view *out);

/* The stream on which the library of `tensor_type` works at present on that device, as a handle; 0 on the CPU and for
 * CUDA's default stream. Returns 0, or -1 with a Python exception set. GIL held. */
int viking_tensor_current_stream(PyObject *tensor_type, int32_t device_type, int32_t device_id, uintptr_t *out);

/* Python: tensor_view(tensor, access="auto") -> dict with the members of viking_tensor_view; `access` is "auto",
 * "exchange", "ints" or "capsule". METH_VARARGS | METH_KEYWORDS. */
PyObject *viking_py_tensor_view(PyObject *module, PyObject *args, PyObject *kwargs);

/* Python: current_stream(tensor_type, device_type, device_id) -> int. METH_VARARGS. */
PyObject *viking_py_current_stream(PyObject *module, PyObject *args);

#endif
