/* Python's lists become the planner's arrays, the planner runs without the GIL, and its arrays become lists again.
 * Nothing is kept: this is for people and tests who ask what a plan would be, not for the engine, which never goes
 * through Python for one.
 */
#include "planning.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../base/os.h"
#include "../core/check.h"
#include "../core/simulate.h"
#include "error.h"

#define MAX_SCALES 8

typedef struct planning {
    uint64_t *bytes;
    uint32_t count;
    viking_trace trace;
    uint64_t budget;
    viking_link link;
    double scales[MAX_SCALES];
    uint32_t scale_count; /* 0: none given */

    viking_map *map;
    viking_plan *plan;
    viking_simulation simulation;
    uint64_t smallest;
    uint64_t planning_ns;
} planning;

/* ---- in ---- */

/* An int in [0, limit]; -1 with an exception that names `what`. */
static int read_number(PyObject *object, uint64_t limit, const char *what, uint64_t *out)
{
    PyObject *number = PyNumber_Index(object);
    unsigned long long value = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);
    bool too_large = PyErr_Occurred() != NULL && PyErr_ExceptionMatches(PyExc_OverflowError);

    Py_XDECREF(number);
    if (PyErr_Occurred() && !too_large)
        return -1;
    if (too_large || value > limit) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: %R is not from 0 to %llu", what, object, (unsigned long long)limit);
        return -1;
    }
    *out = value;
    return 0;
}

/* A list of the sequence's items, which stays alive with them. */
static PyObject *read_list(PyObject *object, const char *what, Py_ssize_t limit)
{
    PyObject *list = PySequence_List(object);
    if (list != NULL && PyList_Size(list) > limit) {
        PyErr_Format(PyExc_ValueError, "%s: %zd are given, at most %zd are accepted", what, PyList_Size(list), limit);
        Py_CLEAR(list);
    }
    return list;
}

static int read_bytes(planning *self, PyObject *object)
{
    PyObject *list = read_list(object, "bytes", INT32_MAX);
    if (list == NULL)
        return -1;
    self->count = (uint32_t)PyList_Size(list);
    self->bytes = malloc(((size_t)self->count + 1) * sizeof *self->bytes);
    if (self->bytes == NULL)
        PyErr_NoMemory();
    for (uint32_t w = 0; w < self->count && !PyErr_Occurred(); w++)
        read_number(PyList_GetItem(list, (Py_ssize_t)w), INT64_MAX, "bytes", &self->bytes[w]);
    Py_DECREF(list);
    return PyErr_Occurred() ? -1 : 0;
}

static int read_use(PyObject *object, viking_use *out)
{
    static const char *const names[] = {"weight", "begin", "end", "kind", "compute_ns"};
    static const uint64_t limits[] = {UINT32_MAX - 1, UINT32_MAX - 2, UINT32_MAX - 2, VIKING_USE_PRODUCE, INT64_MAX};
    uint64_t fields[5] = {0};
    PyObject *list = read_list(object, "a use", 5);

    if (list != NULL && PyList_Size(list) != 5)
        PyErr_SetString(PyExc_ValueError, "a use is (weight, begin, end, kind, compute_ns)");
    for (int k = 0; k < 5 && !PyErr_Occurred(); k++)
        read_number(PyList_GetItem(list, k), limits[k], names[k], &fields[k]);
    Py_XDECREF(list);
    *out = (viking_use){.weight = (uint32_t)fields[0],
                        .begin = (uint32_t)fields[1],
                        .end = (uint32_t)fields[2],
                        .kind = (uint32_t)fields[3],
                        .compute_ns = fields[4]};
    return PyErr_Occurred() ? -1 : 0;
}

