# SPDX-License-Identifier: Apache-2.0
"""No room: a full disk, a full index, no descriptors left. Refused or answered with misses; over
as soon as there is room again. Where nothing may be mounted, the full disk is skipped.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from stratakv import tiers
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.disk import space
from stratakv.tiers.ssd.folder import guard

from ..blocks import ODD, make_keys
from ..store_contract import SECONDS, fetch, put, wait_until
from .ledger import check_sound
from .loop_disk import COMMAND_SECONDS, unmount, why_not

CAPACITY = 2_000_000
DISK_BYTES = 3_000_000
KEYS = make_keys(40)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for one store."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    done = subprocess.run(command, check=False, timeout=COMMAND_SECONDS, capture_output=True)
    if done.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.decode(errors='replace')}")
    yield folder
    unmount(folder)


def fill(path: Path) -> None:
    """Write until nothing goes."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def test_a_store_is_refused_on_a_full_disk_and_opens_when_there_is_room(small_disk: Path) -> None:
    fill(small_disk / "other")
    for _ in range(2):
        with pytest.raises(TierConfigError, match=r"use another path|lower its size"):
            SsdStore(small_disk / "ssd", ODD, CAPACITY)
    (small_disk / "other").unlink()
    store = SsdStore(small_disk / "ssd", ODD, CAPACITY)
    assert all(put(store, KEYS))
    assert None not in fetch(store, KEYS)
    store.close(SECONDS)
    check_sound(small_disk / "ssd")


def test_a_store_on_a_full_disk_can_be_made_smaller(small_disk: Path) -> None:
    """Which is what somebody does whose disk is full: its new index needs room before the old files
    give any back."""
    store = SsdStore(small_disk / "ssd", ODD, CAPACITY)
    assert all(put(store, KEYS))
    slots = store.stats().capacity_blocks
    store.close(SECONDS)
    fill(small_disk / "other")
    store = SsdStore(small_disk / "ssd", ODD, CAPACITY // 2)
    assert store.stats().capacity_blocks < slots
    hot = KEYS[: store.stats().blocks // 2]
    assert None not in fetch(store, hot)
    assert all(put(store, make_keys(3, "more")))
    store.close(SECONDS)
    check_sound(small_disk / "ssd")


def test_a_disk_that_others_fill_takes_nothing_from_the_store(small_disk: Path) -> None:
    """All its room is taken when it is opened; it turns over, is closed, and opened again."""
    store = SsdStore(small_disk / "ssd", ODD, CAPACITY)
    fill(small_disk / "other")
    slots = store.stats().capacity_blocks
    for turn in range(4):
        keys = make_keys(slots, str(turn))
        assert all(put(store, keys))
        assert None not in fetch(store, keys[:8])
    store.close(SECONDS)
    assert store.stats().errors == {}
    check_sound(small_disk / "ssd")
    try:
        store = SsdStore(small_disk / "ssd", ODD, CAPACITY)
    except TierConfigError:
        (small_disk / "other").unlink()  # a start may need a page for its own notes
        store = SsdStore(small_disk / "ssd", ODD, CAPACITY)
    assert None not in fetch(store, keys[:8])
    store.close(SECONDS)


def has_grown(store: SsdStore) -> bool:
    """Give the index room, unless the store's own thread is just writing to it."""
    try:
        store._opened.index_file._env.set_mapsize(2**22)
    except lmdb.Error:
        return False
    return True


def test_an_index_without_room_costs_new_blocks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB itself says that its map is full, in the middle of a commit."""
    monkeypatch.setattr(space, "_INDEX_FACTOR", 0)
    monkeypatch.setattr(space, "_INDEX_BASE_PAGES", 14)
    store = SsdStore(tmp_path / "ssd", ODD, 12_000_000)
    kept: list[bytes] = []
    for batch in range(40):
        keys = make_keys(20, str(batch))
        kept += [key for key, is_kept in zip(keys, put(store, keys), strict=True) if is_kept]
    assert store.stats().errors["MapFullError"] > 0
    assert 0 < len(kept) < 800
    assert None not in fetch(store, kept)
    wait_until(lambda: has_grown(store))
    more = make_keys(20, "more")
    assert all(put(store, more))
    assert None not in fetch(store, kept + more)
    store.close(SECONDS)
    monkeypatch.undo()
    check_sound(tmp_path / "ssd")


@pytest.mark.parametrize(
    ("scan", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
        (
            "import resource, sys; from stratakv.tiers.ssd.folder import scan\n"
            "resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20))\n"
            "sys.exit(scan.main(sys.argv[1:]))",
            "could not be scanned.*memory",
        ),
        (
            "import resource, sys; from stratakv.tiers.ssd.folder import scan\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
            "sys.exit(scan.main(sys.argv[1:]))",
            "could not be scanned.*Too many open files",
        ),
    ],
    ids=["killed", "no-memory", "no-descriptors"],
)
def test_an_index_that_could_not_be_looked_at_is_not_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan: str, says: str
) -> None:
    """The scan met a shortage or the killer of processes; the index is as good as before."""
    path = tmp_path / "ssd"
    store = SsdStore(path, ODD, CAPACITY)
    assert all(put(store, KEYS))
    store.close(SECONDS)
    (tmp_path / "scan.py").write_text(
        "import sys; sys.path[:] = sys.argv[2:]\n" + scan, encoding="utf-8"
    )
    with monkeypatch.context() as patch:
        patch.setattr(guard, "_SCAN", tmp_path / "scan.py")
        patch.syspath_prepend(str(link_to_package(tmp_path)))
        with pytest.raises(TierConfigError, match=says):
            SsdStore(path, ODD, CAPACITY)
    store = SsdStore(path, ODD, CAPACITY)
    assert None not in fetch(store, KEYS)
    assert store.stats().errors == {}
    store.close(SECONDS)


def link_to_package(folder: Path) -> Path:
    """Where a process that knows only paths finds the package."""
    (folder / "path").mkdir()
    (folder / "path" / "stratakv").symlink_to(Path(tiers.__file__).resolve().parents[1])
    return folder / "path"


# For every number of descriptors that are left: opens, or says why not; then uses what is open
# while none is left at all.
STARVED = """
import os, resource, sys
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.contract import fetch, make_keys, put
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.ssd import SsdStore
layout, keys = BlockLayout(1, 16, 1, 48, "float32"), make_keys(10)
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
def limit(descriptors):
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, most))
def leave(count):
    spare = os.dup(0)
    os.close(spare)
    limit(spare + count)
def use(store):
    assert all(put(store, keys)) and None not in fetch(store, keys)
    assert store.stats().errors == {}, store.stats().errors
def opened():
    return SsdStore(sys.argv[1], layout, 2_000_000)
store = opened()
use(store)
store.close(10)
refused = 0
for count in range(0, 16):
    leave(count)
    try:
        store = opened()
    except TierConfigError as error:
        refused += "Too many open files" in str(error)
        limit(most)
        store = opened()
    assert None not in fetch(store, keys), f"lost with {count} descriptors left"
    leave(0)
    use(store)
    store.close(10)
    limit(most)
print(refused)
"""


def test_a_process_without_descriptors_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARVED, str(tmp_path / "ssd")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 2
    check_sound(tmp_path / "ssd")
