/* viking._engine.Engine: the engine of one device, for the Python package.
 *
 * It keeps the homes of its weights alive and asks the framework for its current stream; every policy is in csrc/core.
 * The GIL is let go around everything that may wait. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

#include "../backend/cuda.h"
#include "../backend/host.h"
#include "../base/gate.h"
#include "dlpack.h"
#include "error.h"
#include "home.h"
#include "state.h"
#include "tensor.h"

typedef struct engine_object {
    PyObject_HEAD viking_engine *engine;
    viking_backend *backend; /* owned by the engine */
    PyObject *homes; /* dict: weight -> Home, and each Home that pin_home pinned -> itself */
    PyObject *tensor_type; /* whose current stream counts; NULL on the host backend */
    int index;
    viking_gate gate; /* every call into the core goes through it; closing waits for those without the GIL */
} engine_object;

/* ---- calls ---- */

static viking_status enter(engine_object *self)
{
    return viking_gate_enter(&self->gate)
               ? VIKING_OK
               : viking_status_fail(VIKING_ERROR_STATE, "this engine is closed: its models were detached");
}

viking_status viking_py_call_begin(PyObject *object, int announced, viking_py_call *out)
{
    engine_object *self = (engine_object *)object;
    viking_status status = enter(self);
    if (status != VIKING_OK)
        return status;
    *out = (viking_py_call){.object = Py_NewRef(object), .engine = self->engine, .announced = announced};
    viking_engine_announce(self->engine, announced);
    out->thread = PyEval_SaveThread();
    return VIKING_OK;
}

void viking_py_call_end(viking_py_call *call)
{
    PyEval_RestoreThread(call->thread);
    viking_engine_announce(call->engine, -call->announced);
    viking_gate_leave(&((engine_object *)call->object)->gate);
    Py_DECREF(call->object);
}

PyObject *viking_py_engine_homes(PyObject *object)
{
    return ((engine_object *)object)->homes;
}

int viking_py_engine_stream(PyObject *object, viking_stream *out)
{
    engine_object *self = (engine_object *)object;
    uintptr_t stream = 0;
    if (self->tensor_type != NULL &&
        viking_tensor_current_stream(self->tensor_type, VIKING_DLPACK_CUDA, self->index, &stream) < 0)
        return -1;
    *out = (viking_stream)stream; /* NOLINT(performance-no-int-to-ptr): a handle that torch hands out as a number */
    return 0;
}

static viking_status acquire_patiently(PyObject *object, uint32_t weight, viking_stream stream, viking_acquired *out)
{
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 0, &call);
    if (status != VIKING_OK)
        return status;
    while ((status = viking_engine_acquire(call.engine, weight, stream, out)) == VIKING_BUSY) {
        status = viking_engine_wait_release(call.engine);
        if (status != VIKING_OK) /* threads wait for one another */
            break;
    }
    viking_py_call_end(&call);
    return status;
}

viking_status viking_py_engine_acquire(PyObject *object, uint32_t weight, viking_stream stream, viking_acquired *out)
{
    engine_object *self = (engine_object *)object;
    viking_status status = enter(self);
    if (status != VIKING_OK)
        return status;
    status = VIKING_BUSY;
    if (!viking_engine_may_block(self->engine))
        status = viking_engine_acquire(self->engine, weight, stream, out);
    viking_gate_leave(&self->gate);
    return status == VIKING_BUSY ? acquire_patiently(object, weight, stream, out) : status;
}

viking_status viking_py_engine_release(PyObject *object, uint64_t ticket, viking_stream stream)
{
    engine_object *self = (engine_object *)object;
    viking_status status = enter(self);
    if (status != VIKING_OK)
        return status;
    bool patient = viking_engine_may_block(self->engine);
    if (!patient)
        status = viking_engine_release(self->engine, ticket, stream);
    viking_gate_leave(&self->gate);
    viking_py_call call;
    if (!patient || (status = viking_py_call_begin(object, 0, &call)) != VIKING_OK)
        return status;
    status = viking_engine_release(call.engine, ticket, stream);
    viking_py_call_end(&call);
    return status;
}

