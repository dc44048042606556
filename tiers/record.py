# SPDX-License-Identifier: Apache-2.0
"""The record: a block's bytes after a header by which a reader detects a wrong or damaged record.

    offset bytes field
         0     8 magic "STRKVBLK"
         8     2 record version (2)
        10     2 header bytes (128)
        12     4 flags: the number of the codec that the payload was encoded with, 0 for none
        16     8 payload bytes as stored
        24     8 generation: unique to each write of the store; shows that a slot was reused
        32    16 layout id
        48    40 key
        88     8 payload bytes once decoded; 0 where there is no codec
        96    16 tag from the engine that stored the block (`tag.py`)
       112    16 xxh3-128 over bytes 0..111 and the digest of the payload as stored; or the seal
                 of bytes 0..111 and the payload (`Seal`)
All integers are little-endian. A record of version 1, which had no tag, is refused and counts as a
miss."""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from enum import Enum

import xxhash

from .block import KEY_BYTES
from .tag import NO_TAG, Proof, payload_digest

SEAL_BYTES = 16

Buffer = bytes | bytearray | memoryview

MAGIC = b"STRKVBLK"
RECORD_VERSION = 2
HEADER_BYTES = 128
LARGEST_CODEC = 255

_FIELDS = struct.Struct("<8sHHIQQ16s40sQ16s")


class Seal:
    """A checksum that only a holder of the key can make: the first 16 bytes of an HMAC-SHA256. A
    seal replaces the plain checksum in the header and covers the same bytes, so sealed and plain
    records have the same layout. Thread-safe. Hashing a payload releases the GIL."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")  # keeps the hashed key; `digest` copies it

    def digest(self, checked: Buffer, payload: Buffer) -> bytes:
        """Return the seal over `checked` (a header without checksum) and `payload`, uncopied."""
        hasher = self._keyed.copy()
        hasher.update(checked)
        hasher.update(payload)
        return hasher.digest()[:SEAL_BYTES]


_GENERATION_OFFSET, _KEY_OFFSET, _TAG_OFFSET, _CHECKED_BYTES = 24, 48, 96, 112


class Defect(Enum):
    """The reason why a record was refused. The value is the label in metrics."""

    SHORT = "short"
    MAGIC = "magic"
    VERSION = "version"
    KEY = "key"
    LAYOUT = "layout"
    LENGTH = "length"
    GENERATION = "generation"
    CHECKSUM = "checksum"
    ENCODING = "encoding"  # the checksum is right, but the codec cannot decode the payload


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header fields that differ between records, and the `Seal` if records are sealed. A reader
    with a seal refuses an unsealed record; a reader without a seal refuses a sealed record. Checks
    return the record's tag and do not compare it with the expected header's tag."""

    key: bytes
    layout_id: bytes
    payload_bytes: int
    generation: int
    codec: int = 0
    decoded_bytes: int = 0
    tag: bytes = field(default=NO_TAG, compare=False)
    seal: Seal | None = field(default=None, repr=False, compare=False)

    @property
    def block_bytes(self) -> int:
        """The size of the decoded block in bytes, with or without a codec."""
        return self.decoded_bytes if self.codec else self.payload_bytes


def encode_header(header: RecordHeader, payload: Buffer, digest: bytes | None = None) -> bytes:
    """Encode the 128 header bytes, checksum included. `payload` is read only for a seal or without
    `digest`."""
    if len(header.key) != KEY_BYTES or len(header.layout_id) != 16:
        raise ValueError("a record header takes a 40-byte key and a 16-byte layout id")
    if not 0 <= header.codec <= LARGEST_CODEC:
        raise ValueError(f"a codec has a number up to {LARGEST_CODEC}, not {header.codec}")
    checked = _FIELDS.pack(
        MAGIC,
        RECORD_VERSION,
        HEADER_BYTES,
        header.codec,
        header.payload_bytes,
        header.generation,
        header.layout_id,
        header.key,
        header.decoded_bytes,
        header.tag,
    )
    if digest is None:
        digest = payload_digest(payload)
    return checked + _checksum(checked, payload, digest, header.seal)


