# SPDX-License-Identifier: Apache-2.0
"""A damaged index costs a cold cache and nothing else: no crash, no wrong block, no endless scan.

LMDB ends the process on such files, so the trials run in a child, which has to live to report.
"""

from __future__ import annotations

import json
import mmap
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.record import Defect
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.folder import guard, scan
from stratakv.tiers.ssd.folder.open_store import SET_ASIDE
from stratakv.tiers.ssd.index.index_file import IndexDamaged, IndexFile
from stratakv.tiers.ssd.store_check import check_store

from ..blocks import SMALL, make_keys
from ..store_contract import SECONDS, fetch, put
from .stores import store_keys

CAPACITY = 4 * 1024**2
KEYS = make_keys(150)
PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store whose index has branches, several leaves and pages that were freed."""
    path = tmp_path_factory.mktemp("pristine") / "ssd"
    store = SsdStore(path, SMALL, CAPACITY)
    for start in range(0, 150, 30):
        put(store, KEYS[start : start + 30])
        store.drop(KEYS[start : start + 5])
        put(store, KEYS[start : start + 5])
        if start == 60:
            shutil.copy(path / "index" / "data.mdb", path / "earlier")
    store.close(SECONDS)
    return path


def pages_in_use(index: Path) -> int:
    with (
        (index / "data.mdb").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return scan.newest_meta(data, PAGE).last_page + 1


# Kinds of damage, in TRIALS by number.
ZEROED, CUT, STRUCTURE, ANYWHERE, SWAPPED, STALE, APPENDED = range(7)


def trials_of(pages: int, rng: random.Random, count: int) -> list[list[int]]:
    """[kind, position]: a page zeroed, the file cut, a bit of a page's structure flipped, a bit
    anywhere, two pages swapped, a page or the whole file as it was earlier, garbage appended."""
    trials = [[ZEROED, page] for page in range(pages)]
    trials += [[STALE, page] for page in range(pages + 1)]
    trials += [[APPENDED, rng.randrange(1, 3 * PAGE)] for _ in range(2)]
    for _ in range(count):
        trials.append([CUT, rng.randrange(pages * PAGE)])
        trials.append([SWAPPED, rng.randrange(2, pages)])
        for _ in range(2):
            trials.append([STRUCTURE, rng.randrange(pages) * PAGE + rng.randrange(200)])
            trials.append([ANYWHERE, rng.randrange(pages * PAGE)])
    return trials


def run_trials(pristine: Path, folder: Path, trials: list[list[int]]) -> list[dict[str, int]]:
    done = subprocess.run(
        [sys.executable, "-c", TRIALS, str(pristine), str(folder), str(CAPACITY)],
        input=json.dumps(trials),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr[-2000:]}\n{done.stdout[-300:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


# For each trial: damage a copy, open it, use it until free pages are taken, open it once more.
TRIALS = """
import hashlib, json, mmap, random, shutil, sys
from pathlib import Path
from stratakv.tiers.base import Answer, Stored
from stratakv.tiers.block import BlockLayout, pack_key
from stratakv.tiers.ssd import SsdStore
LAYOUT = BlockLayout(1, 16, 1, 32, "float32")
pristine, folder, capacity = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
keys = [pack_key(hashlib.sha256(f"/{i}".encode()).digest()) for i in range(150)]
more = [pack_key(hashlib.sha256(f"more/{i}".encode()).digest()) for i in range(150)]
memory = memoryview(mmap.mmap(-1, 150 * 4096))
buffers = [memory[i * 4096 : (i + 1) * 4096] for i in range(150)]

def right(key):
    return random.Random(key).randbytes(4096)

def load(store, keys):
    proofs = store.load(keys, buffers[:len(keys)]).result(10)
    for key, proof, buffer in zip(keys, proofs, buffers):
        assert proof is None or bytes(buffer) == right(key), "served wrong bytes"
    return len(proofs) - proofs.count(None)

trials = json.load(sys.stdin)
earlier = pristine / "earlier"
last_stale = max((position for kind, position in trials if kind == 5), default=0)
for kind, position in trials:
    path = folder / "trial"
    shutil.copytree(pristine, path)
    data, page = path / "index" / "data.mdb", mmap.PAGESIZE
    old = earlier.read_bytes()
    with data.open("r+b") as file:
        if kind == 0:
            file.seek(position * page)
            file.write(bytes(page))
        elif kind == 1:
            file.truncate(position)
        elif kind == 4:
            file.seek(position * page)
            here = file.read(page)
            file.seek(2 * page)
            there = file.read(page)
            file.seek(2 * page)
            file.write(here)
            file.seek(position * page)
            file.write(there)
        elif kind == 5 and position == last_stale:
            file.write(old)
        elif kind == 5:
            file.seek(position * page)
            file.write(old[position * page : (position + 1) * page])
        elif kind == 6:
            file.seek(0, 2)
            file.write(random.Random(position).randbytes(position))
        else:
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 1 << position % 8]))
    store = SsdStore(path, LAYOUT, capacity)
    hits = load(store, keys)
    for start in range(0, 60, 15):
        some = more[start : start + 15]
        for key, buffer in zip(some, buffers):
            buffer[:] = right(key)
        assert set(store.store(some, buffers[:15]).result(10)) == {Stored.KEPT}, store.stats()
        store.drop(some[:3])
    stats = store.stats()
    store.close(10)
    again = SsdStore(path, LAYOUT, capacity)
    assert again.lookup(more[3:15]) == [Answer.HIT] * 12
    load(again, more[:60])
    again.close(10)
    aside = [each.name for each in path.glob("index.bad-*")]
    print(json.dumps({"kind": kind, "hits": hits, "aside": len(aside),
                      "counted": stats.errors.get("index_set_aside", 0)}), flush=True)
    shutil.rmtree(path)
