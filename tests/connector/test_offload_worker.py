# SPDX-License-Identifier: Apache-2.0
"""The worker side: the order it asks of a device, and that every job is reported once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.device.base import DeviceError, Event, Stream
from stratakv.connector.device.cpu import CpuCopyDevice, CpuEvent
from stratakv.connector.messages import ConnectorMetadata, ConnectorWorkerOutput, CopyJob
from stratakv.connector.offload_worker import OffloadWorker
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.slab.cpu_slab import CpuSlab

LAYOUT = BlockLayout(1, 4, 1, 8, "float32")
WAIT_SECONDS = 10.0
MOST_SECONDS = 3.0  # that a step waits for its stores


class GatedDevice(CpuCopyDevice):
    """The CPU device with a last writer that takes as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = CpuEvent()
        self.writer.mark_done()
        self.refuse = False

    def writer_event(self) -> Event:
        return self.writer

    def copy(
        self,
        stream: Stream,
        block_ids: Sequence[int],
        slots: Sequence[int],
        after: Sequence[Event] = (),
    ) -> Event:
        if self.refuse:
            raise DeviceError("no")
        return super().copy(stream, block_ids, slots, after)

    def copy_held(
        self, block_ids: Sequence[int], slots: Sequence[int], after: Sequence[Event] = ()
    ) -> Event:
        if self.refuse:
            raise DeviceError("no")
        return super().copy_held(block_ids, slots, after)


class Rig:
    def __init__(self) -> None:
        self.slab = CpuSlab(LAYOUT, 8 * LAYOUT.slot_bytes, populate_threads=1)
        self.device = GatedDevice()
        self.device.register_slab(self.slab)
        self.signal = CopySignal()
        self.worker = OffloadWorker(
            self.device, self.signal.note_ended, store_wait_seconds=MOST_SECONDS
        )
        self.pool = torch.rand(6, 1, 2, 4, 1, 8)
        self.worker.register_pool(self.pool)

    def block(self, block_id: int) -> bytes:
        return self.pool[block_id].numpy().tobytes()

    def slot(self, slot: int) -> bytes:
        return bytes(self.slab.buffer(slot)[: LAYOUT.page_bytes])

    def poll_until(self, count: int) -> ConnectorWorkerOutput:
        """Polls until so many jobs are reported, together."""
        total = ConnectorWorkerOutput()
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            output = self.worker.poll()
            for name in ("finished_stores", "failed_stores", "finished_loads", "failed_loads"):
                getattr(total, name).extend(getattr(output, name))
                count -= len(getattr(output, name))
            if count <= 0:
                return total
            time.sleep(0.001)
        raise AssertionError("a job was not reported")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.device.writer.mark_done()
    rig.worker.shutdown()
    rig.worker.shutdown()
    assert not rig.worker.poll(), "a job was reported twice"
    rig.slab.close()


def test_an_empty_step_asks_nothing_of_the_device(rig: Rig) -> None:
    rig.device.refuse = True
    rig.worker.start_step(ConnectorMetadata())
    rig.worker.wait_before_forward()
    assert not rig.worker.poll()


def test_blocks_have_left_the_pool_before_the_forward_pass(rig: Rig) -> None:
    before = [rig.block(i) for i in range(3)]
    rig.device.writer = CpuEvent()
    threading.Timer(0.05, rig.device.writer.mark_done).start()
    rig.worker.start_step(ConnectorMetadata(stores=[CopyJob(1, [0, 1, 2], [5, 6, 7])]))
    assert not rig.worker.poll()
    rig.worker.wait_before_forward()
    rig.pool.zero_()  # the pass
    assert [rig.slot(i) for i in (5, 6, 7)] == before
    assert rig.poll_until(1) == ConnectorWorkerOutput(finished_stores=[1])


def test_what_copies_cost_is_reported_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_args: object) -> None:
        time.sleep(0.05)

    monkeypatch.setattr("stratakv.connector.device.cpu._copy_runs", slow)
    rig.device.writer = CpuEvent()
    threading.Timer(1.0, rig.device.writer.mark_done).start()
    rig.worker.start_step(
        ConnectorMetadata(stores=[CopyJob(1, [0], [0])], loads=[CopyJob(2, [1], [1])])
    )
    rig.worker.wait_before_forward()
    output = rig.worker.poll()
    assert output.finished_stores == [1]
    assert 0.05 <= output.store_copy_seconds < 1.0, "waiting for the writer is no copying"
    assert 1.0 <= output.store_wait_seconds < WAIT_SECONDS
    costs = []
    deadline = time.monotonic() + WAIT_SECONDS
    while not costs and time.monotonic() < deadline:
        if (output := rig.worker.poll()).finished_loads:
            costs.append(output.load_copy_seconds)
        assert (output.store_copy_seconds, output.store_wait_seconds) == (0.0, 0.0)
    assert 0.05 <= costs[0] < WAIT_SECONDS
    assert rig.worker.poll().load_copy_seconds == 0.0


