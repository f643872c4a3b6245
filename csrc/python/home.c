/* viking._engine.Home: a weight's place in host memory, as an object with the buffer protocol.
 *
 * Tensors that view a home (torch.frombuffer) hold a reference to it, so it lives as long as anybody looks at it:
 * a state_dict outlives detach, and detach gives back what nobody views. */
#include "home.h"

#include "../base/os.h"
#include "../core/home.h"
#include "error.h"
#include "state.h"

typedef struct home_object {
    PyObject_HEAD viking_home *home;
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
    return status == VIKING_OK ? Py_NewRef(Py_None) : viking_py_raise(status);
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
    return status == VIKING_OK ? Py_NewRef(Py_None) : viking_py_raise(status);
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

static int home_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    viking_home *home = ((home_object *)object)->home;
    return PyBuffer_FillInfo(view, object, home->address, (Py_ssize_t)home->bytes, 0, flags);
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
    {"fill", home_fill, METH_VARARGS, fill_doc},
    {"retire", home_retire, METH_NOARGS, retire_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef home_getset[] = {
    {"address", home_address, NULL, "Where it starts: page aligned.", NULL},
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
