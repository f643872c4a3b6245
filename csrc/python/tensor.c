/* Reaching the memory of a tensor: the exchange table, the tensor's methods, or a capsule.
 *
 * The exchange table costs about 0.1 us a tensor and the methods about 1 us, so the table comes first; but the table
 * answers pointer 0 without an error for tensors that have no memory of their own, and the methods raise whatever they
 * like. Both are turned into one refusal here, so that no caller ever copies from address 0. The table is looked up
 * at each call: the look-up costs what a cache would, and a cache would have to keep types alive.
 */
#include "tensor.h"

#include <stdarg.h>
#include <string.h>

#include "dlpack.h"
#include "raised.h"

/* ---- refusals ---- */

static const char no_memory_advice[] =
    "it has no memory of its own (a wrapper or quantised subclass, a fake, meta or sparse tensor, or a storage resized "
    "to 0); pass the plain tensors that it is made of (__tensor_flatten__), or materialise it first";

/* Raise `kind` with a sentence that begins with the object's type. An exception that is already set becomes the cause;
 * one that says nothing about the tensor (KeyboardInterrupt, MemoryError) stays as it is. Returns -1. */
static int refuse(PyObject *tensor, PyObject *kind, const char *format, ...)
{
    if (PyErr_Occurred() && (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)))
        return -1;
    PyObject *cause = viking_raised_take();
    va_list arguments;
    va_start(arguments, format);
    PyObject *reason = PyUnicode_FromFormatV(format, arguments);
    va_end(arguments);
    PyObject *module_name = PyObject_GetAttrString((PyObject *)Py_TYPE(tensor), "__module__");
    PyObject *type_name = PyType_GetQualName(Py_TYPE(tensor));
    if (reason && module_name && type_name) {
        PyErr_Format(kind, "cannot use this %S.%S: %S", module_name, type_name, reason);
        if (cause) {
            PyObject *refusal = viking_raised_take();
            PyException_SetCause(refusal, Py_NewRef(cause));
            viking_raised_restore(refusal);
        }
    }
    Py_XDECREF(reason);
    Py_XDECREF(module_name);
    Py_XDECREF(type_name);
    Py_XDECREF(cause);
    return -1;
}

/* 1 and a new reference if the attribute is there, 0 if not, -1 with an exception set. */
static int optional_attribute(PyObject *object, const char *name, PyObject **out)
{
    *out = PyObject_GetAttrString(object, name);
    if (*out)
        return 1;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    PyErr_Clear();
    return 0;
}

/* ---- what every way ends with ---- */

/* Fill in `bytes` and `contiguous` and refuse what a view cannot describe. */
static int finish(PyObject *tensor, viking_tensor_view *view)
{
    int64_t elements = 1, last = 0, expected = 1;
    bool contiguous = true;
    for (int32_t i = 0; i < view->ndim; i++) {
        if (view->shape[i] < 0 || view->strides[i] < 0)
            return refuse(tensor, PyExc_ValueError,
                          "dimension %d has size %lld and stride %lld, and a view has no negative ones; make a "
                          "contiguous copy",
                          (int)i, (long long)view->shape[i], (long long)view->strides[i]);
        elements *= view->shape[i];
        last += (view->shape[i] - 1) * view->strides[i];
    }
    for (int32_t i = view->ndim - 1; i >= 0 && elements > 0; i--) {
        if (view->shape[i] != 1 && view->strides[i] != expected)
            contiguous = false;
        expected *= view->shape[i];
    }
    size_t element_bytes = ((size_t)view->bits * view->lanes + 7) / 8;
    if (element_bytes == 0)
        return refuse(tensor, PyExc_ValueError, "its elements have no size");
    if (elements > 0 && !view->data)
        return refuse(tensor, PyExc_ValueError, "%s", no_memory_advice);
    view->bytes = elements > 0 ? (size_t)(last + 1) * element_bytes : 0;
    view->contiguous = contiguous;
    return 0;
}

static int too_many_dimensions(PyObject *tensor, long long ndim)
{
    return refuse(tensor, PyExc_ValueError, "it has %lld dimensions, and a view has at most %d", ndim,
                  VIKING_TENSOR_MOST_DIMENSIONS);
}

