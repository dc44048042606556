# SPDX-License-Identifier: Apache-2.0
"""Digests of files: each byte counts, nothing is read twice, and what cannot be read is said."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import time
from pathlib import Path
from typing import Any

import pytest

from stratakv.tiers.identity import file_digests
from stratakv.tiers.identity.digest_cache import YOUNG_NS, DigestCache
from stratakv.tiers.identity.file_digests import PIECE_BYTES, digest_files
from stratakv.tiers.identity.file_state import FileState
from stratakv.tiers.settings.values import ConfigError

NOTHING = DigestCache(None)


class Grown(DigestCache):
    """Takes files as if they were old, wherever the tests' folder lies."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads = 0

    def trusts(self, path: Path) -> bool:
        return True

    def takes(self, state: FileState, now_ns: int) -> bool:
        self.reads += 1
        return True


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(file_digests, "PIECE_BYTES", 100)
    monkeypatch.setattr(file_digests, "_READ_BYTES", 32)
    return 100


def digest_of(path: Path, cache: DigestCache = NOTHING) -> bytes:
    [found] = digest_files([path], cache)
    return found.digest


def stated(content: bytes, piece: int) -> bytes:
    pieces = [content[i : i + piece] for i in range(0, len(content), piece)]
    whole = b"stratakv.file" + len(content).to_bytes(8, "little")
    return hashlib.sha256(whole + b"".join(hashlib.sha256(p).digest() for p in pieces)).digest()


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000, 1001])
def test_the_digest_is_the_stated_one(tmp_path: Path, small_pieces: int, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    assert digest_of(tmp_path / "file") == stated(content, small_pieces)


def test_a_golden_value(tmp_path: Path) -> None:
    """Blocks on disks are named with it; several pieces, in their real size."""
    (tmp_path / "file").write_bytes(b"k" * (PIECE_BYTES + 5))
    golden = "901f8419"
    assert digest_of(tmp_path / "file").hex()[:8] == golden
    assert stated(b"k" * (PIECE_BYTES + 5), 8 * 1024**2).hex()[:8] == golden


def test_each_byte_counts(tmp_path: Path, small_pieces: int) -> None:
    path, content = tmp_path / "file", bytearray(os.urandom(350))
    path.write_bytes(content)
    names = {digest_of(path)}
    for place in range(len(content)):
        content[place] ^= 1
        path.write_bytes(content)
        names.add(digest_of(path))
        content[place] ^= 1
    assert len(names) == 351


def test_a_remembered_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "file", Grown(tmp_path / "cache")
    path.write_bytes(b"content")
    first = digest_of(path, cache)

    def refuse(*_: Any) -> int:
        raise AssertionError("it is read")

    monkeypatch.setattr(os, "preadv", refuse)
    assert digest_of(path, cache) == first
    assert cache.reads == 1
    with pytest.raises(AssertionError, match="it is read"):
        digest_of(path, NOTHING)


def test_a_file_that_was_edited_in_place_with_its_times_set_back(tmp_path: Path) -> None:
    path, cache = tmp_path / "file", Grown(tmp_path / "cache")
    path.write_bytes(b"before")
    first, status = digest_of(path, cache), path.stat()
    with path.open("r+b") as file:
        file.write(b"after.")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns and path.stat().st_size == status.st_size
    assert digest_of(path, cache) != first
    assert cache.reads == 2


def test_a_file_that_a_mapping_goes_on_changing(tmp_path: Path) -> None:
    """A page that is dirty already takes more writes without a word in ctime."""
    path, cache = tmp_path / "file", Grown(tmp_path / "cache")
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[0] = 1
        first = digest_of(path, cache)
        mapped[1] = 1
        if not DigestCache(tmp_path).trusts(path):
            pytest.skip("no file in the tests' folder is remembered")
        assert digest_of(path, cache) != first


def test_y01_a_mapped_write_behind_the_hashing_is_seen(tmp_path: Path) -> None:
    """Also where nothing is remembered, and by a page that was dirty before."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[0] = 1
        [found] = digest_files([path], NOTHING)
        found.check_unchanged()
        time.sleep(0.02)  # the grain of ctime
        mapped[1] = 1
        if not DigestCache(tmp_path).trusts(path):
            pytest.skip("the file system of the tests' folder does not count mapped writes")
        with pytest.raises(ConfigError, match="was changed while it was read"):
            found.check_unchanged()


def test_a_young_file_is_read_again(tmp_path: Path) -> None:
    path, cache = tmp_path / "file", DigestCache(tmp_path / "cache")
    path.write_bytes(b"content")
    state = FileState.from_stat(path.stat())
    digest_of(path, cache)
    if time.time_ns() - state.ctime_ns < YOUNG_NS:
        assert cache.load_digest(state) is None


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "file", Grown(tmp_path / "cache")
    path.write_bytes(b"content")
    read = os.preadv

    def read_and_change(*arguments: Any) -> int:
        length = read(*arguments)
        os.utime(path, ns=(0, 0))
        return length

    monkeypatch.setattr(os, "preadv", read_and_change)
    with pytest.raises(ConfigError, match="was changed while it was read; start again"):
        digest_of(path, cache)
    assert cache.load_digest(FileState.from_stat(path.stat())) is None


@pytest.mark.parametrize("length", [0, OSError(errno.EIO, os.strerror(errno.EIO))])
def test_a_disk_that_fails_while_hashing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: int, length: int | OSError
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    read, calls = os.preadv, 0

    def fail(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls < 7:
            return read(*arguments)
        if isinstance(length, OSError):
            raise length
        return length

    monkeypatch.setattr(os, "preadv", fail)
    words = "Input/output error" if length else "it became shorter while it was read"
    with pytest.raises(ConfigError, match=f"file cannot be read .{words}.*keys of blocks"):
        digest_of(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("gone", "No such file"), ("pipe", "no ordinary file"), (".", "ordinary")):
        with pytest.raises(ConfigError, match=words):
            digest_of(tmp_path / name)


def test_a_change_after_the_hashing_is_found(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    [found] = digest_files([path], NOTHING)
    found.check_unchanged()
    os.utime(path, ns=(0, 0))
    with pytest.raises(ConfigError, match="was changed while it was read"):
        found.check_unchanged()
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        found.check_unchanged()


def test_progress_is_told_every_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: int
) -> None:
    path, lines, now = tmp_path / "file", [], [100.0]
    path.write_bytes(bytes(1000))

    def tick() -> float:
        now[0] += 0.5
        return now[0]

    monkeypatch.setattr(file_digests.time, "monotonic", tick)
    digest_files([path], NOTHING, lines.append)
    assert lines == [
        f"hashing the weights, for the keys of blocks: {done} bytes of 1000 bytes"
        for done in (400, 800)
    ]
    lines.clear()
    monkeypatch.setattr(file_digests.time, "monotonic", lambda: 100.0)
    digest_files([path], NOTHING, lines.append)
    assert not lines
