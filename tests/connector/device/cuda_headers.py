# SPDX-License-Identifier: Apache-2.0
"""What the headers of the CUDA runtime say, as read from those of 12.8.90, 13.0.96 and 13.5.37.

A mistake in a signature crashes, or worse does not, only where there is a device; so ctypes is
compared with this table, and this table with the headers by `source_of_check`, where a
compiler and the headers are at hand (cuda_package.py finds them).
"""

from __future__ import annotations

VERSIONS = (12080, 13000, 13050)

# Name → parameters, in all versions. All return cudaError_t.
PROTOTYPES = {
    "cudaSetDevice": "int",
    "cudaThreadExchangeStreamCaptureMode": "enum cudaStreamCaptureMode *",
    "cudaDeviceGetStreamPriorityRange": "int *, int *",
    "cudaStreamCreateWithPriority": "cudaStream_t *, unsigned int, int",
    "cudaStreamDestroy": "cudaStream_t",
    "cudaStreamWaitEvent": "cudaStream_t, cudaEvent_t, unsigned int",
    "cudaEventCreateWithFlags": "cudaEvent_t *, unsigned int",
    "cudaEventRecord": "cudaEvent_t, cudaStream_t",
    "cudaEventQuery": "cudaEvent_t",
    "cudaEventSynchronize": "cudaEvent_t",
    "cudaEventElapsedTime": "float *, cudaEvent_t, cudaEvent_t",
    "cudaEventDestroy": "cudaEvent_t",
    "cudaMemcpyAsync": "void *, const void *, size_t, enum cudaMemcpyKind, cudaStream_t",
    "cudaRuntimeGetVersion": "int *",
    "cudaDriverGetVersion": "int *",
    "cudaHostRegister": "void *, size_t, unsigned int",
    "cudaHostUnregister": "void *",
    "cudaGetLastError": "void",
}
_BATCH_13 = (
    "void *const *, const void *const *, const size_t *, size_t, cudaMemcpyAttributes *, "
    "size_t *, size_t, cudaStream_t"
)
BATCH_PROTOTYPE = {
    12080: "void **, void **, size_t *, size_t, cudaMemcpyAttributes *, size_t *, size_t, "
    "size_t *, cudaStream_t",
    13000: _BATCH_13,
    13050: _BATCH_13,
}
VALUES = {
    "cudaStreamNonBlocking": 1,
    "cudaEventBlockingSync": 1,
    "cudaEventDisableTiming": 2,
    "cudaMemcpyHostToDevice": 1,
    "cudaMemcpyDeviceToHost": 2,
    "cudaStreamCaptureModeRelaxed": 2,
    "cudaHostRegisterDefault": 0,
    "cudaMemcpySrcAccessOrderStream": 1,
    "cudaMemcpySrcAccessOrderDuringApiCall": 2,
    "cudaMemcpySrcAccessOrderAny": 3,
    "cudaMemcpyFlagPreferOverlapWithCompute": 1,
    "cudaSuccess": 0,
    "cudaErrorNotReady": 600,
}
# Errors after which, by the words of the header or by what they are, nothing works any more.
STICKY = {
    "cudaErrorCudartUnloading": 4,
    "cudaErrorECCUncorrectable": 214,
    "cudaErrorContained": 226,
    "cudaErrorIllegalAddress": 700,
    "cudaErrorLaunchTimeout": 702,
    "cudaErrorContextIsDestroyed": 709,
    "cudaErrorAssert": 710,
    "cudaErrorHardwareStackError": 714,
    "cudaErrorIllegalInstruction": 715,
    "cudaErrorMisalignedAddress": 716,
    "cudaErrorInvalidAddressSpace": 717,
    "cudaErrorInvalidPc": 718,
    "cudaErrorLaunchFailure": 719,
    "cudaErrorTensorMemoryLeak": 721,
    "cudaErrorMpsClientTerminated": 810,
    "cudaErrorExternalDevice": 911,
    "cudaErrorUnknown": 999,
}
# Of cudaMemcpyAttributes: bytes in all, and where each member begins.
ATTRIBUTES_SIZE = 24
ATTRIBUTES = {"srcAccessOrder": 0, "srcLocHint": 4, "dstLocHint": 12, "flags": 20}


def source_of_check(version: int) -> str:
    """A C++ file that compiles with the headers of that version only if the table is right."""
    lines = ["#include <cuda_runtime_api.h>", "#include <cstddef>", "#include <type_traits>"]
    # Where a name is overloaded for C++, the assignment picks the one that is meant.
    batch = {"cudaMemcpyBatchAsync": BATCH_PROTOTYPE[version]}
    for number, (name, parameters) in enumerate({**PROTOTYPES, **batch}.items()):
        lines.append(f"cudaError_t (*f{number})({parameters}) = {name};")
    for name, value in {**VALUES, **STICKY}.items():
        lines.append(f'static_assert({name} == {value}, "{name}");')
    lines.append(f"static_assert(sizeof(cudaMemcpyAttributes) == {ATTRIBUTES_SIZE});")
    for name, offset in ATTRIBUTES.items():
        lines.append(f"static_assert(offsetof(cudaMemcpyAttributes, {name}) == {offset});")
    lines.append("static_assert(sizeof(int) == 4 && sizeof(enum cudaMemcpyKind) == 4);")
    lines.append(f"static_assert(CUDART_VERSION == {version});")
    return "\n".join(lines) + "\n"
