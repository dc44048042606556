# SPDX-License-Identifier: Apache-2.0
"""What only the CUDA device does, on a CUDA made of queues: page-locking, errors, threads, ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from stratakv.connector.device import cuda_lane
from stratakv.connector.device.base import DeviceError, Event, Stream
from stratakv.connector.device.contract_rig import WHOLE_PAGES
from stratakv.connector.device.copy_plan import Way
from stratakv.connector.device.cpu import CpuEvent
from stratakv.connector.device.cuda import CudaCopyDevice
from stratakv.tiers.errors import InvalidBlock
from stratakv.tiers.settings.sizes import show_size
from stratakv.tiers.slab.cpu_slab import CpuSlab

from .fake_cuda import FakeCuda
from .surroundings import BATCHED, KERNEL, SINGLE, random_pool

WAIT_SECONDS = 20.0
BLOCKS, SLOTS = 40, 48
SLOT = WHOLE_PAGES.slot_bytes
PIECE = 4 * SLOT


class Rig:
    """A device, its pool and its slab."""

    def __init__(
        self,
        cuda: FakeCuda,
        *,
        progress: Callable[[int, int], None] | None = None,
        dependency_seconds: float = 60.0,
        slow: tuple[str, ...] = BATCHED,
    ) -> None:
        self.cuda = cuda
        self.slab = CpuSlab(WHOLE_PAGES, SLOTS * SLOT, populate_threads=1)
        self.device = CudaCopyDevice(
            cuda,
            progress=progress,
            dependency_seconds=dependency_seconds,
            piece_bytes=PIECE,
            staging_bytes=3 * SLOT + 100,
        )
        self.pool = cuda.adopt(random_pool(BLOCKS, WHOLE_PAGES))
        self.pages = self.pool.view(torch.uint8).reshape(BLOCKS, -1)
        cuda.slow = frozenset(slow)
        self.device.register_slab(self.slab)
        self.device.register_pool(self.pool)
        cuda.slow = frozenset()

    def store(self, block_ids: list[int], slots: list[int], *after: Event) -> Event:
        return self.device.copy(Stream.STORE, block_ids, slots, after)

    def assert_stored(self, event: Event, block_ids: list[int], slots: list[int]) -> None:
        assert event.wait(WAIT_SECONDS) and event.error() is None
        for block_id, slot in zip(block_ids, slots, strict=True):
            assert bytes(self.slab.buffer(slot)) == bytes(self.pages[block_id].tolist())

    def blocked_event(self) -> tuple[Event, threading.Event]:
        """The writer event of a stream that goes on when the other event is set; then nudge."""
        computing = self.cuda.current
        self.cuda.new_compute_stream()
        opened = self.cuda.block_stream()
        event = self.device.writer_event()
        self.cuda.current = computing
        return event, opened

    def close(self) -> None:
        assert self.device.close(WAIT_SECONDS)
        self.slab.close()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make_rig(cuda: FakeCuda | None = None, *, whole: bool = True, **options: object) -> Rig:
        rig = Rig(cuda or FakeCuda(), **options)  # type: ignore[arg-type]
        if whole:
            assert rig.device.wait_locked(WAIT_SECONDS)
        rigs.append(rig)
        return rig

    yield make_rig
    for rig in rigs:
        rig.close()
        rig.cuda.shut_down()


def test_the_slab_is_locked_in_pieces_and_let_go(make: Callable[..., Rig]) -> None:
    seen: list[tuple[int, int]] = []
    rig = make(progress=lambda done, whole: seen.append((done, whole)))
    assert seen == [(done, SLOTS * SLOT) for done in range(PIECE, SLOTS * SLOT + 1, PIECE)]
    sizes = [size for size in rig.cuda.locked.values() if size == PIECE]
    assert len(sizes) == SLOTS * SLOT // PIECE
    rig.close()
    assert rig.cuda.locked == {}, "slab and buffers are given back"


def test_copies_do_not_wait_for_the_slab_to_be_locked(make: Callable[..., Rig]) -> None:
    go_on = threading.Event()
    rig = make(whole=False, progress=lambda done, whole: go_on.wait(WAIT_SECONDS) and None)
    while not rig.cuda.calls["register_host"]:
        time.sleep(0.001)
    # Slots 0 to 3 are locked; one job has slots of both kinds.
    rig.assert_stored(rig.store([7, 8, 9, 10], [2, 3, 4, 5]), [7, 8, 9, 10], [2, 3, 4, 5])
    go_on.set()
    assert rig.device.wait_locked(WAIT_SECONDS)
    rig.assert_stored(rig.store([1, 2], [4, 5]), [1, 2], [4, 5])


def test_memory_that_cannot_be_locked_is_served_and_said(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "stratakv.connector.device.cuda_slab.resource.getrlimit", lambda which: (65536, 65536)
    )
    rig = make(FakeCuda(most_locked_bytes=4 * SLOT * 2 + 2 * 2 * (3 * SLOT + 100)))
    blocks, slots = list(range(30)), list(range(30))
    rig.assert_stored(rig.store(blocks, slots), blocks, slots)
    [said] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert f"{show_size(2 * PIECE)} of the slab's {show_size(SLOTS * SLOT)} are page-locked" in said
    assert "limit of locked memory is 64KiB; `ulimit -l unlimited` raises it" in said
    assert "stores at " in said and "loads at " in said and " instead of " in said


def test_where_nothing_can_be_locked_blocks_still_move(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda()
    cuda.failures |= {"register_host": 2, "page_locked": 2}
    rig = make(cuda)
    blocks, slots = list(range(20)), list(range(20, 40))
    rig.assert_stored(rig.store(blocks, slots), blocks, slots)
    before = rig.pages[:20].clone()
    rig.pages.zero_()
    load = rig.device.copy(Stream.LOAD, blocks, slots)
    assert load.wait(WAIT_SECONDS) and load.error() is None
    assert torch.equal(rig.pages[:20], before)
    assert "stores have no page-locked buffer" in caplog.text
    assert "stores as the driver does it, loads as the driver does it" in caplog.text


def test_a_limit_that_is_not_the_reason_is_not_blamed(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "stratakv.connector.device.cuda_slab.resource.getrlimit", lambda which: (1 << 40, 1 << 40)
    )
    cuda = FakeCuda()
    cuda.failures["register_host"] = 2
    make(cuda)
    assert "limit of locked memory is not the reason" in caplog.text
    assert "ulimit" not in caplog.text


def test_the_ways_are_chosen_by_measurement(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for slow, way in ((BATCHED, Way.BATCHED), (SINGLE, Way.SINGLE), (KERNEL, Way.KERNEL)):
        caplog.clear()
        cuda = FakeCuda()
        cuda.slow_seconds = 0.01  # beyond what a busy machine takes for the others
        rig = make(cuda, slow=slow)
        rows = [r.getMessage() for r in caplog.records if "measured" in r.getMessage()]
        assert [row.split()[0] for row in rows] == ["stores", "loads"], "said once a direction"
        assert all(f"bytes: {way.value}, and " in row for row in rows)
        blocks, slots = list(range(5, 25)), list(range(20))
        rig.assert_stored(rig.store(blocks, slots), blocks, slots)


def test_without_triton_and_batches_there_are_plain_copies(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda(batch_refusal="the driver is for 12.4")
    cuda.has_kernels = False
    rig = make(cuda)
    rig.assert_stored(rig.store([3, 4], [5, 6]), [3, 4], [5, 6])
    assert "copies are queued one by one: the driver is for 12.4" in caplog.text
    assert "no copies by a kernel of few programs here" in caplog.text
    assert not cuda.batches


def test_a_job_is_one_batch_of_merged_neighbours(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.cuda.batches.clear()
    rig.assert_stored(rig.store([3, 2, 1, 9], [10, 9, 8, 30]), [3, 2, 1, 9], [10, 9, 8, 30])
    [batch] = rig.cuda.batches
    assert sorted(size for _, _, size in batch) == [SLOT, 3 * SLOT]


def test_small_jobs_are_queued_by_the_caller_and_large_ones_by_a_thread(
    make: Callable[..., Rig],
) -> None:
    rig = make()
    with rig.cuda.paused():
        calls = rig.cuda.calls["copy_batch"]
        small = rig.store(list(range(16)), list(range(16)))
        assert rig.cuda.calls["copy_batch"] == calls + 1, "before it returned"
        large = [rig.store(list(range(20)), list(range(20, 40))) for _ in range(3)]
        late = rig.store([0], [47])  # small, but it must stay behind the others
        deadline = time.monotonic() + WAIT_SECONDS
        while rig.cuda.calls["copy_batch"] < calls + 5 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert rig.cuda.calls["copy_batch"] == calls + 5, "all are queued though none has ended"
        assert not small.done() and not late.done()
    assert late.wait(WAIT_SECONDS)
    assert all(event.done() and event.error() is None for event in (small, *large))


def test_an_event_that_is_not_queued_yet_is_waited_for(make: Callable[..., Rig]) -> None:
    """CUDA takes an event that was never recorded for one that has ended."""
    rig = make()
    gate = CpuEvent()
    store = rig.store([4], [4], gate)
    load = rig.device.copy(Stream.LOAD, [30], [4], [store])
    assert not load.wait(0.02)
    gate.mark_done()
    assert load.wait(WAIT_SECONDS) and load.error() is None
    assert torch.equal(rig.pages[30], rig.pages[4])


def test_computing_is_held_and_the_caller_is_not(make: Callable[..., Rig]) -> None:
    rig = make()
    writer, opened = rig.blocked_event()
    before = bytes(rig.pages[4].tolist())
    store = rig.store([4], [4], writer)
    assert rig.device.hold_compute([store], 0.0) == []
    rig.cuda.compute(lambda: rig.pages[4].fill_(1))
    time.sleep(0.02)
    assert bytes(rig.pages[4].tolist()) == before
    opened.set()
    rig.cuda.nudge()
    assert store.wait(WAIT_SECONDS)
    assert bytes(rig.slab.buffer(4)) == before
    rig.cuda.idle()
    assert rig.pages[4].eq(1).all()


def test_where_cuda_holds_nothing_the_caller_waits(make: Callable[..., Rig]) -> None:
    rig = make()
    writer, opened = rig.blocked_event()
    store = rig.store([4], [4], writer)
    rig.cuda.failures["wait_event"] = 1
    assert rig.device.hold_compute([store], 0.02) == [store]
    threading.Timer(0.02, lambda: (opened.set(), rig.cuda.nudge())).start()
    assert rig.device.hold_compute([store], WAIT_SECONDS) == []
    assert store.done()
    del rig.cuda.failures["wait_event"]


def test_what_is_not_queued_in_time_holds_nothing(make: Callable[..., Rig]) -> None:
    rig = make()
    gate = CpuEvent()
    store = rig.store([4], [4], gate)
    assert rig.device.hold_compute([store], 0.02) == [store]
    gate.mark_done()
    assert store.wait(WAIT_SECONDS)


def test_a_dependency_that_never_ends_fails_the_copy_and_not_the_stream(
    make: Callable[..., Rig],
) -> None:
    rig = make(dependency_seconds=0.02)
    stuck = rig.store([0], [0], CpuEvent())
    after = rig.store([1], [1])
    assert stuck.wait(WAIT_SECONDS)
    assert "waited 0.02 s for another stream" in str(stuck.error())
    assert not any(rig.slab.buffer(0)), "a failed copy has written"
    rig.assert_stored(after, [1], [1])


def test_a_full_queue_refuses_at_once(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_lane, "QUEUE_JOBS", 3)
    rig = make()
    writer, opened = rig.blocked_event()
    events = [rig.store([i], [i], writer) for i in range(3)]
    with pytest.raises(DeviceError, match="3 copies wait already"):
        rig.store([3], [3])
    opened.set()
    rig.cuda.nudge()
    assert all(event.wait(WAIT_SECONDS) and event.error() is None for event in events)
    for number in range(5):  # there is room again
        rig.assert_stored(rig.store([number], [number]), [number], [number])


def test_an_error_of_cuda_is_named_and_only_its_copy_fails(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.cuda.failures["copy_batch"] = 1
    failed = rig.store([0], [0])
    assert failed.wait(WAIT_SECONDS)
    assert isinstance(failed.error(), DeviceError)
    assert "cudaErrorOfATest, 1" in str(failed.error())
    del rig.cuda.failures["copy_batch"]
    rig.assert_stored(rig.store([1], [1]), [1], [1])


def test_a_failed_copy_ends_only_when_what_was_queued_of_it_has(make: Callable[..., Rig]) -> None:
    rig = make()
    writer, opened = rig.blocked_event()
    rig.cuda.failures["copy_batch"] = 1
    failed = rig.store([0], [0], writer)
    assert not failed.wait(0.02), "CUDA may have queued some of it"
    opened.set()
    rig.cuda.nudge()
    assert failed.wait(WAIT_SECONDS) and failed.error() is not None


@pytest.mark.parametrize("code", [700, 719])
def test_an_error_that_stays_closes_the_device(make: Callable[..., Rig], code: int) -> None:
    rig = make()
    rig.cuda.failures["after_synchronise"] = code
    event = rig.store([0], [0])
    assert event.wait(WAIT_SECONDS)
    for what in (lambda: rig.store([1], [1]), rig.device.writer_event):
        with pytest.raises(DeviceError, match=rf"the CUDA device is lost.*{code}.*restart it"):
            what()
    assert "is lost" in str(event.error())
    assert rig.device.close(WAIT_SECONDS), "nothing runs any more"


def test_an_error_of_the_writer_is_in_its_event(make: Callable[..., Rig]) -> None:
    rig = make()
    event, opened = rig.blocked_event()
    assert not event.done() and not event.wait(0.01) and event.error() is None
    rig.cuda.failures["has_ended"] = 1
    assert event.wait(WAIT_SECONDS)
    assert isinstance(event.error(), DeviceError)
    del rig.cuda.failures["has_ended"]
    opened.set()
    rig.cuda.nudge()


def test_threads_of_the_device_may_run_beside_a_capture_and_callers_are_left_alone(
    make: Callable[..., Rig],
) -> None:
    rig = make()
    caller = threading.Thread(target=lambda: rig.store([2], [2]), name="caller")
    caller.start()
    caller.join(WAIT_SECONDS)
    own = {name for name, is_own in rig.cuda.entered.items() if is_own}
    assert own == {"stratakv-page-lock"} | {
        f"stratakv-copy-{stream.value}-{what}" for stream in Stream for what in ("queue", "end")
    }
    assert rig.cuda.entered["caller"] is False


def test_every_event_of_cuda_is_given_back(make: Callable[..., Rig]) -> None:
    rig = make()
    for _ in range(20):
        rig.store([0], [0], rig.device.writer_event()).wait(WAIT_SECONDS)
        rig.store(list(range(20)), list(range(20))).wait(WAIT_SECONDS)
    rig.close()
    assert rig.cuda.num_events == 0


def test_a_copy_knows_how_long_it_ran(make: Callable[..., Rig]) -> None:
    rig = make()
    writer, opened = rig.blocked_event()
    store = rig.store([0], [0], writer)
    time.sleep(0.2)
    opened.set()
    rig.cuda.nudge()
    assert store.wait(WAIT_SECONDS)
    assert 0.0 < store.seconds() < 0.2, "not the time in which it waited"


def test_a_device_without_a_pool(make: Callable[..., Rig]) -> None:
    cuda = FakeCuda()
    device = CudaCopyDevice(cuda, staging_bytes=5000)
    with pytest.raises(DeviceError, match="slab must be registered before"):
        device.register_pool(cuda.adopt(random_pool(2, WHOLE_PAGES)))
    with pytest.raises(DeviceError, match="no pool and slab"):
        device.copy(Stream.STORE, [0], [0])
    assert not device.wait_locked(0.0)
    assert device.close(WAIT_SECONDS)
    with pytest.raises(DeviceError, match="closed"):
        device.writer_event()
    cuda.shut_down()


def test_a_pool_on_another_device_is_refused(make: Callable[..., Rig]) -> None:
    rig = make()
    with pytest.raises(InvalidBlock, match="a contiguous pool on cpu, not one on meta"):
        rig.device.register_pool(torch.empty(rig.pool.shape, dtype=torch.bfloat16, device="meta"))


def test_an_error_while_the_device_is_made() -> None:
    cuda = FakeCuda()
    cuda.failures["create_stream"] = 46
    before = threading.active_count()
    with pytest.raises(DeviceError, match="cudaErrorOfATest, 46"):
        CudaCopyDevice(cuda)
    assert threading.active_count() == before
    cuda.shut_down()


def test_memory_that_is_not_given_back_is_said(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    rig.cuda.failures["unregister_host"] = 1
    assert rig.device.close(WAIT_SECONDS)
    assert "page-locked memory was not given back" in caplog.text