def test_a_load_into_a_block_that_is_stored_in_the_same_step(rig: Rig) -> None:
    old = rig.block(0)
    new = bytes(range(256))
    rig.slab.buffer(1)[: LAYOUT.page_bytes] = new
    rig.device.writer = CpuEvent()
    rig.worker.start_step(
        ConnectorMetadata(stores=[CopyJob(1, [0], [0])], loads=[CopyJob(2, [0], [1])])
    )
    assert rig.block(0) == old
    rig.device.writer.mark_done()
    output = rig.poll_until(2)
    assert (output.finished_stores, output.finished_loads) == ([1], [2])
    assert (rig.slot(0), rig.block(0)) == (old, new)


def test_a_load_waits_for_stores_of_earlier_steps_too(rig: Rig) -> None:
    old = rig.block(0)
    rig.device.writer, done = CpuEvent(), rig.device.writer
    rig.worker.start_step(ConnectorMetadata(stores=[CopyJob(1, [0], [0])]))
    slow, rig.device.writer = rig.device.writer, done
    rig.worker.start_step(ConnectorMetadata(loads=[CopyJob(2, [0], [1])]))
    time.sleep(0.02)
    assert rig.block(0) == old
    slow.mark_done()
    rig.poll_until(2)
    assert rig.slot(0) == old


def test_a_load_waits_for_the_last_writer(rig: Rig) -> None:
    old = rig.block(0)
    rig.device.writer = CpuEvent()
    rig.worker.start_step(ConnectorMetadata(loads=[CopyJob(1, [0], [1])]))
    time.sleep(0.02)
    assert rig.block(0) == old
    rig.device.writer.mark_done()
    rig.poll_until(1)


def test_a_copy_that_cannot_begin_is_reported_as_failed(rig: Rig) -> None:
    woken = threading.Event()
    rig.signal.set_wakeup(woken.set)
    rig.device.refuse = True
    rig.worker.start_step(
        ConnectorMetadata(stores=[CopyJob(1, [0], [0])], loads=[CopyJob(2, [1], [1])])
    )
    rig.worker.wait_before_forward()
    assert rig.worker.poll() == ConnectorWorkerOutput(failed_stores=[1], failed_loads=[2])
    assert rig.signal.ended == 2
    assert woken.is_set()
    rig.device.refuse = False
    rig.worker.start_step(ConnectorMetadata(loads=[CopyJob(3, [9], [1])]))  # no such block
    assert rig.worker.poll() == ConnectorWorkerOutput(failed_loads=[3])


def test_a_copy_that_breaks_is_reported_as_failed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise MemoryError("no")

    monkeypatch.setattr("stratakv.connector.device.cpu._copy_runs", broken)
    rig.worker.start_step(
        ConnectorMetadata(stores=[CopyJob(1, [0], [0])], loads=[CopyJob(2, [1], [1])])
    )
    rig.worker.wait_before_forward()
    output = rig.poll_until(2)
    assert (output.failed_stores, output.failed_loads) == ([1], [2])


def test_a_store_that_was_overtaken_by_the_pass_is_no_store(rig: Rig) -> None:
    rig.device.writer = CpuEvent()
    rig.worker.start_step(ConnectorMetadata(stores=[CopyJob(1, [0], [0])]))
    began = time.monotonic()
    rig.worker.wait_before_forward()
    assert MOST_SECONDS <= time.monotonic() - began < WAIT_SECONDS
    assert not rig.worker.poll()
    rig.device.writer.mark_done()
    assert rig.poll_until(1) == ConnectorWorkerOutput(failed_stores=[1])


def test_every_end_reaches_the_signal(rig: Rig) -> None:
    rig.signal.jobs_given(2)
    rig.worker.start_step(
        ConnectorMetadata(stores=[CopyJob(1, [0], [0])], loads=[CopyJob(2, [1], [1])])
    )
    assert rig.signal.wait_idle(WAIT_SECONDS)
    rig.worker.wait_before_forward()
    output = rig.worker.poll()
    assert (output.finished_stores, output.finished_loads) == ([1], [2])
