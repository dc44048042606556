# SPDX-License-Identifier: Apache-2.0
"""A client of the data connection and a server that says anything: never a wrong block, and no byte
of a buffer changes once the call has ended."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from stratakv.tiers.contract import make_buffers, make_keys, payload_of
from stratakv.tiers.native import native_library as library
from stratakv.tiers.remote.transports.data_client import DataConnection
from stratakv.tiers.tag import TAG_BYTES, Proof, Tagger
from stratakv.tiers.wire.frames import REPLY, ReplyFrame, Status, Verb, Welcome, encode_reply
from stratakv.tiers.wire.sockets import Connection, ConnectionLost

from ..cache_server.rig import LAYOUT, WAIT_SECONDS
from ..wire.test_sockets import soon

KEYS = make_keys(3, "hostile")
SIZE = LAYOUT.page_bytes
PAYLOADS = [payload_of(key, LAYOUT) for key in KEYS]
BLOCKS = [
    payload + Tagger(LAYOUT.layout_id(), SIZE).prove(key, payload).tag
    for key, payload in zip(KEYS, PAYLOADS, strict=True)
]
HEAD_BYTES = REPLY.size + len(KEYS)
UNTOUCHED = 0xEE


def reply(states: bytes = b"\1\1\1", blocks: int = 3, number: int = 1) -> bytes:
    head = encode_reply(ReplyFrame(Verb.LOAD, Status.OK, blocks, number, 0))
    return head + states + b"".join(BLOCKS)


class Server:
    """The other end; `buffers` are what its client loads into."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        welcome = Welcome(Status.OK, bytes(16), SIZE, LAYOUT.slot_bytes, 0)
        self.client = DataConnection(Connection(ours), LAYOUT, welcome)
        self.buffers = make_buffers(len(KEYS), LAYOUT)
        for buffer in self.buffers:
            buffer[:] = bytes([UNTOUCHED]) * len(buffer)

    def load(self, said: bytes, seconds: float = WAIT_SECONDS) -> list[Proof | None]:
        self.socket.sendall(said)
        return self.client.load(KEYS, self.buffers, soon(seconds))


@pytest.fixture(params=["library", "twin"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    if request.param == "twin":
        monkeypatch.setattr(library, "library", lambda: None)
    made = Server()
    yield made
    made.client.close()
    made.socket.close()


@pytest.mark.parametrize(
    "said",
    [
        reply(blocks=0),
        reply(b"\1\1\1\0", blocks=4),
        reply(number=2),
        reply(b"\2\1\1"),  # PENDING
        reply(b"\3\1\1"),  # WANTED
        reply(b"\x09\1\1"),  # no state
        b"\xff" * REPLY.size,
    ],
)
def test_words_that_are_no_reply_to_it_end_a_load(server: Server, said: bytes) -> None:
    with pytest.raises(ConnectionLost):
        server.load(said)
    assert all(set(buffer) == {UNTOUCHED} for buffer in server.buffers)


@pytest.mark.parametrize("place", [0, 1, SIZE - 1, SIZE, SIZE + TAG_BYTES - 1])
def test_a_block_with_a_damaged_byte_is_a_miss_and_the_others_are_not(
    server: Server, place: int
) -> None:
    said = bytearray(reply())
    said[HEAD_BYTES + len(BLOCKS[0]) + place] ^= 1
    proofs = server.load(said)
    assert [proof is None for proof in proofs] == [False, True, False]
    assert server.client.corrupt_keys == [KEYS[1]]
    assert [server.buffers[i][:SIZE] for i in (0, 2)] == [PAYLOADS[0], PAYLOADS[2]]


@pytest.mark.parametrize("sent", [HEAD_BYTES - 1, HEAD_BYTES + 5, HEAD_BYTES + len(BLOCKS[0]) + 9])
def test_what_comes_after_the_deadline_is_written_nowhere(server: Server, sent: int) -> None:
    said = reply()
    with pytest.raises(ConnectionLost):
        server.load(said[:sent], seconds=0.02)
    before = [bytes(buffer) for buffer in server.buffers]
    server.socket.sendall(said[sent:])
    assert [bytes(buffer) for buffer in server.buffers] == before
