/* viking._engine.Home: a weight's place in host memory, as an object with the buffer protocol.
 *
 * Tensors that view a home (torch.frombuffer) hold a reference to it, so it lives as long as anybody looks at it:
 * a state_dict outlives detach, and detach gives back what nobody views. */
#include "home.h"

#include <stdlib.h>

#include "../base/os.h"
#include "../core/home.h"
#include "error.h"
#include "state.h"

typedef struct home_object {
    PyObject_HEAD viking_home *home;
    PyObject *owner; /* of borrowed memory; else NULL */
} home_object;

viking_home *viking_py_home_of(PyObject *object)
{
    return ((home_object *)object)->home;
}

static PyObject *home_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"nbytes", NULL};
    Py_ssize_t nbytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n:Home", names, &nbytes))
        return NULL;
    if (nbytes <= 0)
        return PyErr_Format(PyExc_ValueError, "a home needs a positive number of bytes, not %zd", nbytes);
    viking_home *home = NULL;
    viking_status status = viking_home_open((size_t)nbytes, &home);
    if (status != VIKING_OK)
        return viking_py_raise(status);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    home_object *self = (home_object *)allocate(type, 0);
    if (self == NULL)
        viking_home_close(home);
    else
        self->home = home;
    return (PyObject *)self;
}

static void home_dealloc(PyObject *object)
{
    home_object *self = (home_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    viking_home *home = self->home;
    Py_BEGIN_ALLOW_THREADS
    viking_home_close(home);
    Py_END_ALLOW_THREADS
    Py_XDECREF(self->owner);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(fill_doc, "fill(offset, address, nbytes)\n--\n\n"
                       "Copy nbytes from host memory at address into the home at offset (bytes), over several threads\n"
                       "and without the GIL. ValueError if they do not fit. The caller keeps the source alive.");

static PyObject *home_fill(PyObject *object, PyObject *args)
{
    Py_ssize_t offset = 0;
    Py_ssize_t nbytes = 0;
    unsigned long long address = 0;
    if (!PyArg_ParseTuple(args, "nKn:fill", &offset, &address, &nbytes))
        return NULL;
    if (offset < 0 || nbytes < 0 || address == 0)
        return PyErr_Format(PyExc_ValueError, "fill needs a non-negative offset and size and an address");
    viking_home *home = ((home_object *)object)->home;
    viking_status status;
    Py_BEGIN_ALLOW_THREADS
    status = viking_home_fill(home, (size_t)offset, (const void *)(uintptr_t)address, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    return viking_py_done(status);
}

static int read_pieces(PyObject *list, viking_piece *pieces)
{
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
        Py_ssize_t offset = 0, nbytes = 0;
        unsigned long long address = 0;
        PyObject *item = PyList_GetItem(list, i);
        if (!PyTuple_Check(item)) {
            PyErr_SetString(PyExc_TypeError, "a piece is a tuple (offset, address, nbytes)");
            return -1;
        }
        if (!PyArg_ParseTuple(item, "nKn:over", &offset, &address, &nbytes))
            return -1;
        if (offset < 0 || nbytes <= 0) {
            PyErr_SetString(PyExc_ValueError, "a piece needs a non-negative offset and a positive size");
            return -1;
        }
        pieces[i] = (viking_piece){(size_t)offset, (const void *)(uintptr_t)address, (size_t)nbytes};
    }
    return 0;
}

PyDoc_STRVAR(over_doc, "over(pieces, nbytes, owner) -> Home\n--\n\n"
                       "A home over memory that is there already: a list of (offset, address, nbytes), in order. It is "
                       "never\npinned or filled, and keeps `owner` alive. ValueError if the pieces do not fit.");

static PyObject *home_over(PyObject *type, PyObject *args)
{
    PyObject *list = NULL, *owner = NULL;
    Py_ssize_t nbytes = 0;
    if (!PyArg_ParseTuple(args, "O!nO:over", &PyList_Type, &list, &nbytes, &owner))
        return NULL;
    size_t count = (size_t)PyList_Size(list);
    viking_home *home = NULL;
    home_object *self = NULL;
    viking_piece *pieces = PyMem_Calloc(count + 1, sizeof *pieces);
    if (pieces == NULL)
        return PyErr_NoMemory();
    if (read_pieces(list, pieces) < 0)
        goto done;
    viking_status status = viking_home_over(pieces, (uint32_t)count, nbytes < 0 ? 0 : (size_t)nbytes, &home);
    if (status != VIKING_OK) {
        viking_py_raise(status);
        goto done;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc);
    self = (home_object *)allocate((PyTypeObject *)type, 0);
    if (self == NULL) {
        viking_home_close(home);
        goto done;
    }
    self->home = home;
    self->owner = Py_NewRef(owner);
done:
    PyMem_Free(pieces);
    return (PyObject *)self;
}

PyDoc_STRVAR(retire_doc, "retire()\n--\n\n"
                         "The engine is done with it: unpinned, and inherited by children of later forks like any "
                         "memory.");

static PyObject *home_retire(PyObject *object, PyObject *unused)
{
    (void)unused;
    viking_home *home = ((home_object *)object)->home;
    viking_status status;
    Py_BEGIN_ALLOW_THREADS
    status = viking_home_retire(home);
    Py_END_ALLOW_THREADS
    return viking_py_done(status);
}

static PyObject *home_address(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromVoidPtr(((home_object *)object)->home->address);
}

static PyObject *home_nbytes(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromSize_t(((home_object *)object)->home->bytes);
}

static PyObject *home_pinned(PyObject *object, void *closure)
{
    (void)closure;
    return PyBool_FromLong(((home_object *)object)->home->pinned_by != NULL);
}

static PyObject *home_borrowed(PyObject *object, void *closure)
{
    (void)closure;
    return PyBool_FromLong(((home_object *)object)->home->address == NULL);
}

static int home_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    viking_home *home = ((home_object *)object)->home;
    if (home->address == NULL) {
        view->obj = NULL;
        PyErr_SetString(PyExc_BufferError, "a home over borrowed memory is no buffer");
        return -1;
    }
    return PyBuffer_FillInfo(view, object, home->address, (Py_ssize_t)home->bytes, 0, flags);
}

PyObject *viking_py_file_ranges(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    viking_os_range *ranges = NULL;
    size_t count = 0;
    viking_status status = viking_os_file_ranges(&ranges, &count);
    if (status != VIKING_OK)
        return viking_py_raise(status);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *pair = Py_BuildValue("(KK)", (unsigned long long)ranges[i].begin, (unsigned long long)ranges[i].end);
        if (pair == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)i, pair);
    }
    free(ranges);
    return list;
}