/* ---- life ---- */

static viking_status open_backend(const char *kind, int index, const char *runtime, const viking_host_options *options,
                                  viking_backend **out)
{
    if (strcmp(kind, "host") == 0)
        return viking_host_open(options, out);
    if (strcmp(kind, "cuda") == 0)
        return viking_cuda_open(index, runtime, out);
    return viking_status_fail(VIKING_ERROR_INVALID, "an engine runs on \"cuda\" or on \"host\", not on \"%s\"", kind);
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"kind",     "index", "tensor_type",     "runtime", "bytes_per_second",
                            "delay_ns", "seed",  "pin_limit_bytes", NULL};
    const char *kind = NULL;
    const char *runtime = NULL;
    PyObject *tensor_type = Py_None;
    int index = 0;
    viking_host_options options = {0};
    unsigned long long rate = 0;
    unsigned long long delay = 0;
    unsigned long long seed = 0;
    unsigned long long pin_limit = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|iOzKKKK:Engine", names, &kind, &index, &tensor_type, &runtime,
                                     &rate, &delay, &seed, &pin_limit))
        return NULL;
    options.bytes_per_second = rate;
    options.delay_ns = delay;
    options.seed = seed;
    options.pin_limit_bytes = pin_limit;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    engine_object *self = (engine_object *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    self->index = index;
    self->tensor_type = tensor_type == Py_None ? NULL : Py_NewRef(tensor_type);
    self->homes = PyDict_New();
    if (self->homes == NULL)
        goto fail;
    viking_status status;
    Py_BEGIN_ALLOW_THREADS
    status = viking_gate_open(&self->gate);
    if (status == VIKING_OK)
        status = open_backend(kind, index, runtime, &options, &self->backend);
    if (status == VIKING_OK)
        status = viking_engine_open(self->backend, &self->engine);
    Py_END_ALLOW_THREADS
    if (status == VIKING_OK)
        return (PyObject *)self;
    viking_py_raise(status);
fail:
    Py_DECREF(self);
    return NULL;
}

static void close_engine(engine_object *self)
{
    if (!viking_gate_shut(&self->gate) || self->engine == NULL)
        return;
    Py_BEGIN_ALLOW_THREADS
    viking_engine_retire(self->engine);
    viking_gate_await(&self->gate);
    viking_engine_close(self->engine);
    Py_END_ALLOW_THREADS
    PyDict_Clear(self->homes);
}

static void engine_dealloc(PyObject *object)
{
    engine_object *self = (engine_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    close_engine(self);
    Py_CLEAR(self->homes);
    Py_CLEAR(self->tensor_type);
    viking_gate_close(&self->gate);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static int engine_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((engine_object *)object)->homes);
    Py_VISIT(((engine_object *)object)->tensor_type);
    return 0;
}

PyDoc_STRVAR(close_doc, "close()\n--\n\nWait for all copies and for the work that reads the slab, and let go of "
                        "everything. Closing twice is allowed.");

static PyObject *engine_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    close_engine((engine_object *)object);
    return Py_NewRef(Py_None);
}

/* ---- weights ---- */

PyDoc_STRVAR(add_doc,
             "add(home, nbytes) -> int\n--\n\nA weight of nbytes in a Home, which the engine keeps alive until "
             "it is removed. It can be used after the next layout.");

static PyObject *engine_add(PyObject *object, PyObject *args)
{
    PyObject *home = NULL;
    unsigned long long nbytes = 0;
    if (!PyArg_ParseTuple(args, "O!K:add", viking_state_of(object)->home_type, &home, &nbytes))
        return NULL;
    uint32_t weight = 0;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 0, &call);
    if (status == VIKING_OK) {
        status = viking_engine_add(call.engine, viking_py_home_of(home), nbytes, &weight);
        viking_py_call_end(&call);
    }
    if (status != VIKING_OK)
        return viking_py_raise(status);
    PyObject *number = PyLong_FromUnsignedLong(weight);
    if (number != NULL && PyDict_SetItem(((engine_object *)object)->homes, number, home) == 0)
        return number;
    Py_XDECREF(number);
    if (viking_py_call_begin(object, 1, &call) == VIKING_OK) {
        viking_engine_remove(call.engine, weight);
        viking_py_call_end(&call);
    }
    return NULL;
}

