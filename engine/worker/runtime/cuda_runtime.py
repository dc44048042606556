# SPDX-License-Identifier: Apache-2.0
"""CudaRuntime: the CUDA implementation of `device_runtime.py`, with a stream, staging memory,
events, graphs and free memory.

All work runs in one stream, whose priority is higher than that of the streams that copy blocks. In
CUDA, each thread has its own current device and stream. An engine may be built in one thread and
run its steps in another, so the second thread must call `enter_thread` first. This module is
imported only if the worker uses a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .device_runtime import Mark, Work
from .placement import with_index

# Runs before a record: the first runs compile kernels and choose algorithms, which must not become
# part of a graph.
WARM_UPS = 2
# A lower number is a higher priority; copies and all other work of the process have 0.
PRIORITY = -1


class CudaRuntime:
    """A GPU and the stream of the worker."""

    def __init__(self, device: torch.device) -> None:
        self.device = with_index(device)
        self.can_record = True
        self._stream = torch.cuda.Stream(self.device, PRIORITY)  # type: ignore[no-untyped-call]
        self._memory: Any = None  # shared by all graphs, as one runs at a time
        self._here = threading.local()  # `is_in` is set in threads that have entered

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)  # Triton launches on the current device
        torch.cuda.set_stream(self._stream)
        self._here.is_in = True

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext() if getattr(self._here, "is_in", False) else self._in_stream()

    @contextmanager
    def _in_stream(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _EventMark(event)

    def record_work(self, work: Work) -> Work:
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        for _ in range(WARM_UPS):
            work()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may register memory and wait for copies during the capture.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = work()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def seconds_of(self, work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(self._stream)
        work()
        end.record(self._stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class CudaMeter:
    """Reports the memory of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.init()  # type: ignore[no-untyped-call]

    def total_bytes(self) -> int:
        return self._query_memory()[1]

    def free_bytes(self) -> int:
        return self._query_memory()[0]

    def held_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def _query_memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)


class _EventMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