"""


def test_no_damage_ends_the_process_or_serves_wrong_bytes(
    pristine: Path, tmp_path: Path, rng: random.Random, scale: str
) -> None:
    pages = pages_in_use(pristine / "index")
    assert pages >= 10
    trials = trials_of(pages, rng, 3 if scale == "ci" else 1500)
    outcomes = run_trials(pristine, tmp_path, trials)
    assert len(outcomes) == len(trials)
    for outcome in outcomes:
        assert outcome["aside"] == outcome["counted"]
        assert outcome["aside"] == 0 or outcome["hits"] == 0
    noticed = Counter(outcome["kind"] for outcome in outcomes if outcome["aside"])
    tried = Counter(outcome["kind"] for outcome in outcomes)
    # Pages that were free, and bytes that mean nothing, may be lost without anybody noticing.
    assert noticed[ZEROED] >= 6
    assert noticed[CUT] >= tried[CUT] * 3 // 4
    assert noticed[SWAPPED] >= tried[SWAPPED] // 4
    assert noticed[STALE] >= 1
    assert noticed[APPENDED] == 0  # what lies behind the last page is never read


# A row's fields, as offsets from its key, and what may become of the block.
ROW_FIELDS = {
    "slot": (range(-4, 0), {None}),
    "key": (range(40), {Defect.KEY}),
    "generation": (range(40, 48), {Defect.GENERATION}),
    "last use": (range(48, 56), set[Defect]()),
}


@pytest.mark.parametrize("field", ROW_FIELDS)
def test_a_damaged_row_serves_no_wrong_block(
    pristine: Path, tmp_path: Path, rng: random.Random, scale: str, field: str
) -> None:
    """One bit of a field in most rows: 4 fields * 120 rows in CI. LMDB has no checksum,
    so the rows are read as they are; the records' own headers tell."""
    within, defects = ROW_FIELDS[field]
    for trial in range(1 if scale == "ci" else 190):
        path = tmp_path / str(trial)
        shutil.copytree(pristine, path)
        damaged = rng.sample(KEYS, 120)
        data = bytearray((path / "index" / "data.mdb").read_bytes())
        for key in damaged:
            offset, bit = rng.choice(within), 1 << rng.randrange(8)
            at = data.find(key)
            while at >= 0:  # also in pages of earlier commits
                data[at + offset] ^= bit
                at = data.find(key, at + 1)
        (path / "index" / "data.mdb").write_bytes(data)
        store = SsdStore(path, SMALL, CAPACITY)
        found = fetch(store, KEYS)  # asserts that what is served is right
        hits = {key for key, payload in zip(KEYS, found, strict=True) if payload is not None}
        if field == "slot":
            assert store.stats().errors == {SET_ASIDE: 1} and not hits
        elif field == "key":
            assert hits == set(KEYS) - set(damaged)
            fetch(store, store_keys(store))
        else:
            assert hits == (set(KEYS) - set(damaged) if defects else set(KEYS))
        assert set(store.stats().rejected) == {defect.value for defect in defects if defect}
        # The store goes on as if nothing had been, and so does the next one.
        more = make_keys(300, "more")
        for start in range(0, 300, 60):
            assert all(put(store, more[start : start + 60]))
        store.close(SECONDS)
        assert check_store(path).is_clean
        store = SsdStore(path, SMALL, CAPACITY)
        assert store.stats().errors == {}
        assert None not in fetch(store, store_keys(store))
        store.close(SECONDS)
        shutil.rmtree(path)


@pytest.mark.parametrize("number", [0, 2**32 - 1, 2**63, 2**64 - 1])
def test_an_epoch_that_cannot_be_one(pristine: Path, tmp_path: Path, number: int) -> None:
    """Without the identity file the index alone says it; the store must still be able to write."""
    path = tmp_path / "ssd"
    shutil.copytree(pristine, path)
    (path / "identity").unlink()
    index = IndexFile(path / "index", 0)
    with index._env.begin(write=True, db=index._store) as txn:
        txn.put(b"epoch", number.to_bytes(8, "little"))
    index.close()
    store = SsdStore(path, SMALL, CAPACITY)
    assert all(put(store, make_keys(5, "more")))
    assert None not in fetch(store, make_keys(5, "more"))
    store.close(SECONDS)
    assert check_store(path).is_clean