static int view_of_dlpack(PyObject *tensor, const viking_dlpack_tensor *from, viking_tensor_view *out)
{
    if (from->ndim < 0 || from->ndim > VIKING_TENSOR_MOST_DIMENSIONS)
        return too_many_dimensions(tensor, from->ndim);
    *out = (viking_tensor_view){.data = from->data ? (char *)from->data + from->byte_offset : NULL,
                                .device_type = from->device_type,
                                .device_id = from->device_id,
                                .code = from->code,
                                .bits = from->bits,
                                .lanes = from->lanes,
                                .ndim = from->ndim};
    int64_t stride = 1;
    for (int32_t i = from->ndim - 1; i >= 0; i--) {
        out->shape[i] = from->shape[i];
        out->strides[i] = from->strides ? from->strides[i] : stride;
        stride *= from->shape[i];
    }
    return finish(tensor, out);
}

/* ---- the exchange table ---- */

/* 1 and the table, 0 where the type offers none that we know, -1 with an exception set. */
static int find_exchange(PyObject *type, const viking_dlpack_exchange **out)
{
    PyObject *capsule;
    *out = NULL;
    int found = optional_attribute(type, VIKING_DLPACK_EXCHANGE_ATTRIBUTE, &capsule);
    if (found <= 0)
        return found;
    /* Not a capsule of this name: a draft of the protocol, which stored an integer. */
    const viking_dlpack_exchange_header *header = NULL;
    if (PyCapsule_IsValid(capsule, VIKING_DLPACK_EXCHANGE_CAPSULE))
        header = PyCapsule_GetPointer(capsule, VIKING_DLPACK_EXCHANGE_CAPSULE);
    Py_DECREF(capsule); /* the table itself is static */
    while (header && header->version.major != VIKING_DLPACK_MAJOR)
        header = header->previous;
    *out = (const viking_dlpack_exchange *)(const void *)header;
    return header != NULL;
}

static int view_by_table(PyObject *tensor, const viking_dlpack_exchange *table, viking_tensor_view *out)
{
    if (table->borrow) {
        viking_dlpack_tensor borrowed;
        if (table->borrow(tensor, &borrowed) != 0)
            return refuse(tensor, PyExc_ValueError, "%s", no_memory_advice);
        return view_of_dlpack(tensor, &borrowed, out);
    }
    viking_dlpack_managed_versioned *managed = NULL;
    if (table->export_managed(tensor, &managed) != 0 || !managed)
        return refuse(tensor, PyExc_ValueError, "%s", no_memory_advice);
    int result = managed->flags & VIKING_DLPACK_FLAG_COPIED
                     ? refuse(tensor, PyExc_ValueError, "its library gives a copy and not its memory")
                     : view_of_dlpack(tensor, &managed->tensor, out);
    if (managed->deleter)
        managed->deleter(managed);
    return result;
}

static int view_by_exchange(PyObject *tensor, viking_tensor_view *out)
{
    const viking_dlpack_exchange *table;
    int found = find_exchange((PyObject *)Py_TYPE(tensor), &table);
    if (found < 0)
        return -1;
    if (found == 0)
        return refuse(tensor, PyExc_TypeError,
                      "its type has no DLPack C exchange API of version 1 (torch has one from 2.10)");
    return view_by_table(tensor, table, out);
}

/* ---- the tensor's methods ---- */

typedef struct type_name {
    const char *name;
    uint8_t code;
} type_name;

static const type_name type_names[] = {
    {"torch.float64", VIKING_DLPACK_FLOAT},
    {"torch.float32", VIKING_DLPACK_FLOAT},
    {"torch.float16", VIKING_DLPACK_FLOAT},
    {"torch.bfloat16", VIKING_DLPACK_BFLOAT},
    {"torch.int64", VIKING_DLPACK_INT},
    {"torch.int32", VIKING_DLPACK_INT},
    {"torch.int16", VIKING_DLPACK_INT},
    {"torch.int8", VIKING_DLPACK_INT},
    {"torch.uint64", VIKING_DLPACK_UINT},
    {"torch.uint32", VIKING_DLPACK_UINT},
    {"torch.uint16", VIKING_DLPACK_UINT},
    {"torch.uint8", VIKING_DLPACK_UINT},
    {"torch.bool", VIKING_DLPACK_BOOL},
    {"torch.complex32", VIKING_DLPACK_COMPLEX},
    {"torch.complex64", VIKING_DLPACK_COMPLEX},
    {"torch.complex128", VIKING_DLPACK_COMPLEX},
    {"torch.float8_e4m3fn", VIKING_DLPACK_FLOAT8_E4M3FN},
    {"torch.float8_e4m3fnuz", VIKING_DLPACK_FLOAT8_E4M3FNUZ},
    {"torch.float8_e5m2", VIKING_DLPACK_FLOAT8_E5M2},
    {"torch.float8_e5m2fnuz", VIKING_DLPACK_FLOAT8_E5M2FNUZ},
    {"torch.float8_e8m0fnu", VIKING_DLPACK_FLOAT8_E8M0FNU},
    {"torch.float4_e2m1fn_x2", VIKING_DLPACK_FLOAT4_E2M1FN},
};

