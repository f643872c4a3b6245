/* viking._engine: wires the types and functions of this folder together, and nothing else. */
#include "bf16.h"
#include "home.h"
#include "planning.h"
#include "quantize.h"
#include "round.h"
#include "state.h"
#include "survey.h"
#include "tensor.h"

viking_state *viking_state_of_module(PyObject *module)
{
    return (viking_state *)PyModule_GetState(module);
}

viking_state *viking_state_of(PyObject *self)
{
    return (viking_state *)PyType_GetModuleState(Py_TYPE(self));
}

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **out)
{
    *out = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *out == NULL ? -1 : PyModule_AddType(module, *out);
}

static int module_exec(PyObject *module)
{
    viking_state *state = viking_state_of_module(module);
    if (add_type(module, &viking_home_spec, &state->home_type) < 0 ||
        add_type(module, &viking_engine_spec, &state->engine_type) < 0 ||
        add_type(module, &viking_linear_spec, &state->linear_type) < 0)
        return -1;
    state->name_version = PyUnicode_InternFromString("_version");
    state->name_requires_grad = PyUnicode_InternFromString("requires_grad");
    state->name_weight = PyUnicode_InternFromString("weight");
    state->name_bias = PyUnicode_InternFromString("bias");
    return state->name_version == NULL || state->name_requires_grad == NULL || state->name_weight == NULL ||
                   state->name_bias == NULL
               ? -1
               : 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    viking_state *state = viking_state_of_module(module);
    Py_VISIT(state->home_type);
    Py_VISIT(state->engine_type);
    Py_VISIT(state->linear_type);
    Py_VISIT(state->linear_apply);
    Py_VISIT(state->linear_views);
    Py_VISIT(state->linear_repair);
    Py_VISIT(state->linear_replaced);
    Py_VISIT(state->linear_retrain);
    return 0;
}

static int module_clear(PyObject *module)
{
    viking_state *state = viking_state_of_module(module);
    Py_CLEAR(state->home_type);
    Py_CLEAR(state->engine_type);
    Py_CLEAR(state->linear_type);
    Py_CLEAR(state->linear_apply);
    Py_CLEAR(state->linear_views);
    Py_CLEAR(state->linear_repair);
    Py_CLEAR(state->linear_replaced);
    Py_CLEAR(state->linear_retrain);
    Py_CLEAR(state->name_version);
    Py_CLEAR(state->name_requires_grad);
    Py_CLEAR(state->name_weight);
    Py_CLEAR(state->name_bias);
    return 0;
}

static void module_free(void *module)
{
    module_clear((PyObject *)module);
}

PyDoc_STRVAR(force_to_bf16_doc,
             "force_to_bf16(network) -> (changed, kept)\n--\n\n"
             "Convert the fp32 and fp16 parameters of a module to bf16 in place, rounding to nearest even. See "
             "viking.force_to_bf16.");
PyDoc_STRVAR(plan_doc,
             "plan(bytes, uses, budget_bytes, link_bytes_per_second, latency_ns=8000, compute_scales=None) -> "
             "dict\n--\n\nPlan one period of uses under a budget and predict its time. See viking.plan.");
PyDoc_STRVAR(round_to_bf16_doc,
             "round_to_bf16(destination, source, offset, inner)\n--\n\nRound fp32 stochastically to bf16 "
             "with random bits that depend on the key (offset, inner) and the index alone.");
PyDoc_STRVAR(encode_8bit_doc,
             "encode_8bit(source, format, codes, scales) -> float\n--\n\nQuantise a matrix to \"float8_e4m3fn\", "
             "\"float8_e5m2\" or \"int8\" with a scale for each row (None: without); the relative error.");
PyDoc_STRVAR(decode_8bit_doc, "decode_8bit(codes, scales, format, destination)\n--\n\nThe matrix that the codes "
                              "stand for, rounded once to the destination's type.");
PyDoc_STRVAR(row_with_nan_doc, "row_with_nan(source) -> int | None\n--\n\nThe first row of a matrix that holds a NaN.");
PyDoc_STRVAR(survey_doc,
             "survey(runtime=None) -> dict\n--\n\nWhat the engine finds on this machine. See viking.doctor.");
PyDoc_STRVAR(tensor_view_doc, "tensor_view(tensor, access=\"auto\") -> dict\n--\n\nWhere a tensor's bytes are and what "
                              "they mean, reached by \"exchange\", \"ints\" or \"capsule\".");
PyDoc_STRVAR(current_stream_doc,
             "current_stream(tensor_type, device_type, device_id) -> int\n--\n\nThe stream that the "
             "type's framework works on at present.");

PyDoc_STRVAR(trim_doc,
             "trim()\n--\n\nGive host memory that was freed back to the system, where the C library keeps it.");

PyDoc_STRVAR(file_ranges_doc, "file_ranges() -> list\n--\n\nThe parts of this process's memory that are mapped from "
                              "files: (begin, end) in order.");

static PyMethodDef module_methods[] = {
    {"file_ranges", viking_py_file_ranges, METH_NOARGS, file_ranges_doc},
    {"trim", viking_py_trim, METH_NOARGS, trim_doc},
    {"force_to_bf16", viking_py_force_to_bf16, METH_O, force_to_bf16_doc},
    {"plan", (PyCFunction)(void (*)(void))viking_py_plan, METH_VARARGS | METH_KEYWORDS, plan_doc},
    {"round_to_bf16", viking_py_round_to_bf16, METH_VARARGS, round_to_bf16_doc},
    {"encode_8bit", viking_py_encode_8bit, METH_VARARGS, encode_8bit_doc},
    {"decode_8bit", viking_py_decode_8bit, METH_VARARGS, decode_8bit_doc},
    {"row_with_nan", viking_py_row_with_nan, METH_O, row_with_nan_doc},
    {"survey", viking_py_survey, METH_VARARGS, survey_doc},
    {"tensor_view", (PyCFunction)(void (*)(void))viking_py_tensor_view, METH_VARARGS | METH_KEYWORDS, tensor_view_doc},
    {"current_stream", viking_py_current_stream, METH_VARARGS, current_stream_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

PyDoc_STRVAR(module_doc, "Viking's engine. The public names are those of the package viking.");

struct PyModuleDef viking_module_definition = {
    PyModuleDef_HEAD_INIT,          .m_name = "viking._engine",  .m_doc = module_doc,
    .m_size = sizeof(viking_state), .m_methods = module_methods, .m_slots = module_slots,
    .m_traverse = module_traverse,  .m_clear = module_clear,     .m_free = module_free,
};

PyMODINIT_FUNC PyInit__engine(void);

PyMODINIT_FUNC PyInit__engine(void)
{
    return PyModuleDef_Init(&viking_module_definition);
}
