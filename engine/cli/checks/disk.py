# SPDX-License-Identifier: Apache-2.0
"""Checks of a directory for an SSD tier: file system, free space, direct I/O, and existing files.

The checks create no directory, and write one page to an unnamed temporary file."""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path

from ....tiers.errors import TierConfigError
from ....tiers.identity.mounts import mount_of
from ....tiers.mac_key import read_mac_key
from ....tiers.settings.sizes import rough_size
from ....tiers.ssd.folder.identity_note import key_name, read_note, unpack
from ....tiers.ssd.folder.inventory import is_store, look_at
from ....tiers.tier_settings import SsdSettings
from .base import Finding, ok, problem, warning

_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
_LAYERS = {"overlay", "aufs"}
_REMOTE = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|9p|virtiofs|ceph|glusterfs|lustre|beegfs|gpfs|afs|fuse\..+|fuseblk"
)


def check_disks(
    ssd: SsdSettings, check: Callable[[SsdSettings], Iterator[Finding]]
) -> Iterator[Finding]:
    """Run `check` for each disk with the disk's share of the size; check that the disks differ."""
    share = ssd.capacity_bytes // max(1, len(ssd.paths))
    devices: dict[int, Path] = {}
    for path in ssd.paths:
        yield from check(replace(ssd, path=path, capacity_bytes=share))
        there = next(each for each in (path, *path.parents) if each.exists())
        other = devices.setdefault(there.stat().st_dev, path)
        if other != path:
            yield warning(
                "ssd disk", f"{path} and {other} are on one disk, which gains nothing",
                f"findmnt --target {path} shows where it lies; give one directory on each disk",
            )  # fmt: skip


def check_ssd(ssd: SsdSettings, namespace: bytes, host: str) -> Iterator[Finding]:
    """Check that an SSD tier for another engine can be at the path in `ssd`. `host` names the other
    engine, and `namespace` is the prefix of the namespaces of the other engine's chunks."""
    there = yield from _check_path(ssd)
    if there is None or ssd.path is None:
        return
    path = ssd.path.absolute()
    yield from _check_store(path, ssd, namespace, host)
    yield from _check_room(path, there, ssd.capacity_bytes)


def check_folder(ssd: SsdSettings) -> Iterator[Finding]:
    """Check that an SSD tier can be at the path in `ssd`; the tier's content is not checked."""
    there = yield from _check_path(ssd)
    if there is None or ssd.path is None:
        return
    path = ssd.path.absolute()
    if is_store(path) and (owner := look_at(path).owner) is not None:
        yield problem(
            "ssd tier", f"{path} is in use by process {owner}",
            "give each engine a directory of its own, or stop that one",
        )  # fmt: skip
    yield from _check_room(path, there, ssd.capacity_bytes)


def _check_path(ssd: SsdSettings) -> Generator[Finding, None, Path | None]:
    """Check the path; return the nearest existing folder, or None if no tier can be made in it."""
    assert ssd.path is not None
    path = ssd.path.absolute()
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not there.is_dir():
        yield problem("ssd path", f"{there} is no directory", "give the path of one, or a new one")
        return None
    if not os.access(there, os.W_OK | os.X_OK):
        yield problem(
            "ssd path", f"{there} cannot be written to by user {os.getuid()}",
            "change its permissions, or give another --ssd-path",
        )  # fmt: skip
        return None
    yield ok("ssd path", f"{path} can be written" if there == path else f"{path} can be made")
    yield from _check_mount(there)
    yield from _check_direct(there)
    return there


