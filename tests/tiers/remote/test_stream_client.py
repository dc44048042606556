# SPDX-License-Identifier: Apache-2.0
"""The client's end of the gRPC streams against a server that lies: a lost connection or a miss, and
never a wrong block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.contract import filled_buffers, make_buffers, make_keys, payload_of
from stratakv.tiers.remote.transports.stream_client import StreamConnection
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.protobuf_messages import header_message
from stratakv.tiers.wire.raw_messages import Piece, encode_piece
from stratakv.tiers.wire.rpc import SERVICE_NAME, Stub, make_channel
from stratakv.tiers.wire.sockets import ConnectionLost

from ..cache_server.rig import LAYOUT, WAIT_SECONDS, pieces_of, proof_of, running_server

KEYS = make_keys(3)
SIZE = LAYOUT.page_bytes
HALF = SIZE // 2


class Liar:
    """A server whose Load sends `pieces`, and whose Store answers `states`."""

    def __init__(self) -> None:
        self.pieces: Callable[[], Iterator[Piece | bytes]] = lambda: iter(())
        self.states = b""
        self.threads = ThreadPoolExecutor(2)
        self.server = grpc.server(self.threads)
        handlers = {
            "Load": grpc.unary_stream_rpc_method_handler(self._load),
            "Store": grpc.stream_unary_rpc_method_handler(self._store),
        }
        handler = grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)
        self.server.add_generic_rpc_handlers((handler,))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def _load(self, _request: bytes, _context: Any) -> Iterator[bytes]:
        for piece in self.pieces():
            yield piece if isinstance(piece, bytes) else encode_piece(piece)

    def _store(self, requests: Any, _context: Any) -> bytes:
        for _ in requests:
            pass
        return messages.StoreResponse(states=self.states).SerializeToString()


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    liar = Liar()
    yield liar
    liar.server.stop(None).wait()
    liar.threads.shutdown()


@pytest.fixture
def connection(liar: Liar) -> Iterator[StreamConnection]:
    with make_channel(f"127.0.0.1:{liar.port}") as channel:
        yield StreamConnection(Stub(channel), (), LAYOUT, bytes(16))


NO_PROOFS = [None] * 3


def soon() -> float:
    return time.monotonic() + WAIT_SECONDS


def load(connection: StreamConnection, seconds: float = WAIT_SECONDS) -> list[bytes | None]:
    """What is found of KEYS; what lies behind a payload must not have been touched."""
    buffers = make_buffers(3, LAYOUT)
    proofs = connection.load(KEYS, buffers, time.monotonic() + seconds)
    return [
        None if proof is None else bytes(buffer[:SIZE])
        for proof, buffer in zip(proofs, buffers, strict=True)
    ]


def header(index: int, **changes: Any) -> Any:
    key = KEYS[index]
    proof = proof_of(key, memoryview(payload_of(key, LAYOUT)))
    values = {
        "key": key,
        "layout_id": LAYOUT.layout_id(),
        "payload_bytes": SIZE,
        "tag": proof.tag,
        "payload_digest": proof.digest,
    }
    return header_message(**{**values, **changes})


def piece(index: int, offset: int = 0, size: int = SIZE, head: Any = None) -> Piece:
    part = payload_of(KEYS[index % 3], LAYOUT)[offset : offset + size]
    return Piece(index, State.HIT, head, offset, part)


def first(index: int, size: int = SIZE, **changes: Any) -> Piece:
    return piece(index, 0, size, header(index, **changes))


def test_an_honest_server(liar: Liar, connection: StreamConnection) -> None:
    def pieces() -> Iterator[Piece]:
        for piece in pieces_of(KEYS, piece_bytes=1000):
            piece.state = State.HIT
            yield piece

    liar.pieces = pieces
    assert load(connection) == [payload_of(key, LAYOUT) for key in KEYS]


LIES: dict[str, list[Piece | bytes]] = {
    "no header": [piece(0)],
    "a piece twice": [first(0, HALF), piece(0, 0, HALF)],
    "a gap": [first(0, HALF), piece(0, HALF + 8, 8)],
    "a later piece first": [piece(0, HALF, HALF, header(0)), piece(0, 0, HALF)],
    "another block between": [first(0, HALF), piece(1, HALF, HALF)],
    "a block before the last": [first(1), first(0)],
    "a block twice": [first(0), first(0)],
    "a block that nobody asked for": [piece(3, 0, SIZE, header(0))],
    "a block far beyond": [piece(2**32 - 1, 0, SIZE, header(0))],
    "another key": [piece(0, 0, SIZE, header(1))],
    "another layout": [first(0, layout_id=bytes(16))],
    "another length": [first(0, payload_bytes=SIZE + 1)],
    "a short tag": [first(0, tag=b"x")],
    "a short digest": [first(0, payload_digest=b"x")],
    "too long": [first(0), piece(0, 0, 1), piece(0, SIZE, 1)],
    "longer than its block": [Piece(0, State.HIT, header(0), 0, bytes(SIZE + 1))],
    "an offset beyond all": [first(0, HALF), Piece(0, State.HIT, None, 2**64 - 1, b"x")],
    "no bytes": [first(0, 0)],
    "no bytes after the last": [first(0), Piece(0, State.HIT, None, SIZE, b"")],
    "no message": [b"\xff\xff\xff"],
    "no state": [messages.BlockPiece(state=77).SerializeToString()],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("lie", LIES)
def test_what_does_not_follow_loses_the_connection(
    liar: Liar, connection: StreamConnection, lie: str
) -> None:
    liar.pieces = lambda: iter(LIES[lie])
    with pytest.raises(ConnectionLost):
        load(connection)


@pytest.mark.parametrize(
    ("pieces", "corrupt"),
    [
        ([], 0),
        ([first(0, HALF)], 0),
        ([Piece(0), Piece(1), Piece(2)], 0),
        ([Piece(7)], 0),
        ([first(0, tag=bytes(16)), first(1, tag=bytes(16))], 2),
        ([Piece(0, State.HIT, header(0), 0, bytes(SIZE))], 1),
    ],
    ids=["nothing", "half", "misses", "a miss of none", "wrong tags", "other bytes"],
)
def test_what_is_missing_or_wrong_is_a_miss(
    liar: Liar, connection: StreamConnection, pieces: list[Piece], corrupt: int
) -> None:
    liar.pieces = lambda: iter(pieces)
    assert load(connection) == [None] * 3
    assert connection.corrupt_blocks == corrupt


def test_pieces_without_end_cost_the_deadline(liar: Liar, connection: StreamConnection) -> None:
    def forever() -> Iterator[Piece]:
        while True:
            time.sleep(0.01)
            yield Piece(0)

    liar.pieces = forever
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match="DEADLINE_EXCEEDED"):
        load(connection, 0.3)
    assert time.monotonic() - began < WAIT_SECONDS / 2


@pytest.mark.parametrize("states", [b"", b"\x04\x04", b"\x04" * 4, b"\x04\x04\x63"])
def test_answers_to_a_store_that_cannot_be(
    liar: Liar, connection: StreamConnection, states: bytes
) -> None:
    liar.states = states
    with pytest.raises(ConnectionLost):
        connection.store(KEYS, filled_buffers(KEYS, LAYOUT), NO_PROOFS, soon())


def test_a_channel_that_was_replaced_is_a_lost_connection() -> None:
    with running_server() as server:
        channel = server.channel()
        connection = StreamConnection(Stub(channel), (), LAYOUT, bytes(16))
        channel.close()
        with pytest.raises(ConnectionLost, match=r"(?i)closed"):
            load(connection)
        with pytest.raises(ConnectionLost, match=r"(?i)closed"):
            connection.store(KEYS, filled_buffers(KEYS, LAYOUT), NO_PROOFS, soon())


def test_an_end_from_another_thread(liar: Liar, connection: StreamConnection) -> None:
    def slow() -> Iterator[Piece]:
        time.sleep(0.5)
        yield Piece(0)

    liar.pieces = slow
    with ThreadPoolExecutor(1) as pool:
        loading: Future[Any] = pool.submit(load, connection)
        time.sleep(0.1)
        connection.abort_call()
        with pytest.raises(ConnectionLost, match="CANCELLED"):
            loading.result(WAIT_SECONDS)
    with pytest.raises(ConnectionLost, match="the call was ended"):
        load(connection)
