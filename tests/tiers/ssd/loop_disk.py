# SPDX-License-Identifier: Apache-2.0
"""A disk whose power can be cut: ext4 in a file of another ext4, both on loop devices.

    platter   a file in memory            what a disk keeps when its power goes
    outer     ext4 on it, in which lies   the page cache of this one is the disk's write cache
    disk      a file, and on it
    store     ext4, for the test          the page cache of this one is the host's memory

`cut` keeps the disk's cache: it freezes the outer file system, so that nothing reaches the file
`disk` any more, whatever is under way, and copies it. What the inner file system had not sent to
its disk is not in the copy. `cut_with_cache` loses that cache as well: it copies the platter, on
which is only what was flushed to it; the caller has stopped the writer. Neither copy has seen an
unmount, so mounting it replays a journal, as after a power cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

MIB = 1024**2
DISK_BYTES = 20 * MIB
PLATTER_BYTES = 32 * MIB
COMMAND_SECONDS = 30.0

_SHUTDOWN = 0x8004587D  # of ext4: every later call fails, as on a disk that was pulled out
_NO_FLUSH = 2
_FIFREEZE = 0xC0045877
_FITHAW = 0xC0045878


class LoopDisk:
    """Mounts everything in an empty `folder`; `close` takes all of it down again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._undo = contextlib.ExitStack()
        platter, outer = folder / "platter", folder / "outer"
        self._platter, self._disk, self.path = platter, outer / "disk", folder / "store"
        try:
            _make_ext4(platter, PLATTER_BYTES, "-O", "^has_journal")
            self._undo.enter_context(mounted(platter, outer))
            # Written whole, so that no block of the disk has to be found by the outer's metadata.
            self._disk.write_bytes(bytes(DISK_BYTES))
            _make_ext4(self._disk, DISK_BYTES, "-J", "size=4")
            self._undo.enter_context(mounted(self._disk, self.path))
            subprocess.run(["sync", "-f", str(outer)], check=True, timeout=COMMAND_SECONDS)
        except BaseException:
            self.close()
            raise

    def cut(self, copy: Path) -> None:
        """Copy what the disk and its cache have at one moment."""
        descriptor = os.open(self._folder / "outer", os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, _FIFREEZE, 0)
            try:
                shutil.copyfile(self._disk, copy)
            finally:
                fcntl.ioctl(descriptor, _FITHAW, 0)
        finally:
            os.close(descriptor)

    def cut_with_cache(self, copy: Path) -> None:
        """Copy what the platter has. Whoever writes has stopped; what the kernel still does on its
        own would tear the copy, so it is made until two are the same."""
        deadline = time.monotonic() + COMMAND_SECONDS
        before, platter = b"", copy.with_suffix(".platter")
        while (image := self._platter.read_bytes()) != before:
            assert time.monotonic() < deadline, "the platter does not come to rest"
            before = image
        platter.write_bytes(image)
        with mounted(platter, copy.with_suffix(".outer")) as outer:
            shutil.copyfile(outer / "disk", copy)
        platter.unlink()

    def close(self) -> None:
        self._undo.close()


class PulledDisk:
    """ext4 on a loop device in `folder`, mounted at `path`; `close` takes it down at the end."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "mounted"
        self._image = folder / "image"
        self._undo = contextlib.ExitStack()
        _make_ext4(self._image, DISK_BYTES, "-J", "size=4")
        self._undo.enter_context(mounted(self._image, self.path))

    def pull(self) -> None:
        """Nothing that is open there can be read or written any more, nor opened anew."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_FLUSH))
        finally:
            os.close(descriptor)

    def put_back(self) -> None:
        """Mount what is on it again, at the same place, as soon as nobody has the old one open."""
        deadline = time.monotonic() + COMMAND_SECONDS
        command = ["umount", str(self.path)]
        while subprocess.run(
            command, check=False, timeout=COMMAND_SECONDS, capture_output=True
        ).returncode:
            assert time.monotonic() < deadline, "somebody keeps the old one open"
            time.sleep(0.05)
        command = ["mount", "-t", "ext4", "-o", "loop,noatime", str(self._image), str(self.path)]
        subprocess.run(command, check=True, timeout=COMMAND_SECONDS, capture_output=True)

    def close(self) -> None:
        self._undo.close()


@contextlib.contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    """The ext4 in `image`, at `folder`, which is made for it."""
    folder.mkdir()
    command = ["mount", "-t", "ext4", "-o", "loop,noatime", str(image), str(folder)]
    subprocess.run(command, check=True, timeout=COMMAND_SECONDS, capture_output=True)
    try:
        yield folder
    finally:
        unmount(folder)
        folder.rmdir()


def unmount(folder: Path) -> None:
    """Now, or as soon as nobody uses it any more. The loop device goes with it."""
    for options in ((), ("-l",)):
        done = subprocess.run(
            ["umount", *options, str(folder)],
            check=False,
            timeout=COMMAND_SECONDS,
            capture_output=True,
        )
        if not done.returncode:
            return


def why_not() -> str | None:
    """Why there can be no such disk here, None if there can."""
    if os.geteuid():
        return "mounting a loop device needs root"
    if not os.access("/dev/loop-control", os.R_OK | os.W_OK):
        return "there are no loop devices here"
    for program in ("mkfs.ext4", "mount", "umount"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None


def _make_ext4(image: Path, size: int, *options: str) -> None:
    with image.open("ab") as file:
        file.truncate(size)
    command = ["mkfs.ext4", "-q", "-F", "-b", "4096", *options, str(image)]
    subprocess.run(command, check=True, timeout=COMMAND_SECONDS, capture_output=True)
