# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime's functions for streams, events and single copies, bound by ctypes.

torch offers most of these functions too, but two torch streams may be the same CUDA stream, and
torch events report no error codes. A test compares every constant and signature here with the
headers of CUDA 12.8 and 13. Batched copies and page-locking are in `kernels/copy/copy_engine.py`.
Importing this module needs no CUDA."""

from __future__ import annotations

import ctypes
from typing import Any

from ...kernels.copy.copy_engine import CudaError

# Flags of `cudaStreamCreateWithPriority`, `cudaEventCreateWithFlags`, `cudaMemcpyAsync`.
STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC = 1
MEMCPY_HOST_TO_DEVICE = 1
MEMCPY_DEVICE_TO_HOST = 2
# The capture mode of a thread that may call CUDA while another thread captures a graph.
CAPTURE_MODE_RELAXED = 2

SUCCESS = 0
NOT_READY = 600
# Errors after which "any further CUDA work will return the same error" (CUDA's header), so the
# process has to be restarted. The header words the last two errors differently.
STICKY = {
    214: "cudaErrorECCUncorrectable",
    226: "cudaErrorContained",
    700: "cudaErrorIllegalAddress",
    702: "cudaErrorLaunchTimeout",
    709: "cudaErrorContextIsDestroyed",
    710: "cudaErrorAssert",
    714: "cudaErrorHardwareStackError",
    715: "cudaErrorIllegalInstruction",
    716: "cudaErrorMisalignedAddress",
    717: "cudaErrorInvalidAddressSpace",
    718: "cudaErrorInvalidPc",
    719: "cudaErrorLaunchFailure",
    721: "cudaErrorTensorMemoryLeak",
    810: "cudaErrorMpsClientTerminated",
    911: "cudaErrorExternalDevice",
    4: "cudaErrorCudartUnloading",
    999: "cudaErrorUnknown",
}

_pointer, _int, _unsigned, _size = (
    ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
)  # fmt: skip
# The argument types of each function; all functions return `cudaError_t`, an int.
SIGNATURES: dict[str, tuple[type[Any], ...]] = {
    "cudaSetDevice": (_int,),
    "cudaThreadExchangeStreamCaptureMode": (_pointer,),
    "cudaDeviceGetStreamPriorityRange": (_pointer, _pointer),
    "cudaStreamCreateWithPriority": (_pointer, _unsigned, _int),
    "cudaStreamDestroy": (_pointer,),
    "cudaStreamWaitEvent": (_pointer, _pointer, _unsigned),
    "cudaEventCreateWithFlags": (_pointer, _unsigned),
    "cudaEventRecord": (_pointer, _pointer),
    "cudaEventQuery": (_pointer,),
    "cudaEventSynchronize": (_pointer,),
    "cudaEventElapsedTime": (_pointer, _pointer, _pointer),
    "cudaEventDestroy": (_pointer,),
    "cudaMemcpyAsync": (_pointer, _pointer, _size, _int, _pointer),
}


class CudaApi:
    """The functions of one CUDA library as Python functions, for any thread. ctypes releases the
    interpreter's lock during each call. Every method raises CudaError."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, types in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, ctypes.c_int
        library.cudaGetErrorName.restype = ctypes.c_char_p
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def set_device(self, index: int) -> None:
        self._call("cudaSetDevice", index)

    def relax_capture(self) -> None:
        """Let the calling thread call CUDA while another thread captures a graph."""
        mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
        self._call("cudaThreadExchangeStreamCaptureMode", ctypes.addressof(mode))

    def create_stream(self) -> int:
        """Create a stream of the lowest priority that does not wait for the default stream."""
        least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self._call(
            "cudaDeviceGetStreamPriorityRange", ctypes.addressof(least), ctypes.addressof(greatest)
        )
        self._call(
            "cudaStreamCreateWithPriority",
            ctypes.addressof(stream),
            STREAM_NON_BLOCKING,
            least.value,
        )
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream; work queued in it still runs."""
        self._call("cudaStreamDestroy", stream)

    def create_event(self) -> int:
        """Create an event that records its time. Waiting threads sleep."""
        event = ctypes.c_void_p()
        self._call("cudaEventCreateWithFlags", ctypes.addressof(event), EVENT_BLOCKING_SYNC)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Destroy an event; streams that already wait for the event still do."""
        self._call("cudaEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        """Record an event that ends when all work now in the stream has run."""
        self._call("cudaEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """Delay work queued in the stream from now on until the event's last recording is reached.
        An event that was never recorded delays no work."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def has_ended(self, event: int) -> bool:
        """Whether all work before the event has run."""
        code = self._library.cudaEventQuery(event)
        if code == NOT_READY:
            return False
        self._check_error_code(code, "cudaEventQuery")
        return True

    def synchronise_event(self, event: int) -> None:
        """Sleep until all work before the event has run, without a time limit."""
        self._call("cudaEventSynchronize", event)

    def seconds_between(self, start: int, end: int) -> float:
        """Return the seconds between two events that have been reached."""
        milliseconds = ctypes.c_float()
        self._call("cudaEventElapsedTime", ctypes.addressof(milliseconds), start, end)
        return milliseconds.value / 1e3

    def memcpy_async(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        """Queue one copy. With pageable host memory the call may wait for the stream."""
        self._call("cudaMemcpyAsync", target, source, size, kind, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check_error_code(getattr(self._library, name)(*arguments), name)

    def _check_error_code(self, code: int, what: str) -> None:
        if code != SUCCESS:
            raise CudaError.from_code(self._library, code, what)
