# SPDX-License-Identifier: Apache-2.0
"""The CPU slab: slots, pins, eviction, and memory that another process can map."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.block import ALIGNMENT
from stratakv.tiers.errors import InvalidBlock, TierClosed, TierConfigError
from stratakv.tiers.policies.lru import LruPolicy
from stratakv.tiers.slab import shared_memory
from stratakv.tiers.slab.cpu_slab import CpuSlab

from ..blocks import ODD, SMALL, make_keys


@pytest.fixture(params=[False, True], ids=["alone", "served"])
def slab(request: pytest.FixtureRequest) -> Iterator[CpuSlab]:
    made = CpuSlab(SMALL, 8 * SMALL.slot_bytes, is_served=request.param)
    yield made
    made.close()


def fill(slab: CpuSlab, keys: list[bytes]) -> list[int | None]:
    slots = slab.reserve(keys)
    slab.commit(keys, [True] * len(keys))
    return slots


def test_a_block_comes_in_and_is_read(slab: CpuSlab) -> None:
    keys = make_keys(3)
    assert slab.lookup(keys) == [Answer.MISS] * 3
    slots = slab.reserve(keys)
    assert slots == [0, 1, 2]
    assert slab.lookup(keys) == [Answer.PENDING] * 3
    assert slab.pin(keys) == [None] * 3
    assert slab.stats().reserved_blocks == 3
    for slot in (0, 1, 2):
        slab.buffer(slot)[:4] = bytes([slot] * 4)
    slab.commit(keys, [True, False, True])
    assert slab.lookup(keys) == [Answer.HIT, Answer.MISS, Answer.HIT]
    assert slab.pin(keys) == [0, None, 2]
    assert bytes(slab.memory()[2 * SMALL.slot_bytes :][:4]) == b"\x02" * 4
    slab.pin(keys[:1], touch=False)
    assert slab.stats().pinned_blocks == 2
    slab.unpin([keys[0], keys[2]])
    assert slab.stats().pinned_blocks == 1
    slab.unpin(keys[:1])
    stats = slab.stats()
    assert (stats.pinned_blocks, stats.reserved_blocks, stats.capacity_blocks) == (0, 0, 8)
    assert (stats.blocks, stats.stored_blocks, stats.hits, stats.misses) == (2, 2, 2, 4)
    assert stats.used_bytes == 2 * SMALL.slot_bytes
    assert slab.free_slots() == 6


def test_reserve_evicts_the_coldest_and_never_a_pinned_one(slab: CpuSlab) -> None:
    keys = make_keys(12)
    fill(slab, keys[:8])
    assert slab.pin(keys[6:8], touch=False) == [6, 7]
    # Committed head first, so the tail is the coldest; 6 and 7 are pinned.
    assert slab.coldest(3) == [keys[5], keys[4], keys[3]]
    evicted: list[bytes] = []
    assert slab.reserve(keys[8:10], evicted=evicted) == [4, 5]
    assert evicted == [keys[5], keys[4]]
    assert slab.lookup(keys[3:8]) == [Answer.HIT] + [Answer.MISS] * 2 + [Answer.HIT] * 2
    assert slab.stats().evicted_blocks == 2
    assert slab.stats().hits == 0  # touch=False is not a use


def test_reserve_gives_what_can_be_freed(slab: CpuSlab) -> None:
    keys = make_keys(12)
    fill(slab, keys[:8])
    slab.pin(keys[:7])
    assert slab.reserve(keys[8:10]).count(None) == 1
    assert slab.coldest(8) == []
    assert slab.reserve(keys[10:]) == [None, None]
    assert slab.stats().dropped_stores == 3


def test_keys_of_one_call_do_not_evict_each_other(slab: CpuSlab) -> None:
    keys = make_keys(9)
    fill(slab, keys[:8])
    coldest = slab.coldest(1)[0]
    assert slab.reserve([coldest, keys[8]])[0] is None
    assert slab.lookup([coldest]) == [Answer.HIT]


def test_a_known_key_is_not_reserved_again(slab: CpuSlab) -> None:
    keys = make_keys(2)
    assert slab.reserve([keys[0], keys[0], keys[1]]) == [0, None, 1]
    assert slab.reserve(keys) == [None, None]
    assert slab.stats().dropped_stores == 0


def test_touch_is_a_use_but_no_hit(slab: CpuSlab) -> None:
    keys = make_keys(4)
    slab.reserve(keys)
    slab.commit(keys[:3], [True] * 3)
    assert slab.keys() == [keys[2], keys[1], keys[0]]
    slab.touch([keys[1], keys[2], keys[3], *make_keys(1, "unknown")])
    assert slab.keys() == [keys[0], keys[2], keys[1]]
    stats = slab.stats()
    assert (stats.hits, stats.misses, stats.pinned_blocks) == (0, 0, 0)
    slab.commit(keys[3:], [False])


def test_pin_touches_the_tail_first(slab: CpuSlab) -> None:
    keys = make_keys(4)
    fill(slab, keys)
    assert slab.keys() == keys[::-1]
    slab.pin(keys[2:])
    slab.unpin(keys[2:])
    assert slab.keys() == [keys[1], keys[0], keys[3], keys[2]]


def test_forgetting_frees_the_idle_at_once_and_the_others_when_they_are_given_back(
    slab: CpuSlab,
) -> None:
    keys = make_keys(3)
    fill(slab, keys[:2])
    slab.pin(keys[:1])
    slab.reserve(keys[2:])
    free = slab.free_slots()
    slab.forget([*keys, keys[1], *make_keys(1, "unknown")])
    assert slab.free_slots() == free + 1
    assert slab.pin(keys) == [None] * 3
    slab.unpin(keys[:1])
    assert slab.commit(keys[2:], [True]) == []
    assert slab.free_slots() == free + 3
    assert slab.stats().evicted_blocks == 0


def test_misuse_is_refused_and_changes_nothing(slab: CpuSlab) -> None:
    keys = make_keys(2)
    slab.reserve(keys[:1])
    with pytest.raises(InvalidBlock, match="reserved"):
        slab.commit(keys, [True, True])
    assert slab.lookup(keys[:1]) == [Answer.PENDING]
    slab.commit(keys[:1], [True])
    with pytest.raises(InvalidBlock, match="pinned"):
        slab.unpin(keys[:1])
    for slot in (-1, 8):
        with pytest.raises(InvalidBlock, match=f"0 to 7, not {slot}"):
            slab.buffer(slot)


def test_slots_are_aligned_and_populated_with_progress() -> None:
    seen: list[tuple[int, int]] = []
    size = 20 * ODD.slot_bytes
    slab = CpuSlab(ODD, size + 100, progress=lambda done, total: seen.append((done, total)))
    assert slab.num_slots == 20
    assert seen[-1] == (size, size)
    for slot in range(20):
        address = ctypes.addressof(ctypes.c_char.from_buffer(slab.buffer(slot)))
        assert address % ALIGNMENT == 0
        assert len(slab.buffer(slot)) == ODD.slot_bytes
    assert os.fstat(slab.fd).st_blocks * 512 >= size  # the pages exist
    slab.close()


def test_an_old_kernel_populates_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as before Linux 5.14
    monkeypatch.setattr(shared_memory, "_PIECE_BYTES", 8 * SMALL.slot_bytes)
    slab = CpuSlab(SMALL, 20 * SMALL.slot_bytes)
    assert os.fstat(slab.fd).st_blocks * 512 >= 20 * SMALL.slot_bytes
    slab.close()


def test_another_process_maps_the_same_slots(slab: CpuSlab) -> None:
    slab.buffer(3)[:5] = b"hello"
    code = (
        "import mmap, sys; m = mmap.mmap(int(sys.argv[1]), 0)\n"
        f"at = 3 * {SMALL.slot_bytes}; assert m[at:at+5] == b'hello'; m[at:at+5] = b'world'"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(slab.fd)], pass_fds=[slab.fd], check=True, timeout=30
    )
    assert bytes(slab.buffer(3)[:5]) == b"world"


def test_sizes_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TierConfigError, match="at least 4KiB for one block, not 4095 bytes"):
        CpuSlab(SMALL, 4095)
    monkeypatch.setattr(shared_memory, "available_memory_bytes", lambda: 10_000)
    with pytest.raises(TierConfigError, match=r"given 12 KiB and the host has 9\.77 KiB"):
        CpuSlab(SMALL, 12_288)


def test_memory_that_runs_short_is_refused_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(shared_memory, "_populate_piece", refuse)
    with pytest.raises(TierConfigError, match="Cannot allocate memory"):
        CpuSlab(SMALL, 8 * SMALL.slot_bytes)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_host_says_how_much_memory_it_has() -> None:
    available = shared_memory.available_memory_bytes()
    assert available is not None
    assert mmap.PAGESIZE < available < 2**50


def test_close_ends_access_and_tolerates_a_view(caplog: pytest.LogCaptureFixture) -> None:
    slab = CpuSlab(SMALL, 8 * SMALL.slot_bytes)
    view = slab.buffer(0)
    slab.close()
    slab.close()
    assert "still in use" in caplog.text
    view[:1] = b"x"  # not a crash
    with pytest.raises(TierClosed):
        slab.buffer(0)


def test_threads_never_share_a_slot() -> None:
    slab = CpuSlab(SMALL, 16 * SMALL.slot_bytes)
    faults: list[str] = []

    def work(name: int) -> None:
        rng = random.Random(name)
        keys, own = make_keys(40, "shared"), make_keys(1, str(name))
        for _ in range(400):
            some = rng.sample(keys, 3)
            mine = [
                key for key, slot in zip(some, slab.reserve(some), strict=True) if slot is not None
            ]
            slab.commit(mine, [rng.random() < 0.9 for _ in mine])
            pinned = [
                key for key, slot in zip(some, slab.pin(some), strict=True) if slot is not None
            ]
            again = slab.pin(pinned)
            if None in again:
                faults.append("a pinned block was lost")
            slab.unpin(pinned + pinned)
            if slab.reserve(own) != [None]:
                slab.commit(own, [True])
            slab.forget(own)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not faults
    assert slab.free_slots() + slab.stats().blocks == slab.num_slots
    slab.forget(slab.keys())
    assert slab.free_slots() == slab.num_slots
    slab.close()


def test_huge_pages_that_cannot_be_had_are_plain_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_memory, "_MFD_HUGE_2MB", 63 << os.MFD_HUGE_SHIFT)  # no such size
    slab = CpuSlab(SMALL, 20 * SMALL.slot_bytes, huge_pages=True)
    assert not slab.has_huge_pages
    assert caplog.text.count("using plain pages") == 1
    assert slab.num_slots == 20 and len(slab.memory()) == 20 * SMALL.slot_bytes
    slab.close()


def test_slots_on_huge_pages() -> None:
    free = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    if int(free.get("HugePages_Free", "0")) < 2:
        pytest.skip("the host has set no huge pages apart (vm.nr_hugepages)")
    slab = CpuSlab(SMALL, 600 * SMALL.slot_bytes, huge_pages=True)  # 1.2 pages
    assert slab.has_huge_pages
    assert len(slab.memory()) == 600 * SMALL.slot_bytes
    assert os.fstat(slab.fd).st_size == 2 * shared_memory.HUGE_PAGE_BYTES
    slab.buffer(599)[:5] = b"hello"
    slab.close()


def test_the_policy_hears_of_prompts() -> None:
    heard: list[tuple[list[bytes], float]] = []

    class Listening(LruPolicy):
        def observe(self, chain: Sequence[bytes], now: float) -> None:
            heard.append((list(chain), now))

    slab = CpuSlab(SMALL, 4 * SMALL.slot_bytes, policy=Listening())
    keys = make_keys(3)
    slab.observe(keys, 7.5)
    assert heard == [(keys, 7.5)]
    slab.close()