int viking_py_engine_weight(PyObject *number, uint32_t *out)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return -1;
    if (value > UINT32_MAX) {
        PyErr_Format(PyExc_RuntimeError, "weight %llu is not managed by this engine", value);
        return -1;
    }
    *out = (uint32_t)value;
    return 0;
}

PyObject *viking_py_engine_for_weight(PyObject *object, PyObject *argument,
                                      viking_status (*function)(viking_engine *, uint32_t))
{
    uint32_t weight = 0;
    if (viking_py_engine_weight(argument, &weight) < 0)
        return NULL;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 1, &call);
    if (status == VIKING_OK) {
        status = function(call.engine, weight);
        viking_py_call_end(&call);
    }
    return viking_py_done(status);
}

PyDoc_STRVAR(remove_doc, "remove(weight)\n--\n\nForget a weight, once no copy reads its home any more. RuntimeError "
                         "while a use of it is in progress.");

static PyObject *engine_remove(PyObject *object, PyObject *weight)
{
    PyObject *done = viking_py_engine_for_weight(object, weight, viking_engine_remove);
    if (done != NULL && PyDict_DelItem(((engine_object *)object)->homes, weight) < 0)
        PyErr_Clear();
    return done;
}

PyDoc_STRVAR(invalidate_doc, "invalidate(weight)\n--\n\nIts host bytes have changed: the next use fetches them again.");

static PyObject *engine_invalidate(PyObject *object, PyObject *weight)
{
    return viking_py_engine_for_weight(object, weight, viking_engine_invalidate);
}

PyDoc_STRVAR(pin_doc,
             "pin(weight)\n--\n\nPin the home of a streamed weight, unpin that of a resident one. RuntimeError "
             "or MemoryError where the system refuses; the weight is streamed from pageable memory then.");

static PyObject *engine_pin(PyObject *object, PyObject *weight)
{
    return viking_py_engine_for_weight(object, weight, viking_engine_pin);
}

PyDoc_STRVAR(unpin_doc, "unpin(weight)\n--\n\nUnpin its home, whatever the weight is.");

static PyObject *engine_unpin(PyObject *object, PyObject *weight)
{
    return viking_py_engine_for_weight(object, weight, viking_engine_unpin);
}

PyDoc_STRVAR(rehome_doc,
             "rehome(weight, home)\n--\n\nAnother home of the same size, which holds the same bytes; the one "
             "before is unpinned, and no copy reads it any more.");

static PyObject *engine_rehome(PyObject *object, PyObject *args)
{
    PyObject *number = NULL, *home = NULL;
    uint32_t weight = 0;
    if (!PyArg_ParseTuple(args, "OO!:rehome", &number, viking_state_of(object)->home_type, &home) ||
        viking_py_engine_weight(number, &weight) < 0)
        return NULL;
    /* Both are kept until the engine has changed over. */
    PyObject *homes = ((engine_object *)object)->homes, *former = PyDict_GetItemWithError(homes, number);
    if (former == NULL)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_RuntimeError, "weight %u has no home", weight);
    Py_INCREF(former);
    PyObject *result = NULL;
    if (PyDict_SetItem(homes, number, home) == 0) {
        viking_py_call call;
        viking_status status = viking_py_call_begin(object, 1, &call);
        if (status == VIKING_OK) {
            status = viking_engine_rehome(call.engine, weight, viking_py_home_of(home));
            viking_py_call_end(&call);
        }
        result = status == VIKING_OK ? Py_NewRef(Py_None) : NULL;
        if (status != VIKING_OK && PyDict_SetItem(homes, number, former) == 0)
            viking_py_raise(status);
    }
    Py_DECREF(former);
    return result;
}