def _check_mount(folder: Path) -> Iterator[Finding]:
    mount = mount_of(folder)
    if mount is None:
        yield warning("ssd disk", f"what {folder} lies on is not known", "see that it is a disk")
        return
    where = f"{folder} is on {mount.kind} ({mount.source})"
    if mount.kind in _MEMORY:
        yield warning(
            "ssd disk", f"{where}, which is memory: what is there takes memory twice and is gone "
            "after a restart of the machine", "give a path on a local NVMe disk",
        )  # fmt: skip
    elif mount.kind in _LAYERS:
        yield warning(
            "ssd disk", f"{where}, which is the container's own layer: slow, and gone with it",
            "mount a volume of a local disk there",
        )  # fmt: skip
    elif _REMOTE.fullmatch(mount.kind):
        yield warning(
            "ssd disk", f"{where}, which is not a local disk: locks and syncs may mean less there",
            "give a path on a local NVMe disk; a cache server is what engines share",
        )  # fmt: skip
    else:
        yield ok("ssd disk", where)


def _check_direct(folder: Path) -> Iterator[Finding]:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE | os.O_DIRECT
    try:
        descriptor = os.open(folder, flags, 0o600)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.pwrite(descriptor, page, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno == errno.EINVAL:
            yield warning(
                "direct I/O", f"the file system of {folder} has none, so that chunks pass through "
                "the page cache and take memory there", "give a path on ext4 or XFS",
            )  # fmt: skip
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # another check reports a full disk
        else:
            yield warning("direct I/O", f"could not be tried ({error.strerror})", "see the log")
    else:
        yield ok("direct I/O", f"the file system of {folder} takes it")


def _check_store(path: Path, ssd: SsdSettings, namespace: bytes, host: str) -> Iterator[Finding]:
    if not path.is_dir():
        return
    if not is_store(path):
        foreign = [name for name in ("blocks", "index") if os.path.lexists(path / name)]
        if foreign:
            yield problem(
                "ssd tier", f"{path / foreign[0]} is there and of no SSD tier",
                "give another --ssd-path, or remove it",
            )  # fmt: skip
        return
    entry, note = look_at(path), read_note(path)
    if entry.owner is not None:
        yield problem(
            "ssd tier", f"{path} is in use by process {entry.owner}",
            "give each engine a directory of its own, or stop that one",
        )  # fmt: skip
        return
    if note is None:
        yield warning(
            "ssd tier", f"what made the tier in {path} cannot be read",
            f"look with stratakv check {path}",
        )  # fmt: skip
        return
    made_for = unpack(note.namespace)
    cure = f"give another --ssd-path, or remove it with stratakv cache rm {path}"
    if not made_for.given.startswith(namespace):
        yield problem(
            "ssd tier", f"{path} was made for {note.layout_text}, which are no chunks of {host}",
            cure,
        )  # fmt: skip
        return
    file = ssd.mac_key_file
    try:
        key = b"" if file is None else read_mac_key(file, "--ssd-mac-key-file", path).id
    except TierConfigError as error:
        yield problem("ssd tier", str(error), "give the key file that it was made with")
        return
    if key != made_for.key_id:
        yield problem(
            "ssd tier", f"{path} was made with {key_name(made_for.key_id)}, and {key_name(key)} "
            "was given", "give the key file that it was made with, or another --ssd-path",
        )  # fmt: skip
        return
    root = made_for.given.removeprefix(namespace).hex()[:16]
    yield ok(
        "ssd tier", f"{path} has {entry.blocks} chunks of {rough_size(note.page_bytes)}, identity "
        f"{root}; {host} refuses it if it names its own otherwise in the log",
    )  # fmt: skip


def _check_room(path: Path, there: Path, capacity_bytes: int) -> Iterator[Finding]:
    space = os.statvfs(there)
    free, whole = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    taken = look_at(path).allocated_bytes if is_store(path) else 0
    shown = f"{rough_size(free)} of {rough_size(whole)} free"
    if taken:
        shown += f", {rough_size(taken)} taken already"
    if free + taken < capacity_bytes:
        yield problem(
            "ssd room", f"{shown}, and --ssd-bytes is {rough_size(capacity_bytes)}",
            f"give --ssd-bytes {(free + taken) * 9 // 10 >> 20}MiB or less, or free some",
        )  # fmt: skip
    else:
        yield ok("ssd room", f"{shown}, for {rough_size(capacity_bytes)}")
