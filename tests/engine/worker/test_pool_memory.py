# SPDX-License-Identifier: Apache-2.0
"""Memory of a pool: zeros at once, whose pages are taken behind the start."""

from __future__ import annotations

import ctypes
import mmap
import threading

import pytest
import torch

from stratakv.engine.worker import pool_memory
from stratakv.engine.worker.pool_memory import zeroed_memory
from stratakv.kernels.cpu.huge_pages import HUGE_PAGE_BYTES

SIZE = 3 * HUGE_PAGE_BYTES + 100
SECONDS = 30.0


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every memory is taken by a thread, a huge page at a time."""
    monkeypatch.setattr(pool_memory, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(pool_memory, "_PIECE_BYTES", HUGE_PAGE_BYTES)


def taker() -> threading.Thread | None:
    return next((t for t in threading.enumerate() if t.name == "stratakv-pool-pages"), None)


def pages_in_memory(memory: torch.Tensor) -> tuple[int, int]:
    """Those that the system has given, and all of them."""
    count = -(-memory.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    place, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    assert ctypes.CDLL(None).mincore(place, size, found) == 0
    return sum(state & 1 for state in found), count


def test_pages_are_taken_by_a_thread_that_changes_nothing(behind: None) -> None:
    memory = zeroed_memory(SIZE)
    memory[::4096] = 7  # while it is at it
    if (thread := taker()) is not None:
        thread.join(SECONDS)
    assert taker() is None
    taken, count = pages_in_memory(memory)
    assert taken == count
    assert int(memory.sum()) == 7 * -(-SIZE // 4096)


def test_the_thread_ends_with_the_memory(behind: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    gate, entered = threading.Event(), threading.Event()

    class Library:
        def madvise(self, *_: object) -> int:
            asked.append(1)
            entered.set()
            gate.wait(SECONDS)
            return 0

    monkeypatch.setattr(pool_memory.ctypes, "CDLL", lambda _name: Library())
    monkeypatch.setattr(pool_memory, "ask_for_huge_pages", lambda _memory: None)
    memory = zeroed_memory(SIZE)
    thread = taker()
    assert thread is not None and entered.wait(SECONDS)
    del memory
    gate.set()
    thread.join(SECONDS)
    assert not thread.is_alive() and asked == [1]


def test_an_older_kernel_gives_pages_when_they_are_used(
    behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_memory, "_MADV_POPULATE_WRITE", 12345)  # which it does not know
    memory = zeroed_memory(SIZE)
    if (thread := taker()) is not None:
        thread.join(SECONDS)
    assert taker() is None and not memory.any()


@pytest.mark.parametrize("size", [1, 4096, HUGE_PAGE_BYTES, SIZE])
def test_little_memory_is_there_at_once(size: int) -> None:
    memory = zeroed_memory(size)
    assert (memory.shape, memory.dtype) == ((size,), torch.uint8)
    assert taker() is None and not memory.any()
    if size >= HUGE_PAGE_BYTES:
        assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
        taken, count = pages_in_memory(memory)
        assert taken == count


def test_memory_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises((OSError, RuntimeError)):
        zeroed_memory(1 << 60)
