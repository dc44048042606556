# SPDX-License-Identifier: Apache-2.0
"""The digest cache: what it remembers, and which entries and files it does not trust."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import pytest

from stratakv.tiers.identity import digest_cache
from stratakv.tiers.identity.digest_cache import MOST_ENTRIES, YOUNG_NS, DigestCache
from stratakv.tiers.identity.file_state import FileState

DIGEST = bytes(range(32))
STATE = FileState(device=7, inode=8, size=9, mtime_ns=10, ctime_ns=11)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests"


@pytest.fixture
def cache(folder: Path) -> DigestCache:
    return DigestCache(folder)


def entry_of(folder: Path) -> Path:
    [entry] = folder.iterdir()
    return entry


def test_what_is_added_is_found_by_another_process(cache: DigestCache, folder: Path) -> None:
    assert cache.load_digest(STATE) is None
    cache.add(STATE, DIGEST)
    assert DigestCache(folder).load_digest(STATE) == DIGEST
    assert stat.S_IMODE(entry_of(folder).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("field", FileState._fields)
def test_each_part_of_the_state_counts(cache: DigestCache, field: str) -> None:
    cache.add(STATE, DIGEST)
    for step in (1, -1, 2**32):
        assert cache.load_digest(STATE._replace(**{field: getattr(STATE, field) + step})) is None


def test_y01_the_same_numbers_on_another_file_system_are_another_file(cache: DigestCache) -> None:
    cache.add(STATE, DIGEST, 5)
    assert (cache.load_digest(STATE, 5), cache.load_digest(STATE, 6), cache.load_digest(STATE)) == (
        DIGEST,
        None,
        None,
    )


def test_a_later_state_takes_the_place_of_an_earlier_one(cache: DigestCache, folder: Path) -> None:
    cache.add(STATE, DIGEST)
    later = STATE._replace(ctime_ns=12)
    cache.add(later, bytes(32))
    assert (cache.load_digest(STATE), cache.load_digest(later)) == (None, bytes(32))
    entry_of(folder)


def test_a_damaged_entry_is_ignored(cache: DigestCache, folder: Path) -> None:
    cache.add(STATE, DIGEST)
    entry = entry_of(folder)
    good = entry.read_bytes()
    for place in range(len(good)):
        entry.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert cache.load_digest(STATE) is None, place
    for content in (b"", good[:-1], good + b"\0"):
        entry.write_bytes(content)
        assert cache.load_digest(STATE) is None
    entry.write_bytes(good)
    assert cache.load_digest(STATE) == DIGEST


def test_an_entry_of_another_file_is_ignored(cache: DigestCache, folder: Path) -> None:
    cache.add(STATE, DIGEST)
    other = STATE._replace(inode=9)
    entry_of(folder).rename(folder / "7-9")
    assert cache.load_digest(other) is None and cache.load_digest(STATE) is None


def test_what_others_may_have_written_is_ignored(cache: DigestCache, folder: Path) -> None:
    cache.add(STATE, DIGEST)
    entry = entry_of(folder)
    for mode in (0o620, 0o602, 0o640, 0o666):
        entry.chmod(mode)
        assert cache.load_digest(STATE) is None, oct(mode)
    entry.chmod(0o600)
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        assert cache.load_digest(STATE) is None, oct(mode)
    folder.chmod(0o700)
    os.link(entry, folder.parent / "link")
    assert cache.load_digest(STATE) is None
    (folder.parent / "link").unlink()
    assert cache.load_digest(STATE) == DIGEST
    entry.rename(folder.parent / "moved")
    entry.symlink_to(folder.parent / "moved")
    assert cache.load_digest(STATE) is None
    entry.unlink()
    os.mkfifo(entry, 0o600)
    assert cache.load_digest(STATE) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_is_ignored(cache: DigestCache, folder: Path) -> None:
    cache.add(STATE, DIGEST)
    os.chown(entry_of(folder), 12345, -1)
    assert cache.load_digest(STATE) is None
    os.chown(entry_of(folder), 0, -1)
    os.chown(folder, 12345, -1)
    assert cache.load_digest(STATE) is None
    cache.add(STATE, bytes(32))  # says nothing
    os.chown(folder, 0, -1)
    assert cache.load_digest(STATE) == DIGEST


def test_without_a_folder_nothing_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file" / "digests"):
        cache = DigestCache(folder)
        cache.add(STATE, DIGEST)
        assert cache.load_digest(STATE) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XDG_CACHE_HOME": "/c"}, "/c/stratakv/digests"),
        ({"HOME": "/h"}, "/h/.cache/stratakv/digests"),
        ({"XDG_CACHE_HOME": "relative"}, None),
        ({}, None),  # no HOME, and a user who is in no list
    ],
)
def test_where_it_lies(
    variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = DigestCache.of_user()._folder
    assert found == (None if expected is None else Path(expected))


def test_the_oldest_entries_make_room(
    cache: DigestCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_cache, "MOST_ENTRIES", 3)
    assert MOST_ENTRIES > 1000
    for inode in range(5):
        cache.add(STATE._replace(inode=inode), DIGEST)
        (folder / f"7-{inode:x}").touch()
        os.utime(folder / f"7-{inode:x}", ns=(inode, inode))
    kept = [inode for inode in range(5) if cache.load_digest(STATE._replace(inode=inode))]
    assert kept == [2, 3, 4]


def test_a_young_file_is_not_remembered(cache: DigestCache) -> None:
    """Whose next change may have the same ctime."""
    now = STATE.ctime_ns + YOUNG_NS
    assert cache.takes(STATE, now)
    for early in (1, YOUNG_NS, 2 * YOUNG_NS):  # down to a clock that was set back
        assert not cache.takes(STATE, now - early)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("ext4", "rw", True), ("xfs", "rw", True), ("nfs4", "rw", True), ("overlay", "rw", True),
        ("ext4", "rw,lazytime", False), ("tmpfs", "rw", False), ("fuse.sshfs", "rw", False),
        ("fuse", "rw", False), ("9p", "rw", False), ("vfat", "rw", False),
        # Images, whose times are what their maker wrote.
        ("squashfs", "ro", False), ("erofs", "ro", False), ("iso9660", "ro", False),
        ("ext4", "ro", False), ("unheard-of", "rw", False),
    ],
)  # fmt: skip
def test_file_systems_whose_ctime_does_not_count(
    cache: DigestCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: str,
    expected: bool,
) -> None:
    table = tmp_path / "mounts"
    table.write_text(f"1 0 8:1 / / rw - {kind} /dev/root {options}\n")
    of_table = digest_cache.mount_of
    monkeypatch.setattr(digest_cache, "mount_of", lambda path: of_table(path, table))
    assert cache.trusts(tmp_path) is expected
    table.write_text(f"1 0 8:1 / / ro - {kind} /dev/loop0 {options}\n")
    assert not cache.trusts(tmp_path)
    table.write_text(f"1 0 8:1 / / ro - {kind} /dev/root {options}\n")
    assert cache.trusts(tmp_path) is expected  # nothing writes here, but elsewhere
    table.unlink()
    assert not cache.trusts(tmp_path)
