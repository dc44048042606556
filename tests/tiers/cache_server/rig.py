# SPDX-License-Identifier: Apache-2.0
"""A real cache server for tests: in this process, or in one of its own.

In this process, on a thread and an event loop of its own, at a port that is free:

    with running_server() as server:                  one tenant, 64 blocks of LAYOUT, no token
        stub = server.stub()                          every call, see tiers/wire/rpc.py
        server.attach(stub)                           until the tenant store is ready
        stub.lookup(LookupRequest(keys=b""), timeout=5)
        server.tenant_store().lookup([...])           behind the curtain: the tenant store itself

    running_server(tenants=[Tenant(...)], tls=..., ssd_path=tmp_path, data_port=None, ...)
                                                      takes every field of ServerSettings

In a process of its own, to be killed, stopped and restarted (`stratakv cache-server`):

    with server_process("--cpu-bytes", "1MiB") as server:
        server.address, server.stub(), server.kill(), server.stop(), server.go_on(), ...
        server.start()                                again, at the same ports

`store_blocks` and `load_blocks` move blocks by gRPC streams. Keys and payloads are those of
`stratakv.tiers.contract`: `make_keys(8)`, `payload_of(key, LAYOUT)`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.cache_server.access.tenants import Tenant, Tenants, only_tenant, token_digest
from stratakv.tiers.cache_server.server import CacheServer, ServerSettings
from stratakv.tiers.cache_server.tenant_store import TenantStore
from stratakv.tiers.contract import payload_of
from stratakv.tiers.tag import Proof, Tagger
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.limits import PIECE_BYTES
from stratakv.tiers.wire.protobuf_messages import header_message, layout_message
from stratakv.tiers.wire.raw_messages import Piece
from stratakv.tiers.wire.rpc import Stub, make_channel

from ...free_ports import free_ports
from ...nursery_site.nursery_client import popen

# 4 KiB a block.
LAYOUT = BlockLayout(num_layers=1, block_size=16, num_kv_heads=1, head_dim=32, kv_dtype="float32")
# 2.5 MiB a block: three pieces.
LARGE = BlockLayout(num_layers=20, block_size=16, num_kv_heads=8, head_dim=128, kv_dtype="float32")
WAIT_SECONDS = 30.0
SECRET = b"a server secret of 32 bytes or so"


# What a server process is given where it is not to take anyone.
_CREDENTIALS = ("--tenants", "--token-file", "--tls-client-ca", "--config")


def tenant(name: str, *, pool: str = "", cpu_bytes: int = 64 * LAYOUT.slot_bytes) -> Tenant:
    """A tenant whose token is `token_of(name)`."""
    digests = (token_digest(token_of(name)),)
    return Tenant(name, cpu_bytes, pool=pool, token_digests=digests)


def token_of(name: str) -> str:
    """The token of the tenant of that name."""
    return f"token-of-{name}-0123456789"


class Client:
    """What both kinds of server can do for a client."""

    host = "127.0.0.1"
    port = 0
    tls: Any = None  # grpc's channel credentials, where it speaks TLS

    @property
    def address(self) -> str:
        """As grpc takes it."""
        return f"{self.host}:{self.port}"

    def channel(self, token: str | None = None, tls: Any = None, **options: Any) -> Any:
        """A channel; it is the caller's to close. `tls` are grpc's channel credentials, and
        `options` those of a channel without "grpc.", dots as underscores."""
        arguments = [(f"grpc.{name}", value) for name, value in options.items()]
        # Otherwise the channels of a test share one connection.
        arguments.append(("grpc.use_local_subchannel_pool", 1))
        tls = self.tls if tls is None else tls
        channel = make_channel(self.address, tls, arguments)
        return channel if token is None else grpc.intercept_channel(channel, _Bearer(token))

    def stub(self, token: str | None = None, tls: Any = None) -> Stub:
        """Every call, on a channel that closes when it is forgotten."""
        return Stub(self.channel(token, tls))

    def attach(self, stub: Stub, layout: BlockLayout = LAYOUT) -> Any:
        """Attach, again and again while the tenant store is being made; the response."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                request = messages.AttachRequest(layout=layout_message(layout))
                return stub.attach(request, timeout=WAIT_SECONDS)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                    raise
            time.sleep(0.005)

    def health(self, timeout: float = WAIT_SECONDS) -> int:
        """The status that grpc.health.v1 gives."""
        with self.channel() as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            status: int = check(health_pb2.HealthCheckRequest(), timeout=timeout).status
            return status


class RunningServer(Client):
    """A server in this process. `server` is the CacheServer, to look into."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.host = settings.host
        self.loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="test-cache-server", daemon=True)
        self._thread.start()
        self.server = CacheServer(settings)
        try:
            self.call(self.server.start())
        except BaseException:
            self._end()
            raise
        self.port = self.server.port

    def call(self, coroutine: Any, timeout: float = WAIT_SECONDS) -> Any:
        """Run a coroutine on the server's loop; its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def tenant_store(self, name: str = "tenant:default") -> TenantStore:
        """A room that is ready."""
        return self.server.tenant_stores.ready(name)

    def close(self, drain_seconds: float = 2.0) -> bool:
        """Drain and end; whether all tenant stores could be closed. Idempotent; who comes second
        waits."""
        with self._closing:
            if self.loop.is_closed():
                return True
            try:
                return bool(self.call(self.server.drain(drain_seconds)))
            finally:
                self._end()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_SECONDS)
        self.loop.close()


