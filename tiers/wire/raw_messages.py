# SPDX-License-Identifier: Apache-2.0
"""An encoder and a decoder of the message BlockPiece that avoid copies of the payload. The encoder
copies the payload once, after the other fields. The decoder returns a view of the message.

    piece = fields 1 to 4, as the generated code writes them | tag of field 5 | length | payload

The encoded message is valid protobuf, and the decoder accepts fields in any order. For a malformed
or unusual message the decoder calls the generated code, which copies the payload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from google.protobuf.message import DecodeError

from ...proto.v1.block_pb2 import BlockHeader
from ...proto.v1.cache_service_pb2 import BlockPiece, BlockState
from .frames import State, WireError

_PAYLOAD_TAG = 5 << 3 | 2
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_GLANCE_FIELDS = 16  # most fields decoded here; a normal piece has five
_GLANCE_VARINT_BYTES = 10
_LARGEST_STATE = max(State)


@dataclass(slots=True)
class Piece:
    """A part of one block, or the report that a block is missing, with the fields of BlockPiece."""

    index: int = 0
    state: State = State.MISS
    header: BlockHeader | None = None
    offset: int = 0
    payload: bytes | memoryview = b""


def encode_piece(piece: Piece) -> bytes:
    """Encode a piece. Copies the payload once."""
    state = cast("BlockState", int(piece.state))  # the generated type is only for type checkers
    message = BlockPiece(index=piece.index, state=state, header=piece.header, offset=piece.offset)
    head: bytes = message.SerializeToString()
    payload = piece.payload
    if not payload:
        return head
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    return b"".join((head, bytes((_PAYLOAD_TAG,)), _varint(size), payload))


def decode_piece(raw: bytes) -> Piece:
    """Decode a piece, whose payload is a view of `raw` if possible. Raises WireError."""
    parts = _take_apart(raw)
    try:
        if parts is None:
            message = BlockPiece.FromString(raw)
            payload: bytes | memoryview = message.payload
        else:
            head, payload = parts
            message = BlockPiece.FromString(head)
    except DecodeError as error:
        raise WireError("expected a BlockPiece, got bytes that are no such message") from error
    if not 0 <= message.state <= _LARGEST_STATE:
        raise WireError(f"a block's state is a number up to {_LARGEST_STATE}, not {message.state}")
    header = message.header if message.HasField("header") else None
    return Piece(message.index, State(message.state), header, message.offset, payload)


def _take_apart(raw: bytes) -> tuple[bytes, bytes | memoryview] | None:
    """Return the other fields, joined, and the payload. Return None for a malformed message, or one
    with more fields or longer numbers than a piece needs, which the generated code then decodes."""
    view = memoryview(raw)
    others: list[memoryview] = []
    payload: bytes | memoryview = b""
    place, end = 0, len(raw)
    for _ in range(_GLANCE_FIELDS):
        if place == end:
            return b"".join(others), payload
        start, tag = place, raw[place]
        if tag >= 0x80 or tag < 8:  # a field number above 15, or zero
            return None
        content = _content(raw, place + 1, tag & 7)
        if content is None or content[1] > end:
            return None
        first, place = content
        if tag == _PAYLOAD_TAG:
            payload = view[first:place]
        else:
            others.append(view[start:place])
    return None


def _content(raw: bytes, place: int, wire_type: int) -> tuple[int, int] | None:
    """Return start and end of a protobuf field's content; None for a group or a truncated field."""
    if wire_type == _FIXED64:
        return place, place + 8
    if wire_type == _FIXED32:
        return place, place + 4
    if wire_type not in (_VARINT, _LENGTH):
        return None
    value = 0
    for count, byte in enumerate(raw[place : place + _GLANCE_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            after = place + count + 1
            return (after, after + value) if wire_type == _LENGTH else (place, after)
    return None


def _varint(number: int) -> bytes:
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    result.append(number)
    return bytes(result)