/* DLPack's type for tensor.dtype. A type without a number there (qint8, bits8) is opaque: its bytes can travel. */
static int read_type(PyObject *tensor, viking_tensor_view *out)
{
    PyObject *dtype = PyObject_GetAttrString(tensor, "dtype");
    PyObject *text = dtype ? PyObject_Str(dtype) : NULL;
    PyObject *size = text ? PyObject_CallMethod(tensor, "element_size", NULL) : NULL;
    const char *name = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    long bytes = size && name ? PyLong_AsLong(size) : -1;
    int result = -1;
    if (PyErr_Occurred())
        goto done;
    if (bytes < 1 || bytes > 31) {
        refuse(tensor, PyExc_ValueError, "it says that an element has %ld bytes", bytes);
        goto done;
    }
    out->code = VIKING_DLPACK_OPAQUE;
    out->bits = (uint8_t)(8 * bytes);
    out->lanes = 1;
    for (size_t i = 0; i < sizeof type_names / sizeof *type_names; i++)
        if (strcmp(name, type_names[i].name) == 0)
            out->code = type_names[i].code;
    if (out->code == VIKING_DLPACK_FLOAT4_E2M1FN) { /* two to the byte */
        out->bits = 4;
        out->lanes = 2;
    }
    result = 0;
done:
    Py_XDECREF(dtype);
    Py_XDECREF(text);
    Py_XDECREF(size);
    return result;
}

static int read_device(PyObject *tensor, viking_tensor_view *out)
{
    PyObject *device = PyObject_GetAttrString(tensor, "device");
    PyObject *type = device ? PyObject_GetAttrString(device, "type") : NULL;
    PyObject *index = type ? PyObject_GetAttrString(device, "index") : NULL;
    const char *name = index ? PyUnicode_AsUTF8AndSize(type, NULL) : NULL;
    int result = -1;
    if (!name)
        goto done;
    out->device_id = 0;
    if (strcmp(name, "cpu") == 0) {
        out->device_type = VIKING_DLPACK_CPU;
    } else if (strcmp(name, "cuda") == 0) {
        out->device_type = VIKING_DLPACK_CUDA;
        long number = Py_IsNone(index) ? 0 : PyLong_AsLong(index);
        if (number == -1 && PyErr_Occurred())
            goto done;
        out->device_id = (int32_t)number;
    } else if (strcmp(name, "meta") == 0) {
        refuse(tensor, PyExc_ValueError, "%s", no_memory_advice);
        goto done;
    } else {
        refuse(tensor, PyExc_ValueError, "it is on the device '%s', and Viking knows 'cpu' and 'cuda'", name);
        goto done;
    }
    result = 0;
done:
    Py_XDECREF(device);
    Py_XDECREF(type);
    Py_XDECREF(index);
    return result;
}

/* A sequence of integers into out[*inout_count]; *inout_count < 0: any length, which is stored. Takes `sequence`. */
static int read_integers(PyObject *tensor, PyObject *sequence, int64_t *out, int32_t *inout_count)
{
    int result = -1;
    Py_ssize_t length = sequence ? PySequence_Size(sequence) : -1;
    if (length < 0)
        goto done;
    if (length > VIKING_TENSOR_MOST_DIMENSIONS) {
        too_many_dimensions(tensor, (long long)length);
        goto done;
    }
    if (*inout_count >= 0 && length != *inout_count) {
        refuse(tensor, PyExc_ValueError, "it has %d sizes and %d strides", (int)*inout_count, (int)length);
        goto done;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        long long value = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (value == -1 && PyErr_Occurred())
            goto done;
        out[i] = value;
    }
    *inout_count = (int32_t)length;
    result = 0;
done:
    Py_XDECREF(sequence);
    return result;
}

