# SPDX-License-Identifier: Apache-2.0
"""What carries blocks out of a client's memory and back: memcpy, a connection, a tier.

Each has room for as many blocks as the client has, and moves any of them in any order.
"""

from __future__ import annotations

import ctypes
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...proto.v1 import cache_service_pb2 as messages
from ...tiers.base import Stored
from ...tiers.block import DIGEST_BYTES, BlockLayout, pack_key
from ...tiers.remote.address import ServerAddress
from ...tiers.remote.credentials import Credentials
from ...tiers.remote.membership import StaticMembership
from ...tiers.remote.remote_store import RemoteStore
from ...tiers.remote.server_link import ServerLink
from ...tiers.remote.settings import RemoteSettings
from ...tiers.shared_memory import SharedMemory
from ...tiers.wire.frames import MAX_BLOCKS, State, pack_keys
from ..harness.comparison import WrongWork
from ..tiers.scale import MIB, layout_of

SECONDS = 120.0  # that anything may take
_QUEUE_BYTES = 2**40
STAMP_BYTES = 16


class Blocks:
    """Shared memory, as an engine's slab is, warm and full of noise: `buffers[i]` is block i, of
    `layout.page_bytes`, at `addresses[i]`.

    Every block carries a stamp at both ends, new whenever it is stored, so that a load that brought
    nothing, or another block, is noticed.
    """

    def __init__(self, block_bytes: int, count: int) -> None:
        self.layout: BlockLayout = layout_of(block_bytes)
        size = self.layout.slot_bytes
        shared = SharedMemory(
            "stratakv-bench", count * size, huge_pages=False, threads=1, progress=None
        )
        self._map = shared.map
        os.close(shared.fd)
        whole = memoryview(self._map)
        noise = os.urandom(MIB)
        for start in range(0, len(whole), MIB):
            part = whole[start : start + MIB]
            part[:] = noise[: len(part)]
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size = len(whole)
        places = range(0, count * size, size)
        self.buffers = [whole[place : place + block_bytes] for place in places]
        self.addresses = [self.base + place for place in places]

    def __len__(self) -> int:
        return len(self.buffers)

    def stamp(self) -> list[bytes]:
        """New stamps on all blocks."""
        stamps = [os.urandom(STAMP_BYTES) for _ in self.buffers]
        for buffer, stamp in zip(self.buffers, stamps, strict=True):
            buffer[:STAMP_BYTES] = buffer[-STAMP_BYTES:] = stamp
        return stamps

    def scrub(self) -> None:
        """Take all stamps off."""
        none = bytes(STAMP_BYTES)
        for buffer in self.buffers:
            buffer[:STAMP_BYTES] = buffer[-STAMP_BYTES:] = none

    def check(self, stamps: Sequence[bytes]) -> None:
        """Raise WrongWork unless each block has its stamp."""
        for index, (buffer, stamp) in enumerate(zip(self.buffers, stamps, strict=True)):
            if not buffer[:STAMP_BYTES] == buffer[-STAMP_BYTES:] == stamp:
                raise WrongWork(f"block {index} was loaded, but its buffer does not hold it")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a client opens a transport: which one, and what that needs."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)


class Transport(ABC):
    """`order` are numbers of blocks. Raises WrongWork where not all were moved."""

    @abstractmethod
    def store(self, order: Sequence[int]) -> None:
        """Take these blocks, each of them new."""

    @abstractmethod
    def load(self, order: Sequence[int]) -> None:
        """Bring these blocks as they were stored last."""

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """At the end."""


class CopyTransport(Transport):
    """memcpy, to other memory of the same kind."""

    def __init__(self, blocks: Blocks) -> None:
        self._near = blocks
        self._far = Blocks(blocks.layout.page_bytes, len(blocks))
        self._size = blocks.layout.page_bytes

    def store(self, order: Sequence[int]) -> None:
        self._copy(self._far.addresses, self._near.addresses, order)

    def load(self, order: Sequence[int]) -> None:
        self._copy(self._near.addresses, self._far.addresses, order)

    def _copy(self, targets: Sequence[int], sources: Sequence[int], order: Sequence[int]) -> None:
        copy, size = ctypes.memmove, self._size
        for index in order:
            copy(targets[index], sources[index], size)


