# SPDX-License-Identifier: Apache-2.0
"""What a large index costs: memory for each block, time to look one up, time to open it again.

What a quiet machine reaches is the business of `stratakv bench tiers`; here only what is far from
it fails: a busy machine may have no second core for the child that reads.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.ssd.disk.slot_file import SlotFile
from stratakv.tiers.ssd.disk.space import plan_slots
from stratakv.tiers.ssd.folder import guard
from stratakv.tiers.ssd.folder.identity_note import read_note
from stratakv.tiers.ssd.index.index_file import IndexFile, Row
from stratakv.tiers.ssd.index.slot_index import SlotIndex
from stratakv.tiers.ssd.index.slot_sets import FreeSlots, SlotList

from ..blocks import SMALL, make_buffers, make_keys, payload_of
from ..store_contract import SECONDS, fetch, put
from .stores import Open, batch_of, store_keys

BYTES_PER_ENTRY = 256
LOOKUPS_PER_SECOND = 500_000
REOPEN_RATIO = 1.5

# Opens the index three times and prints what the last time cost, then looks keys up.
MEASURE = """
import ctypes, json, random, sys, time
from pathlib import Path
from stratakv.tiers.ssd.folder import guard
from stratakv.tiers.ssd.index.index_file import IndexFile
from stratakv.tiers.ssd.index.slot_index import SlotIndex
folder, slots = Path(sys.argv[1]), int(sys.argv[2])

def resident():
    # What is held, and not what the allocator keeps of buffers that are gone.
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

SlotIndex(1, guard.read_rows(folder, 60))
before = resident()
index = SlotIndex(slots, guard.read_rows(folder, 60))
per_entry = (resident() - before) / len(index)
ratios = []
for _ in range(3):
    file = IndexFile(folder, 0)
    began = time.perf_counter()
    count = sum(1 for _row in file.iter_rows())
    middle = time.perf_counter()
    file.close()
    again = SlotIndex(slots, guard.read_rows(folder, 60))
    ratios.append((time.perf_counter() - middle) / (middle - began))
    assert len(again) == count
    del again
keys = random.Random(1).sample(index.keys(), 51200)
copies = [bytes(bytearray(key)) for key in keys]  # whose hashes nobody has computed yet
began = time.perf_counter()
for start in range(0, len(copies), 256):
    assert all([key in index for key in copies[start : start + 256]])
