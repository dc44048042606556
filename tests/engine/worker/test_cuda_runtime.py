# SPDX-License-Identifier: Apache-2.0
"""The stream that a mark is recorded in, whichever thread steps the engine.

torch.cuda is replaced by a bookkeeper: as in CUDA, each thread has a current device, device 0 at
first, and a current stream of each device, the device's default stream at first. A copy to a device
is queued in its current stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratakv.engine.worker.runtime.cuda_runtime import CudaRuntime
from stratakv.engine.worker.runtime.device_runtime import Mark

Device = torch.device | str | int | None


class Books:
    """The current device and streams of each thread, and the events that were recorded."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self.priorities: list[int] = []  # of the streams that were made
        self._default_streams = [self.new_stream(index) for index in range(4)]
        self.events: list[Any] = []

    def current_device(self) -> int:
        return getattr(self._of_thread, "device", 0)

    def set_device(self, device: Device) -> None:
        self._of_thread.device = self._index(device)

    def current_stream(self, device: Device = None) -> Any:
        index = self._index(device)
        return self._streams().get(index, self._default_streams[index])

    def set_stream(self, stream: Any) -> None:
        self.set_device(stream.device)
        self._streams()[stream.device.index] = stream

    def new_stream(self, device: Device = None, priority: int = 0) -> Any:
        self.priorities.append(priority)
        return SimpleNamespace(device=torch.device("cuda", self._index(device)))

    @contextmanager
    def in_device(self, device: Device) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    @contextmanager
    def in_stream(self, stream: Any) -> Iterator[None]:
        with self.in_device(stream.device):
            before = self.current_stream()
            self.set_stream(stream)
            try:
                yield
            finally:
                self.set_stream(before)

    def new_event(self, **_: Any) -> Any:
        event = SimpleNamespace(stream=None, num_waits=0)

        def record(stream: Any = None) -> None:
            event.stream = self.current_stream() if stream is None else stream

        def synchronize() -> None:
            event.num_waits += 1

        event.record, event.synchronize = record, synchronize
        self.events.append(event)
        return event

    def _streams(self) -> dict[int, Any]:
        if not hasattr(self._of_thread, "streams"):
            self._of_thread.streams = {}
        streams: dict[int, Any] = self._of_thread.streams
        return streams

    def _index(self, device: Device) -> int:
        if device is None:
            return self.current_device()
        index = device if isinstance(device, int) else torch.device(device).index
        return self.current_device() if index is None else index


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    books = Books()
    for name, stand_in in {
        "current_device": books.current_device,
        "set_device": books.set_device,
        "current_stream": books.current_stream,
        "set_stream": books.set_stream,
        "Stream": books.new_stream,
        "device": books.in_device,
        "stream": books.in_stream,
        "Event": books.new_event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return books


def in_another_thread(work: Callable[[], Any]) -> Any:
    """The result of `work` in a thread that has just begun."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results.pop()


def test_a_mark_belongs_to_the_runtimes_device_in_every_thread(books: Books) -> None:
    runtime = CudaRuntime(torch.device("cuda:1"))

    def step() -> tuple[Any, Any, int]:
        """The streams of the mark and of a copy, and the device that Triton launches on."""
        with runtime.entered():
            runtime.mark()
            copied = books.current_stream("cuda:1")
            return books.events.pop().stream, copied, books.current_device()

    def step_of_the_loop() -> tuple[Any, Any, int]:
        runtime.enter_thread()
        return step()

    def step_elsewhere() -> tuple[Any, Any, int]:
        books.set_device("cuda:2")
        return step()

    for found in (step(), *map(in_another_thread, (step, step_of_the_loop, step_elsewhere))):
        marked, copied, device = found
        assert marked is copied, f"the mark is in a stream of {marked.device}"
        assert device == 1


def test_a_thread_that_only_calls_keeps_its_device_and_its_stream(books: Books) -> None:
    """That of whoever builds an engine in a notebook."""
    runtime = CudaRuntime(torch.device("cuda:1"))
    before = books.current_device(), books.current_stream("cuda:1")
    with runtime.entered():
        assert books.current_device() == 1 and books.current_stream() is not before[1]
    assert (books.current_device(), books.current_stream("cuda:1")) == before


def test_steps_come_before_copies(books: Books) -> None:
    """The lower number is served first; copies have 0."""
    CudaRuntime(torch.device("cuda:1"))
    assert books.priorities[-1] < 0


def test_waiting_for_a_mark_waits_for_its_event(books: Books) -> None:
    runtime = CudaRuntime(torch.device("cuda:1"))
    marks: list[Mark] = [runtime.mark(), runtime.mark()]
    marks[1].wait()
    assert [event.num_waits for event in books.events] == [0, 1]
