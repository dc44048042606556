# SPDX-License-Identifier: Apache-2.0
"""The identity of a store: its format version, block layout, namespace, lossy codec and MAC key.

The namespace in an identity is the caller's namespace, followed by the name of a lossy codec and
the id of the MAC key, if the store has them. So a StrataKV version without codecs or keys takes
such a store for the store of another model and does not use it.

The identity is in the index and, a second time, in the file `identity`. The file has four uses. The
file distinguishes a damaged identity in the index from the store of another model. When a lost
index is rebuilt from the records, the file gives the namespace, which record headers lack. The file
has the last epoch, so that no opening repeats an epoch. The file has the generation of the last
clear, so that cleared blocks stay forgotten although their rows and records remain. The file is one
line of JSON and one line with its checksum. A change replaces the file by a rename, or overwrites
it if the disk is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
import xxhash

from ...block import BlockLayout
from ...codecs.base import Codec
from ...errors import TierConfigError
from ...mac_key import MacKey
from ...record import Seal
from ..index.index_file import Identity, sync_folder

NAME = "identity"
_LIMIT_BYTES = 64 * 1024
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

_LOSSY = b"\0codec="  # before the name of a lossy codec
_SEAL = b"\0seal=hmac-sha256:"  # before the id of a key; always last


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of the identity file; bytes are in base64."""

    format_version: int
    layout_id: bytes
    namespace: bytes
    layout_text: str
    page_bytes: int  # payload of one record
    epoch: int  # of the last opening
    cleared_up_to: int = 0  # the generation of the last clear

    @property
    def identity(self) -> Identity:
        return Identity(self.format_version, self.layout_id, self.namespace, self.layout_text)


def make_note(identity: Identity, page_bytes: int, epoch: int, cleared_up_to: int = 0) -> Note:
    return Note(*identity, page_bytes, epoch, cleared_up_to)


def read_note(folder: Path) -> Note | None:
    """Read the identity file in `folder`. Return None if the file is missing or damaged."""
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
    """Write the identity file in `folder`, durably. May raise OSError."""
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


class FullNamespace(NamedTuple):
    """The parts of the namespace in an identity."""

    given: bytes
    codec: str = ""  # empty: no lossy codec
    key_id: bytes = b""  # empty: no key, plain checksums

    def pack(self) -> bytes:
        return self._unsealed() + (_SEAL + self.key_id if self.key_id else b"")

    def seal(self, key: MacKey) -> Seal:
        return key.seal(self._unsealed())

    def _unsealed(self) -> bytes:
        return self.given + (_LOSSY + self.codec.encode() if self.codec else b"")


def unpack(namespace: bytes) -> FullNamespace:
    """Split an identity's namespace into its parts. The bytes are not trusted."""
    rest, mark, key_id = namespace.rpartition(_SEAL)
    if not mark:
        rest, key_id = namespace, b""
    given, _, codec = rest.partition(_LOSSY)
    return FullNamespace(given, codec.decode(errors="replace"), key_id)


def full_namespace(given: bytes, codec: Codec | None, key: MacKey | None) -> FullNamespace:
    """Return the namespace of a store. It contains the name of a lossy codec and the id of the MAC
    key, so that a store opens only with the same lossy codec and the same key."""
    lossy = codec.name if codec is not None and not codec.is_lossless else ""
    return FullNamespace(given, lossy, b"" if key is None else key.id)


def identity_of(format_version: int, layout: BlockLayout, namespace: FullNamespace) -> Identity:
    """The identity to store in the index and in the identity file."""
    text = (
        f"{layout.num_layers} layers of {layout.num_kv_heads} KV heads of {layout.head_dim}, "
        f"blocks of {layout.block_size} tokens, {layout.kv_dtype}"
    )
    return Identity(format_version, layout.layout_id(), namespace.pack(), text)


def refuse(path: Path, found: Identity, wanted: Identity) -> NoReturn:
    """Raise TierConfigError that says how the two identities differ, and the cure."""
    theirs, ours = _difference(found, wanted)
    cure = "give the key file it was made with, " if "MAC key" in theirs + ours else ""
    raise TierConfigError(
        f"the SSD tier in {path} was made for {theirs}, and this engine has {ours}; {cure}use "
        "another path or delete that directory"
    )


def _difference(found: Identity, wanted: Identity) -> tuple[str, str]:
    if found.layout_id != wanted.layout_id:
        return found.layout_text, wanted.layout_text
    theirs, ours = unpack(found.namespace), unpack(wanted.namespace)
    if theirs.given != ours.given:
        # Where block keys do not identify the model, the store's namespace does.
        return f"another model or block hash ({_name_of(theirs.given)})", _name_of(ours.given)
    if theirs.codec != ours.codec:
        return _codec_of(theirs.codec), _codec_of(ours.codec)
    return key_name(theirs.key_id), key_name(ours.key_id)


def key_name(key_id: bytes) -> str:
    return f"the MAC key {key_id.hex()[:16]}" if key_id else "no MAC key"


def _name_of(namespace: bytes) -> str:
    return f"namespace {namespace.hex()[:16]}" if namespace else "no namespace"


def _codec_of(name: str) -> str:
    return f"the codec {name}" if name else "no codec that changes numbers"
