# SPDX-License-Identifier: Apache-2.0
"""The functions of CUDA as ctypes calls them, against what the headers say."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from stratakv.connector.device import cuda_api
from stratakv.connector.device.cuda_api import SIGNATURES, STICKY, CudaApi
from stratakv.kernels.copy import copy_engine
from stratakv.kernels.copy.copy_engine import CopyAttributes, CudaError, CudaRuntime

from . import cuda_headers

STREAM, EVENT = 0x7F00_1000, 0x7F00_2000


def ctypes_of(parameters: str) -> list[type[Any]]:
    """What a list of C parameters is for ctypes."""
    kinds: list[type[Any]] = []
    for parameter in [] if parameters == "void" else parameters.split(","):
        name = parameter.strip()
        if "*" in name or name in ("cudaStream_t", "cudaEvent_t"):
            kinds.append(ctypes.c_void_p)
        elif name.startswith("enum ") or name == "int":
            kinds.append(ctypes.c_int)
        else:
            kinds.append({"unsigned int": ctypes.c_uint, "size_t": ctypes.c_size_t}[name])
    return kinds


class Library:
    """Functions that record their arguments and give back a code."""

    def __init__(self, version: int = 13050) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.codes: dict[str, int] = {}
        self.writes: dict[str, list[tuple[int, Any]]] = {}  # argument → what to write there
        for name in cuda_headers.PROTOTYPES:
            setattr(self, name, self._function(name))
        self.cudaMemcpyBatchAsync = self._function("cudaMemcpyBatchAsync")

        def give(number: Any) -> int:
            number._obj.value = version
            return 0

        self.cudaRuntimeGetVersion: Any = give
        self.cudaDriverGetVersion: Any = give
        self.cudaGetErrorName: Any = lambda code: b"cudaErrorOfATest"
        self.cudaGetErrorString: Any = lambda code: b"what CUDA says"

    def _function(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            for place, value in self.writes.get(name, []):
                type(value).from_address(arguments[place]).value = value.value
            return self.codes.get(name, 0)

        return call


@pytest.mark.parametrize("version", cuda_headers.VERSIONS)
def test_signatures_are_those_of_the_headers(version: int) -> None:
    library = Library(version)
    CudaApi(library)
    CudaRuntime(library)
    for name, types in SIGNATURES.items():
        function = getattr(library, name)
        assert list(types) == ctypes_of(cuda_headers.PROTOTYPES[name]), name
        assert function.argtypes == types and function.restype is ctypes.c_int
    for name in ("cudaHostRegister", "cudaHostUnregister"):
        expected = ctypes_of(cuda_headers.PROTOTYPES[name])
        assert list(getattr(library, name).argtypes) == expected
    batch: Any = library.cudaMemcpyBatchAsync
    assert list(batch.argtypes) == ctypes_of(cuda_headers.BATCH_PROTOTYPE[version])


def test_numbers_are_those_of_the_headers() -> None:
    values = cuda_headers.VALUES
    assert values["cudaStreamNonBlocking"] == cuda_api.STREAM_NON_BLOCKING
    assert values["cudaEventBlockingSync"] == cuda_api.EVENT_BLOCKING_SYNC
    assert not cuda_api.EVENT_BLOCKING_SYNC & values["cudaEventDisableTiming"]
    assert values["cudaMemcpyHostToDevice"] == cuda_api.MEMCPY_HOST_TO_DEVICE
    assert values["cudaMemcpyDeviceToHost"] == cuda_api.MEMCPY_DEVICE_TO_HOST
    assert values["cudaStreamCaptureModeRelaxed"] == cuda_api.CAPTURE_MODE_RELAXED
    assert values["cudaMemcpySrcAccessOrderStream"] == copy_engine.ACCESS_ORDER_STREAM
    flag = values["cudaMemcpyFlagPreferOverlapWithCompute"]
    assert flag == copy_engine.PREFER_OVERLAP_WITH_COMPUTE
    assert (values["cudaSuccess"], values["cudaErrorNotReady"]) == (
        cuda_api.SUCCESS,
        cuda_api.NOT_READY,
    )
    assert {code: name for name, code in cuda_headers.STICKY.items()} == STICKY
    assert ctypes.sizeof(CopyAttributes) == cuda_headers.ATTRIBUTES_SIZE
    offsets = [getattr(CopyAttributes, name).offset for name, *_ in CopyAttributes._fields_]
    assert offsets == list(cuda_headers.ATTRIBUTES.values())


def test_what_is_asked_of_cuda() -> None:
    library = Library()
    library.writes = {
        "cudaDeviceGetStreamPriorityRange": [(0, ctypes.c_int(0)), (1, ctypes.c_int(-5))],
        "cudaStreamCreateWithPriority": [(0, ctypes.c_void_p(STREAM))],
        "cudaEventCreateWithFlags": [(0, ctypes.c_void_p(EVENT))],
        "cudaEventElapsedTime": [(0, ctypes.c_float(2.5))],
    }
    api = CudaApi(library)
    assert api.create_stream() == STREAM
    assert library.calls[-1][2:] == (cuda_api.STREAM_NON_BLOCKING, 0), "the lowest priority"
    assert api.create_event() == EVENT
    assert library.calls[-1][2:] == (cuda_api.EVENT_BLOCKING_SYNC,), "with a time, and no spinning"
    assert api.seconds_between(EVENT, EVENT + 1) == pytest.approx(2.5e-3)
    assert library.calls[-1][2:] == (EVENT, EVENT + 1)
    library.calls.clear()
    api.wait_event(STREAM, EVENT)
    api.record_event(EVENT, STREAM)
    api.memcpy_async(1000, 2000, 30, cuda_api.MEMCPY_HOST_TO_DEVICE, STREAM)
    api.synchronise_event(EVENT)
    api.destroy_event(EVENT)
    api.destroy_stream(STREAM)
    api.set_device(1)
    assert library.calls == [
        ("cudaStreamWaitEvent", STREAM, EVENT, 0),
        ("cudaEventRecord", EVENT, STREAM),
        ("cudaMemcpyAsync", 1000, 2000, 30, 1, STREAM),
        ("cudaEventSynchronize", EVENT),
        ("cudaEventDestroy", EVENT),
        ("cudaStreamDestroy", STREAM),
        ("cudaSetDevice", 1),
    ]


def test_a_thread_may_go_on_beside_a_capture() -> None:
    library = Library()
    modes = []

    def exchange(address: int) -> int:
        modes.append(ctypes.c_int.from_address(address).value)
        return 0

    library.cudaThreadExchangeStreamCaptureMode: Any = exchange  # type: ignore[misc]
    CudaApi(library).relax_capture()
    assert modes == [cuda_headers.VALUES["cudaStreamCaptureModeRelaxed"]]


def test_an_event_is_reached_or_not_or_fails() -> None:
    library = Library()
    api = CudaApi(library)
    assert api.has_ended(EVENT)
    library.codes["cudaEventQuery"] = cuda_headers.VALUES["cudaErrorNotReady"]
    assert not api.has_ended(EVENT)
    library.codes["cudaEventQuery"] = 700
    with pytest.raises(
        CudaError, match=r"cudaEventQuery failed: .*cudaErrorOfATest, 700"
    ) as failed:
        api.has_ended(EVENT)
    assert failed.value.code == 700
