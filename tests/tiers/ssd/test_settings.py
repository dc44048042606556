# SPDX-License-Identifier: Apache-2.0
"""Paths, sizes and settings of the SSD store: bounds that hold, refusals with cause and cure."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import lmdb
import msgspec
import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.settings.sizes import show_size
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.folder.directory import LEFT_BEHIND_SECONDS, StoreDirectory
from stratakv.tiers.ssd.folder.identity_note import read_note, write_note
from stratakv.tiers.ssd.index.index_file import FORMAT_VERSION
from stratakv.tiers.ssd.store_check import check_store

from ...open_files import open_paths
from ..blocks import ODD, SMALL, make_keys
from ..store_contract import SECONDS, fetch, put
from .stores import BIG, Open, capacity_for, store_keys


def test_space_on_the_disk_stays_within_the_capacity(open_store: Open, tmp_path: Path) -> None:
    for slots, layout in ((9, BIG), (200, SMALL), (300, ODD)):
        path = tmp_path / f"bound-{slots}"
        store = open_store(slots=slots, layout=layout, path=path)
        for start in range(0, 3 * slots, 50):
            put(store, make_keys(50, f"{start}"))
        assert on_disk(path) <= store.stats().capacity_bytes
        assert store.stats().used_bytes <= store.stats().capacity_bytes
        # Most of it is blocks; what is not, is what the index may ever need.
        assert store.stats().blocks >= slots * 15 // 16
        store.close(SECONDS)
        assert on_disk(path) <= store.stats().capacity_bytes


def on_disk(path: Path) -> int:
    """Bytes that the file system has given to everything below and including `path`."""
    return sum(each.lstat().st_blocks * 512 for each in [path, *path.rglob("*")])


def test_files_are_private(open_store: Open, tmp_path: Path) -> None:
    put(open_store(), make_keys(2))
    for each in [tmp_path / "ssd", *(tmp_path / "ssd").rglob("*")]:
        mode = stat.S_IMODE(each.stat().st_mode)
        assert mode == (0o700 if each.is_dir() else 0o600), each


def test_files_that_others_could_read_become_private(open_store: Open, tmp_path: Path) -> None:
    open_store().close(SECONDS)
    index = tmp_path / "ssd" / "index"
    shutil.copytree(index, tmp_path / "ssd" / "index.bad-1")
    for each in (tmp_path / "ssd").rglob("*"):
        each.chmod(0o777 if each.is_dir() else 0o666)
    open_store()
    for each in (tmp_path / "ssd").rglob("*"):
        mode = stat.S_IMODE(each.stat().st_mode)
        assert mode == (0o700 if each.is_dir() else 0o600), each


def test_a_directory_that_others_made_keeps_its_mode(open_store: Open, tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    (tmp_path / "ssd").chmod(0o755)
    open_store()
    assert stat.S_IMODE((tmp_path / "ssd").stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["lock", "identity", "blocks", "index", "index/data.mdb"])
@pytest.mark.parametrize("kind", ["link", "other"])
def test_links_and_other_things_in_the_way_are_refused(
    open_store: Open, tmp_path: Path, name: str, kind: str
) -> None:
    open_store().close(SECONDS)
    path, elsewhere = tmp_path / "ssd" / name, tmp_path / "elsewhere"
    path.rename(elsewhere)
    if kind == "link":
        path.symlink_to(elsewhere)
    elif name == "index":
        path.write_text("a file")
    else:
        path.mkdir()
    kept = sorted((each, each.stat().st_mtime_ns) for each in [elsewhere, *elsewhere.rglob("*")])
    found = "a symbolic link" if kind == "link" else "something else"
    wanted = "folder" if name == "index" else "file"
    with pytest.raises(TierConfigError, match=f"{name} to be a {wanted} and finds {found}; use"):
        open_store()
    assert kept == sorted(
        (each, each.stat().st_mtime_ns) for each in [elsewhere, *elsewhere.rglob("*")]
    )


def test_a_directory_behind_a_link_is_taken(open_store: Open, tmp_path: Path) -> None:
    """PATH itself is the operator's; a link to another disk is how many move a cache."""
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "ssd").symlink_to(tmp_path / "large-disk")
    open_store().close(SECONDS)
    assert (tmp_path / "large-disk" / "blocks").exists()