static int view_by_ints(PyObject *tensor, viking_tensor_view *out)
{
    *out = (viking_tensor_view){.ndim = -1};
    PyObject *method;
    int found = optional_attribute(tensor, "data_ptr", &method);
    if (found < 0)
        return refuse(tensor, PyExc_ValueError, "%s", no_memory_advice);
    if (found == 0)
        return refuse(tensor, PyExc_TypeError, "it has no data_ptr() as torch's tensors have");
    /* The device first: a meta tensor deserves its own sentence and not that of pointer 0. */
    if (read_device(tensor, out) < 0) {
        Py_DECREF(method);
        return -1;
    }
    PyObject *address = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    if (!address)
        return refuse(tensor, PyExc_ValueError, "%s", no_memory_advice);
    out->data = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    if (!out->data && PyErr_Occurred())
        return -1;

    if (read_type(tensor, out) < 0 ||
        read_integers(tensor, PyObject_GetAttrString(tensor, "shape"), out->shape, &out->ndim) < 0 ||
        read_integers(tensor, PyObject_CallMethod(tensor, "stride", NULL), out->strides, &out->ndim) < 0)
        return -1;
    return finish(tensor, out);
}

/* ---- a capsule ---- */

static int view_of_capsule(PyObject *tensor, PyObject *capsule, viking_tensor_view *out)
{
    int result = -1;
    if (PyCapsule_IsValid(capsule, VIKING_DLPACK_CAPSULE_VERSIONED)) {
        viking_dlpack_managed_versioned *managed = PyCapsule_GetPointer(capsule, VIKING_DLPACK_CAPSULE_VERSIONED);
        /* Renamed, the capsule no longer deletes what it holds: from here on it is ours. */
        if (PyCapsule_SetName(capsule, VIKING_DLPACK_CAPSULE_VERSIONED_USED) != 0)
            return -1;
        if (managed->version.major != VIKING_DLPACK_MAJOR)
            refuse(tensor, PyExc_ValueError, "its DLPack version is %u.%u, and Viking reads 1.x",
                   (unsigned)managed->version.major, (unsigned)managed->version.minor);
        else if (managed->flags & VIKING_DLPACK_FLAG_COPIED)
            refuse(tensor, PyExc_ValueError, "its library gives a copy and not its memory");
        else
            result = view_of_dlpack(tensor, &managed->tensor, out);
        if (managed->deleter)
            managed->deleter(managed);
        return result;
    }
    if (PyCapsule_IsValid(capsule, VIKING_DLPACK_CAPSULE)) {
        viking_dlpack_managed *managed = PyCapsule_GetPointer(capsule, VIKING_DLPACK_CAPSULE);
        if (PyCapsule_SetName(capsule, VIKING_DLPACK_CAPSULE_USED) != 0)
            return -1;
        result = view_of_dlpack(tensor, &managed->tensor, out);
        if (managed->deleter)
            managed->deleter(managed);
        return result;
    }
    return refuse(tensor, PyExc_TypeError, "its __dlpack__() returned no fresh DLPack capsule");
}

/* True on the CPU, where many producers take no stream but None. -1 with an exception set. */
static int is_on_cpu(PyObject *tensor)
{
    PyObject *device;
    int found = optional_attribute(tensor, "__dlpack_device__", &device);
    if (found <= 0)
        return found;
    PyObject *pair = PyObject_CallNoArgs(device);
    Py_DECREF(device);
    PyObject *type = pair ? PySequence_GetItem(pair, 0) : NULL;
    Py_XDECREF(pair);
    long number = type ? PyLong_AsLong(type) : -1; /* numpy's is an IntEnum */
    Py_XDECREF(type);
    if (number == -1 && PyErr_Occurred())
        return -1;
    return number == VIKING_DLPACK_CPU || number == VIKING_DLPACK_CUDA_HOST;
}

/* object.__dlpack__(stream=-1, max_version=(1, 3), copy=False), and for producers older than these words without the
 * last two. */