@contextmanager
def running_server(
    tenants: Sequence[Tenant] | Tenants | None = None,
    *,
    cpu_bytes: int = 64 * LAYOUT.slot_bytes,
    ssd_bytes: int = 0,
    token: str | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """A server in this process, drained in the end. `cpu_bytes`, `ssd_bytes` and `token` are those
    of the default tenant, where no others are given."""
    if tenants is None:
        tenants = only_tenant(
            cpu_bytes,
            ssd_bytes,
            token,
            has_client_ca=bool(settings.get("tls") and settings["tls"].client_ca),
        )
    elif not isinstance(tenants, Tenants):
        tenants = Tenants(tenants)
    given = {"secret": SECRET, "port": 0, "data_port": 0, "drain_seconds": 2.0, **settings}
    server = RunningServer(ServerSettings(tenants=tenants, **given))
    try:
        yield server
    finally:
        server.close()


class ServerProcess(Client):
    """`stratakv cache-server` with these flags, at ports that stay the same over restarts. It takes
    anyone unless they name credentials, or `own_token` is said."""

    def __init__(self, *flags: str, own_token: bool = False) -> None:
        self.port, self.data_port = free_ports(2)
        has_credentials = own_token or any(flag in flags for flag in _CREDENTIALS)
        self.flags = flags if has_credentials else (*flags, "--insecure")
        self.process: Any = None
        self.output = ""
        # One that is killed leaves the folder of its socket behind.
        self._scratch = tempfile.TemporaryDirectory(prefix="stratakv-test-")

    def start(self, *, wait: bool = True) -> None:
        """Start it, and wait until it is SERVING."""
        command = [sys.executable, "-m", "stratakv.engine.cli.main", "cache-server"]
        ports = ["--port", str(self.port), "--data-port", str(self.data_port)]
        self.process = popen(
            [*command, *ports, *self.flags],
            cwd="/",
            env={**os.environ, "TMPDIR": self._scratch.name},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if wait:
            self.wait_until_serving()

    def wait_until_serving(self) -> None:
        """Until grpc.health.v1 says SERVING."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended: {self.wait()} {self.output}")
            try:
                if self.health(1.0) == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass
            assert time.monotonic() < deadline, "the server does not serve"
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """SIGSTOP: it hangs."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def terminate(self) -> int:
        """SIGTERM, and wait for the end; the exit code."""
        self._signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end; the exit code. What it wrote is in `output`."""
        assert self.process is not None
        self.output += self.process.communicate(timeout=WAIT_SECONDS)[0]
        return self.process.returncode

    def close(self) -> None:
        """End it, whatever its state, and remove what it leaves."""
        if self.process is not None and self.process.returncode is None:
            self.kill()
        self._scratch.cleanup()

    def _signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)


@contextmanager
def server_process(*flags: str, start: bool = True) -> Iterator[ServerProcess]:
    """A server in a process of its own, with little memory unless the flags say otherwise."""
    if "--cpu-bytes" not in flags:
        flags = ("--cpu-bytes", str(64 * LAYOUT.slot_bytes), *flags)
    server = ServerProcess(*flags)
    try:
        if start:
            server.start()
        yield server
    finally:
        server.close()


def proof_of(key: bytes, payload: memoryview, layout: BlockLayout = LAYOUT) -> Proof:
    """Tag and digest of a block."""
    return Tagger(layout.layout_id(), layout.page_bytes).prove(key, payload)


def pieces_of(
    keys: Sequence[bytes], layout: BlockLayout = LAYOUT, piece_bytes: int = PIECE_BYTES
) -> Iterator[Piece]:
    """What a Store sends of blocks whose bytes are `payload_of(key, layout)`."""
    layout_id = layout.layout_id()
    for index, key in enumerate(keys):
        payload = memoryview(payload_of(key, layout))
        proof = Tagger(layout_id, len(payload)).prove(key, payload)
        for offset in range(0, len(payload), piece_bytes):
            header = None if offset else header_message(key, layout_id, len(payload), *proof)
            part = payload[offset : offset + piece_bytes]
            yield Piece(index, State.MISS, header, offset, part)


def store_blocks(
    stub: Stub, keys: Sequence[bytes], layout: BlockLayout = LAYOUT, timeout: float = WAIT_SECONDS
) -> list[State]:
    """Store blocks by a stream; what became of each."""
    response = stub.store(pieces_of(keys, layout), timeout=timeout)
    return [State(state) for state in response.states]


def load_blocks(
    stub: Stub, keys: Sequence[bytes], timeout: float = WAIT_SECONDS
) -> list[bytes | None]:
    """Load blocks by a stream; the bytes of each, None for a miss. Checks order and tags."""
    found: list[bytearray | None] = []
    tags: list[bytes] = []
    request = messages.LoadRequest(keys=b"".join(keys))
    for piece in stub.load(request, timeout=timeout):
        if piece.state is State.MISS:
            assert (piece.index, len(piece.payload)) == (len(found), 0)
            found.append(None)
            tags.append(b"")
            continue
        if not piece.offset:
            assert piece.index == len(found) and piece.header is not None
            found.append(bytearray())
            tags.append(piece.header.tag)
            layout_id = piece.header.layout_id
        block = found[piece.index]
        assert block is not None and piece.offset == len(block)
        block += piece.payload
    assert len(found) == len(keys)
    for key, block, tag in zip(keys, found, tags, strict=True):
        assert block is None or Tagger(layout_id, len(block)).prove(key, block).tag == tag
    return [None if block is None else bytes(block) for block in found]


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Sends a token with every call, also where there is no TLS."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        given = tuple(details.metadata or ())
        details = _Details(details, given + self._metadata)
        return continuation(details, request)

    intercept_unary_unary = _call
    intercept_unary_stream = _call
    intercept_stream_unary = _call
    intercept_stream_stream = _call


class _Details(grpc.ClientCallDetails):
    def __init__(self, details: Any, metadata: Any) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = metadata
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression
