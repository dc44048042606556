# SPDX-License-Identifier: Apache-2.0
"""PeerTier: loads blocks from the slabs of other engines, and stores no blocks there.

When a request is queued, the tier sends one look-up of the whole prompt to all engines at the same
time. The tier loads a block from an engine that has reported the block. If an engine fails, the
failure is counted and the engine's blocks are misses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from ..base import Answer, Stored, StoreTier, TierStats
from ..block import BlockLayout
from ..errors import TierClosed
from ..tag import Proof, Proofs
from .futures import all_of, raise_if_none_began, submit, then
from .membership import ServerAddress
from .remote_settings import RemoteSettings
from .server_link import ServerLink, all_up, errors_of
from .server_watch import ServerWatch
from .transfers import Transfer, Transfers, as_bytes, check_buffers
from .transports.block_connection import BlockConnection

NAME = "peer"


class _Peer:
    """The link to one other engine, and the queue of loads from it."""

    def __init__(
        self, address: ServerAddress, layout: BlockLayout, settings: RemoteSettings
    ) -> None:
        self.link = ServerLink(address, layout, settings)
        self.loads = Transfers(
            self.link,
            "peer-load",
            _load,
            size=layout.page_bytes,
            seconds=settings.load_seconds,
            most_bytes=settings.queue_bytes,
        )


class PeerTier(StoreTier):
    """The slabs of the engines at `addresses`, with blocks of `layout`, as one tier. Only `wait_up`
    and `close` wait for an engine. Each engine is used as soon as it is up."""

    is_read_only = True

    def __init__(
        self,
        addresses: Sequence[ServerAddress],
        layout: BlockLayout,
        settings: RemoteSettings | None = None,
    ) -> None:
        settings = replace(settings or RemoteSettings(), stores=False)
        settings.credentials.check_files()
        self.name = NAME
        self.layout = layout
        self._peers = [_Peer(address, layout, settings) for address in dict.fromkeys(addresses)]
        self._watches: list[ServerWatch] = []
        self._lock = threading.Lock()
        self._stats = TierStats()
        self._closed = False

    @property
    def is_up(self) -> bool:
        return any(peer.link.is_up for peer in self._peers)

    def wait_up(self, timeout_seconds: float) -> bool:
        return all_up([peer.link for peer in self._peers], timeout_seconds)

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        self._check_open()
        answers = [Answer.MISS] * len(keys)
        for peer in self._peers:
            if not peer.link.is_up:
                continue
            for i, answer in enumerate(peer.link.presence.answers(keys)):
                if answer is Answer.HIT or answers[i] is Answer.MISS:
                    answers[i] = answer
        return answers

    def prefetch_lookup(self, keys: Sequence[bytes]) -> Future[None] | None:
        self._check_open()
        asked = [future for peer in self._peers for future in peer.link.prefetch_lookup(keys)]
        return all_of(asked, lambda: None) if asked else None

    def watch(self, news: Callable[[Sequence[bytes]], None]) -> bool:
        self._check_open()
        if not self._watches:
            self._watches = [ServerWatch(peer.link, news) for peer in self._peers]
        return True

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        self._check_open()
        check_buffers(self.layout, keys, buffers)
        proofs: list[Proof | None] = [None] * len(keys)
        begun, futures = [], []
        for peer, places in self._divided(keys):
            wanted = [keys[i] for i in places]
            memory = [as_bytes(buffers[i]) for i in places]
            moved = submit(peer.loads, Transfer(wanted, memory, [None] * len(wanted)))
            begun.append(moved)
            futures.append(then(moved, partial(_loaded, peer, places, wanted, proofs)))
        raise_if_none_began(begun)
        return all_of(futures, lambda: self._count_hits(proofs))

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        """Refuse every block: each engine fills its own slab."""
        done: Future[list[Stored]] = Future()
        done.set_result([Stored.REFUSED] * len(keys))
        return done

    def drop(self, keys: Sequence[bytes]) -> int:
        """Record that no engine has `keys`, although the engines keep the blocks. Return 0."""
        for peer in self._peers:
            peer.link.presence.learn(keys, [False] * len(keys))
        return 0

    def clear(self) -> None:
        """Clear the record of the engines' blocks. The engines keep their blocks."""
        for peer in self._peers:
            peer.link.presence.clear()

    def stats(self) -> TierStats:
        size, links = self.layout.page_bytes, [peer.link for peer in self._peers]
        corrupt = sum(peer.loads.corrupt_blocks for peer in self._peers)
        capacity = sum(link.capacity_bytes for link in links)
        blocks = sum(link.presence.hits for link in links)
        with self._lock:
            hits, misses = self._stats.hits, self._stats.misses
        return TierStats(
            capacity_bytes=capacity,
            used_bytes=min(blocks * size, capacity),
            capacity_blocks=capacity // size,
            blocks=blocks,
            hits=hits,
            misses=misses,
            loaded_blocks=hits,
            loaded_bytes=hits * size,
            load_seconds=sum(peer.loads.seconds for peer in self._peers),
            rejected={"checksum": corrupt} if corrupt else {},
            errors=errors_of(links),
        )

    def close(self, timeout_seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_seconds
        for peer in self._peers:
            peer.loads.close(deadline)
            peer.link.close()
        for watch in self._watches:
            watch.close()

    def _divided(self, keys: Sequence[bytes]) -> list[tuple[_Peer, list[int]]]:
        """Return the engines to load from, each with the positions of its keys. The engine with
        most keys sends all of them, then the one with most of the other keys, and so on."""
        believed = [
            (peer, {i for i, a in enumerate(peer.link.presence.answers(keys)) if a is Answer.HIT})
            for peer in self._peers
            if peer.link.is_up
        ]
        divided = []
        while believed:
            peer, places = max(believed, key=lambda each: len(each[1]))
            if not places:
                break
            divided.append((peer, sorted(places)))
            believed = [(other, left - places) for other, left in believed if other is not peer]
        return divided

    def _count_hits(self, proofs: list[Proof | None]) -> list[Proof | None]:
        misses = proofs.count(None)
        with self._lock:
            self._stats.hits += len(proofs) - misses
            self._stats.misses += misses
        return proofs

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosed(f"the {self.name} tier was closed")


def _load(connection: BlockConnection, batch: Transfer, deadline: float) -> list[Proof | None]:
    return connection.load(batch.keys, batch.buffers, deadline)


def _loaded(
    peer: _Peer,
    places: Sequence[int],
    keys: Sequence[bytes],
    proofs: list[Proof | None],
    found: Sequence[Proof | None],
) -> None:
    for i, proof in zip(places, found, strict=True):
        proofs[i] = proof
    peer.link.presence.learn(keys, [proof is not None for proof in found])