@pytest.mark.parametrize("name", [b"format", b"layout_id", b"namespace", b"epoch"])
@pytest.mark.parametrize("has_note", [True, False])
def test_a_damaged_name_in_the_index(
    pristine: Path, tmp_path: Path, name: bytes, has_note: bool
) -> None:
    """With the identity file it is known to be damage; without it the store is refused."""
    path = tmp_path / "ssd"
    shutil.copytree(pristine, path)
    if not has_note:
        (path / "identity").unlink()
    index = IndexFile(path / "index", 0)
    with index._env.begin(write=True, db=index._store) as txn:
        txn.put(name, b"\xff\xff\xff")
    index.close()
    if has_note or name in (b"format", b"epoch"):
        store = SsdStore(path, SMALL, CAPACITY)
        assert store.stats().errors == ({} if name == b"epoch" else {SET_ASIDE: 1})
        assert all(put(store, make_keys(5, "more")))
        store.close(SECONDS)
    else:
        with pytest.raises(TierConfigError, match="was made for"):
            SsdStore(path, SMALL, CAPACITY)


def find_damage(folder: Path, timeout_seconds: float) -> str | None:
    """What is wrong with the index in `folder`, None if nothing is."""
    try:
        for _batch in guard.read_rows(folder, timeout_seconds):
            pass
    except IndexDamaged as damage:
        return str(damage)
    return None


def test_a_sound_index_is_found_sound_quickly(pristine: Path) -> None:
    began = time.monotonic()
    assert find_damage(pristine / "index", 30.0) is None
    assert time.monotonic() - began < 20.0  # 0.05 s on an idle machine


@pytest.fixture
def damaged(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the store whose index ends in the middle."""
    path = tmp_path / "ssd"
    shutil.copytree(pristine, path)
    with (path / "index" / "data.mdb").open("r+b") as file:
        file.truncate(pages_in_use(path / "index") * PAGE // 2)
    return path


def test_a_damaged_index_is_set_aside_with_one_line(
    damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SsdStore(damaged, SMALL, CAPACITY)
    assert len(caplog.records) == 1
    assert "is damaged (the file has " in caplog.text
    assert "index.bad-1 and the tier starts empty" in caplog.text
    assert store.stats().errors == {SET_ASIDE: 1}
    assert store.lookup(KEYS) == [Answer.MISS] * 150
    assert all(put(store, KEYS[:10]))
    store.close(SECONDS)
    store = SsdStore(damaged, SMALL, CAPACITY)
    assert store.stats().errors == {}
    assert None not in fetch(store, KEYS[:10])
    store.close(SECONDS)


def test_only_the_last_damaged_index_is_kept(damaged: Path) -> None:
    for number in (1, 2, 3):
        SsdStore(damaged, SMALL, CAPACITY).close(SECONDS)
        assert [each.name for each in damaged.glob("index.bad-*")] == [f"index.bad-{number}"]
        (damaged / "index" / "data.mdb").write_bytes(b"not an index")


def test_a_damaged_index_of_a_larger_store_is_not_kept(damaged: Path) -> None:
    SsdStore(damaged, SMALL, CAPACITY).close(SECONDS)
    assert list(damaged.glob("index.bad-*"))
    SsdStore(damaged, SMALL, CAPACITY // 2).close(SECONDS)
    kept = [each.stat().st_size for each in damaged.glob("index.bad-*/data.mdb")]
    assert all(size <= (damaged / "index" / "data.mdb").stat().st_size for size in kept)


@pytest.fixture
def scan_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the process that scans an index run this code."""

    def replace(code: str) -> None:
        (tmp_path / "scan.py").write_text(code)
        monkeypatch.setattr(guard, "_SCAN", tmp_path / "scan.py")

    return replace


def test_a_scan_has_a_time_limit(pristine: Path, scan_of: Callable[[str], None]) -> None:
    scan_of("import time; time.sleep(600)\n")
    with pytest.raises(OSError, match=r"stood still for 0\.05 seconds"):
        find_damage(pristine / "index", 0.05)


def test_a_scan_that_is_killed_means_damage(pristine: Path, scan_of: Callable[[str], None]) -> None:
    scan_of("import os, signal; os.kill(os.getpid(), signal.SIGBUS)\n")
    reason = find_damage(pristine / "index", 30.0)
    assert reason == f"reading it ended by {signal.SIGBUS.name}"


def test_an_index_that_lmdb_refuses_is_set_aside(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan that overlooks something: LMDB's own word counts too."""
    path = tmp_path / "ssd"
    shutil.copytree(pristine, path)
    (path / "index" / "data.mdb").write_bytes(b"\0" * 100_000)
    monkeypatch.setattr(guard, "read_rows", lambda *_arguments: iter(()))
    store = SsdStore(path, SMALL, CAPACITY)
    assert store.stats().errors == {SET_ASIDE: 1}
    assert store.lookup(KEYS) == [Answer.MISS] * 150
    store.close(SECONDS)