PyObject *viking_py_trim(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    viking_os_trim();
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

static PyMethodDef home_methods[] = {
    {"over", home_over, METH_VARARGS | METH_CLASS, over_doc},
    {"fill", home_fill, METH_VARARGS, fill_doc},
    {"retire", home_retire, METH_NOARGS, retire_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef home_getset[] = {
    {"address", home_address, NULL, "Where it starts: page aligned; 0 if borrowed.", NULL},
    {"borrowed", home_borrowed, NULL, "It is made of memory that belongs to others.", NULL},
    {"nbytes", home_nbytes, NULL, "Its size in bytes.", NULL},
    {"pinned", home_pinned, NULL, "Its pages are locked for the device.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(home_doc, "Home(nbytes)\n--\n\n"
                       "Page-aligned host memory of its own for one weight; a writable buffer. Not inherited by forked "
                       "children until retired.");

static PyType_Slot home_slots[] = {
    {Py_tp_doc, (void *)home_doc},
    {Py_tp_new, (void *)home_new},
    {Py_tp_dealloc, (void *)home_dealloc},
    {Py_tp_methods, home_methods},
    {Py_tp_getset, home_getset},
    {Py_bf_getbuffer, (void *)home_getbuffer},
    {0, NULL},
};

PyType_Spec viking_home_spec = {
    .name = "viking._engine.Home",
    .basicsize = sizeof(home_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = home_slots,
};
