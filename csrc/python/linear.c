/* viking.LinearLayerMemoryManager: stands between one Linear module and the engine.
 *
 * Its forward replaces the module's. It captures nothing of the module but the module: weight and bias are looked up at
 * every use and compared (identity, address, version) with what the home was filled from, so an edit, a replacement or
 * a load_state_dict in between is seen by the next use. The arithmetic is one autograd Function in Python
 * (viking.nn.linear), which asks for them by `use`; the tensors over the span are made once per layout. */
#include <string.h>

#include "engine.h"
#include "error.h"
#include "home.h"
#include "raised.h"
#include "state.h"
#include "tensor.h"

typedef struct member {
    PyObject *parameter; /* the Parameter, or None for a bias that is absent */
    void *address; /* of its bytes in the home */
    long long version; /* of the bytes that the device may hold */
} member;

enum { WEIGHT, BIAS, MEMBERS };

typedef struct linear_object {
    PyObject_HEAD PyObject *module;
    PyObject *manager;
    PyObject *engine; /* Engine; NULL: detached */
    PyObject *home;
    PyObject *parameters; /* module._parameters */
    PyObject *kind; /* of the module when it was bound: its forward is the one that we stand for */
    member members[MEMBERS];
    member scale; /* the `scale` of an 8-bit weight, which is the same tensor for all its life; None without one */
    PyObject *views; /* (weight, bias) over the span; NULL: to be made */
    void *views_address;
    uint64_t views_layout;
    uint32_t weight;
    int trained; /* as the engine was told */
    unsigned long long nbytes;
} linear_object;

static PyObject *member_name(PyObject *self, int which)
{
    viking_state *state = viking_state_of(self);
    return which == WEIGHT ? state->name_weight : state->name_bias;
}

static int detached(const linear_object *self)
{
    if (self->engine != NULL)
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "this Linear was detached from Viking: a graph that was built while it was "
                                        "attached cannot run backward any more; run backward before viking.detach");
    return 1;
}

/* Made by hand, and not by attach: it stands for no weight of the engine yet. */
static int unbound(const linear_object *self)
{
    if (self->home != NULL)
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "this LinearLayerMemoryManager manages nothing yet: make one by viking.attach "
                                        "or by LinearLayerMemoryManager.attach");
    return 1;
}

/* viking.nn.linear, at the first call only: the module must import without torch. */
static int load_python_side(viking_state *state)
{
    if (state->linear_apply != NULL)
        return 0;
    PyObject *module = PyImport_ImportModule("viking.nn.linear");
    if (module == NULL)
        return -1;
    state->linear_views = PyObject_GetAttrString(module, "make_views");
    state->linear_repair = PyObject_GetAttrString(module, "repair");
    state->linear_replaced = PyObject_GetAttrString(module, "replaced");
    state->linear_retrain = PyObject_GetAttrString(module, "retrain");
    PyObject *apply = PyObject_GetAttrString(module, "apply");
    Py_DECREF(module);
    if (apply == NULL || state->linear_views == NULL || state->linear_repair == NULL ||
        state->linear_replaced == NULL || state->linear_retrain == NULL) {
        Py_XDECREF(apply);
        Py_CLEAR(state->linear_views);
        Py_CLEAR(state->linear_repair);
        Py_CLEAR(state->linear_replaced);
        Py_CLEAR(state->linear_retrain);
        return -1;
    }
    state->linear_apply = apply;
    return 0;
}

/* ---- what the home was filled from ---- */

