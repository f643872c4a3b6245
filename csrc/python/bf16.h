/* Python: force_to_bf16(network) -> (changed, kept). */
#ifndef VIKING_PYTHON_BF16_H
#define VIKING_PYTHON_BF16_H

#include <Python.h>

/* Convert the fp32 and fp16 parameters of `network` to bf16 in place (METH_O). `network` is a torch.nn.Module, or has
 * the lists of modules `unet_loras` and `text_encoder_loras` of a LoRA network, or both. Returns the number of unique
 * parameters changed and kept. Raises ValueError where a parameter has a gradient and TypeError for what is no
 * network; after any exception the network is as it was. */
PyObject *viking_py_force_to_bf16(PyObject *module, PyObject *network);

#endif
