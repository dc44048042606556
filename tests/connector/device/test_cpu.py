# SPDX-License-Identifier: Apache-2.0
"""What only the CPU device does: its queue bound, its deadline, every dtype of a pool."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from stratakv.connector.device import cpu
from stratakv.connector.device.base import DeviceError, Stream
from stratakv.connector.device.cpu import CpuCopyDevice, CpuEvent
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.errors import InvalidBlock
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.tag import payload_digest

WAIT_SECONDS = 10.0


@pytest.fixture
def slab() -> Iterator[CpuSlab]:
    layout = BlockLayout(1, 4, 1, 8, "float32")
    slab = CpuSlab(layout, 4 * layout.slot_bytes, populate_threads=1)
    yield slab
    slab.close()


def pool_of(slab: CpuSlab, num_blocks: int = 4) -> torch.Tensor:
    return torch.rand(num_blocks, 1, 2, 4, 1, 8)


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16"])
def test_every_dtype_keeps_its_bits(name: str) -> None:
    layout = BlockLayout(2, 4, 2, 8, name)
    slab = CpuSlab(layout, 4 * layout.slot_bytes, populate_threads=1)
    device = CpuCopyDevice()
    device.register_slab(slab)
    pool = torch.randn(3, 2, 2, 4, 2, 8, dtype=torch.float64).to(getattr(torch, name))
    pool[1, 0, 0, 0, 0, 0] = float("nan")
    device.register_pool(pool)
    before = pool.view(torch.uint8).clone()
    assert device.copy(Stream.STORE, [0, 1, 2], [2, 0, 1]).wait(WAIT_SECONDS)
    pool.zero_()
    assert device.copy(Stream.LOAD, [0, 1, 2], [2, 0, 1]).wait(WAIT_SECONDS)
    assert torch.equal(pool.view(torch.uint8), before)
    assert device.close(WAIT_SECONDS)
    slab.close()


def test_pages_that_lie_apart(slab: CpuSlab) -> None:
    """Whole pages with gaps between them: where one begins is not told by how long it is."""
    device = CpuCopyDevice()
    device.register_slab(slab)
    device.make_digests()
    size = slab.layout.page_bytes
    memory = np.random.default_rng(1).integers(0, 256, (5, 3 * size), np.uint8)
    pages = memory[:, size : 2 * size]
    device.register_parts([pages])
    stored = device.copy_held([4, 0, 1], [2, 0, 3])
    assert stored.done() and stored.error() is None
    for block, slot in ((4, 2), (0, 0), (1, 3)):
        assert bytes(slab.buffer(slot)[:size]) == pages[block].tobytes()
    assert device.digests(stored) == [payload_digest(pages[i].tobytes()) for i in (4, 0, 1)]
    assert device.close(WAIT_SECONDS)


def test_pages_that_lie_in_several_places(slab: CpuSlab) -> None:
    """Three quarters of a page are rows of another array each, and a quarter is in one piece."""
    device = CpuCopyDevice()
    device.register_slab(slab)
    device.make_digests()
    size = slab.layout.page_bytes // 4
    numbers = np.random.default_rng(1)
    outer = numbers.integers(0, 256, (3, 5, size), np.uint8)  # layers outermost
    inner = numbers.integers(0, 256, (5, size), np.uint8)
    device.register_parts([outer.transpose(1, 0, 2), inner])
    wanted = outer.copy(), inner.copy()
    stored = device.copy(Stream.STORE, [4, 0, 1], [2, 0, 3])
    assert stored.wait(WAIT_SECONDS) and stored.error() is None
    page = outer[:, 4].tobytes() + inner[4].tobytes()
    assert bytes(slab.buffer(2)[: len(page)]) == page
    digests = device.digests(stored)
    assert digests is not None and digests[0] == payload_digest(page)
    outer[:], inner[:] = 0, 0
    loaded = device.copy(Stream.LOAD, [4, 0, 1], [2, 0, 3])
    assert loaded.wait(WAIT_SECONDS) and loaded.error() is None
    for block in (0, 1, 4):
        assert (outer[:, block] == wanted[0][:, block]).all()
        assert (inner[block] == wanted[1][block]).all()
    assert not outer[:, 2:4].any() and not inner[2:4].any()
    assert device.close(WAIT_SECONDS)


def test_parts_that_make_no_page_are_refused(slab: CpuSlab) -> None:
    device = CpuCopyDevice()
    part = np.zeros((5, slab.layout.page_bytes // 2), np.uint8)
    with pytest.raises(DeviceError):
        device.register_parts([part, part])
    device.register_slab(slab)
    with pytest.raises(InvalidBlock, match="a page of the slab's layout has"):
        device.register_parts([part])
    with pytest.raises(InvalidBlock, match=r"\[5, 4\] blocks"):
        device.register_parts([part, part[:4]])
    assert device.close(WAIT_SECONDS)


def test_a_copy_without_a_pool_is_refused(slab: CpuSlab) -> None:
    device = CpuCopyDevice()
    with pytest.raises(DeviceError):
        device.register_pool(pool_of(slab))
    device.register_slab(slab)
    with pytest.raises(DeviceError):
        device.copy(Stream.STORE, [0], [0])
    assert device.close(WAIT_SECONDS)


def test_a_full_queue_refuses_at_once(slab: CpuSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "QUEUE_JOBS", 2)
    device = CpuCopyDevice()
    device.register_slab(slab)
    device.register_pool(pool_of(slab))
    gate = CpuEvent()
    events = [device.copy(Stream.STORE, [0], [0], [gate])]
    deadline = time.monotonic() + WAIT_SECONDS
    while device._streams[Stream.STORE]._jobs.qsize() and time.monotonic() < deadline:
        time.sleep(0.001)  # until it runs
    events += [device.copy(Stream.STORE, [0], [0], [gate]) for _ in range(2)]
    with pytest.raises(DeviceError, match="2 copies"):
        device.copy(Stream.STORE, [0], [0], [gate])
    gate.mark_done()
    assert all(event.wait(WAIT_SECONDS) and event.error() is None for event in events)
    assert device.close(WAIT_SECONDS)


def test_everybody_who_waits_for_an_event_is_woken() -> None:
    event = CpuEvent()
    assert not event.done() and not event.wait(0.0) and not event.wait(-1.0)
    woken: list[bool] = []
    waiters = [
        threading.Thread(target=lambda: woken.append(event.wait(WAIT_SECONDS))) for _ in range(3)
    ]
    for waiter in waiters:
        waiter.start()
    event.mark_done(MemoryError("no"), 2.0)
    event.mark_done()
    for waiter in waiters:
        waiter.join(WAIT_SECONDS)
    assert woken == [True] * 3 and event.done() and event.wait(-1.0)
    assert isinstance(event.error(), MemoryError) and event.seconds() == 2.0, "the first end counts"


def test_a_full_queue_is_closed_in_order(slab: CpuSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "QUEUE_JOBS", 1)
    device = CpuCopyDevice()
    device.register_slab(slab)
    device.register_pool(pool_of(slab))
    gate = CpuEvent()
    last = device.copy(Stream.STORE, [0], [0], [gate])
    with contextlib.suppress(DeviceError):  # the first may have begun, or may be all that fits
        last = device.copy(Stream.STORE, [1], [1], [gate])
    assert not device.close(0.05)
    gate.mark_done()
    assert device.close(WAIT_SECONDS)
    assert last.done() and last.error() is None


def test_a_dependency_that_never_ends_fails_the_copy_and_not_the_stream(slab: CpuSlab) -> None:
    device = CpuCopyDevice(dependency_seconds=0.02)
    device.register_slab(slab)
    device.register_pool(pool_of(slab))
    never = CpuEvent()
    stuck = device.copy(Stream.STORE, [0], [0], [never])
    after = device.copy(Stream.STORE, [1], [1])
    assert stuck.wait(WAIT_SECONDS)
    assert isinstance(stuck.error(), DeviceError)
    assert not any(slab.buffer(0)), "a failed copy has written"
    assert after.wait(WAIT_SECONDS)
    assert after.error() is None
    assert device.close(WAIT_SECONDS)


def test_an_error_while_copying_is_in_the_event(
    slab: CpuSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise MemoryError("no")

    device = CpuCopyDevice()
    device.register_slab(slab)
    device.register_pool(pool_of(slab))
    monkeypatch.setattr(cpu, "_copy_runs", broken)
    event = device.copy(Stream.LOAD, [0], [0])
    assert event.wait(WAIT_SECONDS)
    assert isinstance(event.error(), MemoryError)
    assert device.close(WAIT_SECONDS)


def page(slab: CpuSlab, slot: int) -> bytes:
    return bytes(slab.buffer(slot)[: slab.layout.page_bytes])


def held_device(slab: CpuSlab) -> tuple[CpuCopyDevice, torch.Tensor, list[int]]:
    """A device, its pool, and the threads that have copied something."""
    device, pool, copied_by = CpuCopyDevice(), pool_of(slab), list[int]()
    device.set_notify(lambda: copied_by.append(threading.get_ident()))
    device.register_slab(slab)
    device.register_pool(pool)
    return device, pool, copied_by


def test_a_small_store_that_holds_the_pass_is_made_by_the_caller(slab: CpuSlab) -> None:
    device, pool, copied_by = held_device(slab)
    gate = CpuEvent()
    stuck = device.copy(Stream.STORE, [3], [3], [gate])
    event = device.copy_held([0, 2], [1, 0], [device.writer_event()])
    assert event.done() and event.error() is None
    assert copied_by == [threading.get_ident()], "its end was told"
    assert page(slab, 1) == pool[0].numpy().tobytes()
    assert page(slab, 0) == pool[2].numpy().tobytes()
    assert not stuck.done()
    gate.mark_done()
    with pytest.raises(InvalidBlock, match="block ids go from 0 to 3"):
        device.copy_held([4], [0])
    assert device.close(WAIT_SECONDS)
    with pytest.raises(DeviceError, match="closed"):
        device.copy_held([0], [0])


@pytest.mark.parametrize("why", ["it waits for something", "it is large"])
def test_another_one_is_made_by_the_thread(
    slab: CpuSlab, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    device, pool, copied_by = held_device(slab)
    gate = CpuEvent()
    if why == "it is large":
        monkeypatch.setattr(cpu, "HELD_BYTES", slab.layout.page_bytes)
        gate.mark_done()
    event = device.copy_held([0, 1], [0, 1], [gate])
    gate.mark_done()
    assert event.wait(WAIT_SECONDS)
    assert page(slab, 1) == pool[1].numpy().tobytes()
    assert device.close(WAIT_SECONDS)
    assert len(copied_by) == 1 and threading.get_ident() not in copied_by
