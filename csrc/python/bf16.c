/* force_to_bf16: every fp32 and fp16 parameter of a network becomes bf16, and stays the same Parameter.
 *
 * Only `parameter.data` is exchanged, so that optimizers, hooks and ties between modules keep pointing at the right
 * object. Parameters that share a storage (tied slices, views) must share one afterwards too, so what is converted is
 * not a parameter but the piece of storage that a group of parameters covers, and the new parameters are laid over it
 * as the old ones were. The order is: look at everything, allocate and convert everything, exchange everything. A
 * failure before the last phase leaves nothing to undo, and the last phase undoes itself.
 *
 * Torch converts what is not ordinary memory of this process: tensors on a GPU, meta, fake and sparse ones.
 */
#include "bf16.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../base/os.h"
#include "../base/parallel.h"
#include "../core/convert.h"
#include "dlpack.h"
#include "raised.h"
#include "tensor.h"

#define GRAIN_ELEMENTS ((size_t)1 << 16)

/* A parameter that changes. */
typedef struct change {
    PyObject *parameter;
    PyObject *old; /* parameter.data: keeps the old memory until the end */
    PyObject *replacement;
    viking_convert_source kind;
    bool alone; /* converted by torch, by itself */
    uintptr_t storage; /* identity of the storage; the rest is in elements from its beginning */
    int64_t offset;
    int64_t span; /* from the first to behind the last element */
    int64_t elements; /* fewer than span where there are gaps, more where it is expanded */
    const char *data; /* of the first element; NULL where torch must convert */
} change;

/* A piece of storage that this process converts. */
typedef struct piece {
    uint16_t *destination;
    const char *source;
    viking_convert_source kind;
    size_t count;
    size_t before; /* elements of all pieces before it */
} piece;

typedef struct conversion {
    PyObject *torch;
    PyObject *float32, *float16, *bfloat16;
    PyObject *parameter_type;
    PyObject *seen; /* dict: address of a parameter -> its name */
    change *changes;
    size_t change_count, change_capacity;
    piece *pieces; /* as many as changes at most */
    size_t piece_count;
    size_t piece_elements;
    Py_ssize_t kept;
} conversion;

static int conversion_open(conversion *self)
{
    *self = (conversion){.torch = PyImport_ImportModule("torch")};
    if (!self->torch)
        return -1;
    PyObject *nn = PyObject_GetAttrString(self->torch, "nn");
    self->parameter_type = nn ? PyObject_GetAttrString(nn, "Parameter") : NULL;
    Py_XDECREF(nn);
    self->float32 = PyObject_GetAttrString(self->torch, "float32");
    self->float16 = PyObject_GetAttrString(self->torch, "float16");
    self->bfloat16 = PyObject_GetAttrString(self->torch, "bfloat16");
    self->seen = PyDict_New();
    return PyErr_Occurred() ? -1 : 0;
}

static void conversion_close(conversion *self)
{
    for (size_t i = 0; i < self->change_count; i++) {
        Py_XDECREF(self->changes[i].parameter);
        Py_XDECREF(self->changes[i].old);
        Py_XDECREF(self->changes[i].replacement);
    }
    free(self->changes);
    free(self->pieces);
    Py_XDECREF(self->torch);
    Py_XDECREF(self->float32);
    Py_XDECREF(self->float16);
    Py_XDECREF(self->bfloat16);
    Py_XDECREF(self->parameter_type);
    Py_XDECREF(self->seen);
}

/* ---- looking ---- */

/* object.name() as an integer; -1 with an exception set. */
static long long call_for_integer(PyObject *object, const char *name)
{
    PyObject *number = PyObject_CallMethod(object, name, NULL);
    long long value = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    return value;
}

/* object.name() as a truth; -1 with an exception set. */
static int call_for_truth(PyObject *object, const char *name)
{
    PyObject *answer = PyObject_CallMethod(object, name, NULL);
    int truth = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return truth;
}

/* Whether a parameter of a class of its own is to be left alone: it wraps other tensors, or it is lazy and has no
 * shape yet. */
