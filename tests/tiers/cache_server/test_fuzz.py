# SPDX-License-Identifier: Apache-2.0
"""Whatever comes, the server goes on: messages of every call and frames of both connections,
random, mutated and extreme. Nothing but the declared statuses, no slot held, memory within its
bounds, and another tenant's blocks as they were."""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.contract import make_keys, payload_of
from stratakv.tiers.remote.transports.socket_connection import decode
from stratakv.tiers.wire.frames import (
    REPLY,
    WELCOME,
    RequestFrame,
    State,
    Status,
    Verb,
    decode_reply,
    decode_welcome,
    encode_greeting,
    encode_request,
    pack_keys,
)
from stratakv.tiers.wire.protobuf_messages import layout_message
from stratakv.tiers.wire.raw_messages import encode_piece
from stratakv.tiers.wire.rpc import METHODS, Method

from .rig import (
    LAYOUT,
    WAIT_SECONDS,
    ServerProcess,
    load_blocks,
    pieces_of,
    server_process,
    store_blocks,
    tenant,
    token_of,
)

Code = grpc.StatusCode
MESSAGES, FRAMES = (1_800, 2_500_000), (1_800, 2_500_000)
WINDOW = 64  # calls on their way at a time
MOST_MORE_BYTES = 64 * 1024**2
# What a caller may be told of messages that are not as they should be.
DECLARED = {Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED}
KEYS, THEIRS = make_keys(8), make_keys(8, "theirs")


@pytest.fixture
def server(tmp_path: Path, no_nursery: None) -> Iterator[ServerProcess]:
    """A process with tenants ann, who has blocks, and eve, who fuzzes; its memory is its own."""
    path = tmp_path / "tenants.toml"
    path.write_text(
        "".join(
            f'[[tenant]]\nname = "{each.name}"\ntoken_sha256 = "{each.token_digests[0].hex()}"\n'
            f"cpu_bytes = {each.cpu_bytes}\n"
            for each in (tenant("ann"), tenant("eve"))
        )
    )
    with server_process("--tenants", str(path), "--cpu-bytes", "1MiB", "--shared-memory") as server:
        for name in ("ann", "eve"):
            server.attach(server.stub(token_of(name)))
        ann = server.stub(token_of("ann"))
        assert store_blocks(ann, KEYS) == [State.KEPT] * 8
        store_blocks(server.stub(token_of("eve")), THEIRS)
        for _ in range(200):  # warm
            load_blocks(ann, KEYS)
        before = memory_bytes(server, "VmHWM")
        yield server
        assert load_blocks(ann, KEYS) == [payload_of(key, LAYOUT) for key in KEYS]
        check_nothing_held(server)
        assert memory_bytes(server, "VmHWM") - before <= MOST_MORE_BYTES
        server.terminate()
    assert "Traceback" not in server.output, server.output[-3000:]


def memory_bytes(server: ServerProcess, field: str) -> int:
    assert server.process is not None
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise AssertionError("the kernel does not say")


def check_nothing_held(server: ServerProcess) -> None:
    """Every slot of eve's room can be given to another block."""
    eve = server.stub(token_of("eve"))
    deadline = time.monotonic() + 90.0  # leases that fuzzed calls took run up to a minute
    while eve.stats(messages.StatsRequest(), timeout=WAIT_SECONDS).leases:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    fresh = make_keys(64, "fresh")
    while set(store_blocks(eve, fresh)) != {State.KEPT}:
        assert time.monotonic() < deadline, "slots are held by nobody"
        time.sleep(0.1)


# Messages