static PyObject *capsule_of(PyObject *object)
{
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    PyObject *empty = PyTuple_New(0), *keywords = NULL, *capsule = NULL;
    int on_cpu = method && empty ? is_on_cpu(object) : -1;
    if (on_cpu < 0)
        goto done;
    keywords =
        Py_BuildValue("{s(ii)sO}", "max_version", (int)VIKING_DLPACK_MAJOR, (int)VIKING_DLPACK_MINOR, "copy", Py_False);
    PyObject *stream = on_cpu ? NULL : PyLong_FromLong(-1); /* -1: do not synchronise */
    if (!keywords || (stream && PyDict_SetItemString(keywords, "stream", stream) < 0) || PyErr_Occurred()) {
        Py_XDECREF(stream);
        goto done;
    }
    Py_XDECREF(stream);
    capsule = PyObject_Call(method, empty, keywords);
    if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        if (PyDict_DelItemString(keywords, "max_version") == 0 && PyDict_DelItemString(keywords, "copy") == 0)
            capsule = PyObject_Call(method, empty, keywords);
    }
done:
    Py_XDECREF(method);
    Py_XDECREF(empty);
    Py_XDECREF(keywords);
    return capsule;
}

/* Torch before 2.9 exports no float8: its bytes then, and the type from the tensor itself. */
static int view_of_float8(PyObject *tensor, PyObject *plain, viking_tensor_view *out)
{
    int result = -1;
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *bytes_type = torch ? PyObject_GetAttrString(torch, "uint8") : NULL;
    PyObject *bytes = bytes_type ? PyObject_CallMethod(plain, "view", "O", bytes_type) : NULL;
    PyObject *capsule = bytes ? capsule_of(bytes) : NULL;
    if (capsule && view_of_capsule(tensor, capsule, out) == 0)
        result = read_type(tensor, out);
    Py_XDECREF(torch);
    Py_XDECREF(bytes_type);
    Py_XDECREF(bytes);
    Py_XDECREF(capsule);
    return result;
}

/* 1 if the name of tensor.dtype begins with torch.float8, 0 if not, -1 with an exception set. */
static int is_float8(PyObject *tensor)
{
    PyObject *dtype;
    int found = optional_attribute(tensor, "dtype", &dtype);
    if (found <= 0)
        return found;
    PyObject *text = PyObject_Str(dtype);
    Py_DECREF(dtype);
    const char *name = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    int result = name ? strncmp(name, "torch.float8", strlen("torch.float8")) == 0 : -1;
    Py_XDECREF(text);
    return result;
}

static int view_by_capsule(PyObject *tensor, viking_tensor_view *out)
{
    PyObject *plain = NULL, *method = NULL, *capsule = NULL;
    int result = -1;
    int found = optional_attribute(tensor, "__dlpack__", &method);
    if (found < 0)
        return -1;
    if (found == 0)
        return refuse(tensor, PyExc_TypeError, "it is no tensor (no __dlpack__, no data_ptr())");
    Py_DECREF(method);

    /* Torch refuses to export what requires a gradient; detach() is the same memory without that. */
    found = optional_attribute(tensor, "detach", &method);
    if (found < 0)
        return -1;
    plain = found ? PyObject_CallNoArgs(method) : Py_NewRef(tensor);
    if (found)
        Py_DECREF(method);
    if (!plain)
        return refuse(tensor, PyExc_ValueError, "%s", no_memory_advice);

    capsule = capsule_of(plain);
    if (capsule) {
        result = view_of_capsule(tensor, capsule, out);
        goto done;
    }
    PyObject *exception = viking_raised_take();
    int float8 = is_float8(tensor);
    if (float8 == 0) {
        viking_raised_restore(exception);
        refuse(tensor, PyExc_ValueError, "its library does not export it; %s", no_memory_advice);
        goto done;
    }
    Py_XDECREF(exception);
    if (float8 > 0)
        result = view_of_float8(tensor, plain, out);
done:
    Py_DECREF(plain);
    Py_XDECREF(capsule);
    return result;
}

/* ---- entries ---- */

int viking_tensor_view_of(PyObject *tensor, viking_tensor_access access, viking_tensor_view *out)
{
    const viking_dlpack_exchange *table;
    PyObject *method;
    int found;
    *out = (viking_tensor_view){0};
    switch (access) {
    case VIKING_TENSOR_EXCHANGE:
        return view_by_exchange(tensor, out);
    case VIKING_TENSOR_INTS:
        return view_by_ints(tensor, out);
    case VIKING_TENSOR_CAPSULE:
        return view_by_capsule(tensor, out);
    case VIKING_TENSOR_AUTO:
        found = find_exchange((PyObject *)Py_TYPE(tensor), &table);
        if (found < 0)
            return -1;
        if (found)
            return view_by_table(tensor, table, out);
        found = optional_attribute(tensor, "data_ptr", &method);
        if (found < 0)
            return -1;
        if (!found)
            return view_by_capsule(tensor, out);
        Py_DECREF(method);
        return view_by_ints(tensor, out);
    }
    PyErr_SetString(PyExc_ValueError, "unknown way to reach a tensor");
    return -1;
}