PyDoc_STRVAR(use_window_doc, "use_window(nbytes)\n--\n\nCopies from pageable homes go through a pinned window of about "
                             "this size from now on; 0: straight from the home. RuntimeError or MemoryError where the "
                             "system refuses; there is no window then.");

/* A method that takes a size or a rate. */
static PyObject *with_number(PyObject *object, PyObject *argument, viking_status (*function)(viking_engine *, uint64_t))
{
    unsigned long long number = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 1, &call);
    if (status == VIKING_OK) {
        status = function(call.engine, number);
        viking_py_call_end(&call);
    }
    return viking_py_done(status);
}

static PyObject *engine_use_window(PyObject *object, PyObject *nbytes)
{
    return with_number(object, nbytes, viking_engine_use_window);
}

PyDoc_STRVAR(pace_doc, "pace(bytes_per_second)\n--\n\nCopies to the device take at least as long as over such a link, "
                       "from the next one on; 0: as fast as they go. RuntimeError where the runtime cannot call back.");

static PyObject *engine_pace(PyObject *object, PyObject *bytes_per_second)
{
    return with_number(object, bytes_per_second, viking_engine_pace);
}

/* A method that takes nothing and gives nothing and may wait. */
static PyObject *plain(PyObject *object, viking_status (*function)(viking_engine *))
{
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 1, &call);
    if (status == VIKING_OK) {
        status = function(call.engine);
        viking_py_call_end(&call);
    }
    return viking_py_done(status);
}

PyDoc_STRVAR(drain_doc, "drain_copies()\n--\n\nWait until no copy reads any home.");

static PyObject *engine_drain(PyObject *object, PyObject *unused)
{
    (void)unused;
    return plain(object, viking_engine_drain_copies);
}

/* ---- layout ---- */

PyDoc_STRVAR(layout_doc,
             "layout(budget) -> int\n--\n\nFind addresses under a budget in bytes; the size of the slab that "
             "they need. Nothing changes yet. ValueError names the smallest budget that works.");

static PyObject *engine_layout(PyObject *object, PyObject *argument)
{
    unsigned long long budget = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    uint64_t slab = 0;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 1, &call);
    if (status == VIKING_OK) {
        status = viking_engine_layout(call.engine, budget, &slab);
        viking_py_call_end(&call);
    }
    return status == VIKING_OK ? PyLong_FromUnsignedLongLong(slab) : viking_py_raise(status);
}

PyDoc_STRVAR(range_doc, "budget_range() -> (int, int)\n--\n\nThe smallest budget that works and the one that holds "
                        "everything, in bytes.");

static PyObject *engine_budget_range(PyObject *object, PyObject *unused)
{
    (void)unused;
    uint64_t smallest = 0;
    uint64_t largest = 0;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 1, &call);
    if (status == VIKING_OK) {
        status = viking_engine_budget_range(call.engine, &smallest, &largest);
        viking_py_call_end(&call);
    }
    if (status != VIKING_OK)
        return viking_py_raise(status);
    return Py_BuildValue("KK", (unsigned long long)smallest, (unsigned long long)largest);
}

PyDoc_STRVAR(use_layout_doc, "use_layout(address)\n--\n\nPut the layout found last into force over device memory at "
                             "address, which the current stream may still be using. The caller keeps it alive until "
                             "drop_slab. RuntimeError while weights are in use.");

static PyObject *engine_use_layout(PyObject *object, PyObject *argument)
{
    void *base = PyLong_AsVoidPtr(argument);
    viking_stream stream;
    if (PyErr_Occurred() || viking_py_engine_stream(object, &stream) < 0)
        return NULL;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 1, &call);
    if (status == VIKING_OK) {
        status = viking_engine_use_layout(call.engine, base, stream);
        viking_py_call_end(&call);
    }
    return viking_py_done(status);
}