static int read_uses(planning *self, PyObject *object)
{
    PyObject *list = read_list(object, "uses", INT32_MAX);
    uint32_t count;
    if (list == NULL)
        return -1;
    count = (uint32_t)PyList_Size(list);
    self->trace.uses = malloc(((size_t)count + 1) * sizeof *self->trace.uses);
    if (self->trace.uses == NULL)
        PyErr_NoMemory();
    for (uint32_t i = 0; i < count && !PyErr_Occurred(); i++) {
        viking_use *use = &self->trace.uses[i];
        if (read_use(PyList_GetItem(list, (Py_ssize_t)i), use) == 0 && use->end >= self->trace.ticks)
            self->trace.ticks = use->end + 1;
    }
    self->trace.count = self->trace.capacity = count;
    Py_DECREF(list);
    return PyErr_Occurred() ? -1 : 0;
}

static int read_scales(planning *self, PyObject *object)
{
    PyObject *list = NULL;
    if (object == NULL || object == Py_None)
        return 0;
    list = read_list(object, "compute_scales", MAX_SCALES);
    if (list == NULL)
        return -1;
    self->scale_count = (uint32_t)PyList_Size(list);
    if (self->scale_count == 0)
        PyErr_SetString(PyExc_ValueError, "compute_scales: give at least one, or None");
    for (uint32_t k = 0; k < self->scale_count && !PyErr_Occurred(); k++) {
        self->scales[k] = PyFloat_AsDouble(PyList_GetItem(list, (Py_ssize_t)k));
        if (!PyErr_Occurred() && !(self->scales[k] >= 0.0 && self->scales[k] <= 1e6))
            PyErr_Format(PyExc_ValueError, "compute_scales: %R is not from 0 to 1e6",
                         PyList_GetItem(list, (Py_ssize_t)k));
    }
    Py_DECREF(list);
    return PyErr_Occurred() ? -1 : 0;
}

static int read_arguments(planning *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"bytes",          "uses", "budget_bytes", "link_bytes_per_second", "latency_ns",
                            "compute_scales", NULL};
    PyObject *bytes, *uses, *budget, *rate, *latency = NULL, *scales = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO|OO:plan", names, &bytes, &uses, &budget, &rate, &latency,
                                     &scales))
        return -1;
    self->link.latency_ns = 8000;
    if (read_bytes(self, bytes) < 0 || read_uses(self, uses) < 0 || read_scales(self, scales) < 0 ||
        read_number(budget, INT64_MAX, "budget_bytes", &self->budget) < 0 ||
        read_number(rate, INT64_MAX, "link_bytes_per_second", &self->link.bytes_per_second) < 0 ||
        (latency != NULL && read_number(latency, INT64_MAX, "latency_ns", &self->link.latency_ns) < 0))
        return -1;
    return 0;
}

/* ---- planning, without the GIL ---- */

static viking_status run(planning *self)
{
    viking_map_request request = {.trace = &self->trace,
                                  .bytes = self->bytes,
                                  .count = self->count,
                                  .budget_bytes = self->budget,
                                  .link = self->link,
                                  .compute_scales = self->scale_count > 0 ? self->scales : NULL,
                                  .compute_scale_count = self->scale_count};
    uint64_t begin = viking_os_clock_ns();
    viking_status status = viking_map_build(&request, &self->map);

    if (status == VIKING_OK)
        status = viking_plan_build(self->map, &self->trace, &self->plan);
    self->planning_ns = viking_os_clock_ns() - begin;
    if (status == VIKING_OK)
        status = viking_check(self->map, self->plan, &self->trace);
    if (status == VIKING_OK)
        status = viking_simulate(self->map, self->plan, &self->trace, &self->link, 1.0, &self->simulation);
    if (status == VIKING_OK)
        status = viking_map_smallest_budget(&self->trace, self->bytes, self->count, &self->smallest);
    return status;
}

/* ---- out ---- */

/* dict[name] = value, which is taken over; NULL passes its exception on. */
static int put(PyObject *dict, const char *name, PyObject *value)
{
    int result = value == NULL ? -1 : PyDict_SetItemString(dict, name, value);
    Py_XDECREF(value);
    return result;
}

static int put_number(PyObject *dict, const char *name, uint64_t value)
{
    return put(dict, name, PyLong_FromUnsignedLongLong(value));
}

