# SPDX-License-Identifier: Apache-2.0
"""All parts together on a real disk: blocks go out, survive a restart, and come back bit by bit."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from stratakv.connector.build import build_offload
from stratakv.connector.messages import EvictedBlock, LoadReport
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.mac_key import MacKey
from stratakv.tiers.ssd.folder.identity_note import read_note, unpack
from stratakv.tiers.tier_settings import CpuSettings, SsdSettings, TierSettings

LAYOUT = BlockLayout(2, 4, 2, 80, "bfloat16")  # 5120 bytes: more than a page, not a whole number
NUM_BLOCKS = 24
SSD_BYTES = 16 * 1024**2
WAIT_SECONDS = 20.0


@dataclass
class FakeRequest:
    request_id: str
    block_hashes: list[bytes]
    tail_hash: bytes | None = None

    @property
    def num_tokens(self) -> int:
        return LAYOUT.block_size * len(self.block_hashes) + 1


def digests(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def ssd_at(path: Path | None) -> SsdSettings:
    return SsdSettings(path=path, capacity_bytes=SSD_BYTES, io_threads=2)


class Engine:
    """A pool, the two sides, and the part of a step that concerns them."""

    def __init__(self, path: Path | None, slots: int) -> None:
        self.scheduler, self.worker = build_offload(
            LAYOUT,
            TierSettings(
                cpu=CpuSettings(capacity_bytes=slots * LAYOUT.slot_bytes, populate_threads=1),
                ssd=ssd_at(path),
            ),
            namespace=b"test",
        )
        self.woken = threading.Event()
        self.scheduler.set_wakeup(self.woken.set)
        shape = (NUM_BLOCKS, 2, 2, 4, 2, 80)
        self.pool = torch.randn(shape).to(torch.bfloat16)
        self.worker.register_pool(self.pool)

    def step(self, evicted: list[EvictedBlock] | None = None) -> list:
        self.worker.start_step(self.scheduler.build_meta(evicted or []))
        self.worker.wait_before_forward()
        return self.scheduler.update_from_worker(self.worker.poll())

    def load(self, hashes: list[bytes], block_ids: list[int]) -> LoadReport:
        request = FakeRequest("r", hashes)
        match = self.scheduler.get_matched_tokens(request, 0)
        assert match.tokens == len(hashes) * LAYOUT.block_size
        self.scheduler.begin_load(request, [block_ids], match.tokens, overlapped=False)
        deadline = time.monotonic() + WAIT_SECONDS
        while not (reports := self.step()):
            while not self.scheduler.has_pending_work():
                assert self.woken.wait(deadline - time.monotonic()), "no wake-up came"
                self.woken.clear()
        (report,) = reports
        return report

    def let_the_disk_keep_up(self) -> None:
        """Steps until nothing is being written, as in a long forward pass."""
        hierarchy = self.scheduler._hierarchy
        deadline = time.monotonic() + WAIT_SECONDS
        self.step()
        while hierarchy._write_backs.in_flight:
            assert self.woken.wait(deadline - time.monotonic()), "no wake-up came"
            self.woken.clear()
            self.step()

    def shutdown(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown(WAIT_SECONDS)


def test_blocks_come_back_from_the_disk_after_a_restart(tmp_path: Path) -> None:
    hashes = digests(NUM_BLOCKS)
    first = Engine(tmp_path, slots=32)
    wanted = first.pool.view(torch.uint8).clone()
    out = [EvictedBlock(i, hashes[i] + b"\0\0") for i in range(NUM_BLOCKS)]
    first.step(out[:10])
    # The others are still in the pool when the engine goes down.
    first.step(out[10:])
    first.shutdown()

    second = Engine(tmp_path, slots=32)
    order = list(range(NUM_BLOCKS - 1, -1, -1))
    report = second.load(hashes, order)
    assert report.num_loaded_tokens == NUM_BLOCKS * LAYOUT.block_size
    assert report.tokens_by_tier == {"ssd": NUM_BLOCKS * LAYOUT.block_size}
    assert torch.equal(second.pool.view(torch.uint8)[order], wanted)
    second.pool.zero_()
    assert set(second.load(hashes, order).tokens_by_tier) == {"cpu"}
    assert torch.equal(second.pool.view(torch.uint8)[order], wanted)
    second.shutdown()


def test_a_slab_much_smaller_than_what_passes_through_loses_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path, slots=16)
    kept: dict[bytes, torch.Tensor] = {}
    for turn in range(12):
        engine.pool.copy_(torch.randn(engine.pool.shape))
        hashes = [bytes([turn, i]) * 16 for i in range(4)]
        kept.update({digest: engine.pool[i].clone() for i, digest in enumerate(hashes)})
        engine.step([EvictedBlock(i, digest + b"\0\0") for i, digest in enumerate(hashes)])
        engine.let_the_disk_keep_up()
    stats = engine.scheduler.stats()["tiers"]
    assert stats["cpu"]["dropped_stores"] == 0
    assert stats["ssd"]["stored_blocks"] > 0
    for name, page in kept.items():
        engine.load([name], [5])
        assert torch.equal(engine.pool[5].view(torch.uint8), page.view(torch.uint8))
    engine.shutdown()


def test_a_mac_key_seals_what_lies_on_the_disk(tmp_path: Path) -> None:
    key, file, folder = MacKey(bytes(32)), tmp_path / "mac.key", tmp_path / "ssd"
    file.write_bytes(bytes(32))
    settings = TierSettings(
        cpu=CpuSettings(capacity_bytes=8 * LAYOUT.slot_bytes, populate_threads=1),
        ssd=replace(ssd_at(folder), mac_key_file=file),
    )
    scheduler, worker = build_offload(LAYOUT, settings, namespace=b"test")
    worker.shutdown()
    scheduler.shutdown(WAIT_SECONDS)
    note = read_note(folder)
    assert note is not None and unpack(note.namespace).key_id == key.id
    with pytest.raises(TierConfigError, match=f"made for the MAC key {key.id.hex()}, and"):
        build_offload(LAYOUT, replace(settings, ssd=ssd_at(folder)), namespace=b"test")


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_queued_prompt_reaches_the_policy_of_the_disk(tmp_path: Path, policy: str) -> None:
    """Also below a drill, and where the slab does not learn."""
    settings = TierSettings(
        cpu=CpuSettings(capacity_bytes=8 * LAYOUT.slot_bytes, policy="lru", populate_threads=1),
        ssd=replace(ssd_at(tmp_path), policy=policy, admission="all"),
        faults="load:error=0",
    )
    scheduler, worker = build_offload(LAYOUT, settings, namespace=b"test")
    (store,) = scheduler._hierarchy.stores
    hashes = digests(3)
    scheduler.request_queued(FakeRequest("r", hashes))
    assert store.learns == scheduler._hierarchy.learns == (policy == "adaptive")
    chosen = store.inner.opened._state.index._policy  # type: ignore[attr-defined]
    if policy == "lru":
        assert chosen is None
    else:
        assert [key[:32] for key in chosen._history.blocks] == hashes
    worker.shutdown()
    scheduler.shutdown(WAIT_SECONDS)


def test_a_damaged_record_is_a_failed_load_and_is_forgotten(tmp_path: Path) -> None:
    hashes = digests(4)
    first = Engine(tmp_path, slots=8)
    pages = first.pool.clone()
    first.step([EvictedBlock(i, hashes[i] + b"\0\0") for i in range(4)])
    first.shutdown()
    assert damage(tmp_path, pages[2]) == 1

    second = Engine(tmp_path, slots=8)
    report = second.load(hashes, [0, 1, 2, 3])
    assert report.num_loaded_tokens == 2 * LAYOUT.block_size
    assert torch.equal(second.pool[:2].view(torch.uint8), pages[:2].view(torch.uint8))
    stats = second.scheduler.stats()
    assert stats["failures"] == {"partial": 1}
    assert stats["tiers"]["ssd"]["rejected"] == {"checksum": 1}
    other = FakeRequest("other", hashes)
    assert second.scheduler.get_matched_tokens(other, 0).tokens == 2 * LAYOUT.block_size
    second.shutdown()


def damage(path: Path, page: torch.Tensor) -> int:
    """Flip a bit of this page wherever it lies below `path`; in how many files."""
    content = bytes(page.contiguous().view(torch.uint8).flatten().tolist())
    found = 0
    for file in path.rglob("*"):
        if file.is_file() and (at := file.read_bytes().find(content)) >= 0:
            with file.open("r+b") as handle:
                handle.seek(at + 100)
                handle.write(bytes([content[100] ^ 1]))
            found += 1
    return found


def test_without_a_disk_the_slab_is_all_there_is() -> None:
    engine = Engine(None, slots=8)
    engine.step([EvictedBlock(3, digests(1)[0] + b"\0\0")])
    page = engine.pool[3].clone()
    assert engine.load(digests(1), [7]).tokens_by_tier == {"cpu": LAYOUT.block_size}
    assert torch.equal(engine.pool[7], page)
    assert set(engine.scheduler.stats()["tiers"]) == {"cpu"}
    engine.shutdown()


def test_a_path_that_cannot_work_leaves_nothing_open(tmp_path: Path) -> None:
    threads = threading.active_count()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TierConfigError):
        Engine(tmp_path / "file", slots=8)
    assert threading.active_count() == threads
    Engine(tmp_path / "free", slots=8).shutdown()
    assert threading.active_count() == threads
