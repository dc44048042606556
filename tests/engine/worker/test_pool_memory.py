# SPDX-License-Identifier: Apache-2.0
"""Memory of a pool: zeros at once, whose pages are taken behind the start."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stratakv.engine.worker import kv_pool
from stratakv.engine.worker.kv_pool import zeroed_memory
from stratakv.kernels.cpu.huge_pages import HUGE_PAGE_BYTES
from stratakv.kernels.cpu.library import CpuLibrary, Missing, cpu_library

FIRST = HUGE_PAGE_BYTES
SIZE = 3 * HUGE_PAGE_BYTES + 100
SECONDS = 30.0


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every memory is taken by a thread, but for its first huge page."""
    monkeypatch.setattr(kv_pool, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(kv_pool, "_FIRST_BYTES", FIRST)


@pytest.fixture
def library() -> CpuLibrary:
    found = cpu_library()
    if isinstance(found, Missing):
        pytest.skip(f"needs the compiled kernels: {found.reason}")
    return found


def taker() -> threading.Thread | None:
    return next((t for t in threading.enumerate() if t.name == "pool-pages"), None)


def no_taker() -> bool:
    if (thread := taker()) is not None:
        thread.join(SECONDS)
    return taker() is None


def pages_in_memory(memory: torch.Tensor) -> tuple[int, int]:
    """Those that the system has given, and all of them. A page that was only read is none."""
    first = memory.data_ptr() // mmap.PAGESIZE
    count = -(-(memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE) - first
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(8 * first)
        found = torch.frombuffer(bytearray(file.read(8 * count)), dtype=torch.int64)
    is_there, is_only_here = found < 0, (found >> 56) & 1  # the page of zeros is everybody's
    return int((is_there & (is_only_here == 1)).sum()), count


def test_pages_are_taken_by_a_thread_that_changes_nothing(
    behind: None, library: CpuLibrary
) -> None:
    memory = zeroed_memory(SIZE)
    memory[::4096] = 7  # while it is at it
    assert no_taker()
    assert int(memory.sum()) == 7 * -(-SIZE // 4096)


def test_pages_are_taken_where_a_sandbox_refuses_a_lower_priority(
    behind: None, library: CpuLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuses)
    memory = zeroed_memory(SIZE)
    assert no_taker()
    there, of = pages_in_memory(memory)
    assert there == of


def test_the_pool_is_there_where_no_thread_can_be_had(
    behind: None, library: CpuLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    memory = zeroed_memory(SIZE)
    assert pages_in_memory(memory)[0] == FIRST // mmap.PAGESIZE
    assert not memory.any()


def test_every_page_is_there_when_the_thread_has_ended(behind: None, library: CpuLibrary) -> None:
    memory = zeroed_memory(SIZE)
    assert no_taker()
    taken, count = pages_in_memory(memory)
    assert taken == count
    assert not memory.any()


def test_the_thread_ends_with_the_memory(
    behind: None, library: CpuLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[ctypes.c_int64] = []
    has_begun = threading.Event()

    def take(address: int, num_bytes: int, ends: Any) -> int:
        told.append(ends._obj)
        has_begun.set()
        end = time.monotonic() + SECONDS
        while not told[0].value and time.monotonic() < end:
            time.sleep(0.001)
        return library.take_pages(address, num_bytes, ctypes.byref(ctypes.c_int64(0)))  # mapped

    slow = dataclasses.replace(library, take_pages=take)
    monkeypatch.setattr(kv_pool, "cpu_library", lambda: slow)
    memory = zeroed_memory(SIZE)
    part = memory.view(-1)[:10].view(torch.int16)
    assert has_begun.wait(SECONDS)
    del memory
    assert told[0].value == 0, "a part of it lives"
    del part
    assert told[0].value == 1
    assert no_taker()


def test_taking_pages_ends_when_it_is_told_to(library: CpuLibrary) -> None:
    mapped = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    assert not memory.any()
    library.take_pages(memory.data_ptr(), SIZE, ctypes.byref(ctypes.c_int64(1)))
    assert pages_in_memory(memory)[0] == 0
    whole = SIZE // mmap.PAGESIZE * mmap.PAGESIZE  # the page behind is another's
    library.take_pages(memory.data_ptr(), whole, ctypes.byref(ctypes.c_int64(0)))
    taken, count = pages_in_memory(memory)
    assert taken == count - 1
    library.take_pages(memory.data_ptr(), SIZE, ctypes.byref(ctypes.c_int64(0)))
    taken, count = pages_in_memory(memory)
    assert taken == count


def test_what_is_written_while_pages_are_taken_stays(library: CpuLibrary) -> None:
    """Pages that are there already, so that both meet often: where taking one were not a single
    operation, a round in six lost a number with two processors."""
    pages = 4096
    memory = torch.zeros(pages * mmap.PAGESIZE, dtype=torch.uint8)
    first = memory[:: mmap.PAGESIZE]
    address, goes_on = memory.data_ptr(), ctypes.c_int64(0)

    def take() -> None:
        for _ in range(6):
            library.take_pages(address, memory.nbytes, ctypes.byref(goes_on))

    for _ in range(30):
        thread, count = threading.Thread(target=take), 0
        first.zero_()
        thread.start()
        while thread.is_alive():
            first.add_(1)
            count += 1
        thread.join(SECONDS)
        assert bool((first == count % 256).all())


def test_without_the_library_pages_come_when_they_are_used(
    behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pool, "cpu_library", lambda: Missing("of a test"))
    memory = zeroed_memory(SIZE)
    assert taker() is None
    taken, _ = pages_in_memory(memory)
    assert taken == FIRST // mmap.PAGESIZE
    assert not memory.any()


@pytest.mark.parametrize("size", [1, 4096, HUGE_PAGE_BYTES, SIZE])
def test_little_memory_is_there_at_once(size: int) -> None:
    memory = zeroed_memory(size)
    assert (memory.shape, memory.dtype) == ((size,), torch.uint8)
    assert taker() is None and not memory.any()
    taken, count = pages_in_memory(memory)
    assert taken == count


@pytest.mark.parametrize("size", [1 << 60, 1 << 63])
def test_memory_that_cannot_be_had_is_an_error(size: int) -> None:
    with pytest.raises((OSError, RuntimeError)):
        zeroed_memory(size)