int viking_tensor_current_stream(PyObject *tensor_type, int32_t device_type, int32_t device_id, uintptr_t *out)
{
    *out = 0;
    if (device_type == VIKING_DLPACK_CPU || device_type == VIKING_DLPACK_CUDA_HOST)
        return 0;
    const viking_dlpack_exchange *table;
    int found = find_exchange(tensor_type, &table);
    if (found < 0)
        return -1;
    if (found) {
        void *stream = NULL;
        if (table->current_work_stream(device_type, device_id, &stream) != 0)
            return -1;
        *out = (uintptr_t)stream;
        return 0;
    }
    if (device_type != VIKING_DLPACK_CUDA) {
        PyErr_Format(PyExc_ValueError, "no way to ask for the current stream of DLPack device type %d",
                     (int)device_type);
        return -1;
    }
    /* Before torch 2.10: what the code that torch.compile generates calls. */
    PyObject *torch = PyImport_ImportModule("torch._C");
    PyObject *stream = torch ? PyObject_CallMethod(torch, "_cuda_getCurrentRawStream", "i", (int)device_id) : NULL;
    void *handle = stream ? PyLong_AsVoidPtr(stream) : NULL;
    Py_XDECREF(torch);
    Py_XDECREF(stream);
    if (PyErr_Occurred())
        return -1;
    *out = (uintptr_t)handle;
    return 0;
}

/* ---- for Python ---- */

static PyObject *tuple_of(const int64_t *values, int32_t count)
{
    PyObject *tuple = PyTuple_New(count);
    if (!tuple)
        return NULL;
    for (int32_t i = 0; i < count; i++) {
        PyObject *item = PyLong_FromLongLong(values[i]);
        if (!item || PyTuple_SetItem(tuple, i, item) < 0) {
            Py_DECREF(tuple);
            return NULL;
        }
    }
    return tuple;
}

PyObject *viking_py_tensor_view(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"tensor", "access", NULL};
    static const char *const ways[] = {"auto", "exchange", "ints", "capsule"}; /* in the order of the enumeration */
    (void)module;
    PyObject *tensor;
    const char *way = "auto";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|s:tensor_view", keywords, &tensor, &way))
        return NULL;
    int access = 0, count = (int)(sizeof ways / sizeof *ways);
    while (access < count && strcmp(way, ways[access]) != 0)
        access++;
    if (access == count)
        return PyErr_Format(PyExc_ValueError, "access is 'auto', 'exchange', 'ints' or 'capsule', not '%s'", way);

    viking_tensor_view view;
    if (viking_tensor_view_of(tensor, (viking_tensor_access)access, &view) < 0)
        return NULL;
    PyObject *data = PyLong_FromVoidPtr(view.data), *contiguous = PyBool_FromLong(view.contiguous);
    PyObject *shape = tuple_of(view.shape, view.ndim), *strides = tuple_of(view.strides, view.ndim);
    PyObject *result = NULL;
    if (data && contiguous && shape && strides)
        result = Py_BuildValue("{sO si si si si si sO sO sn sO}", "data", data, "device_type", (int)view.device_type,
                               "device_id", (int)view.device_id, "code", (int)view.code, "bits", (int)view.bits,
                               "lanes", (int)view.lanes, "shape", shape, "strides", strides, "bytes",
                               (Py_ssize_t)view.bytes, "contiguous", contiguous);
    Py_XDECREF(data);
    Py_XDECREF(contiguous);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return result;
}

PyObject *viking_py_current_stream(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *type;
    int device_type, device_id;
    if (!PyArg_ParseTuple(args, "Oii:current_stream", &type, &device_type, &device_id))
        return NULL;
    uintptr_t stream;
    if (viking_tensor_current_stream(type, device_type, device_id, &stream) < 0)
        return NULL;
    return PyLong_FromVoidPtr((void *)stream);
}
