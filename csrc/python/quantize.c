/* 8-bit weights for Python: finds the memory, lets go of the GIL and converts. Codes are tensors of bytes here, whatever
 * their format: DLPack's names for 8-bit floats are younger than the oldest torch. */
#include "quantize.h"

#include <stdint.h>
#include <string.h>

#include "../core/quantize.h"
#include "dlpack.h"
#include "error.h"
#include "tensor.h"

/* A contiguous tensor in ordinary memory. */
static int look(PyObject *tensor, const char *what, viking_tensor_view *out)
{
    if (viking_tensor_view_of(tensor, VIKING_TENSOR_AUTO, out) < 0)
        return -1;
    bool host = out->device_type == VIKING_DLPACK_CPU || out->device_type == VIKING_DLPACK_CUDA_HOST;
    if (host && out->contiguous && out->lanes == 1)
        return 0;
    PyErr_Format(PyExc_ValueError, "the %s of an 8-bit conversion must be a contiguous tensor on the CPU", what);
    return -1;
}

/* rows x columns elements of fp32, fp16 or bf16. */
static int look_at_matrix(PyObject *tensor, viking_tensor_view *view, viking_quantize_matrix *out)
{
    if (look(tensor, "matrix", view) < 0)
        return -1;
    bool wide = view->code == VIKING_DLPACK_FLOAT && view->bits == 32;
    bool half = view->code == VIKING_DLPACK_FLOAT && view->bits == 16;
    bool brain = view->code == VIKING_DLPACK_BFLOAT && view->bits == 16;
    if (view->ndim != 2 || !(wide || half || brain)) {
        PyErr_SetString(PyExc_ValueError, "the matrix of an 8-bit conversion must be 2-dimensional, in fp32, fp16 or "
                                          "bf16");
        return -1;
    }
    *out = (viking_quantize_matrix){
        .elements = view->data,
        .kind = wide ? VIKING_QUANTIZE_FP32 : (half ? VIKING_QUANTIZE_FP16 : VIKING_QUANTIZE_BF16),
        .rows = (size_t)view->shape[0],
        .columns = (size_t)view->shape[1],
    };
    return 0;
}

/* The bytes of the codes and the scales (None: none) that belong to such a matrix. */
static int look_at_codes(PyObject *codes, PyObject *scales, const viking_quantize_matrix *matrix, uint8_t **out_codes,
                         float **out_scales)
{
    viking_tensor_view view;
    if (look(codes, "codes", &view) < 0)
        return -1;
    *out_codes = view.data;
    *out_scales = NULL;
    bool fits = view.bits == 8 && view.bytes == matrix->rows * matrix->columns;
    if (fits && scales != Py_None) {
        if (look(scales, "scales", &view) < 0)
            return -1;
        *out_scales = view.data;
        fits = view.code == VIKING_DLPACK_FLOAT && view.bits == 32 && view.bytes == 4 * matrix->rows;
    }
    if (fits)
        return 0;
    PyErr_Format(PyExc_ValueError,
                 "a matrix of %zu x %zu has as many codes of one byte, and %zu scales in fp32 or none", matrix->rows,
                 matrix->columns, matrix->rows);
    return -1;
}

static int format_of(const char *name, viking_quantize_format *out)
{
    static const char *const names[] = {"float8_e4m3fn", "float8_e5m2", "int8"};
    for (int format = 0; format < 3; format++)
        if (strcmp(name, names[format]) == 0) {
            *out = (viking_quantize_format)format;
            return 0;
        }
    PyErr_Format(PyExc_ValueError, "unknown 8-bit format %s: there are float8_e4m3fn, float8_e5m2 and int8", name);
    return -1;
}

PyObject *viking_py_encode_8bit(PyObject *module, PyObject *args)
{
    PyObject *source = NULL, *codes = NULL, *scales = NULL;
    const char *name = NULL;
    viking_tensor_view view;
    viking_quantize_matrix matrix;
    viking_quantize_format format;
    uint8_t *to = NULL;
    float *row_scales = NULL;
    double error = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OsOO:encode_8bit", &source, &name, &codes, &scales) || format_of(name, &format) < 0 ||
        look_at_matrix(source, &view, &matrix) < 0 || look_at_codes(codes, scales, &matrix, &to, &row_scales) < 0)
        return NULL;
    viking_status status;
    Py_BEGIN_ALLOW_THREADS
    status = viking_quantize_encode(&matrix, format, 0, to, row_scales, &error);
    Py_END_ALLOW_THREADS
    return status == VIKING_OK ? PyFloat_FromDouble(error) : viking_py_raise(status);
}

PyObject *viking_py_decode_8bit(PyObject *module, PyObject *args)
{
    PyObject *destination = NULL, *codes = NULL, *scales = NULL;
    const char *name = NULL;
    viking_tensor_view view;
    viking_quantize_matrix matrix;
    viking_quantize_format format;
    uint8_t *from = NULL;
    float *row_scales = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOsO:decode_8bit", &codes, &scales, &name, &destination) ||
        format_of(name, &format) < 0 || look_at_matrix(destination, &view, &matrix) < 0 ||
        look_at_codes(codes, scales, &matrix, &from, &row_scales) < 0)
        return NULL;
    viking_status status;
    Py_BEGIN_ALLOW_THREADS
    status = viking_quantize_decode(from, row_scales, format, matrix.rows, matrix.columns, 0, matrix.kind, view.data);
    Py_END_ALLOW_THREADS
    if (status != VIKING_OK)
        return viking_py_raise(status);
    Py_RETURN_NONE;
}

PyObject *viking_py_row_with_nan(PyObject *module, PyObject *source)
{
    viking_tensor_view view;
    viking_quantize_matrix matrix;
    size_t row = 0;
    (void)module;
    if (look_at_matrix(source, &view, &matrix) < 0)
        return NULL;
    viking_status status;
    Py_BEGIN_ALLOW_THREADS
    status = viking_quantize_find_nan(&matrix, 0, &row);
    Py_END_ALLOW_THREADS
    if (status != VIKING_OK)
        return viking_py_raise(status);
    if (row == matrix.rows)
        Py_RETURN_NONE;
    return PyLong_FromSize_t(row);
}