static int version_of(PyObject *self, PyObject *parameter, long long *out)
{
    PyObject *version = PyObject_GetAttr(parameter, viking_state_of(self)->name_version);
    if (version == NULL)
        return -1;
    *out = PyLong_AsLongLong(version);
    Py_DECREF(version);
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

/* 1: the tensor's bytes are those in the home; 0: other ones; -1: exception. */
static int has_its_bytes(const member *tensor)
{
    if (tensor->parameter == Py_None)
        return 1;
    viking_tensor_view view;
    if (viking_tensor_view_of(tensor->parameter, VIKING_TENSOR_AUTO, &view) < 0)
        return -1;
    return view.data == tensor->address;
}

/* 1: the module's tensor is the one that lives in the home; 0: it was replaced; -1: exception. */
static int is_at_home(linear_object *self, int which)
{
    PyObject *parameter = PyDict_GetItemWithError(self->parameters, member_name((PyObject *)self, which));
    if (parameter == NULL)
        return PyErr_Occurred() ? -1 : 0;
    return parameter == self->members[which].parameter ? has_its_bytes(&self->members[which]) : 0;
}

/* A write since the last use voids what is on the device. */
static int look_for_write(linear_object *self, member *tensor)
{
    long long version = 0;
    if (tensor->parameter == Py_None)
        return 0;
    if (version_of((PyObject *)self, tensor->parameter, &version) < 0)
        return -1;
    if (version == tensor->version)
        return 0;
    viking_py_call call;
    viking_status status = viking_py_call_begin(self->engine, 0, &call);
    if (status == VIKING_OK) {
        status = viking_engine_invalidate(call.engine, self->weight);
        viking_py_call_end(&call);
    }
    if (status != VIKING_OK) {
        viking_py_raise(status);
        return -1;
    }
    tensor->version = version;
    return 0;
}

/* A parameter that wants a gradient takes part in the graph, a frozen one does not. */
static int wants_gradient(PyObject *self, PyObject *parameter)
{
    if (parameter == Py_None)
        return 0;
    PyObject *flag = PyObject_GetAttr(parameter, viking_state_of(self)->name_requires_grad);
    int wants = flag == NULL ? -1 : PyObject_IsTrue(flag);
    Py_XDECREF(flag);
    return wants;
}

static int is_trained(linear_object *self)
{
    int trained = 0;
    for (int which = WEIGHT; which < MEMBERS && trained == 0; which++)
        trained = wants_gradient((PyObject *)self, self->members[which].parameter);
    return trained;
}

/* What is trained was, or is, stepped by the host: the engine must know before the next use. */
static int look_for_training(linear_object *self)
{
    int trained = is_trained(self);
    if (trained < 0 || trained == self->trained)
        return trained < 0 ? -1 : 0;
    PyObject *done = PyObject_CallFunction(viking_state_of((PyObject *)self)->linear_retrain, "O", self);
    Py_XDECREF(done);
    if (done != NULL)
        self->trained = trained;
    return done == NULL ? -1 : 0;
}

/* Edits since the last use void what is on the device; replaced tensors are moved into the home first. */
static int look_for_edits(linear_object *self)
{
    int at_home = 1;
    for (int which = WEIGHT; which < MEMBERS && at_home == 1; which++)
        at_home = is_at_home(self, which);
    if (at_home == 1)
        at_home = has_its_bytes(&self->scale);
    if (at_home < 0)
        return -1;
    if (at_home == 0) {
        PyObject *done = PyObject_CallFunctionObjArgs(viking_state_of((PyObject *)self)->linear_repair, self, NULL);
        Py_XDECREF(done);
        /* detached: what replaced it cannot be streamed */
        return done == NULL || detached(self) ? -1 : look_for_training(self);
    }
    if (look_for_training(self) < 0)
        return -1;
    for (int which = WEIGHT; which < MEMBERS; which++)
        if (look_for_write(self, &self->members[which]) < 0)
            return -1;
    return look_for_write(self, &self->scale);
}

/* A tensor as it is now (NULL: none). Returns 0, or -1 with an exception set. */
static int remember(PyObject *self, PyObject *tensor, member *out)
{
    member fresh = {.parameter = tensor == NULL ? Py_None : tensor};
    if (fresh.parameter != Py_None) {
        viking_tensor_view view;
        if (viking_tensor_view_of(tensor, VIKING_TENSOR_AUTO, &view) < 0 ||
            version_of(self, tensor, &fresh.version) < 0)
            return -1;
        fresh.address = view.data;
    }
    PyObject *former = out->parameter;
    Py_INCREF(fresh.parameter);
    *out = fresh;
    Py_XDECREF(former);
    return 0;
}

static int remember_scale(linear_object *self)
{
    PyObject *scale = PyObject_GetAttrString(self->members[WEIGHT].parameter, "scale");
    if (scale == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    PyErr_Clear();
    int done = remember((PyObject *)self, scale, &self->scale);
    Py_XDECREF(scale);
    return done;
}

PyDoc_STRVAR(
    bind_doc,
    "bind(weight, home, nbytes)\n--\n\nThe module's weight and bias are now in home, as the engine's weight of "
    "that number. For viking.nn.");

static PyObject *linear_bind(PyObject *object, PyObject *args)
{
    linear_object *self = (linear_object *)object;
    PyObject *home = NULL;
    unsigned long weight = 0;
    unsigned long long nbytes = 0;
    if (detached(self) ||
        !PyArg_ParseTuple(args, "kO!K:bind", &weight, viking_state_of(object)->home_type, &home, &nbytes))
        return NULL;
    for (int which = WEIGHT; which < MEMBERS; which++) {
        PyObject *parameter = PyDict_GetItemWithError(self->parameters, member_name(object, which));
        if ((parameter == NULL && PyErr_Occurred()) || remember(object, parameter, &self->members[which]) < 0)
            return NULL;
    }
    if (remember_scale(self) < 0)
        return NULL;
    Py_XDECREF(self->kind);
    self->kind = Py_NewRef((PyObject *)Py_TYPE(self->module));
    Py_XDECREF(self->home);
    self->home = Py_NewRef(home);
    self->weight = (uint32_t)weight;
    self->nbytes = nbytes;
    self->trained = is_trained(self);
    if (self->trained < 0)
        return NULL;
    Py_CLEAR(self->views);
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(renew_doc,
             "renew()\n--\n\nWrites until now need no more notice: the device has forgotten the bytes of before "
             "them, or holds none. For viking.nn.");

static PyObject *linear_renew(PyObject *object, PyObject *unused)
{
    (void)unused;
    linear_object *self = (linear_object *)object;
    for (int which = WEIGHT; which < MEMBERS; which++) {
        member *tensor = &self->members[which];
        if (tensor->parameter != Py_None && version_of(object, tensor->parameter, &tensor->version) < 0)
            return NULL;
    }
    return Py_NewRef(Py_None);
}

/* ---- uses ---- */

static int make_views(linear_object *self, const viking_acquired *acquired)
{
    PyObject *views = PyObject_CallFunction(viking_state_of((PyObject *)self)->linear_views, "ON", self,
                                            PyLong_FromVoidPtr(acquired->address));
    if (views != NULL && (!PyTuple_Check(views) || PyTuple_Size(views) != MEMBERS)) {
        PyErr_SetString(PyExc_TypeError, "make_views must return (weight, bias)");
        Py_CLEAR(views);
    }
    if (views == NULL)
        return -1;
    Py_XDECREF(self->views);
    self->views = views;
    self->views_address = acquired->address;
    self->views_layout = acquired->layout;
    return 0;
}

/* Begin a use: (weight, bias) over the span, and the ticket that ends it. NULL with an exception: nothing was begun. */
static PyObject *begin_use(linear_object *self, uint64_t *out_ticket)
{
    viking_stream stream;
    if (detached(self) || unbound(self) || load_python_side(viking_state_of((PyObject *)self)) < 0 ||
        look_for_edits(self) < 0)
        return NULL;
    if (viking_py_engine_stream(self->engine, &stream) < 0)
        return NULL;
    viking_acquired acquired;
    viking_status status = viking_py_engine_acquire(self->engine, self->weight, stream, &acquired);
    if (status != VIKING_OK)
        return viking_py_raise(status);
    bool valid =
        self->views != NULL && self->views_address == acquired.address && self->views_layout == acquired.layout;
    if (!valid && make_views(self, &acquired) < 0) {
        viking_py_engine_release(self->engine, acquired.ticket, stream);
        return NULL;
    }
    *out_ticket = acquired.ticket;
    return Py_NewRef(self->views);
}

static int end_use(linear_object *self, uint64_t ticket)
{
    viking_stream stream;
    if (detached(self))
        return -1;
    if (viking_py_engine_stream(self->engine, &stream) < 0)
        return -1;
    viking_status status = viking_py_engine_release(self->engine, ticket, stream);
    if (status == VIKING_OK)
        return 0;
    viking_py_raise(status);
    return -1;
}

PyDoc_STRVAR(use_doc,
             "use(compute) -> Any\n--\n\nWhat compute(weight, bias) returns, called with the module's tensors on the "
             "device; work that it queues on the current stream finds them there. They are overwritten afterwards: do "
             "not keep them. The use ends with the call, whatever it raises.");

/* In C and not a `try` in Python: an interrupt that comes while the bytes are awaited is raised as soon as a call
 * returns, before any `try` has begun, and the use would stay open for ever. */
static PyObject *linear_use(PyObject *object, PyObject *compute)
{
    linear_object *self = (linear_object *)object;
    uint64_t ticket = 0;
    PyObject *views = begin_use(self, &ticket);
    if (views == NULL)
        return NULL;
    PyObject *result = PyObject_CallObject(compute, views);
    Py_DECREF(views);
    PyObject *exception = viking_raised_take();
    if (end_use(self, ticket) < 0 && exception == NULL)
        Py_CLEAR(result);
    if (exception != NULL)
        viking_raised_restore(exception);
    return result;
}

PyDoc_STRVAR(acquire_doc,
             "acquire() -> (weight, bias, ticket)\n--\n\nThe module's tensors on the device, for work queued "
             "on the current stream until release(ticket). They are overwritten afterwards: do not keep "
             "them. What needs them during one call alone takes use().");

static PyObject *linear_acquire(PyObject *object, PyObject *unused)
{
    (void)unused;
    linear_object *self = (linear_object *)object;
    uint64_t ticket = 0;
    PyObject *views = begin_use(self, &ticket);
    if (views == NULL)
        return NULL;
    PyObject *result =
        Py_BuildValue("OOK", PyTuple_GetItem(views, WEIGHT), PyTuple_GetItem(views, BIAS), (unsigned long long)ticket);
    Py_DECREF(views);
    if (result == NULL) {
        PyObject *exception = viking_raised_take();
        end_use(self, ticket);
        viking_raised_restore(exception);
    }
    return result;
}

PyDoc_STRVAR(release_doc, "release(ticket)\n--\n\nEnd a use; the work that needed it is queued on the current stream.");

static PyObject *linear_release(PyObject *object, PyObject *argument)
{
    unsigned long long ticket = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred() || end_use((linear_object *)object, ticket) < 0)
        return NULL;
    return Py_NewRef(Py_None);
}

/* The module's weight and bias, with a flag for each: does it take part in the graph? 1: they are those that were bound
 * and so is the module's class; 0: not; -1: exception. */
static int given_tensors(linear_object *self, PyObject **out)
{
    int as_bound = (PyObject *)Py_TYPE(self->module) == self->kind;
    for (int which = WEIGHT; which < MEMBERS; which++) {
        out[which] = PyDict_GetItemWithError(self->parameters, member_name((PyObject *)self, which));
        if (out[which] == NULL && PyErr_Occurred())
            return -1;
        if (out[which] != self->members[which].parameter)
            as_bound = 0;
        int wants = out[which] == NULL ? 0 : wants_gradient((PyObject *)self, out[which]);
        if (wants < 0)
            return -1;
        if (wants == 0)
            out[which] = Py_None;
    }
    return as_bound;
}

/* What the module does without us: the manager was detached, or its tensors cannot be streamed any more. */
static PyObject *own_forward(linear_object *self, PyObject *input)
{
    return PyObject_CallMethod((PyObject *)Py_TYPE(self->module), "forward", "OO", self->module, input);
}

PyDoc_STRVAR(forward_doc,
             "forward(input) -> Tensor\n--\n\n"
             "The module's linear with its streamed weight: (*, in_features) -> (*, out_features), bit for bit what "
             "torch.nn.Linear computes on the device, autograd and autocast included. A parameter that requires a "
             "gradient gets it on the host, by the end of the backward pass.");

static PyObject *linear_forward(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"input", NULL};
    linear_object *self = (linear_object *)object;
    viking_state *state = viking_state_of(object);
    PyObject *input = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:forward", names, &input))
        return NULL;
    if (self->engine == NULL)
        return own_forward(self, input);
    if (load_python_side(state) < 0)
        return NULL;
    PyObject *given[MEMBERS];
    int as_bound = given_tensors(self, given);
    if (as_bound == 0 && self->home != NULL) {
        PyObject *result = PyObject_CallFunctionObjArgs(state->linear_replaced, object, input, NULL);
        if (result != Py_NotImplemented)
            return result;
        Py_DECREF(result);
        if (self->engine == NULL)
            return own_forward(self, input);
        as_bound = given_tensors(self, given);
    }
    if (as_bound < 0)
        return NULL;
    PyObject *result =
        PyObject_CallFunctionObjArgs(state->linear_apply, input, object, given[WEIGHT], given[BIAS], NULL);
    if (result == NULL && self->engine == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear(); /* its use found other data under its Parameters */
        return own_forward(self, input);
    }
    return result;
}

/* ---- attach and detach ---- */

PyDoc_STRVAR(
    attach_doc,
    "attach(module, manager) -> LinearLayerMemoryManager\n--\n\n"
    "Manage one torch.nn.Linear under a viking.MemoryManager: its tensors move into a home, its forward becomes "
    "this type's. ValueError, with the reason, for a module that cannot be streamed. The module's manager "
    "already: that one is returned.");

static PyObject *linear_attach(PyObject *type, PyObject *args)
{
    (void)type;
    PyObject *module = NULL;
    PyObject *manager = NULL;
    if (!PyArg_ParseTuple(args, "OO:attach", &module, &manager))
        return NULL;
    return PyObject_CallMethod(manager, "manage_linear", "O", module);
}

PyDoc_STRVAR(detach_doc, "detach()\n--\n\nGive the module back its own forward; its parameters stay what they are. "
                         "Detaching twice is allowed.");

static PyObject *linear_detach(PyObject *object, PyObject *unused)
{
    (void)unused;
    linear_object *self = (linear_object *)object;
    if (self->engine == NULL)
        return Py_NewRef(Py_None);
    return PyObject_CallMethod(self->manager, "release_linear", "O", object);
}

PyDoc_STRVAR(unbind_doc, "unbind()\n--\n\nForget engine and home. For viking.nn.");

static PyObject *linear_unbind(PyObject *object, PyObject *unused)
{
    (void)unused;
    linear_object *self = (linear_object *)object;
    Py_CLEAR(self->views);
    Py_CLEAR(self->home);
    Py_CLEAR(self->engine);
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(forget_home_doc, "forget_home()\n--\n\nIts tensors are not at home any more: the next use has them "
                              "brought there. For viking.nn.");

static PyObject *linear_forget_home(PyObject *object, PyObject *unused)
{
    (void)unused;
    ((linear_object *)object)->members[WEIGHT].address = NULL;
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(forget_views_doc, "forget_views()\n--\n\nLet go of the tensors over the slab. For viking.nn.");

static PyObject *linear_forget_views(PyObject *object, PyObject *unused)
{
    (void)unused;
    Py_CLEAR(((linear_object *)object)->views);
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(reduce_doc, "A managed module cannot be copied or pickled.");

static PyObject *linear_reduce(PyObject *object, PyObject *unused)
{
    (void)object;
    (void)unused;
    PyErr_SetString(PyExc_TypeError, "a module whose weights are streamed cannot be copied or pickled: save its "
                                     "state_dict(), or call viking.detach(model) first");
    return NULL;
}

/* ---- attributes ---- */

static int weight_stats(linear_object *self, viking_weight_stats *out)
{
    if (detached(self) || unbound(self))
        return -1;
    viking_py_call call;
    viking_status status = viking_py_call_begin(self->engine, 0, &call);
    if (status == VIKING_OK) {
        status = viking_engine_weight_stats(call.engine, self->weight, out);
        viking_py_call_end(&call);
    }
    if (status == VIKING_OK)
        return 0;
    viking_py_raise(status);
    return -1;
}

static PyObject *linear_path(PyObject *object, void *closure)
{
    (void)closure;
    viking_weight_stats stats;
    if (weight_stats((linear_object *)object, &stats) < 0)
        return NULL;
    static const char *const names[] = {"resident", "streamed", "demand"};
    return PyUnicode_FromString(names[stats.residency]);
}

static PyObject *linear_device_ptr(PyObject *object, void *closure)
{
    (void)closure;
    viking_weight_stats stats;
    if (weight_stats((linear_object *)object, &stats) < 0)
        return NULL;
    linear_object *self = (linear_object *)object;
    if (stats.device_address == NULL)
        return PyLong_FromLong(0);
    size_t offset = viking_home_offset_of(viking_py_home_of(self->home), self->members[WEIGHT].address);
    return PyLong_FromVoidPtr((unsigned char *)stats.device_address + offset);
}

static PyObject *linear_uses(PyObject *object, void *closure)
{
    (void)closure;
    viking_weight_stats stats;
    return weight_stats((linear_object *)object, &stats) < 0 ? NULL : PyLong_FromUnsignedLongLong(stats.uses);
}

static PyObject *linear_fetches(PyObject *object, void *closure)
{
    (void)closure;
    viking_weight_stats stats;
    return weight_stats((linear_object *)object, &stats) < 0 ? NULL : PyLong_FromUnsignedLongLong(stats.fetches);
}

static PyObject *linear_home_ptr(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromVoidPtr(((linear_object *)object)->members[WEIGHT].address);
}

static PyObject *linear_nbytes(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(((linear_object *)object)->nbytes);
}

static PyObject *linear_weight(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLong(((linear_object *)object)->weight);
}

static PyObject *linear_module(PyObject *object, void *closure)
{
    (void)closure;
    return Py_NewRef(((linear_object *)object)->module);
}

static PyObject *linear_manager(PyObject *object, void *closure)
{
    (void)closure;
    return Py_NewRef(((linear_object *)object)->manager);
}

static PyObject *linear_home(PyObject *object, void *closure)
{
    (void)closure;
    PyObject *home = ((linear_object *)object)->home;
    return Py_NewRef(home == NULL ? Py_None : home);
}

/* ---- life ---- */

static PyObject *linear_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"module", "manager", "engine", NULL};
    PyObject *module = NULL;
    PyObject *manager = NULL;
    PyObject *engine = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:LinearLayerMemoryManager", names, &module, &manager, &engine))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    linear_object *self = (linear_object *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    self->module = Py_NewRef(module);
    self->manager = Py_NewRef(manager);
    for (int which = WEIGHT; which < MEMBERS; which++)
        self->members[which].parameter = Py_NewRef(Py_None);
    self->scale.parameter = Py_NewRef(Py_None);
    self->parameters = PyObject_GetAttrString(module, "_parameters");
    if (self->parameters != NULL && !PyDict_Check(self->parameters))
        PyErr_SetString(PyExc_TypeError, "LinearLayerMemoryManager needs a torch.nn.Linear");
    else if (self->parameters != NULL && Py_TYPE(engine) != viking_state_of((PyObject *)self)->engine_type)
        PyErr_SetString(PyExc_TypeError, "LinearLayerMemoryManager needs a viking._engine.Engine");
    if (PyErr_Occurred()) {
        Py_DECREF(self);
        return NULL;
    }
    self->engine = Py_NewRef(engine);
    return (PyObject *)self;
}

static int linear_traverse(PyObject *object, visitproc visit, void *arg)
{
    linear_object *self = (linear_object *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->module);
    Py_VISIT(self->manager);
    Py_VISIT(self->engine);
    Py_VISIT(self->home);
    Py_VISIT(self->parameters);
    Py_VISIT(self->kind);
    Py_VISIT(self->views);
    for (int which = WEIGHT; which < MEMBERS; which++)
        Py_VISIT(self->members[which].parameter);
    Py_VISIT(self->scale.parameter);
    return 0;
}

static int linear_clear(PyObject *object)
{
    linear_object *self = (linear_object *)object;
    Py_CLEAR(self->views);
    Py_CLEAR(self->home);
    Py_CLEAR(self->engine);
    Py_CLEAR(self->manager);
    Py_CLEAR(self->module);
    Py_CLEAR(self->parameters);
    Py_CLEAR(self->kind);
    for (int which = WEIGHT; which < MEMBERS; which++)
        Py_CLEAR(self->members[which].parameter);
    Py_CLEAR(self->scale.parameter);
    return 0;
}

static void linear_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    linear_clear(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef linear_methods[] = {
    {"forward", (PyCFunction)(void (*)(void))linear_forward, METH_VARARGS | METH_KEYWORDS, forward_doc},
    {"use", linear_use, METH_O, use_doc},
    {"acquire", linear_acquire, METH_NOARGS, acquire_doc},
    {"release", linear_release, METH_O, release_doc},
    {"attach", linear_attach, METH_VARARGS | METH_STATIC, attach_doc},
    {"detach", linear_detach, METH_NOARGS, detach_doc},
    {"bind", linear_bind, METH_VARARGS, bind_doc},
    {"renew", linear_renew, METH_NOARGS, renew_doc},
    {"unbind", linear_unbind, METH_NOARGS, unbind_doc},
    {"forget_home", linear_forget_home, METH_NOARGS, forget_home_doc},
    {"forget_views", linear_forget_views, METH_NOARGS, forget_views_doc},
    {"__reduce__", linear_reduce, METH_NOARGS, reduce_doc},
    {"__deepcopy__", linear_reduce, METH_O, reduce_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef linear_getset[] = {
    {"module", linear_module, NULL, "The torch.nn.Linear.", NULL},
    {"manager", linear_manager, NULL, "The viking.MemoryManager it was attached under.", NULL},
    {"home", linear_home, NULL, "The Home of its tensors; None once detached.", NULL},
    {"weight", linear_weight, NULL, "Number of its weight in the engine.", NULL},
    {"nbytes", linear_nbytes, NULL, "Bytes of its tensors, weight and bias.", NULL},
    {"path", linear_path, NULL, "\"resident\", \"streamed\", or \"demand\" before an order is known.", NULL},
    {"home_ptr", linear_home_ptr, NULL, "Host address of module.weight.", NULL},
    {"device_ptr", linear_device_ptr, NULL, "Device address of module.weight, 0 when it is not there.", NULL},
    {"uses", linear_uses, NULL, "Uses so far.", NULL},
    {"fetches", linear_fetches, NULL, "Copies to the device so far.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(linear_doc,
             "Stands between one torch.nn.Linear and the engine that streams its weight. Made by viking.attach "
             "or LinearLayerMemoryManager.attach(module, manager); found at "
             "module._layer_memory_manager.");

static PyType_Slot linear_slots[] = {
    {Py_tp_doc, (void *)linear_doc},         {Py_tp_new, (void *)linear_new},
    {Py_tp_dealloc, (void *)linear_dealloc}, {Py_tp_traverse, (void *)linear_traverse},
    {Py_tp_clear, (void *)linear_clear},     {Py_tp_methods, linear_methods},
    {Py_tp_getset, linear_getset},           {0, NULL},
};

PyType_Spec viking_linear_spec = {
    .name = "viking._engine.LinearLayerMemoryManager",
    .basicsize = sizeof(linear_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = linear_slots,
};