PyDoc_STRVAR(drop_slab_doc, "drop_slab()\n--\n\nWait until nothing touches the slab any more; its memory may be freed "
                            "then. RuntimeError while weights are in use.");

static PyObject *engine_drop_slab(PyObject *object, PyObject *unused)
{
    (void)unused;
    return plain(object, viking_engine_drop_slab);
}

/* ---- a step ---- */

PyDoc_STRVAR(pass_begin_doc, "pass_begin(key, training) -> bool\n--\n\nA root module is entered. True if a new layout "
                             "would serve better.");

static PyObject *engine_pass_begin(PyObject *object, PyObject *args)
{
    unsigned long long key = 0;
    int training = 0;
    if (!PyArg_ParseTuple(args, "Kp:pass_begin", &key, &training))
        return NULL;
    viking_stream stream;
    if (viking_py_engine_stream(object, &stream) < 0)
        return NULL;
    bool stale = false;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 0, &call);
    if (status == VIKING_OK) {
        status = viking_engine_pass_begin(call.engine, key, training != 0, stream, &stale);
        viking_py_call_end(&call);
    }
    return status == VIKING_OK ? PyBool_FromLong(stale) : viking_py_raise(status);
}

PyDoc_STRVAR(acquire_doc,
             "acquire(weight) -> (ticket, address)\n--\n\nThe weight's bytes are at the device address for "
             "work queued on the current stream until release(ticket).");

static PyObject *engine_acquire(PyObject *object, PyObject *argument)
{
    uint32_t weight = 0;
    viking_stream stream;
    if (viking_py_engine_weight(argument, &weight) < 0 || viking_py_engine_stream(object, &stream) < 0)
        return NULL;
    viking_acquired acquired;
    viking_status status = viking_py_engine_acquire(object, weight, stream, &acquired);
    if (status != VIKING_OK)
        return viking_py_raise(status);
    return Py_BuildValue("KN", (unsigned long long)acquired.ticket, PyLong_FromVoidPtr(acquired.address));
}

PyDoc_STRVAR(release_doc, "release(ticket)\n--\n\nEnd a use; the work that needed it is queued on the current stream.");

static PyObject *engine_release(PyObject *object, PyObject *argument)
{
    unsigned long long ticket = PyLong_AsUnsignedLongLong(argument);
    viking_stream stream;
    if (PyErr_Occurred() || viking_py_engine_stream(object, &stream) < 0)
        return NULL;
    viking_status status = viking_py_engine_release(object, ticket, stream);
    return viking_py_done(status);
}

/* ---- what happened ---- */

PyDoc_STRVAR(stats_doc,
             "stats() -> dict\n--\n\nCounters of the engine: bytes and ns; see viking.stats for their meaning.");