class ServiceTransport(Transport):
    """Shared by the transports to a cache server: a block has the key it was last stored under."""

    def __init__(self, blocks: Blocks, kind: str, ca_file: Path | None) -> None:
        self._blocks = blocks
        self._kind = kind
        self._keys = [b""] * len(blocks)
        self._settings = RemoteSettings(
            credentials=Credentials(ca_file=ca_file),
            attach_seconds=SECONDS,
            lookup_seconds=SECONDS,
            load_seconds=SECONDS,
            store_seconds=SECONDS,
            queue_bytes=_QUEUE_BYTES,
            shares_memory=kind == "memory",
        )

    def _renew(self, order: Sequence[int]) -> None:
        for index in order:
            self._keys[index] = pack_key(os.urandom(DIGEST_BYTES))

    def _parts(self, order: Sequence[int]) -> list[tuple[list[bytes], list[memoryview]]]:
        """Keys and buffers, as many at a time as the protocol allows."""
        buffers = self._blocks.buffers
        parts = [order[start : start + MAX_BLOCKS] for start in range(0, len(order), MAX_BLOCKS)]
        return [([self._keys[i] for i in part], [buffers[i] for i in part]) for part in parts]

    def _check_kind(self, found: str) -> None:
        """A client takes another connection where it cannot have the best."""
        if found != self._kind:
            raise WrongWork(f"blocks went through {found or 'nothing'}, not {self._kind}")


class ConnectionTransport(ServiceTransport):
    """A client's connection to a cache server, of one `kind`."""

    def __init__(
        self, blocks: Blocks, *, address: ServerAddress, kind: str, ca_file: Path | None = None
    ) -> None:
        super().__init__(blocks, kind, ca_file)
        with ExitStack() as opened:
            self._link = ServerLink(address, blocks.layout, self._settings)
            opened.callback(self._link.close)
            if not self._link.wait_up(SECONDS):
                raise WrongWork(f"{address} cannot be reached")
            self._connection = self._link.connect(time.monotonic() + SECONDS)
            opened.callback(self._connection.close)
            self._check_kind(self._connection.kind)
            self._opened = opened.pop_all()

    def store(self, order: Sequence[int]) -> None:
        self._renew(order)
        for keys, buffers in self._parts(order):
            proofs = [None] * len(keys)
            deadline = time.monotonic() + SECONDS
            states = self._connection.store(keys, buffers, proofs, deadline)
            if states.count(State.KEPT) != len(keys):
                raise WrongWork("the server did not keep every block")

    def load(self, order: Sequence[int]) -> None:
        for keys, buffers in self._parts(order):
            if None in self._connection.load(keys, buffers, time.monotonic() + SECONDS):
                raise WrongWork("the server did not have every block")

    def look_up(self, calls: int, keys: int) -> list[float]:
        """Seconds of each call for so many keys of blocks that are there."""
        wanted = self._keys[:keys]
        states = bytes([State.HIT]) * keys
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            request = messages.LookupRequest(keys=pack_keys(wanted))
            response = self._link.call("lookup", request, SECONDS)
            seconds.append(time.perf_counter() - began)
            if response.prefix != keys or response.states != states:
                raise WrongWork("the server did not find every block")
        return seconds

    def close(self) -> None:
        self._opened.close()


class TierTransport(ServiceTransport):
    """The tier that an engine has on a cache server, on the best connection there is."""

    def __init__(self, blocks: Blocks, *, address: ServerAddress) -> None:
        super().__init__(blocks, "memory", None)
        self._tier = RemoteStore(StaticMembership([address]), blocks.layout, self._settings)
        if not self._tier.wait_up(SECONDS):
            self._tier.close(SECONDS)
            raise WrongWork(f"{address} cannot be reached")

    def store(self, order: Sequence[int]) -> None:
        self._renew(order)
        for stored in [self._tier.store(*part) for part in self._parts(order)]:
            if any(outcome is not Stored.KEPT for outcome in stored.result(SECONDS)):
                raise WrongWork("the server did not keep every block")
        self._check_kind(",".join(self._tier.kinds()))

    def load(self, order: Sequence[int]) -> None:
        for loaded in [self._tier.load(*part) for part in self._parts(order)]:
            if None in loaded.result(SECONDS):
                raise WrongWork("the server did not have every block")
        self._check_kind(",".join(self._tier.kinds()))

    def close(self) -> None:
        self._tier.close(SECONDS)