class Messages:
    """What is sent to each call."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        pieces = [encode_piece(piece) for piece in pieces_of(THEIRS[:2], piece_bytes=2048)]
        packed = b"".join(THEIRS)
        layout = layout_message(LAYOUT)
        self._valid: dict[str, list[bytes]] = {
            "Attach": [messages.AttachRequest(layout=layout).SerializeToString()],
            "Lookup": [messages.LookupRequest(keys=packed).SerializeToString()],
            "Load": [messages.LoadRequest(keys=packed).SerializeToString()],
            "Store": pieces,
            "Pin": [messages.PinRequest(keys=packed, lease_ms=50).SerializeToString()],
            "Unpin": [messages.UnpinRequest(lease=1).SerializeToString()],
            "Touch": [messages.TouchRequest(keys=packed).SerializeToString()],
            "Delete": [messages.DeleteRequest(keys=packed).SerializeToString()],
        }
        self._extreme: dict[str, list[bytes]] = {
            "Attach": [
                messages.AttachRequest(layout=self._layout(layout, field)).SerializeToString()
                for field in layout.DESCRIPTOR.fields_by_name
            ],
            "Lookup": [
                messages.LookupRequest(keys=bytes(size)).SerializeToString()
                for size in (1, 39, 41, 4096 * 40, 4096 * 40 + 1, 4097 * 40, 1_000_000)
            ],
            "Load": [
                messages.LoadRequest(keys=bytes(size)).SerializeToString()
                for size in (39, 41, 256 * 40, 257 * 40, 1_000_000)
            ],
            "Store": [
                messages.BlockPiece(index=2**32 - 1, offset=2**64 - 1).SerializeToString(),
                messages.BlockPiece(index=2**32 - 1, payload=b"x" * 1024**2).SerializeToString(),
                messages.BlockPiece(payload=b"x" * (1024**2 + 1)).SerializeToString(),
                messages.BlockPiece(header={"payload_bytes": 2**64 - 1}).SerializeToString(),
                messages.BlockPiece(
                    header={"payload_bytes": 4096, "layout_id": bytes(16), "tag": bytes(16)}
                ).SerializeToString(),
            ],
            "Pin": [
                messages.PinRequest(keys=keys, lease_ms=lease).SerializeToString()
                for keys in (b"", bytes(40), bytes(257 * 40))
                for lease in (0, 1, 60_000, 60_001, 2**32 - 1)
            ],
            "Unpin": [
                messages.UnpinRequest(lease=lease).SerializeToString() for lease in (0, 2**64 - 1)
            ],
            "Touch": [messages.TouchRequest(keys=bytes(4097 * 40)).SerializeToString()],
            "Delete": [
                messages.DeleteRequest(keys=bytes(40), all=True).SerializeToString(),
                messages.DeleteRequest(all=True).SerializeToString(),
            ],
        }

    def of(self, method: Method) -> bytes:
        """One message: random, mutated, extreme, or as it should be."""
        rng = self.rng
        valid = self._valid.get(method.name, [b""])
        kind = rng.random()
        if kind < 0.2:
            return rng.randbytes(rng.choice((0, 1, 2, 10, 100, 1000)))
        if kind < 0.35:
            return rng.choice(self._extreme.get(method.name, [b"\x08\x01"]))
        raw = rng.choice(valid)
        return raw if kind < 0.5 else mutated(raw, rng)

    def _layout(self, layout: Any, field: str) -> Any:
        changed = type(layout)()
        changed.CopyFrom(layout)
        value = getattr(changed, field)
        setattr(changed, field, "x" * 1000 if isinstance(value, str) else 2**32 - 1)
        return changed


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, cuts, copies, numbers put in."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place : place + rng.choice((1, 8, 1000))]
        elif kind == 2:
            data[place:place] = data[place : place + rng.choice((1, 8, 100))]
        elif kind == 3:
            data[place:place] = rng.choice((b"\xff" * 10, b"\0", b"\x80", b"\xff\xff\xff\x7f"))
        elif data:
            data[place % len(data)] = rng.choice((0, 0x7F, 0x80, 0xFF))
    return bytes(data)


def test_messages_of_every_call(server: ServerProcess, scale: str, rng: random.Random) -> None:
    source = Messages(rng)
    codes: collections.Counter[tuple[str, Any]] = collections.Counter()
    running: collections.deque[tuple[Method, Any]] = collections.deque()
    with server.channel(token_of("eve")) as channel:
        calls = {
            method.name: (
                channel.stream_stream(method.path)
                if method.client_streaming or method.server_streaming
                else channel.unary_unary(method.path)
            )
            for method in METHODS
        }
        for number in range(MESSAGES[scale == "long"]):
            method = METHODS[number % len(METHODS)]
            call = calls[method.name]
            if method.client_streaming:
                sent = [source.of(method) for _ in range(rng.randint(0, 4))]
                future = call(iter(sent), timeout=WAIT_SECONDS)
            elif method.server_streaming:
                future = call(iter([source.of(method)]), timeout=WAIT_SECONDS)
            else:
                future = call.future(source.of(method), timeout=WAIT_SECONDS)
            running.append((method, future))
            if len(running) == WINDOW:
                take(running.popleft(), codes)
        while running:
            take(running.popleft(), codes)
    by_call = collections.Counter(code.name for _, code in codes.elements())
    print(f"{dict(by_call)}")
    for method in METHODS:
        seen = {code for name, code in codes if name == method.name}
        assert seen <= DECLARED, f"{method.name}: {seen}"
        assert Code.OK in seen or method.name == "Attach", method.name
    assert by_call["INVALID_ARGUMENT"] > MESSAGES[scale == "long"] // 10


def take(running: tuple[Method, Any], codes: Any) -> None:
    """Wait for the end of a call; of a Watch, for its beginning."""
    method, call = running
    if method.name == "Watch":
        with contextlib.suppress(grpc.RpcError):
            next(call)
            codes[method.name, Code.OK] += 1
            call.cancel()
            return
    elif method.client_streaming or method.server_streaming:
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
    codes[method.name, call.code()] += 1


# Frames


def request_of(rng: random.Random, verbs: list[Verb]) -> bytes:
    """What a client could say, or nearly."""
    verb = rng.choice(verbs)
    count = rng.choice((0, 1, 2, 8, 256, 257, 2**32 - 1))
    argument = rng.choice((0, 1, 2, 50, 60_000, 60_001, 2**64 - 1))
    kind = rng.random()
    if kind < 0.2:
        return rng.randbytes(rng.choice((1, 24, 64, 1000)))
    keys = THEIRS[:count] if count <= 8 else make_keys(8, str(rng.random())) * 32
    body = bytes(32 * min(count, 256)) if verb is Verb.COMMIT else pack_keys(keys)
    if kind < 0.5:
        argument, count = 50, len(keys) if verb is not Verb.COMMIT else count % 257
    raw = encode_request(RequestFrame(verb, count % 2**32, rng.randrange(2**64), argument)) + body
    if verb is Verb.STORE and rng.random() < 0.5:
        payload = payload_of(THEIRS[0], LAYOUT)
        raw += (payload + bytes(16)) * rng.randint(0, 3)
    return mutated(raw, rng) if kind > 0.7 else raw


def answers(raw: bytes) -> None:
    """What the server said must be words of the protocol. Raises ConnectionLost."""
    while len(raw) >= REPLY.size:
        reply = decode(decode_reply, raw[: REPLY.size])
        raw = raw[REPLY.size :]
        if reply.status is not Status.OK:
            continue
        states = [State(byte) for byte in raw[: reply.blocks]]
        raw = raw[reply.blocks :]
        hits, wanted = states.count(State.HIT), states.count(State.WANTED)
        if reply.verb is Verb.LOAD:
            raw = raw[hits * (LAYOUT.page_bytes + 16) :]
        elif reply.verb is Verb.PIN:
            raw = raw[hits * 20 :]
        elif reply.verb is Verb.RESERVE:
            raw = raw[wanted * 4 :]


@pytest.mark.parametrize("path", ["data", "memory"])
def test_frames(server: ServerProcess, path: str, scale: str, rng: random.Random) -> None:
    eve = server.stub(token_of("eve"))
    verbs = (
        [Verb.LOAD, Verb.STORE]
        if path == "data"
        else [Verb.PIN, Verb.UNPIN, Verb.RESERVE, Verb.COMMIT]
    )
    frames = 0
    ended: collections.Counter[str] = collections.Counter()
    while frames < FRAMES[scale == "long"] // 2:
        offer = eve.open_data(messages.OpenDataRequest(), timeout=WAIT_SECONDS)
        greeting = encode_greeting(offer.ticket)
        is_greeted = rng.random() < 0.9
        if not is_greeted:
            greeting = mutated(greeting, rng)
        several = [request_of(rng, verbs) for _ in range(rng.randint(1, 12))]
        frames += 1 + len(several)
        with connected(offer, path) as sock:
            raw = b""
            try:
                sock.sendall(greeting + b"".join(several))
                sock.shutdown(socket.SHUT_WR)
                while part := sock.recv(1024**2):
                    raw += part
                ended["closed"] += 1
            except TimeoutError:
                raise AssertionError(f"no end, with --seed as printed, after {frames}") from None
            except OSError:
                ended["reset"] += 1
        if len(raw) >= WELCOME.size:
            welcome = decode(decode_welcome, raw[: WELCOME.size])
            ended[welcome.status.name] += 1
            if welcome.status is Status.OK:
                answers(raw[WELCOME.size :])
            else:
                assert len(raw) == WELCOME.size
        else:
            assert not is_greeted or ended["reset"]
    print(f"{frames} frames: {dict(ended)}")
    assert ended["OK"] > frames // 20


@contextlib.contextmanager
def connected(offer: Any, path: str) -> Iterator[socket.socket]:
    if path == "memory":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(offer.unix_path)
    else:
        sock = socket.create_connection(("127.0.0.1", offer.port))
    sock.settimeout(WAIT_SECONDS)
    with sock:
        yield sock
