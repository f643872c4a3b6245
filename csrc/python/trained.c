/* Methods of viking._engine.Engine for weights that the host steps, and for their gradients. */
#include "engine.h"

#include "error.h"
#include "home.h"
#include "state.h"

const char viking_py_set_trained_doc[] = "set_trained(weight, training)\n--\n\nWhen the host writes to it unseen: 0 "
                                         "never, 1 between passes, 2 at any moment.";

PyObject *viking_py_set_trained(PyObject *object, PyObject *args)
{
    PyObject *number = NULL;
    int training = 0;
    uint32_t weight = 0;
    if (!PyArg_ParseTuple(args, "Oi:set_trained", &number, &training) || viking_py_engine_weight(number, &weight) < 0)
        return NULL;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 0, &call);
    if (status == VIKING_OK) {
        status = viking_engine_set_trained(call.engine, weight, (viking_training)training);
        viking_py_call_end(&call);
    }
    return viking_py_done(status);
}

const char viking_py_forget_trained_doc[] =
    "forget_trained()\n--\n\nThe next use of each trained weight fetches it again.";

PyObject *viking_py_forget_trained(PyObject *object, PyObject *unused)
{
    (void)unused;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 0, &call);
    if (status == VIKING_OK) {
        status = viking_engine_forget_trained(call.engine);
        viking_py_call_end(&call);
    }
    return viking_py_done(status);
}

const char viking_py_expect_step_doc[] =
    "expect_step(weight)\n--\n\nIts gradient was made: until the next pass begins, the host may step it at any moment.";

PyObject *viking_py_expect_step(PyObject *object, PyObject *weight)
{
    return viking_py_engine_for_weight(object, weight, viking_engine_expect_step);
}

/* ---- gradients ---- */

const char viking_py_download_doc[] =
    "download(destination, source, nbytes) -> int\n--\n\nCopy what the current stream has been given to compute at the "
    "device address source to the host address destination; a ticket for download_await and download_release. The "
    "caller keeps both alive until it has arrived.";

PyObject *viking_py_download(PyObject *object, PyObject *args)
{
    unsigned long long destination = 0;
    unsigned long long source = 0;
    unsigned long long nbytes = 0;
    viking_stream stream;
    if (!PyArg_ParseTuple(args, "KKK:download", &destination, &source, &nbytes) ||
        viking_py_engine_stream(object, &stream) < 0)
        return NULL;
    uint64_t ticket = 0;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 0, &call);
    if (status == VIKING_OK) {
        /* NOLINTBEGIN(performance-no-int-to-ptr): addresses that torch hands out as numbers */
        status = viking_engine_download(call.engine, (void *)(uintptr_t)destination, (const void *)(uintptr_t)source,
                                        nbytes, stream, &ticket);
        /* NOLINTEND(performance-no-int-to-ptr) */
        viking_py_call_end(&call);
    }
    return status == VIKING_OK ? PyLong_FromUnsignedLongLong(ticket) : viking_py_raise(status);
}

const char viking_py_download_await_doc[] =
    "download_await(ticket)\n--\n\nWait until that copy has arrived on the host; 2**64 - 1: all copies so far.";

PyObject *viking_py_download_await(PyObject *object, PyObject *argument)
{
    unsigned long long ticket = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 0, &call);
    if (status == VIKING_OK) {
        status = viking_engine_download_await(call.engine, ticket);
        viking_py_call_end(&call);
    }
    return viking_py_done(status);
}

const char viking_py_download_release_doc[] = "download_release(ticket)\n--\n\nWhat the current stream is given from "
                                              "now on may overwrite the source of that copy.";

PyObject *viking_py_download_release(PyObject *object, PyObject *argument)
{
    unsigned long long ticket = PyLong_AsUnsignedLongLong(argument);
    viking_stream stream;
    if (PyErr_Occurred() || viking_py_engine_stream(object, &stream) < 0)
        return NULL;
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 0, &call);
    if (status == VIKING_OK) {
        status = viking_engine_download_release(call.engine, ticket, stream);
        viking_py_call_end(&call);
    }
    return viking_py_done(status);
}

static PyObject *for_home(PyObject *object, PyObject *home, viking_status (*function)(viking_engine *, viking_home *))
{
    if (Py_TYPE(home) != viking_state_of(object)->home_type)
        return PyErr_Format(PyExc_TypeError, "a Home is needed, not a %R", (PyObject *)Py_TYPE(home));
    viking_py_call call;
    viking_status status = viking_py_call_begin(object, 1, &call);
    if (status == VIKING_OK) {
        status = function(call.engine, viking_py_home_of(home));
        viking_py_call_end(&call);
    }
    return viking_py_done(status);
}

const char viking_py_pin_home_doc[] = "pin_home(home)\n--\n\nPin a Home that is no weight's, and keep it alive until "
                                      "unpin_home or close. RuntimeError or "
                                      "MemoryError where the system refuses.";

PyObject *viking_py_pin_home(PyObject *object, PyObject *home)
{
    PyObject *homes = viking_py_engine_homes(object);
    PyObject *done = for_home(object, home, viking_engine_pin_home);
    if (done == NULL || PyDict_SetItem(homes, home, home) == 0)
        return done;
    Py_DECREF(done);
    Py_XDECREF(for_home(object, home, viking_engine_unpin_home));
    return NULL;
}

const char viking_py_unpin_home_doc[] = "unpin_home(home)\n--\n\nUnpin it again. No copy into it may be in flight.";

PyObject *viking_py_unpin_home(PyObject *object, PyObject *home)
{
    PyObject *done = for_home(object, home, viking_engine_unpin_home);
    if (done != NULL && PyDict_DelItem(viking_py_engine_homes(object), home) < 0)
        PyErr_Clear(); /* it was not pinned */
    return done;
}