static PyObject *engine_stats(PyObject *object, PyObject *unused)
{
    (void)unused;
    viking_engine_stats s;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 0, &call);
    if (status == VIKING_OK) {
        status = viking_engine_stats_of(call.engine, &s);
        viking_py_call_end(&call);
    }
    if (status != VIKING_OK)
        return viking_py_raise(status);
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = {
        {"budget_bytes", s.budget_bytes},
        {"slab_bytes", s.slab_bytes},
        {"ring_bytes", s.ring_bytes},
        {"resident_bytes", s.resident_bytes},
        {"streamed_bytes", s.streamed_bytes},
        {"pinned_bytes", s.pinned_bytes},
        {"window_bytes", s.window_bytes},
        {"staged_bytes", s.staged_bytes},
        {"passes", s.passes},
        {"steps", s.steps},
        {"layouts", s.layouts},
        {"demand_fetches", s.demand_fetches},
        {"fetched_bytes", s.fetched_bytes},
        {"written_bytes", s.written_bytes},
        {"floor_bytes", s.floor_bytes},
        {"total_fetched_bytes", s.total_fetched_bytes},
        {"stall_ns", s.stall_ns},
        {"paths", s.paths},
        {"readers", s.readers},
        {"weights", s.weights},
        {"uses", s.uses},
        {"waiting", s.waiting},
        {"streams", s.streams},
        {"events", s.events},
        {"pins", s.pins},
    };
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < sizeof numbers / sizeof *numbers; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(numbers[i].value);
        if (value == NULL || PyDict_SetItemString(dict, numbers[i].name, value) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

PyDoc_STRVAR(profile_next_doc, "profile_next()\n--\n\nMeasure the next pass, use by use and copy by copy.");

static PyObject *engine_profile_next(PyObject *object, PyObject *unused)
{
    (void)unused;
    return plain(object, viking_engine_profile_next);
}

PyDoc_STRVAR(
    profile_doc,
    "profile() -> list\n--\n\nThe last measured pass as (kind, weight, begin_ns, end_ns): kind \"copy\" from start "
    "to end of the copy, kind \"use\" from the moment its stream waited for the bytes to the moment it had them. "
    "Empty until a measured pass is complete on the device.");

static PyObject *engine_profile(PyObject *object, PyObject *unused)
{
    (void)unused;
    viking_profile_span *spans = NULL;
    uint32_t count = 0;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 0, &call);
    if (status == VIKING_OK) {
        status = viking_engine_profile_read(call.engine, &spans, &count);
        viking_py_call_end(&call);
    }
    if (status != VIKING_OK)
        return viking_py_raise(status);
    PyObject *list = PyList_New(count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *span =
            Py_BuildValue("sIKK", spans[i].kind == VIKING_PROFILE_COPY ? "copy" : "use", (unsigned)spans[i].weight,
                          (unsigned long long)spans[i].begin_ns, (unsigned long long)spans[i].end_ns);
        if (span == NULL || PyList_SetItem(list, i, span) < 0)
            Py_CLEAR(list);
    }
    free(spans);
    return list;
}

PyDoc_STRVAR(last_trace_doc,
             "last_trace() -> list\n--\n\nThe uses of the last complete pass as (weight, begin, end, kind, "
             "compute_ns), as viking._engine.plan takes them.");

static PyObject *engine_last_trace(PyObject *object, PyObject *unused)
{
    (void)unused;
    viking_trace trace;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 0, &call);
    if (status == VIKING_OK) {
        status = viking_engine_last_trace(call.engine, &trace);
        viking_py_call_end(&call);
    }
    if (status != VIKING_OK)
        return viking_py_raise(status);
    PyObject *list = PyList_New(trace.count);
    for (uint32_t i = 0; list != NULL && i < trace.count; i++) {
        const viking_use *use = &trace.uses[i];
        PyObject *item = Py_BuildValue("IIIIK", (unsigned)use->weight, (unsigned)use->begin, (unsigned)use->end,
                                       (unsigned)use->kind, (unsigned long long)use->compute_ns);
        if (item == NULL || PyList_SetItem(list, i, item) < 0)
            Py_CLEAR(list);
    }
    viking_trace_free(&trace);
    return list;
}

PyDoc_STRVAR(planned_fetches_doc, "planned_fetches() -> list\n--\n\nHow often the layout in force fetches each weight "
                                  "in a pass, by number; 0 for what is resident.");

static PyObject *engine_planned_fetches(PyObject *object, PyObject *unused)
{
    (void)unused;
    uint32_t *counts = NULL;
    uint32_t count = 0;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 0, &call);
    if (status == VIKING_OK) {
        status = viking_engine_planned_fetches(call.engine, &counts, &count);
        viking_py_call_end(&call);
    }
    if (status != VIKING_OK)
        return viking_py_raise(status);
    PyObject *list = PyList_New(count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = PyLong_FromUnsignedLong(counts[i]);
        if (item == NULL || PyList_SetItem(list, i, item) < 0)
            Py_CLEAR(list);
    }
    free(counts);
    return list;
}

PyDoc_STRVAR(memory_doc, "memory() -> (free, total)\n--\n\nBytes of device memory, as its driver reports them.");