static int is_kept_subclass(const conversion *self, PyObject *parameter)
{
    if ((PyObject *)Py_TYPE(parameter) == self->parameter_type)
        return 0;
    PyObject *flatten = PyObject_GetAttrString((PyObject *)Py_TYPE(parameter), "__tensor_flatten__");
    if (flatten) {
        Py_DECREF(flatten);
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    PyErr_Clear();
    PyObject *module = PyImport_ImportModule("torch.nn.parameter");
    PyObject *lazy = module ? PyObject_CallMethod(module, "is_lazy", "O", parameter) : NULL;
    int result = lazy ? PyObject_IsTrue(lazy) : -1;
    Py_XDECREF(module);
    Py_XDECREF(lazy);
    return result;
}

/* Elements from the first to behind the last, from size() and stride(). */
static int measure(PyObject *tensor, int64_t *out_span)
{
    PyObject *sizes = PyObject_CallMethod(tensor, "size", NULL);
    PyObject *strides = sizes ? PyObject_CallMethod(tensor, "stride", NULL) : NULL;
    Py_ssize_t count = strides ? PySequence_Size(sizes) : -1;
    int64_t last = 0;
    int result = count < 0 ? -1 : 0;
    for (Py_ssize_t i = 0; i < count && result == 0; i++) {
        PyObject *size = PySequence_GetItem(sizes, i), *stride = PySequence_GetItem(strides, i);
        long long size_value = size ? PyLong_AsLongLong(size) : -1;
        long long stride_value = stride ? PyLong_AsLongLong(stride) : -1;
        Py_XDECREF(size);
        Py_XDECREF(stride);
        if (PyErr_Occurred())
            result = -1;
        last += (size_value - 1) * stride_value;
    }
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    *out_span = last + 1;
    return result;
}

/* What has no storage, no elements or elements that are not what the memory says is `alone`. Returns 0, or -1 with an
 * exception set. */
static int locate(change *entry)
{
    entry->alone = true;
    entry->elements = call_for_integer(entry->old, "numel");
    int negated = entry->elements < 0 ? -1 : call_for_truth(entry->old, "is_neg");
    if (negated < 0)
        return -1;
    if (entry->elements == 0 || negated)
        return 0;

    PyObject *storage = PyObject_CallMethod(entry->old, "untyped_storage", NULL);
    PyObject *identity = storage ? PyObject_GetAttrString(storage, "_cdata") : NULL;
    Py_XDECREF(storage);
    if (!identity) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear(); /* sparse: no storage that anything could share */
        return 0;
    }
    entry->storage = (uintptr_t)PyLong_AsVoidPtr(identity);
    Py_DECREF(identity);
    entry->offset = PyErr_Occurred() ? -1 : call_for_integer(entry->old, "storage_offset");
    if (PyErr_Occurred() || measure(entry->old, &entry->span) < 0)
        return -1;
    entry->alone = false;

    viking_tensor_view view;
    if (viking_tensor_view_of(entry->old, VIKING_TENSOR_AUTO, &view) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_ValueError))
            return -1;
        PyErr_Clear(); /* meta, fake, of many dimensions: torch knows how */
        return 0;
    }
    if (view.device_type == VIKING_DLPACK_CPU)
        entry->data = view.data;
    return 0;
}

/* Decide about one parameter and remember it if it changes. */
static int look_at(conversion *self, PyObject *name, PyObject *parameter)
{
    PyObject *address = PyLong_FromVoidPtr(parameter);
    int known = address ? PyDict_Contains(self->seen, address) : -1;
    if (known == 0 && PyDict_SetItem(self->seen, address, name) < 0)
        known = -1;
    Py_XDECREF(address);
    if (known != 0)
        return known < 0 ? -1 : 0;

    PyObject *gradient = PyObject_GetAttrString(parameter, "grad");
    if (!gradient)
        return -1;
    bool has_gradient = !Py_IsNone(gradient);
    Py_DECREF(gradient);
    if (has_gradient) {
        PyErr_Format(PyExc_ValueError,
                     "parameter '%S' has a gradient, which would not fit a bf16 parameter: call force_to_bf16 before "
                     "the first backward pass, or zero_grad(set_to_none=True) first; nothing was changed",
                     name);
        return -1;
    }

    PyObject *dtype = PyObject_GetAttrString(parameter, "dtype");
    if (!dtype)
        return -1;
    Py_DECREF(dtype); /* torch's dtypes live for ever */
    int kept = dtype != self->float32 && dtype != self->float16 ? 1 : is_kept_subclass(self, parameter);
    if (kept != 0) {
        self->kept += kept > 0;
        return kept < 0 ? -1 : 0;
    }

    if (self->change_count == self->change_capacity) {
        size_t capacity = self->change_capacity ? 2 * self->change_capacity : 64;
        change *grown = realloc(self->changes, capacity * sizeof *grown);
        if (!grown) {
            PyErr_NoMemory();
            return -1;
        }
        self->changes = grown;
        self->change_capacity = capacity;
    }
    change *entry = &self->changes[self->change_count];
    *entry = (change){.kind = dtype == self->float32 ? VIKING_CONVERT_FP32 : VIKING_CONVERT_FP16};
    entry->old = PyObject_GetAttrString(parameter, "data");
    if (!entry->old)
        return -1;
    entry->parameter = Py_NewRef(parameter);
    self->change_count++;
    return locate(entry);
}