/* list[at] = value, which is taken over. */
static int list_put(PyObject *list, uint32_t at, PyObject *value)
{
    return value == NULL ? -1 : PyList_SetItem(list, (Py_ssize_t)at, value);
}

static PyObject *offsets_list(const viking_map *map)
{
    PyObject *list = PyList_New((Py_ssize_t)map->count);
    for (uint32_t w = 0; list != NULL && w < map->count; w++)
        if (list_put(list, w, PyLong_FromUnsignedLongLong(map->offsets[w])) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *resident_list(const viking_map *map)
{
    PyObject *list = PyList_New((Py_ssize_t)map->count);
    for (uint32_t w = 0; list != NULL && w < map->count; w++)
        if (list_put(list, w, PyBool_FromLong(map->resident[w])) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *fetch_list(const viking_plan *plan)
{
    PyObject *list = PyList_New((Py_ssize_t)plan->count);
    for (uint32_t k = 0; list != NULL && k < plan->count; k++) {
        const viking_fetch *fetch = &plan->fetches[k];
        PyObject *item = fetch->after == VIKING_PLAN_NO_GATE
                             ? Py_BuildValue("(IIO)", fetch->weight, fetch->need, Py_None)
                             : Py_BuildValue("(IIL)", fetch->weight, fetch->need, (long long)fetch->after);
        if (list_put(list, k, item) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *span_list(const viking_span_of_time *spans, uint32_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (uint32_t k = 0; list != NULL && k < count; k++)
        if (list_put(list, k,
                     Py_BuildValue("(KKII)", (unsigned long long)spans[k].begin_ns, (unsigned long long)spans[k].end_ns,
                                   spans[k].weight, spans[k].index)) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *describe(const planning *self)
{
    const viking_simulation *simulation = &self->simulation;
    PyObject *dict = PyDict_New();

    if (dict == NULL || put(dict, "offsets", offsets_list(self->map)) < 0 ||
        put(dict, "resident", resident_list(self->map)) < 0 ||
        put_number(dict, "ring_bytes", self->map->ring_bytes) < 0 ||
        put_number(dict, "resident_bytes", self->map->resident_bytes) < 0 ||
        put_number(dict, "slab_bytes", self->map->slab_bytes) < 0 || put(dict, "fetches", fetch_list(self->plan)) < 0 ||
        put_number(dict, "fetched_bytes", self->plan->fetched_bytes) < 0 ||
        put_number(dict, "smallest_budget", self->smallest) < 0 ||
        put_number(dict, "period_ns", simulation->period_ns) < 0 ||
        put_number(dict, "compute_ns", simulation->compute_ns) < 0 ||
        put_number(dict, "stall_ns", simulation->stall_ns) < 0 ||
        put_number(dict, "link_ns", simulation->link_ns) < 0 ||
        put(dict, "computes", span_list(simulation->computes, self->trace.count)) < 0 ||
        put(dict, "copies", span_list(simulation->copies, simulation->copy_count)) < 0 ||
        put(dict, "planning_seconds", PyFloat_FromDouble((double)self->planning_ns / 1e9)) < 0)
        Py_CLEAR(dict);
    return dict;
}

PyObject *viking_py_plan(PyObject *module, PyObject *args, PyObject *kwargs)
{
    planning self;
    PyObject *result = NULL;

    (void)module;
    memset(&self, 0, sizeof self);
    viking_trace_init(&self.trace);
    if (read_arguments(&self, args, kwargs) == 0) {
        viking_status status;
        Py_BEGIN_ALLOW_THREADS
        status = run(&self);
        Py_END_ALLOW_THREADS
        result = status == VIKING_OK ? describe(&self) : viking_py_raise(status);
    }
    viking_simulation_free(&self.simulation);
    viking_plan_free(self.plan);
    viking_map_free(self.map);
    viking_trace_free(&self.trace);
    free(self.bytes);
    return result;
}