@pytest.mark.parametrize("slots", [16, 40, 200])
def test_another_capacity_keeps_what_fits(open_store: Open, tmp_path: Path, slots: int) -> None:
    keys = make_keys(40)
    store = open_store(slots=40)
    put(store, keys)
    store.close(SECONDS)
    store = open_store(slots=slots)
    hits = store.lookup(keys).count(Answer.HIT)
    assert hits == min(slots, 40)
    found = fetch(store, keys)
    assert len(found) - found.count(None) == hits
    assert on_disk(tmp_path / "ssd") <= store.stats().capacity_bytes
    put(store, make_keys(slots, "more"))
    store.close(SECONDS)
    store = open_store(slots=slots)
    assert None not in fetch(store, store_keys(store))
    assert len(store_keys(store)) >= slots * 15 // 16


def test_a_small_loss_of_slots_rewrites_no_index(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(40)
    store = open_store(slots=40)
    put(store, keys)
    store.close(SECONDS)
    monkeypatch.setattr("stratakv.tiers.ssd.folder.open_store.rebuild", None)
    store = open_store(slots=38)
    assert store.lookup(keys).count(Answer.HIT) == 38


def test_a_second_process_is_refused_with_the_owner(open_store: Open, tmp_path: Path) -> None:
    open_store()
    code = (
        "import sys; from stratakv.tiers.ssd import SsdStore\n"
        "from stratakv.tiers.block import BlockLayout\n"
        "try: SsdStore(sys.argv[1], BlockLayout(1, 16, 1, 32, 'float32'), 10**7)\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "ssd")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"in use by process {os.getpid()};" in done.stdout
    with pytest.raises(TierConfigError, match=f"in use by process {os.getpid()}"):
        open_store()


@pytest.mark.slow
def test_a_lock_that_a_killed_owner_left_to_a_child_is_waited_for(tmp_path: Path) -> None:
    """A process forks and ends while it starts another one; what it held stays with the child. The
    copy stands for what a fork in C leaves, which calls no hook of Python's."""
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from stratakv.tiers.ssd.folder.directory import StoreDirectory\n"
        "directory = StoreDirectory(Path(sys.argv[1]))\n"
        "copy = os.dup(directory._lock.descriptor)\n"
        "if os.fork(): os._exit(0)\n"
        "os.close(1); os.close(2); time.sleep(float(sys.argv[2]))\n"
    )
    for seconds, is_left in (("1", True), ("6", False)):
        path = tmp_path / seconds
        command = [sys.executable, "-c", code, str(path), seconds]
        subprocess.run(command, timeout=60, check=True)
        began = time.monotonic()
        if is_left:
            StoreDirectory(path).close()
            assert time.monotonic() - began < LEFT_BEHIND_SECONDS
        else:
            with pytest.raises(TierConfigError, match="in use by process"):
                StoreDirectory(path)
            assert LEFT_BEHIND_SECONDS <= time.monotonic() - began < 5.5


def test_another_layout_or_namespace_is_refused(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(3)
    store = open_store(namespace=b"\x01\x02")
    put(store, keys)
    store.close(SECONDS)
    with pytest.raises(TierConfigError, match=r"heads of 32, .* has .* heads of 48, .*delete"):
        open_store(layout=ODD, namespace=b"\x01\x02")
    with pytest.raises(TierConfigError, match=r"namespace 0102\), .* has no namespace;"):
        open_store()
    with monkeypatch.context() as patch:  # in another format as well
        patch.setattr("stratakv.tiers.ssd.folder.open_store.FORMAT_VERSION", FORMAT_VERSION + 1)
        with pytest.raises(TierConfigError, match=r"namespace 0102\), .* has no namespace;"):
            open_store()
    # Nothing was changed by the refusals.
    assert None not in fetch(open_store(namespace=b"\x01\x02"), keys)


@pytest.mark.parametrize("has_note", [True, False])
def test_a_store_of_another_format_starts_empty(
    open_store: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_note: bool,
) -> None:
    keys = make_keys(3)
    store = open_store()
    put(store, keys)
    store.close(SECONDS)
    if not has_note:
        (tmp_path / "ssd" / "identity").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("stratakv.tiers.ssd.folder.open_store.FORMAT_VERSION", FORMAT_VERSION + 1)
        patch.setattr("stratakv.tiers.ssd.store_check.FORMAT_VERSION", FORMAT_VERSION + 1)
        store = open_store()
        assert store.lookup(keys) == [Answer.MISS] * 3
        assert store.stats().errors == {"other_format": 1}
        assert put(store, keys) == [True] * 3
        store.close(SECONDS)
        assert check_store(tmp_path / "ssd").is_clean
        assert None not in fetch(open_store(), keys)
    [line] = caplog.messages
    assert f"has format {FORMAT_VERSION} and this version has format {FORMAT_VERSION + 1}" in line


def test_a_store_of_format_1(open_store: Open, tmp_path: Path) -> None:
    """Its rows were shorter. It starts empty, set aside where no identity file says why."""
    path = tmp_path / "ssd"
    open_store().close(SECONDS)
    with lmdb.open(str(path / "index"), max_dbs=2, lock=False) as index:
        with index.begin(write=True, db=index.open_db(b"slots")) as txn:
            txn.put(bytes(4), make_keys(1)[0] + bytes(16))
        with index.begin(write=True, db=index.open_db(b"store")) as txn:
            txn.put(b"format", (1).to_bytes(8, "little"))
    note = read_note(path)
    assert note is not None
    write_note(path, msgspec.structs.replace(note, format_version=1))
    with pytest.raises(TierConfigError, match="has format 1 and this version checks"):
        check_store(path, fix=True)
    (path / "identity").unlink()
    store = open_store()
    assert store.stats().errors == {"index_set_aside": 1}
    assert store.stats().blocks == 0
    assert (path / "index.bad-1").exists()
    store.close(SECONDS)
    write_note(path, msgspec.structs.replace(note, format_version=1))
    store = open_store()
    assert store.stats().errors == {"other_format": 1}
    assert store.stats().blocks == 0


def test_a_path_or_size_that_cannot_work_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    for path in (file, file / "below"):
        with pytest.raises(TierConfigError, match=r"needs a directory and .* is in the way"):
            SsdStore(path, SMALL, 10**7)
    with pytest.raises(TierConfigError, match=r"cannot write to /sys/stratakv .*permissions"):
        SsdStore("/sys/stratakv", SMALL, 10**7)
    smallest = capacity_for(1)
    sizes = f"at least {re.escape(show_size(smallest))} .*, not {smallest - 1}"
    with pytest.raises(TierConfigError, match=sizes):
        SsdStore(tmp_path / "a", SMALL, smallest - 1)
    with pytest.raises(TierConfigError, match=r"iB are free; lower its size by \d+MiB"):
        SsdStore(tmp_path / "b", SMALL, 2**60)
    with pytest.raises(TierConfigError, match="I/O thread"):
        SsdStore(tmp_path / "c", SMALL, 10**7, io_threads=0)
    SsdStore(tmp_path / "d", SMALL, smallest).close(SECONDS)


@pytest.mark.parametrize("name", ["blocks", "index"])
def test_files_of_somebody_else_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(TierConfigError, match=f"would write over .*/{name}, which it did not make"):
        SsdStore(tmp_path, SMALL, capacity_for(1))
    assert (tmp_path / name).read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    (tmp_path / name).unlink()
    (tmp_path / "notes").write_text("beside it")
    for _ in range(2):
        SsdStore(tmp_path, SMALL, capacity_for(1)).close(SECONDS)
    assert (tmp_path / "notes").read_text() == "beside it"


def test_a_refused_opening_leaves_nothing_open(open_store: Open) -> None:
    open_store(slots=8).close(SECONDS)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(TierConfigError):
            open_store(layout=ODD)
    assert len(os.listdir("/proc/self/fd")) == before
    open_store(slots=8)


def test_a_folder_in_place_of_the_identity_is_no_note(tmp_path: Path) -> None:
    """And its descriptor is not left open."""
    (tmp_path / "identity").mkdir()
    assert read_note(tmp_path) is None
    assert str(tmp_path / "identity") not in open_paths()