static PyObject *engine_memory(PyObject *object, PyObject *unused)
{
    (void)unused;
    engine_object *self = (engine_object *)object;
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    viking_status status = enter(self);
    if (status == VIKING_OK) {
        status = self->backend->operations->memory(self->backend, &free_bytes, &total_bytes);
        viking_gate_leave(&self->gate);
    }
    return status == VIKING_OK ? Py_BuildValue("nn", (Py_ssize_t)free_bytes, (Py_ssize_t)total_bytes)
                               : viking_py_raise(status);
}

static PyMethodDef engine_methods[] = {
    {"close", engine_close, METH_NOARGS, close_doc},
    {"add", engine_add, METH_VARARGS, add_doc},
    {"remove", engine_remove, METH_O, remove_doc},
    {"invalidate", engine_invalidate, METH_O, invalidate_doc},
    {"pin", engine_pin, METH_O, pin_doc},
    {"unpin", engine_unpin, METH_O, unpin_doc},
    {"use_window", engine_use_window, METH_O, use_window_doc},
    {"pace", engine_pace, METH_O, pace_doc},
    {"rehome", engine_rehome, METH_VARARGS, rehome_doc},
    {"drain_copies", engine_drain, METH_NOARGS, drain_doc},
    {"set_trained", viking_py_set_trained, METH_VARARGS, viking_py_set_trained_doc},
    {"forget_trained", viking_py_forget_trained, METH_NOARGS, viking_py_forget_trained_doc},
    {"expect_step", viking_py_expect_step, METH_O, viking_py_expect_step_doc},
    {"download", viking_py_download, METH_VARARGS, viking_py_download_doc},
    {"download_await", viking_py_download_await, METH_O, viking_py_download_await_doc},
    {"download_release", viking_py_download_release, METH_O, viking_py_download_release_doc},
    {"pin_home", viking_py_pin_home, METH_O, viking_py_pin_home_doc},
    {"unpin_home", viking_py_unpin_home, METH_O, viking_py_unpin_home_doc},
    {"layout", engine_layout, METH_O, layout_doc},
    {"budget_range", engine_budget_range, METH_NOARGS, range_doc},
    {"use_layout", engine_use_layout, METH_O, use_layout_doc},
    {"drop_slab", engine_drop_slab, METH_NOARGS, drop_slab_doc},
    {"pass_begin", engine_pass_begin, METH_VARARGS, pass_begin_doc},
    {"acquire", engine_acquire, METH_O, acquire_doc},
    {"release", engine_release, METH_O, release_doc},
    {"stats", engine_stats, METH_NOARGS, stats_doc},
    {"profile_next", engine_profile_next, METH_NOARGS, profile_next_doc},
    {"profile", engine_profile, METH_NOARGS, profile_doc},
    {"last_trace", engine_last_trace, METH_NOARGS, last_trace_doc},
    {"planned_fetches", engine_planned_fetches, METH_NOARGS, planned_fetches_doc},
    {"memory", engine_memory, METH_NOARGS, memory_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(engine_doc,
             "Engine(kind, index=0, tensor_type=None, runtime=None, bytes_per_second=0, delay_ns=0, seed=0, "
             "pin_limit_bytes=0)\n--\n\n"
             "The engine of one device: kind \"cuda\", with the type whose current stream counts (torch.Tensor) and "
             "optionally the path of a CUDA runtime, or \"host\", with the pace, random delays and pin limit that the "
             "host backend is to have.");

static PyType_Slot engine_slots[] = {
    {Py_tp_doc, (void *)engine_doc},           {Py_tp_new, (void *)engine_new}, {Py_tp_dealloc, (void *)engine_dealloc},
    {Py_tp_traverse, (void *)engine_traverse}, {Py_tp_methods, engine_methods}, {0, NULL},
};

PyType_Spec viking_engine_spec = {
    .name = "viking._engine.Engine",
    .basicsize = sizeof(engine_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = engine_slots,
};
