# SPDX-License-Identifier: Apache-2.0
"""RemoteStore: the tier that engines share, on one or several cache servers.

When a request is queued, `prefetch_lookup` looks up its prompt's blocks on the servers; `lookup`
returns the servers' last answers. Rendezvous hashing divides blocks among the servers. If a server
fails, its blocks are misses, and the failure is counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from ..base import Answer, Stored, StoreTier, TierStats
from ..block import BlockLayout
from ..errors import TierBusy, TierClosed, TierError
from ..tag import Proof, Proofs
from ..wire.frames import MAX_BLOCKS, State
from .futures import all_of, raise_if_none_began, submit, then
from .membership import Membership, Rendezvous, ServerAddress, StaticMembership
from .presence_cache import PresenceCache
from .remote_settings import RemoteSettings
from .server_link import ServerLink, all_up, errors_of
from .server_watch import ServerWatch
from .transfers import Transfer, Transfers, as_bytes, check_buffers
from .transports.block_connection import BlockConnection

log = logging.getLogger(__name__)


NAME = "remote"
_OUTCOMES = {State.KEPT: Stored.KEPT, None: Stored.DAMAGED}


class _Server:
    """The link to one server, with a queue of loads and a queue of stores."""

    def __init__(
        self,
        address: ServerAddress,
        layout: BlockLayout,
        settings: RemoteSettings,
        forget: Callable[[_Server, Sequence[bytes]], None],
    ) -> None:
        self._forget = forget
        self.link = ServerLink(address, layout, settings)
        size = layout.page_bytes
        self.loads = Transfers(
            self.link,
            "load",
            self._load_blocks,
            size=size,
            seconds=settings.load_seconds,
            most_bytes=settings.queue_bytes,
        )
        self.stores = Transfers(
            self.link,
            "store",
            _store,
            size=size,
            seconds=settings.store_seconds,
            most_bytes=settings.queue_bytes,
        )
        # Deletions that the server has not finished, by key, and calls of `clear`.
        self.going: dict[bytes, int] = {}
        self.clearing = 0

    def _load_blocks(
        self, connection: BlockConnection, batch: Transfer, deadline: float
    ) -> list[Proof | None]:
        proofs = connection.load(batch.keys, batch.buffers, deadline)
        if connection.corrupt_keys:
            self._forget(self, connection.corrupt_keys)
        return proofs


class RemoteStore(StoreTier):
    """A store on the servers of `membership`, for blocks of one layout. Only `wait_up` and `close`
    wait for a server. Each server is used as soon as it is up."""

    is_shared = True

    def __init__(
        self, membership: Membership, layout: BlockLayout, settings: RemoteSettings | None = None
    ) -> None:
        settings = RemoteSettings() if settings is None else settings
        settings.credentials.check_files()
        self.name = NAME
        self.layout = layout
        members = membership.members()
        self._owners = Rendezvous(members).owners
        self._servers = [
            _Server(member, layout, settings, self._drop_corrupt) for member in members
        ]
        self._watches: list[ServerWatch] = []
        self._lock = threading.Lock()
        self._stats = TierStats()
        self._closed = False

    @property
    def is_up(self) -> bool:
        return any(server.link.is_up for server in self._servers)

    def wait_up(self, timeout_seconds: float) -> bool:
        """Wait until all servers are attached. Return False on a timeout. Called at the start."""
        return all_up([server.link for server in self._servers], timeout_seconds)

    def kinds(self) -> set[str]:
        """The transports of the connections that are open now. For tools."""
        queues = [queue for server in self._servers for queue in (server.loads, server.stores)]
        return {kind for queue in queues if (kind := queue.kind) is not None}

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        self._check_open()
        answers = [Answer.MISS] * len(keys)
        for server, places in self._divided(keys):
            if not server.link.is_up or server.clearing:
                continue
            found = server.link.presence.answers([keys[i] for i in places])
            for i, answer in zip(places, found, strict=True):
                answers[i] = answer
        return answers

    def prefetch_lookup(self, keys: Sequence[bytes]) -> Future[None] | None:
        self._check_open()
        futures: list[Future[None]] = []
        for server, places in self._divided(keys):
            if not server.clearing:
                futures += server.link.prefetch_lookup([keys[i] for i in places])
        if not futures:
            return None
        return all_of(futures, lambda: None)

    def watch(self, news: Callable[[Sequence[bytes]], None]) -> bool:
        self._check_open()
        if not self._watches:
            self._watches = [ServerWatch(server.link, news) for server in self._servers]
        return True

    def lease(self, keys: Sequence[bytes], seconds: float) -> Future[list[bool]] | None:
        self._check_open()
        kept = [False] * len(keys)
        futures: list[Future[None]] = []
        for server, places in self._divided(keys):
            for start in range(0, len(places), MAX_BLOCKS):
                part = places[start : start + MAX_BLOCKS]
                asked = [keys[i] for i in part]
                held = server.link.pin_blocks(asked, seconds)
                futures.append(then(held, partial(_mark, server.link.presence, asked, kept, part)))
        return all_of(futures, lambda: kept) if futures else None

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        self._check_buffers(keys, buffers)
        answers: list[Proof | None] = [None] * len(keys)
        begun: list[Future[list[Proof | None]]] = []
        futures: list[Future[None]] = []
        for server, places in self._divided(keys):
            with self._lock:
                clearing = bool(server.clearing)
                places = [i for i in places if not clearing and keys[i] not in server.going]
            if not places:
                continue
            wanted = [keys[i] for i in places]
            memory = [as_bytes(buffers[i]) for i in places]
            moved = submit(server.loads, Transfer(wanted, memory, [None] * len(wanted)))
            begun.append(moved)
            futures.append(then(moved, partial(self._loaded, server, places, wanted, answers)))
        raise_if_none_began(begun)
        return all_of(futures, lambda: self._count_loads(answers))

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        self._check_buffers(keys, buffers)
        given = [None] * len(keys) if proofs is None else proofs
        if not any(server.link.was_up for server in self._servers):
            # After TierBusy the caller offers the blocks again; a server may be up by then.
            raise TierBusy(f"no server of the {self.name} tier has been attached yet")
        outcomes = [Stored.REFUSED] * len(keys)
        begun: list[Future[list[State | None]]] = []
        futures: list[Future[None]] = []
        for server, places in self._divided(keys):
            wanted = [keys[i] for i in places]
            known = server.link.presence.answers(wanted)
            memory = [as_bytes(buffers[i]) for i in places]
            moved = submit(server.stores, Transfer(wanted, memory, [given[i] for i in places]))
            begun.append(moved)
            server.link.presence.asked(wanted)  # `lookup` returns PENDING until the store ends
            moved.add_done_callback(partial(_sent, server.link.presence, wanted))
            futures.append(then(moved, partial(self._stored, places, wanted, known, outcomes)))
        raise_if_none_began(begun)
        return all_of(futures, lambda: outcomes)

    def drop(self, keys: Sequence[bytes]) -> int:
        """Delete blocks on the servers, for all engines. Return how many were known."""
        self._check_open()
        known = 0
        for server, places in self._divided(keys):
            known += self._drop_at(server, [keys[i] for i in places])
        return known

    def clear(self) -> None:
        """Delete every block of this tenant on the servers, so that no engine finds them."""
        self._check_open()
        for server in self._servers:
            server.link.presence.clear()
            with self._lock:
                server.clearing += 1
            self._delete_on_server(
                server, partial(server.link.delete_blocks, (), all_blocks=True), None
            )

    def stats(self) -> TierStats:
        size = self.layout.page_bytes
        with self._lock:
            links = [server.link for server in self._servers]
            blocks = sum(link.presence.hits for link in links)
            capacity = sum(link.capacity_bytes for link in links)
            corrupt = sum(server.loads.corrupt_blocks for server in self._servers)
            stats = self._stats
            return TierStats(
                capacity_bytes=capacity,
                used_bytes=min(blocks * size, capacity),
                capacity_blocks=capacity // size,
                blocks=blocks,
                hits=stats.hits,
                misses=stats.misses,
                stored_blocks=stats.stored_blocks,
                loaded_blocks=stats.hits,
                stored_bytes=stats.stored_blocks * size,
                loaded_bytes=stats.hits * size,
                store_seconds=sum(server.stores.seconds for server in self._servers),
                load_seconds=sum(server.loads.seconds for server in self._servers),
                rejected={"checksum": corrupt} if corrupt else {},
                errors=errors_of(links),
                corrupt_records_dropped=corrupt,
            )

    def close(self, timeout_seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_seconds
        for server in self._servers:
            server.stores.close(deadline)
            server.loads.close(deadline)
            server.link.close()
        for watch in self._watches:
            watch.close()

    def _loaded(
        self,
        server: _Server,
        places: Sequence[int],
        keys: Sequence[bytes],
        answers: list[Proof | None],
        proofs: Sequence[Proof | None],
    ) -> None:
        for i, proof in zip(places, proofs, strict=True):
            answers[i] = proof
        server.link.presence.learn(keys, [proof is not None for proof in proofs])

    def _count_loads(self, answers: list[Proof | None]) -> list[Proof | None]:
        with self._lock:
            misses = answers.count(None)
            self._stats.hits += len(answers) - misses
            self._stats.misses += misses
        return answers

    def _stored(
        self,
        places: Sequence[int],
        keys: Sequence[bytes],
        known: Sequence[Answer],
        outcomes: list[Stored],
        states: Sequence[State | None],
    ) -> None:
        for i, state in zip(places, states, strict=True):
            outcomes[i] = _OUTCOMES.get(state, Stored.REFUSED)
        new = {
            key
            for key, state, was in zip(keys, states, known, strict=True)
            if state is State.KEPT and was is not Answer.HIT
        }
        with self._lock:
            self._stats.stored_blocks += len(new)

    def _drop_at(self, server: _Server, keys: Sequence[bytes]) -> int:
        known = server.link.presence.invalidate_keys(keys)
        with self._lock:
            for key in keys:
                server.going[key] = server.going.get(key, 0) + 1
        self._delete_on_server(server, partial(server.link.delete_blocks, keys), keys)
        return known

    def _drop_corrupt(self, server: _Server, keys: Sequence[bytes]) -> None:
        """Delete blocks whose tag does not match, so that they can be stored again."""
        try:
            self._drop_at(server, keys)
        except TierError as error:  # the queue was closed
            log.debug("corrupt blocks stay on %s for now: %s", server.link.address, error)

    def _delete_on_server(
        self, server: _Server, call: Callable[[], None], keys: Sequence[bytes] | None
    ) -> None:
        """Queue a deletion after the submitted stores. `keys` None means all blocks."""

        def ended(_future: Future[None]) -> None:
            with self._lock:
                server.clearing -= keys is None
                for key in keys or ():
                    server.going[key] -= 1
                    if not server.going[key]:
                        del server.going[key]

        server.stores.submit_call(call).add_done_callback(ended)

    def _divided(self, keys: Sequence[bytes]) -> list[tuple[_Server, Sequence[int]]]:
        """Return the servers that own some of `keys`, each with the positions of its keys."""
        if len(self._servers) == 1:
            return [(self._servers[0], range(len(keys)))] if keys else []
        places: list[list[int]] = [[] for _ in self._servers]
        for i, owner in enumerate(self._owners(keys)):
            places[owner].append(i)
        return [(s, p) for s, p in zip(self._servers, places, strict=True) if p]

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosed(f"the {self.name} tier was closed")

    def _check_buffers(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        self._check_open()
        check_buffers(self.layout, keys, buffers)


def open_remote(
    addresses: Sequence[ServerAddress], layout: BlockLayout, settings: RemoteSettings | None = None
) -> RemoteStore:
    """Make the tier of servers at `addresses`. Raises TierConfigError for bad credentials."""
    return RemoteStore(StaticMembership(addresses), layout, settings)


def _store(connection: BlockConnection, batch: Transfer, deadline: float) -> list[State | None]:
    return connection.store(batch.keys, batch.buffers, batch.proofs, deadline)


def _mark(
    presence: PresenceCache,
    keys: Sequence[bytes],
    kept: list[bool],
    places: Sequence[int],
    count: int,
) -> None:
    """Set `kept` for the first `count` blocks, and remove the answers about other blocks."""
    presence.invalidate_keys(keys[count:])
    for i in places[:count]:
        kept[i] = True


def _sent(
    presence: PresenceCache, keys: Sequence[bytes], moved: Future[list[State | None]]
) -> None:
    """Record the end of a store in `presence`, whether the store succeeded or failed."""
    is_known = moved.exception() is None
    presence.answered(keys, [s is State.KEPT for s in moved.result()] if is_known else None)
