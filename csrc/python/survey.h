/* What the engine finds on this machine: for `python -m viking.doctor`. */
#ifndef VIKING_PYTHON_SURVEY_H
#define VIKING_PYTHON_SURVEY_H

#include <Python.h>

/* survey(runtime=None) -> dict (METH_VARARGS)
 *
 * runtime: the path of a CUDA runtime; None: the one that an engine would use. The dict holds
 *     convert       "avx512", "avx2" or "scalar": how this processor converts to bf16
 *     library       the file that the CUDA runtime comes from, or None
 *     runtime       its version, 13000 for CUDA 13.0, or None
 *     driver        the newest version that the driver serves, 0 without a driver, or None
 *     devices       how many CUDA devices may be opened
 *     problem       why there are none, as a sentence, or None
 */
PyObject *viking_py_survey(PyObject *module, PyObject *args);

#endif