class PlainHeaders:
    """A maker of the headers of `encode_header` for one layout without a codec, in a fifth of the
    time, since common fields are encoded only once. Thread-safe."""

    def __init__(self, layout_id: bytes, payload_bytes: int, seal: Seal | None = None) -> None:
        whole = _FIELDS.pack(
            MAGIC, RECORD_VERSION, HEADER_BYTES, 0, payload_bytes, 0, layout_id, b"", 0, b""
        )
        self.shared = whole  # the common fields, and zeros for other fields
        self._head = whole[:_GENERATION_OFFSET]
        self._layout_id = layout_id
        self._decoded = bytes(_TAG_OFFSET - _KEY_OFFSET - KEY_BYTES)
        self._seal = seal

    def encode_headers(
        self, key: bytes, generation: int, tag: bytes, payload: Buffer, digest: bytes
    ) -> bytes:
        """Return the 128 header bytes for `payload`, whose digest is `digest`."""
        number = generation.to_bytes(8, "little")
        checked = b"".join((self._head, number, self._layout_id, key, self._decoded, tag))
        if len(checked) != _CHECKED_BYTES:
            raise ValueError("a record header takes a 40-byte key, and a 16-byte layout id and tag")
        return checked + _checksum(checked, payload, digest, self._seal)


def decode_header(raw_header: Buffer) -> RecordHeader | None:
    """Decode the fields of a header without checking them. None for other bytes."""
    if len(raw_header) < HEADER_BYTES or bytes(raw_header[: len(MAGIC)]) != MAGIC:
        return None
    fields = _FIELDS.unpack(bytes(raw_header[:_CHECKED_BYTES]))
    _magic, _version, _size, flags, length, generation, layout_id, key, decoded, tag = fields
    return RecordHeader(key, layout_id, length, generation, flags, decoded, tag)


def check_record(raw_header: Buffer, payload: Buffer, expected: RecordHeader) -> Defect | None:
    """Return None if the record is exactly the `expected` record, else the first defect found."""
    found = verify_record(raw_header, payload, expected)
    return found if isinstance(found, Defect) else None


def verify_record(raw_header: Buffer, payload: Buffer, expected: RecordHeader) -> Proof | Defect:
    """Return tag and payload digest if the record is exactly the `expected` record, else the first
    defect found. The payload is hashed last, so wrong headers are refused without hashing."""
    defect = check_fields(raw_header, payload, expected)
    if defect is not None:
        return defect
    checked = bytes(raw_header[:_CHECKED_BYTES])
    digest = payload_digest(payload)
    found = bytes(raw_header[_CHECKED_BYTES:HEADER_BYTES])
    if not hmac.compare_digest(found, _checksum(checked, payload, digest, expected.seal)):
        return Defect.CHECKSUM
    return Proof(checked[_TAG_OFFSET:], digest)


def check_fields(raw_header: Buffer, payload: Buffer, expected: RecordHeader) -> Defect | None:
    """Do the checks of `check_record` except for the checksum. Does not read the payload."""
    if len(raw_header) < HEADER_BYTES:
        return Defect.SHORT
    fields = _FIELDS.unpack(bytes(raw_header[:_CHECKED_BYTES]))
    magic, version, size, flags, length, generation, layout_id, key, decoded, _tag = fields
    if magic != MAGIC:
        return Defect.MAGIC
    if version != RECORD_VERSION or size != HEADER_BYTES:
        return Defect.VERSION
    if flags != expected.codec or flags > LARGEST_CODEC:
        return Defect.VERSION
    if key != expected.key:
        return Defect.KEY
    if layout_id != expected.layout_id:
        return Defect.LAYOUT
    if length != expected.payload_bytes or len(payload) != expected.payload_bytes:
        return Defect.LENGTH
    if decoded != expected.decoded_bytes:
        return Defect.LENGTH
    if generation != expected.generation:
        return Defect.GENERATION
    return None


def _checksum(checked: bytes, payload: Buffer, digest: bytes, seal: Seal | None) -> bytes:
    if seal is not None:
        return seal.digest(checked, payload)
    return xxhash.xxh3_128_digest(checked + digest)
