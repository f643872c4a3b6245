/* Compile-only: csrc/python/dlpack.h describes the same memory as the header that torch ships.
 *
 *     cc -std=c11 -fsyntax-only -Icsrc -I"$(python -c 'import torch, os; print(os.path.dirname(torch.__file__))')/include"
 *        tests/c/assert_dlpack.c
 */
#include <stddef.h>

#include <ATen/dlpack.h>

#include "python/dlpack.h"

#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #ours " has the size of " #theirs)
#define SAME_PLACE(ours, our_member, theirs, their_member)                                                             \
    _Static_assert(offsetof(ours, our_member) == offsetof(theirs, their_member) &&                                     \
                       sizeof(((ours *)0)->our_member) == sizeof(((theirs *)0)->their_member),                         \
                   #ours "." #our_member " lies where " #theirs "." #their_member " does")
#define SAME_VALUE(ours, theirs) _Static_assert((long long)(ours) == (long long)(theirs), #ours " is " #theirs)

/* A newer minor version adds values only; a newer major one changes the layout. */
SAME_VALUE(VIKING_DLPACK_MAJOR, DLPACK_MAJOR_VERSION);
_Static_assert(DLPACK_MINOR_VERSION >= VIKING_DLPACK_MINOR, "this torch has a DLPack older than the exchange API");

SAME_VALUE(VIKING_DLPACK_CPU, kDLCPU);
SAME_VALUE(VIKING_DLPACK_CUDA, kDLCUDA);
SAME_VALUE(VIKING_DLPACK_CUDA_HOST, kDLCUDAHost);
SAME_VALUE(VIKING_DLPACK_ROCM, kDLROCM);

SAME_VALUE(VIKING_DLPACK_INT, kDLInt);
SAME_VALUE(VIKING_DLPACK_UINT, kDLUInt);
SAME_VALUE(VIKING_DLPACK_FLOAT, kDLFloat);
SAME_VALUE(VIKING_DLPACK_OPAQUE, kDLOpaqueHandle);
SAME_VALUE(VIKING_DLPACK_BFLOAT, kDLBfloat);
SAME_VALUE(VIKING_DLPACK_COMPLEX, kDLComplex);
SAME_VALUE(VIKING_DLPACK_BOOL, kDLBool);
SAME_VALUE(VIKING_DLPACK_FLOAT8_E4M3FN, kDLFloat8_e4m3fn);
SAME_VALUE(VIKING_DLPACK_FLOAT8_E4M3FNUZ, kDLFloat8_e4m3fnuz);
SAME_VALUE(VIKING_DLPACK_FLOAT8_E5M2, kDLFloat8_e5m2);
SAME_VALUE(VIKING_DLPACK_FLOAT8_E5M2FNUZ, kDLFloat8_e5m2fnuz);
SAME_VALUE(VIKING_DLPACK_FLOAT8_E8M0FNU, kDLFloat8_e8m0fnu);
SAME_VALUE(VIKING_DLPACK_FLOAT4_E2M1FN, kDLFloat4_e2m1fn);

SAME_VALUE(VIKING_DLPACK_FLAG_COPIED, DLPACK_FLAG_BITMASK_IS_COPIED);

SAME_SIZE(viking_dlpack_version, DLPackVersion);
SAME_PLACE(viking_dlpack_version, major, DLPackVersion, major);
SAME_PLACE(viking_dlpack_version, minor, DLPackVersion, minor);

/* Their device and dtype are structs of their own; ours are flat. */
SAME_SIZE(viking_dlpack_tensor, DLTensor);
SAME_PLACE(viking_dlpack_tensor, data, DLTensor, data);
SAME_PLACE(viking_dlpack_tensor, device_type, DLTensor, device.device_type);
SAME_PLACE(viking_dlpack_tensor, device_id, DLTensor, device.device_id);
SAME_PLACE(viking_dlpack_tensor, ndim, DLTensor, ndim);
SAME_PLACE(viking_dlpack_tensor, code, DLTensor, dtype.code);
SAME_PLACE(viking_dlpack_tensor, bits, DLTensor, dtype.bits);
SAME_PLACE(viking_dlpack_tensor, lanes, DLTensor, dtype.lanes);
SAME_PLACE(viking_dlpack_tensor, shape, DLTensor, shape);
SAME_PLACE(viking_dlpack_tensor, strides, DLTensor, strides);
SAME_PLACE(viking_dlpack_tensor, byte_offset, DLTensor, byte_offset);

SAME_SIZE(viking_dlpack_managed, DLManagedTensor);
SAME_PLACE(viking_dlpack_managed, tensor, DLManagedTensor, dl_tensor);
SAME_PLACE(viking_dlpack_managed, context, DLManagedTensor, manager_ctx);
SAME_PLACE(viking_dlpack_managed, deleter, DLManagedTensor, deleter);

SAME_SIZE(viking_dlpack_managed_versioned, DLManagedTensorVersioned);
SAME_PLACE(viking_dlpack_managed_versioned, version, DLManagedTensorVersioned, version);
SAME_PLACE(viking_dlpack_managed_versioned, context, DLManagedTensorVersioned, manager_ctx);
SAME_PLACE(viking_dlpack_managed_versioned, deleter, DLManagedTensorVersioned, deleter);
SAME_PLACE(viking_dlpack_managed_versioned, flags, DLManagedTensorVersioned, flags);
SAME_PLACE(viking_dlpack_managed_versioned, tensor, DLManagedTensorVersioned, dl_tensor);

SAME_SIZE(viking_dlpack_exchange_header, DLPackExchangeAPIHeader);
SAME_PLACE(viking_dlpack_exchange_header, version, DLPackExchangeAPIHeader, version);
SAME_PLACE(viking_dlpack_exchange_header, previous, DLPackExchangeAPIHeader, prev_api);

SAME_SIZE(viking_dlpack_exchange, DLPackExchangeAPI);
SAME_PLACE(viking_dlpack_exchange, header, DLPackExchangeAPI, header);
SAME_PLACE(viking_dlpack_exchange, allocate, DLPackExchangeAPI, managed_tensor_allocator);
SAME_PLACE(viking_dlpack_exchange, export_managed, DLPackExchangeAPI, managed_tensor_from_py_object_no_sync);
SAME_PLACE(viking_dlpack_exchange, import_managed, DLPackExchangeAPI, managed_tensor_to_py_object_no_sync);
SAME_PLACE(viking_dlpack_exchange, borrow, DLPackExchangeAPI, dltensor_from_py_object_no_sync);
SAME_PLACE(viking_dlpack_exchange, current_work_stream, DLPackExchangeAPI, current_work_stream);

/* That an int32_t argument may stand for their enumeration. */
SAME_SIZE(int32_t, DLDeviceType);
