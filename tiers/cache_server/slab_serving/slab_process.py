# SPDX-License-Identifier: Apache-2.0
"""The process that serves an engine's slab to other engines: a cache server over a `PeerStore`.

    standard input     `Start`, as a line of JSON; the end of the input ends this process
    standard output    lines of JSON: {"ready": port}, {"error": why}, {"log": [level, text]},
                       {"sent": [blocks, bytes], "held": blocks}

The process can read the slab's memory and its index, and can protect slots from eviction. The
process has a lower priority than the engine, and no engine step waits for one of its locks."""

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
from dataclasses import replace

import msgspec

from ...block import BlockLayout
from ...errors import TierConfigError
from ...slab.slab_index import SlabReader
from ...wire.connection_tags import Tags
from ...wire.status import WrongLayout
from ..access.tenants import Tenants, only_tenant
from ..served_store import ServedStore, ServedStores
from ..server import CacheServer, ServerSettings
from .served_files import ServedFiles, in_flags_of_serve
from .served_slab import HELD_SHARE, SLAB, PeerStore

MAX_START_BYTES = 64 * 1024
_NICE = 5
_DRAIN_SECONDS = 2.0
_SWITCH_SECONDS = 0.0005
_TELL_SECONDS = 1.0
_LOOK_SECONDS = 5.0  # between two checks of the token and TLS files
_MAX_QUIET_SECONDS = 2.0  # then unchanged values are sent again: the engine ends a silent process

log = logging.getLogger("stratakv.tiers.cache_server.slab_serving.slab_process")


class Start(msgspec.Struct, kw_only=True):
    """The settings of this process. The descriptors `slab_fd` and `index_fd` are inherited."""

    slab_fd: int
    index_fd: int
    num_slots: int
    layout: tuple[int, int, int, int, str]  # the arguments of BlockLayout
    namespace: bytes
    host: str
    port: int
    data_port: int
    files: ServedFiles
    own_token: str | None  # the token for this user's clients on this machine
    insecure: bool
    log_level: int


class PeerStores(ServedStores):
    """The stores of this server: every authenticated caller gets the engine's one store."""

    def __init__(self, store: PeerStore, names: list[str]) -> None:
        self._store = store
        self._names = names

    def start(self) -> None:
        """Do nothing, because the store is open already."""

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
    """A handler that sends log records to the engine, whose logger writes them."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tell({"log": [record.levelno, self.format(record)]})
        except Exception:  # noqa: BLE001 - as logging's own handlers do
            self.handleError(record)


_telling = threading.Lock()


def tell(what: Mapping[str, object]) -> None:
    """Write a line of JSON to standard output, for the engine. Thread-safe."""
    line = msgspec.json.encode(what) + b"\n"
    with _telling:
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            pass  # the engine has ended; the end of standard input ends this process


def main() -> int:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the engine too
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
        seen = start.files.state()
        server = make_server(start)
        renewed = RenewedFiles(server, start, seen)
        gc.freeze()
        return asyncio.run(_serve(server, renewed))
    except TierConfigError as error:
        tell({"error": str(error)})
        return 2


def make_server(start: Start) -> CacheServer:
    """Make the server without starting it. Raises TierConfigError."""
    layout = BlockLayout(*start.layout)
    reader = SlabReader(start.index_fd, start.num_slots, HELD_SHARE)
    tags = Tags(layout, None, start.namespace)
    store = PeerStore(reader, start.slab_fd, layout, tags)
    settings = ServerSettings(
        tenants=_tenants(start),
        own_token=start.own_token,
        secret=secrets.token_bytes(32),
        host=start.host,
        port=start.port,
        data_port=start.data_port,
        shares_memory=False,
        tls=start.files.tls(),
        insecure=start.insecure,
        drain_seconds=_DRAIN_SECONDS,
    )
    return CacheServer(settings, PeerStores(store, list(settings.tenants.quotas)))


def _tenants(start: Start) -> Tenants:
    """Make the only tenant, with the token that the file has now. Raises TierConfigError."""
    token = start.files.token()
    return only_tenant(
        start.num_slots * BlockLayout(*start.layout).slot_bytes,
        0,
        start.own_token if token is None else token,
        has_client_ca=start.files.tls_client_ca is not None,
    )


class RenewedFiles:
    """Reloads the server when the files of its token or TLS change."""

    def __init__(self, server: CacheServer, start: Start, seen: tuple[object, ...]) -> None:
        self._server = server
        self._start = start
        self._seen = seen  # the state of the files before they were read

    async def reload_changed(self) -> None:
        """Reload the server if a file has changed. Unusable files are logged and have no effect."""
        state = self._start.files.state()
        if state == self._seen:
            return
        self._seen = state
        try:
            await self._server.reload(self._settings)
        except (TierConfigError, OSError) as error:
            log.error(
                "the files that this engine serves its blocks with have changed and cannot be "
                "used: %s; it goes on with those before",
                in_flags_of_serve(str(error)),
            )
        else:
            log.info("the files that this engine serves its blocks with were read anew")

    async def look_for_ever(self) -> None:
        """Call `reload_changed` every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self.reload_changed()
            except Exception:  # the task must go on: no other one reloads files
                log.exception("the files of --kv-serve cannot be looked at")

    def _settings(self) -> ServerSettings:
        return replace(self._server.settings, tenants=_tenants(self._start))


async def _serve(server: CacheServer, renewed: RenewedFiles) -> int:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wait_for_the_end() -> None:
        while sys.stdin.buffer.read(4096):
            pass  # only the end of input is expected
        loop.call_soon_threadsafe(ended.set)

    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await server.start()
    threading.Thread(target=wait_for_the_end, name="stratakv-peer-input", daemon=True).start()
    tell({"ready": server.port})
    tasks = [
        asyncio.create_task(_tell_what_is_sent(server)),
        asyncio.create_task(renewed.look_for_ever()),
    ]
    await ended.wait()
    for task in tasks:
        task.cancel()
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
