# SPDX-License-Identifier: Apache-2.0
"""A slab that a real process serves, and engines' tiers that read it.

with served() as slab:          64 slots of LAYOUT, on a free port of loopback
    fill(slab.slab, keys)       blocks whose bytes are `payload_of(key, LAYOUT)`
    with slab.tier() as tier:   attached
        fetch(tier, keys)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stratakv.tiers import contract
from stratakv.tiers.cache_server.slab_serving.serving import SlabServing
from stratakv.tiers.contract import payload_of
from stratakv.tiers.remote.credentials import Credentials
from stratakv.tiers.remote.membership import ServerAddress
from stratakv.tiers.remote.peer_tier import PeerTier
from stratakv.tiers.remote.remote_settings import RemoteSettings
from stratakv.tiers.remote.transfer_queue import RemoteError
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.tag import Tagger
from stratakv.tiers.tier_settings import ListenAddress, ServeSettings

from ..rig import LAYOUT, WAIT_SECONDS

NAMESPACE = b"one model".ljust(32, b".")
TAGGER = Tagger(LAYOUT.layout_id(), LAYOUT.page_bytes)


class Served:
    """A slab and the process that serves it."""

    def __init__(self, slots: int = 64, port: int = 0, **settings: Any) -> None:
        self.slab = CpuSlab(LAYOUT, slots * LAYOUT.slot_bytes, is_served=True)
        address = ListenAddress("127.0.0.1", port)
        try:
            self.serving = SlabServing(
                self.slab, address, ServeSettings(**settings), namespace=NAMESPACE
            )
        except BaseException:
            self.slab.close()
            raise

    def address(self, *, tls: bool = False) -> ServerAddress:
        return ServerAddress("127.0.0.1", self.serving.port, tls)

    @contextmanager
    def tier(self, namespace: bytes = NAMESPACE) -> Iterator[PeerTier]:
        """The tier of an engine that reads this slab alone."""
        with opened([self.address()], namespace) as tier:
            assert tier.wait_up(WAIT_SECONDS)
            yield tier

    def close(self) -> None:
        self.serving.close(WAIT_SECONDS)
        self.slab.close()


@contextmanager
def served(slots: int = 64, **settings: Any) -> Iterator[Served]:
    made = Served(slots, **settings)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def opened(
    addresses: Sequence[ServerAddress],
    namespace: bytes = NAMESPACE,
    credentials: Credentials | None = None,
) -> Iterator[PeerTier]:
    settings = RemoteSettings(credentials=credentials or Credentials(), namespace=namespace)
    tier = PeerTier(addresses, LAYOUT, settings)
    try:
        yield tier
    finally:
        tier.close(WAIT_SECONDS)


def fill(slab: CpuSlab, keys: Sequence[bytes]) -> list[int | None]:
    """Store blocks; the slot of each, None where there was no room."""
    slots = slab.reserve(keys)
    kept = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot is not None]
    for key, slot in kept:
        slab.buffer(slot)[: LAYOUT.page_bytes] = payload_of(key, LAYOUT)
    names = [key for key, _ in kept]
    slab.commit(names, [True] * len(names), [TAGGER.prove(k, payload_of(k, LAYOUT)) for k in names])
    return slots


def fetch(tier: PeerTier, keys: Sequence[bytes]) -> list[bool]:
    """Look the blocks up and load them; which came. None do from an engine that is away; other
    bytes than were stored fail."""
    try:
        asked = tier.prefetch_lookup(keys)
        if asked is not None:
            asked.result(WAIT_SECONDS)
        return [payload is not None for payload in contract.fetch(tier, keys)]
    except RemoteError:
        return [False] * len(keys)


def wait_for(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_SECONDS} s"
        time.sleep(0.005)
