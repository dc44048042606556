# SPDX-License-Identifier: Apache-2.0
"""Writes and reads records whose payload a codec has encoded, one record at a time.

Every slot has the size of an unencoded block. So encoding reduces the bytes read and written, but
no more blocks fit. A block whose encoding saves no page is written unencoded; such a block has
`encoded_bytes` 0 in its row and is not read by `DecodingReader`. The checksum covers the encoded
bytes and is checked before decoding. A lossy codec does not restore the stored bytes exactly, so
the block's tag is made from the decoded bytes."""

from __future__ import annotations

from ..block import ALIGNMENT
from ..codecs.base import Codec
from ..codecs.known_codecs import readable_codecs
from ..record import HEADER_BYTES, Defect, decode_header, encode_header, verify_record
from ..tag import Proof, payload_digest
from .disk.disk_queue import DiskQueue
from .disk.slot_file import Scratch
from .disk.space import HEADER_PAGE_BYTES
from .index.slot_index import Entry
from .state import StoreState


class EncodingWriter:
    """Encodes blocks and makes record headers. Thread-safe with a scratch for each thread."""

    def __init__(self, state: StoreState, codec: Codec) -> None:
        self._state = state
        self._codec = codec

    def encode(
        self, entry: Entry, payload: memoryview, scratch: Scratch, tag: bytes, digest: bytes
    ) -> Entry:
        """Encode a block, or only its header, to the scratch. Return the entry with the length."""
        state, codec = self._state, self._codec
        used = codec.encode(payload, scratch.encoded[: state.layout.slot_bytes - ALIGNMENT])
        if used:
            entry = entry._replace(encoded_bytes=used)
            expected = state.encoded_header_of(entry, codec.number, tag)
            header = encode_header(expected, scratch.encoded[:used])
        else:
            header = state.headers.encode_headers(entry.key, entry.generation, tag, payload, digest)
        scratch.headers[0][:HEADER_BYTES] = header
        return entry


class DecodingReader:
    """A reader of records that were encoded by the store's codec or by any lossless codec.
    Thread-safe if each thread has its own scratch and queue."""

    def __init__(self, state: StoreState, codec: Codec | None) -> None:
        self._state = state
        self._codecs = readable_codecs(state.layout, codec)
        self._most_bytes = state.layout.slot_bytes - ALIGNMENT

    def start(self, entry: Entry, scratch: Scratch, disk: DiskQueue, number: int) -> None:
        """Start to read a record into the scratch: the bytes in its row, if these fit."""
        size = max(1, min(entry.encoded_bytes, self._most_bytes))  # a damaged row may have any size
        self._state.slot_file.start_read_encoded(disk, number, entry.slot, size, scratch)

    def decode_block(
        self, entry: Entry, payload: memoryview, num_bytes: int, scratch: Scratch
    ) -> Proof | Defect:
        """Verify a record of which `num_bytes` were read, header page included, and decode the
        record into `payload`. Return the block's proof, or the defect that was found."""
        state, size = self._state, entry.encoded_bytes
        if size > self._most_bytes:
            return Defect.LENGTH  # a damaged row
        if num_bytes < HEADER_PAGE_BYTES + size:
            return Defect.SHORT
        header, encoded = scratch.headers[0], scratch.encoded[:size]
        found = decode_header(header)
        if found is None:
            return Defect.MAGIC
        codec = self._codecs.get(found.codec)
        if codec is None:
            return Defect.VERSION
        expected = state.encoded_header_of(entry, codec.number)
        verified = verify_record(header, encoded, expected)
        if isinstance(verified, Defect):
            return verified
        try:
            codec.decode(encoded, payload)
        except ValueError:
            return Defect.ENCODING
        digest = payload_digest(payload)
        made_here = state.tagger.tag(entry.key, digest)
        return Proof(verified.tag if codec.is_lossless else made_here, digest)
