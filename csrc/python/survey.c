/* What the engine finds on this machine, asked of the parts that will use it. A machine without CUDA is an answer and
 * no error. */
#include "survey.h"

#include <string.h>

#include "../backend/cuda.h"
#include "../core/convert.h"

static const char *convert_name(void)
{
    if (viking_convert_available(VIKING_CONVERT_AVX512))
        return "avx512";
    return viking_convert_available(VIKING_CONVERT_AVX2) ? "avx2" : "scalar";
}

PyObject *viking_py_survey(PyObject *module, PyObject *args)
{
    (void)module;
    const char *path = NULL;
    if (!PyArg_ParseTuple(args, "|z:survey", &path))
        return NULL;
    viking_cuda_versions versions;
    memset(&versions, 0, sizeof versions);
    char problem[512] = "";
    int devices = 0;
    viking_status found;
    Py_BEGIN_ALLOW_THREADS;
    found = viking_cuda_find(path, &versions);
    viking_status status = found == VIKING_OK ? viking_cuda_device_count(path, &devices) : found;
    if (status != VIKING_OK)
        strncpy(problem, viking_status_detail(), sizeof problem - 1);
    Py_END_ALLOW_THREADS;
    if (found != VIKING_OK) {
        return Py_BuildValue("{s:s,s:O,s:O,s:O,s:i,s:s}", "convert", convert_name(), "library", Py_None, "runtime",
                             Py_None, "driver", Py_None, "devices", 0, "problem", problem);
    }
    return Py_BuildValue("{s:s,s:s,s:i,s:i,s:i,s:z}", "convert", convert_name(), "library", versions.library, "runtime",
                         versions.runtime, "driver", versions.driver, "devices", devices, "problem",
                         problem[0] ? problem : NULL);
}
