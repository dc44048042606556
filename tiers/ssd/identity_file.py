# SPDX-License-Identifier: Apache-2.0
"""PATH/identity: what the store was made for, said a second time outside of the index.

With it a damaged name in the index is told from another model's store, an index that was lost can
be made again from the records, whose headers do not carry the namespace, and no opening repeats
the epoch of an earlier one. One line of JSON and one of its checksum, replaced as a whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import xxhash

from .index_file import Identity, sync_folder

NAME = "identity"
_LIMIT_BYTES = 64 * 1024


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says; bytes are in base64."""

    format_version: int
    layout_id: bytes
    namespace: bytes
    layout_text: str
    page_bytes: int  # payload of one record
    epoch: int  # of the last opening

    @property
    def identity(self) -> Identity:
        return Identity(self.format_version, self.layout_id, self.namespace, self.layout_text)


def make_note(identity: Identity, page_bytes: int, epoch: int) -> Note:
    return Note(*identity, page_bytes, epoch)


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
    fresh.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(fresh, flags, 0o600), "wb") as file:
        file.write(line + b"\n" + _checksum(line) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(folder / NAME)
    sync_folder(folder)


def _checksum(line: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(line).encode()
