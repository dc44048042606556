# SPDX-License-Identifier: Apache-2.0
"""PATH/identity: what the store was made for, said a second time outside of the index.

With it a damaged name in the index is told from another model's store, an index that was lost can
be made again from the records, whose headers do not carry the namespace, no opening repeats the
epoch of an earlier one, and what was cleared stays forgotten though its rows and records are still
there. One line of JSON and one of its checksum, replaced as a whole; on a full disk, which has no
room for a second file, written over.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import xxhash

from ..index.index_file import Identity, sync_folder

NAME = "identity"
_LIMIT_BYTES = 64 * 1024
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the file says; bytes are in base64."""

    format_version: int
    layout_id: bytes
    namespace: bytes
    layout_text: str
    page_bytes: int  # payload of one record
    epoch: int  # of the last opening
    cleared_up_to: int = 0  # the last generation that was forgotten all at once

    @property
    def identity(self) -> Identity:
        return Identity(self.format_version, self.layout_id, self.namespace, self.layout_text)


def make_note(identity: Identity, page_bytes: int, epoch: int, cleared_up_to: int = 0) -> Note:
    return Note(*identity, page_bytes, epoch, cleared_up_to)


def read_note(folder: Path) -> Note | None:
    """What the file in `folder` says; None where there is none or it is damaged."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(folder / NAME, flags)
        try:  # not `open`, which leaves the descriptor of a directory open
            line, _, checksum = os.read(descriptor, _LIMIT_BYTES).partition(b"\n")
        finally:
            os.close(descriptor)
    except OSError:
        return None
    if checksum.strip() != _checksum(line):
        return None
    try:
        return msgspec.json.decode(line, type=Note)
    except msgspec.MsgspecError:
        return None


def write_note(folder: Path, note: Note) -> None:
    """Replace the file, durably. May raise OSError."""
    fresh = folder / f"{NAME}.new"
    line = msgspec.json.encode(note)
    text = line + b"\n" + _checksum(line) + b"\n"
    fresh.unlink(missing_ok=True)
    try:
        _write(fresh, os.O_CREAT | os.O_EXCL, text)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        if error.errno not in _NO_ROOM or not (folder / NAME).exists():
            raise
        _write(folder / NAME, 0, text)
        return
    fresh.rename(folder / NAME)
    sync_folder(folder)


def _write(path: Path, flags: int, text: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        if os.pwrite(descriptor, text, 0) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, len(text))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(line: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(line).encode()
