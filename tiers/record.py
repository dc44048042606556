# SPDX-License-Identifier: Apache-2.0
"""The record: a block's bytes with the header that lets a reader refuse everything else.

    offset bytes field
         0     8 magic "STRKVBLK"
         8     2 record version (1)
        10     2 header bytes (128)
        12     4 flags: the number of the codec that the payload was encoded with, 0 for none
        16     8 payload bytes, as they lie here
        24     8 generation: a number no other write of the store has; tells a reused slot
        32    16 layout id
        48    40 key
        88     8 payload bytes once decoded; 0 where there is no codec
        96    16 reserved, zero
       112    16 xxh3-128 over bytes 0..111 and the payload, or their seal (`record_seal.py`)
All integers little-endian. Knows nothing of files or sockets; both write the same header.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from enum import Enum

import xxhash

from .block import KEY_BYTES
from .record_seal import Buffer, Seal

MAGIC = b"STRKVBLK"
RECORD_VERSION = 1
HEADER_BYTES = 128
KEY_OFFSET = 48
LARGEST_CODEC = 255
_CHECKED_BYTES = 112
_FIELDS = struct.Struct("<8sHHIQQ16s40sQ16x")


class Defect(Enum):
    """Why a record was refused; the value is the label in metrics."""

    SHORT = "short"
    MAGIC = "magic"
    VERSION = "version"
    KEY = "key"
    LAYOUT = "layout"
    LENGTH = "length"
    GENERATION = "generation"
    CHECKSUM = "checksum"
    ENCODING = "encoding"  # whole, but no codec can have written it


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The fields of a header that vary, and what seals the record: no reader that expects a seal
    takes a plain checksum for one, nor the other way round."""

    key: bytes
    layout_id: bytes
    payload_bytes: int
    generation: int
    codec: int = 0
    decoded_bytes: int = 0
    seal: Seal | None = field(default=None, repr=False, compare=False)

    @property
    def block_bytes(self) -> int:
        """The length of the block, whether it is encoded or not."""
        return self.decoded_bytes if self.codec else self.payload_bytes


def encode_header(header: RecordHeader, payload: Buffer) -> bytes:
    """The 128 header bytes for `payload`, checksum included. Reads the payload once."""
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
    )
    return checked + _proof(checked, payload, header.seal)


def decode_header(raw_header: Buffer) -> RecordHeader | None:
    """What a header says of its record, unverified; None for bytes that are no header."""
    if len(raw_header) < HEADER_BYTES or bytes(raw_header[: len(MAGIC)]) != MAGIC:
        return None
    fields = _FIELDS.unpack(bytes(raw_header[:_CHECKED_BYTES]))
    _magic, _version, _size, flags, length, generation, layout_id, key, decoded = fields
    return RecordHeader(key, layout_id, length, generation, flags, decoded)


def check_record(raw_header: Buffer, payload: Buffer, expected: RecordHeader) -> Defect | None:
    """None if the record is exactly the expected one, else the first defect found.

    The payload is hashed last, so that a misdirected read costs no hashing.
    """
    defect = check_fields(raw_header, payload, expected)
    if defect is not None:
        return defect
    found = bytes(raw_header[_CHECKED_BYTES:HEADER_BYTES])
    wanted = _proof(bytes(raw_header[:_CHECKED_BYTES]), payload, expected.seal)
    return None if hmac.compare_digest(found, wanted) else Defect.CHECKSUM


def check_fields(raw_header: Buffer, payload: Buffer, expected: RecordHeader) -> Defect | None:
    """As `check_record`, without a look at what the payload holds."""
    if len(raw_header) < HEADER_BYTES:
        return Defect.SHORT
    fields = _FIELDS.unpack(bytes(raw_header[:_CHECKED_BYTES]))
    magic, version, size, flags, length, generation, layout_id, key, decoded = fields
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


def _proof(checked: bytes, payload: Buffer, seal: Seal | None) -> bytes:
    return _checksum(checked, payload) if seal is None else seal.digest(checked, payload)


def _checksum(checked: bytes, payload: Buffer) -> bytes:
    hasher = xxhash.xxh3_128(checked)
    hasher.update(payload)
    return hasher.digest()