rate = len(copies) / (time.perf_counter() - began)
print(json.dumps({"bytes_per_entry": per_entry, "ratio": min(ratios), "lookups": rate}))
"""


@pytest.mark.parametrize("order", ["in order", "at random"])
def test_a_large_index_is_small_and_quick(
    tmp_path: Path, rng: random.Random, scale: str, order: str, no_nursery: None
) -> None:
    slots = 100_000 if scale == "ci" else 1_000_000
    make_index(tmp_path / "index", slots, rng, shuffled=order == "at random")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "index"), str(slots)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    print(slots, order, measured)
    assert measured["bytes_per_entry"] <= BYTES_PER_ENTRY
    assert measured["lookups"] >= LOOKUPS_PER_SECOND / (5 if scale == "ci" else 1)
    assert measured["ratio"] <= REOPEN_RATIO * (4 if scale == "ci" else 2)


def make_index(folder: Path, slots: int, rng: random.Random, *, shuffled: bool) -> None:
    """An index of nine tenths of the slots, filled in batches, with last uses in any order."""
    map_bytes = plan_slots(SMALL.slot_bytes, slots).index_bytes
    index = IndexFile(folder, map_bytes)
    index.reserve(map_bytes)
    order = rng.sample(range(slots), slots * 9 // 10)
    if not shuffled:
        order.sort()
    uses = rng.sample(range(1, 2 * slots), len(order))
    step = 4096 if not shuffled else 50_000
    for start in range(0, len(order), step):
        index.put(
            [
                Row(slot, rng.randbytes(40), 7 << 32 | slot, use)
                for slot, use in zip(order[start : start + step], uses[start:], strict=False)
            ]
        )
    index.close()


@pytest.mark.parametrize("kind", ["dense", "holes", "same uses", "wide uses", "broken uses"])
def test_what_was_read_is_what_was_written(rng: random.Random, kind: str) -> None:
    """Blocks, order of eviction and free slots, however the rows lie."""
    slots = list(range(500)) if kind == "dense" else sorted(rng.sample(range(500), 400))
    uses = rng.sample(range(1, 2000), len(slots))
    if kind == "same uses":
        uses = [5] * len(slots)
    elif kind == "wide uses":
        uses = [use * 10**9 for use in uses]
    elif kind == "broken uses":
        uses[3] += 2**63
    rows = [
        Row(slot, rng.randbytes(40), rng.randrange(2**64), use, rng.randrange(2**64))
        for slot, use in zip(slots, uses, strict=True)
    ]
    index = SlotIndex(490, [batch_of(rows[:130]), batch_of(rows[130:])])
    kept = [row for row in rows if row.slot < 490]
    assert set(index.keys()) == {row.key for row in kept}
    assert [(row.slot, row.key) for row in index.iter_by_use()] == [
        (row.slot, row.key) for row in sorted(kept, key=lambda row: row.last_use % 2**62)
    ]
    for row, entry in zip(kept, index.pin([row.key for row in kept]), strict=True):
        assert entry == (row.key, row.slot, row.generation, row.encoded_bytes)
    assert index.allocate(500) == sorted(set(range(490)) - set(slots))
    # The next rows can be written, whatever a damaged one said.
    batch_of([index.touched_rows(1)[0]])


def test_free_slots_are_given_out_as_from_a_heap(rng: random.Random) -> None:
    free, model = FreeSlots(bytearray(b"\1" * 300)), set(range(300))
    taken: list[int] = []
    for _ in range(3000):
        if rng.random() < 0.5:
            count = rng.randrange(20)
            wanted = sorted(model)[:count]
            assert free.pop_lowest(count) == wanted
            model -= set(wanted)
            taken += wanted
        elif taken:
            slot = taken.pop(rng.randrange(len(taken)))
            free.add_these([slot])
            model.add(slot)
        assert free.count == len(model)
    assert all((slot in free) == (slot in model) for slot in range(300))


def test_a_list_of_slots_keeps_its_order(rng: random.Random) -> None:
    slots, model = SlotList(50), list[int]()
    slots.extend(model := rng.sample(range(50), 10))
    for _ in range(2000):
        slot = rng.randrange(50)
        if slot in model:
            model.remove(slot)
        if rng.random() < 0.6:
            slots.move_all_to_end([slot])
            model.append(slot)
        else:
            slots.discard_all([slot])
        assert list(slots) == model
        assert (slot in slots) == (slot in model)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(SlotFile, "start_read"), (SlotFile, "start_write"), (SlotFile, "sync"), (IndexFile, "put"),
     (IndexFile, "delete")],
)  # fmt: skip
def test_a_look_up_waits_for_no_disk(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """While each kind of I/O hangs, look-ups and refusals answer at once."""
    store = open_store(slots=20)
    keys, more = make_keys(20), make_keys(20, "more")
    assert all(put(store, keys))
    assert None not in fetch(store, keys)
    hangs, go_on = threading.Event(), threading.Event()
    real: Callable[..., object] = getattr(owner, name)

    def hang(*arguments: object) -> object:
        hangs.set()
        assert go_on.wait(SECONDS)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, hang)
        buffers = make_buffers(20, SMALL)
        if name == "start_read":
            future = store.load(keys, buffers)
        else:
            for key, buffer in zip(more, buffers, strict=True):
                buffer[: SMALL.page_bytes] = payload_of(key, SMALL)
            future = store.store(more, buffers)  # type: ignore[assignment]
        try:
            assert hangs.wait(SECONDS)
            began = time.monotonic()
            for _ in range(100):
                store.lookup([*keys, *more])
            store.stats()
            assert time.monotonic() - began < SECONDS, "as long as the disk hangs"
            assert not go_on.is_set()
        finally:
            go_on.set()
        future.result(SECONDS)


def test_the_order_of_use_survives_a_restart(open_store: Open) -> None:
    """What was used last before the restart is evicted last after it."""
    store = open_store(slots=40)
    keys = make_keys(30)
    put(store, keys[:15])
    put(store, keys[15:])
    assert None not in fetch(store, keys[10:20])
    store.close(SECONDS)
    store = open_store(slots=40)
    put(store, make_keys(26, "more"))
    answers = store.lookup(keys)
    assert answers[:10] == [Answer.MISS] * 10
    assert answers[10:21] == [Answer.HIT] * 11


def test_no_opening_repeats_an_epoch(open_store: Open, tmp_path: Path) -> None:
    """Also where the index or the identity file was lost in between."""
    seen = []
    for loss in ("nothing", "index", "identity", "nothing", "index"):
        store = open_store(slots=4)
        seen.append(store._opened.epoch)
        store.close(SECONDS)
        note = read_note(tmp_path / "ssd")
        assert note is not None and note.epoch == seen[-1]
        if loss == "index":
            (tmp_path / "ssd" / "index" / "data.mdb").unlink()
        elif loss == "identity":
            (tmp_path / "ssd" / "identity").write_bytes(b"{}\n")
    assert seen == list(range(seen[0], seen[0] + 5))


def test_an_index_whose_name_was_damaged_is_set_aside(open_store: Open, tmp_path: Path) -> None:
    """The identity file says that the index is not another model's."""
    open_store(slots=4).close(SECONDS)
    index = IndexFile(tmp_path / "ssd" / "index", 0)
    index.write_identity(index.identity()._replace(layout_id=b"?" * 16))  # type: ignore[union-attr]
    index.close()
    store = open_store(slots=4)
    assert store.stats().errors == {"index_set_aside": 1}
    store.close(SECONDS)


def test_a_crash_while_the_index_is_replaced_costs_nothing(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller store makes its index anew; the kill comes when the old one is gone."""
    keys = make_keys(40)
    store = open_store(slots=4000)
    put(store, keys)
    store.close(SECONDS)

    def killed(_self: Path, _target: Path) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.rename", killed)
        with pytest.raises(TierConfigError, match="killed"):
            open_store(slots=40)
    assert not (tmp_path / "ssd" / "index").exists()
    store = open_store(slots=40)
    assert sorted(store_keys(store)) == sorted(keys)
    assert None not in fetch(store, keys)
    assert not (tmp_path / "ssd" / "index.new").exists()


def test_the_child_knows_the_sizes_of_a_row() -> None:
    """`scan.py` imports nothing of ours, so it says them again."""
    from stratakv.tiers.ssd.folder import scan
    from stratakv.tiers.ssd.index import index_file

    assert scan._SLOT_BYTES == index_file.SLOT_BYTES == len(batch_of([Row(1, b"k" * 40, 2, 3)])[0])
    assert scan._VALUE_BYTES == index_file.VALUE_BYTES
    assert scan._BATCH <= guard._MOST_ROWS_IN_BATCH
