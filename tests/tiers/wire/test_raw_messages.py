# SPDX-License-Identifier: Apache-2.0
"""BlockPiece by our own hand and by the generated code: the same bytes mean the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from stratakv.proto.v1.block_pb2 import BlockHeader, BlockKey
from stratakv.proto.v1.cache_service_pb2 import BlockPiece
from stratakv.tiers.wire.frames import State, WireError
from stratakv.tiers.wire.raw_messages import Piece, decode_piece, encode_piece

HEADER = BlockHeader(
    key=BlockKey(digest=bytes(range(32)), group=1, shard_rank=2, shard_count=4),
    layout_id=b"L" * 16,
    payload_bytes=98304,
    tag=b"T" * 16,
    payload_digest=b"D" * 16,
)
CI_MUTANTS, LONG_MUTANTS = 20_000, 2_000_000

headers = st.none() | st.builds(
    BlockHeader,
    layout_id=st.binary(max_size=20),
    generation=st.integers(0, 2**64 - 1),
    payload_bytes=st.integers(0, 2**64 - 1),
    tag=st.binary(max_size=20),
    payload_digest=st.binary(max_size=20),
)
pieces = st.builds(
    Piece,
    index=st.integers(0, 2**32 - 1),
    state=st.sampled_from(State),
    header=headers,
    offset=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=300),
)


def _message(piece: Piece) -> Any:
    return BlockPiece(
        index=piece.index,
        state=int(piece.state),
        header=piece.header,
        offset=piece.offset,
        payload=bytes(piece.payload),
    )


def _outcome(raw: bytes) -> Any:
    """What the generated code says of bytes."""
    try:
        message = BlockPiece.FromString(raw)
    except DecodeError:
        return None
    if not 0 <= message.state <= max(State):
        return None
    header = message.header if message.HasField("header") else None
    return Piece(message.index, State(message.state), header, message.offset, message.payload)


def _our_outcome(raw: bytes) -> Any:
    try:
        piece = decode_piece(raw)
    except WireError:
        return None
    piece.payload = bytes(piece.payload)
    return piece


@given(pieces)
def test_ours_is_read_by_the_generated_code(piece: Piece) -> None:
    assert BlockPiece.FromString(encode_piece(piece)) == _message(piece)


@given(pieces)
def test_the_generated_code_is_read_by_ours(piece: Piece) -> None:
    assert _our_outcome(_message(piece).SerializeToString()) == piece


def test_the_bytes_are_those_of_the_generated_code() -> None:
    for size in (0, 1, 127, 128, 16383, 16384, 2**20):
        piece = Piece(7, State.HIT, HEADER, 2**40, memoryview(bytearray(size)))
        assert encode_piece(piece) == _message(piece).SerializeToString(deterministic=True)


def test_a_payload_is_a_view_of_the_message() -> None:
    raw = encode_piece(Piece(1, State.HIT, HEADER, 0, b"x" * 1000))
    payload = decode_piece(raw).payload
    assert isinstance(payload, memoryview) and payload.obj is raw
    first = _message(Piece(payload=b"y" * 1000)).SerializeToString() + encode_piece(Piece(3))
    assert isinstance(decode_piece(first).payload, memoryview)


# Field by field, as other writers may send them: repeated, unknown, of another type, long-winded.
_PARTS = [
    b"\x08\x05",  # index 5
    b"\x08\x85\x80\x00",  # index 5 in three bytes
    b"\x10\x01",  # state HIT
    b"\x10\x63",  # a state nobody knows
    b"\x1a" + bytes([len(HEADER.SerializeToString())]) + HEADER.SerializeToString(),
    b"\x1a\x02\x18\x07",  # a header with a generation: merged with the one before
    b"\x1a\x03\xff\xff\xff",  # no header
    b"\x20\x80\x80\x40",  # offset
    b"\x2a\x03abc",  # payload
    b"\x2a\x00",  # an empty one
    b"\x2a\x83\x00abc",  # a length in two bytes
    b"\xaa\x00\x03abc",  # a tag in two bytes
    b"\x28\x07",  # field 5 as a number
    b"\x2d1234",  # field 5 as four bytes
    b"\x3a\x02zz",  # unknown fields
    b"\x31\x00\x00\x00\x00\x00\x00\x00\x00",
    b"\xa2\x06\x01a",
    b"\x33\x2a\x03xyz\x34",  # a group with what looks like a payload
    b"\x34",  # the end of a group that never began
    b"\x00\x01",  # field zero
    b"\x2e\x00",  # wire type 6
    b"\x2a\x7fab",  # cut off
    b"\x08" + b"\xff" * 10,  # a varint without an end
    b"\x2a" + b"\xff" * 9 + b"\x01",
    b"\x2a\xff\xff\xff\xff\x7f",
]


@given(st.lists(st.sampled_from(_PARTS), max_size=20))
def test_fields_in_any_order(parts: list[bytes]) -> None:
    raw = b"".join(parts)
    assert _our_outcome(raw) == _outcome(raw)


def test_every_piece_of_the_alphabet_was_tried() -> None:
    """Both verdicts come up, so that agreeing means something."""
    verdicts = {_outcome(part) is None for part in _PARTS}
    assert verdicts == {True, False}
    for first in _PARTS:
        for second in _PARTS:
            assert _our_outcome(first + second) == _outcome(first + second)


def test_damaged_messages(rng: random.Random, scale: str) -> None:
    seeds = [
        encode_piece(Piece(3, State.HIT, HEADER, 0, rng.randbytes(40))),
        encode_piece(Piece(9, State.MISS)),
        b"".join(rng.sample(_PARTS, 8)),
    ]
    refused = 0
    for _ in range(LONG_MUTANTS if scale == "long" else CI_MUTANTS):
        raw = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(raw) + 1)
            match rng.randrange(4):
                case 0:
                    raw[place : place + 1] = rng.randbytes(1)
                case 1:
                    del raw[place:]
                case 2:
                    del raw[place : place + 1]
                case _:
                    raw[place:place] = rng.randbytes(rng.randint(1, 4))
            raw = raw or bytearray(b"\x08")
        expected = _outcome(bytes(raw))
        assert _our_outcome(bytes(raw)) == expected, bytes(raw).hex()
        refused += expected is None
    assert refused


def test_a_million_fields_cost_no_time_of_ours() -> None:
    raw = b"\x08\x01" * 1_000_000
    assert decode_piece(raw).index == 1


@pytest.mark.parametrize("raw", [b"\x10\x07", b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"])
def test_a_state_that_nobody_knows_is_refused(raw: bytes) -> None:
    with pytest.raises(WireError, match="a block's state is a number up to 6"):
        decode_piece(raw)