/* Every pair of module.named_parameters(). */
static int look_at_module(conversion *self, PyObject *module, const char *list_name, Py_ssize_t index)
{
    PyObject *pairs = PyObject_CallMethod(module, "named_parameters", NULL);
    PyObject *iterator = pairs ? PyObject_GetIter(pairs) : NULL;
    PyObject *pair = NULL;
    Py_XDECREF(pairs);
    while (iterator && (pair = PyIter_Next(iterator))) {
        PyObject *name = PySequence_GetItem(pair, 0), *parameter = PySequence_GetItem(pair, 1);
        if (name && list_name) {
            PyObject *inner = name;
            name = PyUnicode_FromFormat("%s[%zd].%S", list_name, index, inner);
            Py_DECREF(inner);
        }
        int result = name && parameter ? look_at(self, name, parameter) : -1;
        Py_XDECREF(name);
        Py_XDECREF(parameter);
        Py_DECREF(pair);
        if (result < 0)
            break;
    }
    Py_XDECREF(iterator);
    return PyErr_Occurred() ? -1 : 0;
}

/* 1 if `network` has that list, 0 if not, -1 with an exception set. */
static int look_at_list(conversion *self, PyObject *network, const char *list_name)
{
    PyObject *list = PyObject_GetAttrString(network, list_name);
    if (!list) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    if (Py_IsNone(list)) {
        Py_DECREF(list);
        return 1;
    }
    PyObject *iterator = PyObject_GetIter(list), *module;
    Py_DECREF(list);
    for (Py_ssize_t index = 0; iterator && (module = PyIter_Next(iterator)); index++) {
        int result = look_at_module(self, module, list_name, index);
        Py_DECREF(module);
        if (result < 0)
            break;
    }
    Py_XDECREF(iterator);
    return PyErr_Occurred() ? -1 : 1;
}

static int look_at_network(conversion *self, PyObject *network)
{
    PyObject *method = PyObject_GetAttrString(network, "named_parameters");
    bool is_module = method != NULL;
    Py_XDECREF(method);
    if (!is_module) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
    } else if (look_at_module(self, network, NULL, 0) < 0) {
        return -1;
    }
    /* LoRA modules hang in these lists without being children of the network. */
    int unet = look_at_list(self, network, "unet_loras");
    int text_encoder = unet < 0 ? -1 : look_at_list(self, network, "text_encoder_loras");
    if (text_encoder < 0)
        return -1;
    if (is_module || unet || text_encoder)
        return 0;
    PyErr_Format(PyExc_TypeError,
                 "force_to_bf16 takes a torch.nn.Module or a network with unet_loras or text_encoder_loras, not %R",
                 (PyObject *)Py_TYPE(network));
    return -1;
}

/* ---- converting ---- */

static int by_place(const void *left, const void *right)
{
    const change *a = left, *b = right;
    if (a->alone != b->alone)
        return a->alone ? 1 : -1;
    if (a->storage != b->storage)
        return a->storage < b->storage ? -1 : 1;
    if (a->kind != b->kind)
        return a->kind < b->kind ? -1 : 1;
    return a->offset < b->offset ? -1 : a->offset > b->offset;
}

static int convert_alone(const conversion *self, change *entry)
{
    entry->replacement = PyObject_CallMethod(entry->old, "to", "O", self->bfloat16);
    return entry->replacement ? 0 : -1;
}

