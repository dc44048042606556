# SPDX-License-Identifier: Apache-2.0
"""The words of the data connection: what is written is read, and nothing else is taken."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.block import KEY_BYTES, BlockLayout
from stratakv.tiers.wire import frames as wire
from stratakv.tiers.wire.frames import (
    ReplyFrame,
    RequestFrame,
    State,
    Status,
    Verb,
    Welcome,
    WireError,
)

LAYOUT = BlockLayout(1, 16, 1, 32, "float32")
NUMBERS = st.integers(0, 2**64 - 1)
BLOCKS = st.integers(0, wire.MAX_BLOCKS)


@given(st.sampled_from(list(Verb)), BLOCKS, NUMBERS, NUMBERS)
def test_requests_are_read_as_they_were_written(
    verb: Verb, blocks: int, number: int, argument: int
) -> None:
    request = RequestFrame(verb, blocks, number, argument)
    assert wire.decode_request(wire.encode_request(request)) == request


@given(st.sampled_from(list(Verb)), st.sampled_from(list(Status)), BLOCKS, NUMBERS, NUMBERS)
def test_replies_are_read_as_they_were_written(
    verb: Verb, status: Status, blocks: int, number: int, argument: int
) -> None:
    reply = ReplyFrame(verb, status, blocks, number, argument)
    assert wire.decode_reply(wire.encode_reply(reply)) == reply


@given(st.sampled_from(list(Status)), st.binary(min_size=16, max_size=16), NUMBERS, NUMBERS)
def test_welcomes_are_read_as_they_were_written(
    status: Status, boot_id: bytes, page_bytes: int, slot_bytes: int
) -> None:
    welcome = Welcome(status, boot_id, page_bytes, slot_bytes, 7)
    assert wire.decode_welcome(wire.encode_welcome(welcome)) == welcome


def test_a_greeting_brings_version_and_ticket() -> None:
    ticket = bytes(range(32))
    assert wire.decode_greeting(wire.encode_greeting(ticket)) == (wire.VERSION, ticket)
    with pytest.raises(WireError, match="expected a greeting"):
        wire.decode_greeting(b"GET / HT" + bytes(wire.GREETING.size - 8))


@given(st.binary(min_size=wire.REQUEST.size, max_size=wire.REQUEST.size))
def test_bytes_that_are_no_request_are_refused(raw: bytes) -> None:
    try:
        request = wire.decode_request(raw)
    except WireError:
        return
    assert wire.encode_request(request) == raw


@given(st.binary(min_size=wire.REPLY.size, max_size=wire.REPLY.size))
def test_bytes_that_are_no_reply_are_refused(raw: bytes) -> None:
    try:
        reply = wire.decode_reply(raw)
    except WireError:
        return
    assert wire.encode_reply(reply) == raw


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (wire.WELCOME.pack(b"HTTP/1.1", 1, 0, 0, bytes(16), 1, 1, 0), "expected the welcome"),
        (wire.WELCOME.pack(wire.MAGIC, 3, 0, 0, bytes(16), 1, 1, 0), "speaks version 3"),
        (wire.WELCOME.pack(wire.MAGIC, 2, 99, 0, bytes(16), 1, 1, 0), "unknown status 99"),
    ],
)
def test_welcomes_of_others_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        wire.decode_welcome(raw)


def test_more_blocks_than_one_request_may_name_are_refused() -> None:
    raw = wire.REQUEST.pack(Verb.LOAD, 0, 0, wire.MAX_BLOCKS + 1, 1, 0)
    with pytest.raises(WireError, match="257 blocks"):
        wire.decode_request(raw)


@given(st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=20))
def test_keys_are_unpacked_as_they_were_packed(keys: list[bytes]) -> None:
    assert wire.unpack_keys(wire.pack_keys(keys)) == keys


@pytest.mark.parametrize("size", [1, KEY_BYTES - 1, KEY_BYTES + 1, (wire.MAX_KEYS + 1) * KEY_BYTES])
def test_keys_of_a_wrong_length_are_refused(size: int) -> None:
    with pytest.raises(WireError, match=f"of 40 bytes each, got {size} bytes"):
        wire.unpack_keys(bytes(size))


def test_states_have_the_numbers_of_the_service() -> None:
    named = {f"BLOCK_STATE_{state.name}": int(state) for state in State}
    # A field that is absent reads as zero, and that is a miss.
    named["BLOCK_STATE_UNSPECIFIED"] = named.pop("BLOCK_STATE_MISS")
    assert named == dict(messages.BlockState.items())


def test_words_have_the_sizes_that_other_languages_rely_on() -> None:
    sizes = [word.size for word in (wire.GREETING, wire.WELCOME, wire.REQUEST, wire.REPLY)]
    assert sizes == [48, 56, 24, 24]
    assert wire.encode_request(RequestFrame(Verb.PIN, 2, 3, 4)) == struct.pack(
        "<BBHIQQ", 3, 0, 0, 2, 3, 4
    )
