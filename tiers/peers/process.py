# SPDX-License-Identifier: Apache-2.0
"""The process that serves an engine's slab to other engines: a cache server over a `PeerStore`.

    standard input     `Start`, as a line of JSON; its end is the engine's, and then this one's
    standard output    lines of JSON: {"ready": port}, {"error": why}, {"log": [level, text]},
                       {"sent": [blocks, bytes], "held": blocks}

It has the slab's memory to read and the index to read and hold slots in, and runs at a lower
priority than the engine: what it does costs the engine's step no lock and no turn.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..block import BlockLayout
from ..cache_server.access.tenants import only_tenant
from ..cache_server.access.tls import TlsFiles
from ..cache_server.served_store import ServedStore, ServedStores
from ..cache_server.server import CacheServer, ServerSettings
from ..errors import TierConfigError
from ..remote.block_connection import Tags
from ..wire.status import WrongLayout
from .peer_store import HELD_SHARE, SLAB, PeerStore
from .slab_index import SlabReader

MAX_START_BYTES = 64 * 1024
_NICE = 5
_DRAIN_SECONDS = 2.0
_SWITCH_SECONDS = 0.0005
_TELL_SECONDS = 1.0
_MAX_QUIET_SECONDS = 2.0  # what has been told is told again: the engine gives up who is silent

log = logging.getLogger("stratakv.tiers.peers.process")


class Start(msgspec.Struct, kw_only=True):
    """Everything this process needs. Descriptors are inherited."""

    slab_fd: int
    index_fd: int
    num_slots: int
    layout: tuple[int, int, int, int, str]  # the arguments of BlockLayout
    namespace: bytes
    host: str
    port: int
    data_port: int
    token: str | None
    own_token: str | None  # for clients of this user on this machine
    tls_cert: str | None
    tls_key: str | None
    tls_client_ca: str | None
    insecure: bool
    log_level: int


class PeerStores(ServedStores):
    """One store, for whoever is let in."""

    def __init__(self, store: PeerStore, names: list[str]) -> None:
        self._store = store
        self._names = names

    def start(self) -> None:
        """It is there."""

    def attach(self, name: str, layout: BlockLayout) -> ServedStore:
        if layout != self._store.layout:
            raise WrongLayout(
                f"the blocks of this engine are {self._store.layout} and the caller's are {layout}"
            )
        return self._store

    def ready(self, name: str) -> ServedStore:
        return self._store

    def layout(self, name: str) -> BlockLayout | None:
        return self._store.layout

    def open_tenant_stores(self) -> Mapping[str, ServedStore]:
        return dict.fromkeys(self._names, self._store)

    def close(self, timeout_seconds: float) -> bool:
        return self._store.close(timeout_seconds)


class _LinesOfJson(logging.Handler):
    """Log records as lines for the engine, which logs them as its own."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tell({"log": [record.levelno, self.format(record)]})
        except Exception:  # noqa: BLE001 - as logging's own handlers do
            self.handleError(record)


_telling = threading.Lock()


def tell(what: Mapping[str, object]) -> None:
    """A line to the engine."""
    line = msgspec.json.encode(what) + b"\n"
    with _telling:
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            pass  # the engine is gone, which the end of standard input says too


def main() -> int:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the engine too
    line = sys.stdin.buffer.readline(MAX_START_BYTES)
    try:
        start = msgspec.json.decode(line, type=Start)
    except msgspec.MsgspecError as error:
        sys.stderr.write(f"this process is started by `stratakv serve --kv-serve`: {error}\n")
        return 2
    handler = _LinesOfJson()
    logging.basicConfig(level=start.log_level, handlers=[handler], format="%(message)s")
    os.umask(0o077)
    os.nice(_NICE)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        server = make_server(start)
        gc.freeze()
        return asyncio.run(_serve(server))
    except TierConfigError as error:
        tell({"error": str(error)})
        return 2


def make_server(start: Start) -> CacheServer:
    """The server, not started. Raises TierConfigError."""
    layout = BlockLayout(*start.layout)
    reader = SlabReader(start.index_fd, start.num_slots, HELD_SHARE)
    tags = Tags(layout, None, start.namespace)
    store = PeerStore(reader, start.slab_fd, layout, tags)
    tenants = only_tenant(
        start.num_slots * layout.slot_bytes,
        0,
        start.own_token if start.token is None else start.token,
        has_client_ca=start.tls_client_ca is not None,
    )
    tls = None
    if start.tls_cert is not None and start.tls_key is not None:
        client_ca = None if start.tls_client_ca is None else Path(start.tls_client_ca)
        tls = TlsFiles(Path(start.tls_cert), Path(start.tls_key), client_ca)
    settings = ServerSettings(
        tenants=tenants,
        own_token=start.own_token,
        secret=secrets.token_bytes(32),
        host=start.host,
        port=start.port,
        data_port=start.data_port,
        shares_memory=False,
        tls=tls,
        insecure=start.insecure,
        drain_seconds=_DRAIN_SECONDS,
    )
    return CacheServer(settings, PeerStores(store, list(tenants.quotas)))


async def _serve(server: CacheServer) -> int:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wait_for_the_end() -> None:
        while sys.stdin.buffer.read(4096):
            pass  # nothing more is said
        loop.call_soon_threadsafe(ended.set)

    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await server.start()
    threading.Thread(target=wait_for_the_end, name="stratakv-peer-input", daemon=True).start()
    tell({"ready": server.port})
    telling = asyncio.create_task(_tell_what_is_sent(server))
    await ended.wait()
    telling.cancel()
    await server.drain()
    return 0


async def _tell_what_is_sent(server: CacheServer) -> None:
    told: dict[str, object] = {}
    told_at = 0.0
    while True:
        await asyncio.sleep(_TELL_SECONDS)
        for store in server.tenant_stores.open_tenant_stores().values():
            stats = store.stats()[SLAB]
            now: dict[str, object] = {
                "sent": [stats.loaded_blocks, stats.loaded_bytes],
                "held": stats.pinned_blocks,
            }
            if now != told or time.monotonic() - told_at >= _MAX_QUIET_SECONDS:
                told, told_at = now, time.monotonic()
                tell(now)


if __name__ == "__main__":
    sys.exit(main())