/* torch.empty(elements, dtype=torch.bfloat16, device=like.device) */
static PyObject *new_storage(const conversion *self, PyObject *like, int64_t elements)
{
    PyObject *device = PyObject_GetAttrString(like, "device");
    PyObject *empty = device ? PyObject_GetAttrString(self->torch, "empty") : NULL;
    PyObject *positional = empty ? Py_BuildValue("(L)", (long long)elements) : NULL;
    PyObject *named = positional ? Py_BuildValue("{sOsO}", "dtype", self->bfloat16, "device", device) : NULL;
    PyObject *result = named ? PyObject_Call(empty, positional, named) : NULL;
    Py_XDECREF(device);
    Py_XDECREF(empty);
    Py_XDECREF(positional);
    Py_XDECREF(named);
    return result;
}

/* The `count` elements of entry's storage from `offset` on go to `storage` from `at` on: now, by torch, or later with
 * all the others. */
static int add_piece(conversion *self, const change *entry, int64_t offset, int64_t count, PyObject *storage,
                     int64_t at)
{
    if (entry->data) {
        viking_tensor_view view;
        if (viking_tensor_view_of(storage, VIKING_TENSOR_AUTO, &view) < 0)
            return -1;
        size_t element_bytes = entry->kind == VIKING_CONVERT_FP32 ? 4 : 2;
        /* Mapping fresh small pages takes several times as long as converting what goes into them. */
        viking_os_prefer_huge_pages((uint16_t *)view.data + at, (size_t)count * sizeof(uint16_t));
        self->pieces[self->piece_count++] =
            (piece){.destination = (uint16_t *)view.data + at,
                    .source = entry->data - (size_t)(entry->offset - offset) * element_bytes,
                    .kind = entry->kind,
                    .count = (size_t)count,
                    .before = self->piece_elements};
        self->piece_elements += (size_t)count;
        return 0;
    }
    PyObject *from = PyObject_CallMethod(entry->old, "as_strided", "(L)(i)L", (long long)count, 1, (long long)offset);
    PyObject *to = from ? PyObject_CallMethod(storage, "narrow", "iLL", 0, (long long)at, (long long)count) : NULL;
    PyObject *done = to ? PyObject_CallMethod(to, "copy_", "O", from) : NULL;
    Py_XDECREF(from);
    Py_XDECREF(to);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int lay_over(change *entry, PyObject *storage, int64_t at)
{
    PyObject *sizes = PyObject_CallMethod(entry->old, "size", NULL);
    PyObject *strides = sizes ? PyObject_CallMethod(entry->old, "stride", NULL) : NULL;
    if (strides)
        entry->replacement = PyObject_CallMethod(storage, "as_strided", "OOL", sizes, strides, (long long)at);
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    return entry->replacement ? 0 : -1;
}

static int64_t end_of(const change *entry)
{
    return entry->offset + entry->span;
}

/* Parameters of one storage and one type, by offset. Runs of overlapping ones are the components; the new storage
 * holds the components one behind the other, or, where the space between them is at most as much again, all of it. */
static int convert_group(conversion *self, change *group, size_t count)
{
    int64_t covered = 0, end = group[0].offset;
    for (size_t i = 0; i < count; i++) {
        int64_t begin = group[i].offset > end ? group[i].offset : end;
        if (end_of(&group[i]) > begin) {
            covered += end_of(&group[i]) - begin;
            end = end_of(&group[i]);
        }
    }
    int64_t hull = end - group[0].offset;
    bool whole = hull / 2 <= covered;

    PyObject *storage = new_storage(self, group[0].old, whole ? hull : covered);
    if (!storage)
        return -1;
    int64_t at = 0;
    for (size_t first = 0, next; first < count; first = next) {
        int64_t component_end = whole ? end : end_of(&group[first]);
        for (next = first + 1; next < count && group[next].offset < component_end; next++)
            if (end_of(&group[next]) > component_end)
                component_end = end_of(&group[next]);
        int64_t begin = group[first].offset;
        if (add_piece(self, &group[first], begin, component_end - begin, storage, at) < 0)
            goto fail;
        for (size_t i = first; i < next; i++)
            if (lay_over(&group[i], storage, at + group[i].offset - begin) < 0)
                goto fail;
        at += component_end - begin;
    }
    Py_DECREF(storage);
    return 0;
fail:
    Py_DECREF(storage);
    return -1;
}

/* Make every replacement; those that this process converts are still without content. */
static int prepare(conversion *self)
{
    if (self->change_count == 0)
        return 0;
    self->pieces = malloc(self->change_count * sizeof *self->pieces);
    if (!self->pieces) {
        PyErr_NoMemory();
        return -1;
    }
    qsort(self->changes, self->change_count, sizeof *self->changes, by_place);
    for (size_t i = 0, next; i < self->change_count; i = next) {
        change *entry = &self->changes[i];
        next = i + 1;
        while (!entry->alone && next < self->change_count && !self->changes[next].alone &&
               self->changes[next].storage == entry->storage && self->changes[next].kind == entry->kind)
            next++;
        /* A lone slice with gaps need not carry them along, and on other devices torch does all of it in one. */
        bool by_itself = entry->alone || (next == i + 1 && (!entry->data || entry->span > entry->elements));
        if ((by_itself ? convert_alone(self, entry) : convert_group(self, entry, next - i)) < 0)
            return -1;
    }
    return 0;
}

typedef struct pieces_job {
    const piece *pieces;
    size_t count;
} pieces_job;

/* Elements [begin, end) of the pieces in a row. */
static void convert_pieces(void *context, size_t begin, size_t end)
{
    const pieces_job *job = context;
    size_t low = 0, high = job->count; /* the last piece that begins at or before `begin` */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (job->pieces[middle].before <= begin)
            low = middle;
        else
            high = middle;
    }
    for (const piece *p = &job->pieces[low]; begin < end; p++) {
        size_t from = begin - p->before;
        size_t count = p->count - from < end - begin ? p->count - from : end - begin;
        size_t element_bytes = p->kind == VIKING_CONVERT_FP32 ? 4 : 2;
        /* Cannot fail: the destination is fresh memory and the kinds are known. */
        (void)viking_convert_to_bf16(p->destination + from, p->source + from * element_bytes, p->kind, count, 1);
        begin += count;
    }
}

/* All or none. */
static int exchange(conversion *self)
{
    for (size_t i = 0; i < self->change_count; i++) {
        if (PyObject_SetAttrString(self->changes[i].parameter, "data", self->changes[i].replacement) == 0)
            continue;
        PyObject *exception = viking_raised_take();
        while (i-- > 0)
            if (PyObject_SetAttrString(self->changes[i].parameter, "data", self->changes[i].old) < 0)
                PyErr_WriteUnraisable(self->changes[i].parameter);
        viking_raised_restore(exception);
        return -1;
    }
    return 0;
}

static int convert(conversion *self)
{
    if (prepare(self) < 0)
        return -1;
    pieces_job job = {self->pieces, self->piece_count};
    Py_BEGIN_ALLOW_THREADS
    viking_parallel_for(self->piece_elements, GRAIN_ELEMENTS, 0, convert_pieces, &job);
    Py_END_ALLOW_THREADS
    return exchange(self);
}

/* Outside inference mode, or the parameters would become inference tensors and never train again. */
static int convert_outside_inference_mode(conversion *self)
{
    PyObject *mode = PyObject_CallMethod(self->torch, "inference_mode", "O", Py_False);
    PyObject *entered = mode ? PyObject_CallMethod(mode, "__enter__", NULL) : NULL;
    if (!entered) {
        Py_XDECREF(mode);
        return -1;
    }
    Py_DECREF(entered);
    int result = convert(self);
    PyObject *exception = viking_raised_take();
    PyObject *left = PyObject_CallMethod(mode, "__exit__", "OOO", Py_None, Py_None, Py_None);
    Py_DECREF(mode);
    if (!left && !exception)
        return -1;
    PyErr_Clear();
    Py_XDECREF(left);
    viking_raised_restore(exception);
    return result;
}

PyObject *viking_py_force_to_bf16(PyObject *module, PyObject *network)
{
    (void)module;
    conversion self;
    PyObject *result = NULL;
    if (conversion_open(&self) == 0 && look_at_network(&self, network) == 0 &&
        convert_outside_inference_mode(&self) == 0)
        result = Py_BuildValue("(nn)", (Py_ssize_t)self.change_count, self.kept);
    conversion_close(&self);
    return result;
}
