# SPDX-License-Identifier: Apache-2.0
"""Records whose payload went through a codec: one at a time, header page and what was encoded.

A slot has the size of a block whatever lies in it, so that fewer bytes move and no more fit. What
saves no page, or has no encoding, is written as it is; its row says so and the reader never comes
here. The checksum covers the encoded bytes and is looked at before they are decoded. Knows nothing
of batches, or of when a record is offered.
"""

from __future__ import annotations

from ..block import ALIGNMENT
from ..codecs.base import Codec
from ..codecs.choice import readable_codecs
from ..record import HEADER_BYTES, Defect, check_record, decode_header, encode_header
from .slot_file import Scratch
from .slot_index import Entry
from .state import StoreState


class EncodingWriter:
    """Writes blocks through a codec. Thread-safe but for the scratch."""

    def __init__(self, state: StoreState, codec: Codec) -> None:
        self._state = state
        self._codec = codec

    def write(self, entry: Entry, payload: memoryview, scratch: Scratch) -> Entry:
        """Write one block; its entry as the row must say it. May raise OSError."""
        state, codec = self._state, self._codec
        used = codec.encode(payload, scratch.encoded[: state.layout.slot_bytes - ALIGNMENT])
        if not used:
            header = encode_header(state.header_of(entry), payload)
            scratch.headers[0][:HEADER_BYTES] = header
            state.slot_file.write(entry.slot, [payload], scratch)
            return entry
        entry = entry._replace(encoded_bytes=used)
        expected = state.encoded_header_of(entry, codec.number)
        scratch.headers[0][:HEADER_BYTES] = encode_header(expected, scratch.encoded[:used])
        state.slot_file.write_encoded(entry.slot, used, scratch)
        return entry


class DecodingReader:
    """Reads what was written through a codec: the store's own, if it has one, or one of those
    without loss. Thread-safe but for the scratch."""

    def __init__(self, state: StoreState, codec: Codec | None) -> None:
        self._state = state
        self._codecs = readable_codecs(state.layout, codec)

    def read(self, entry: Entry, payload: memoryview, scratch: Scratch) -> Defect | None:
        """Read one block; None if `payload` is exactly what was encoded. May raise OSError."""
        state, size = self._state, entry.encoded_bytes
        if size > state.layout.slot_bytes - ALIGNMENT:
            return Defect.LENGTH  # a damaged row
        if not state.slot_file.read_encoded(entry.slot, size, scratch):
            return Defect.SHORT
        header, encoded = scratch.headers[0], scratch.encoded[:size]
        found = decode_header(header)
        if found is None:
            return Defect.MAGIC
        codec = self._codecs.get(found.codec)
        if codec is None:
            return Defect.VERSION
        expected = state.encoded_header_of(entry, codec.number)
        defect = check_record(header, encoded, expected)
        if defect is not None:
            return defect
        try:
            codec.decode(encoded, payload)
        except ValueError:
            return Defect.ENCODING
        return None
