# SPDX-License-Identifier: Apache-2.0
"""Transfers: the loads or the stores of one server, with a queue, a thread and a connection.

The first transfer opens a connection, which later transfers use. A connection that fails is closed.
A transfer that fails on an earlier connection is tried again on a new connection, since the server
may have restarted, or the old connection may have been idle too long. A fallback connection is
closed at intervals, so that the next transfer tries to open a better connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..block import BlockLayout
from ..errors import InvalidBlock
from ..tag import Proofs
from ..wire.frames import MAX_BLOCKS
from ..wire.sockets import ConnectionLost
from .server_link import ServerLink
from .transfer_queue import RemoteError, RemoteLate, TransferQueue
from .transports.block_connection import BlockConnection

_T = TypeVar("_T")


# Seconds until a fallback connection is closed: the first (doubled for each next), and at most.
_FALLBACK_SECONDS, _LONGEST_FALLBACK_SECONDS = 5.0, 600.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks to load or store: each key with its buffer and, if known, its proof."""

    keys: Sequence[bytes]
    buffers: Sequence[memoryview]
    proofs: Proofs

    def batches(self) -> Iterator[Transfer]:
        """Yield the blocks in batches of at most MAX_BLOCKS, the limit of one request."""
        for start in range(0, len(self.keys), MAX_BLOCKS):
            part = slice(start, start + MAX_BLOCKS)
            yield Transfer(self.keys[part], self.buffers[part], self.proofs[part])


# Moves a batch through a connection until a deadline, and returns an answer for each block.
Move = Callable[[BlockConnection, Transfer, float], "list[_T]"]


class Transfers(Generic[_T]):
    """The transfers in one direction. A block has `size` bytes; `seconds` limits a transfer."""

    def __init__(
        self,
        link: ServerLink,
        name: str,
        move: Move[_T],
        *,
        size: int,
        seconds: float,
        most_bytes: int,
    ) -> None:
        self._link = link
        self._move = move
        self._size = size
        self._seconds = seconds
        # Only the queue's thread closes the connection. A call during which another thread closed
        # it could use a descriptor that belongs to another file.
        self._queue = TransferQueue(f"stratakv-remote-{name}", most_bytes, self._drop_connection)
        self._is_ending = False  # True: no connection is opened, no transfer tried again
        self._connection: BlockConnection | None = None
        self._fallback_seconds = _FALLBACK_SECONDS
        self._give_up_at = float("inf")
        self.seconds = 0.0  # the total time of transfers
        self.corrupt_blocks = 0

    def submit(self, transfer: Transfer) -> Future[list[_T]]:
        """Queue a transfer; its future may get a RemoteError. Raises TierBusy, TierClosed."""
        return self._queue.submit(
            lambda deadline: self._run(transfer, deadline),
            time.monotonic() + self._seconds,
            len(transfer.keys) * self._size,
        )

    def submit_call(self, call: Callable[[], None]) -> Future[None]:
        """Queue `call`, which runs after the work that was submitted before."""
        return self._queue.submit(lambda _: call(), time.monotonic() + self._seconds, 0)

    @property
    def kind(self) -> str | None:
        """The transport of the open connection, or None without an open connection."""
        connection = self._connection
        return None if connection is None else connection.kind

    def close(self, deadline: float) -> None:
        """Wait for the queued transfers until the deadline, then abort all others. Idempotent."""
        if not self._queue.close(deadline):
            self._is_ending = True
            connection = self._connection
            if connection is not None:
                connection.abort_call()
            self._queue.close(time.monotonic() + 1.0)

    def _run(self, transfer: Transfer, deadline: float) -> list[_T]:
        began = time.monotonic()
        answers: list[_T] = []
        try:
            for batch in transfer.batches():
                answers += self._move_batch(batch, deadline)
        finally:
            self.seconds += time.monotonic() - began
        return answers

    def _move_batch(self, batch: Transfer, deadline: float) -> list[_T]:
        may_try_again = self._connection is not None
        while True:
            try:
                return self._try_once(batch, deadline)
            except ConnectionLost as lost:
                why = str(lost)
            late = time.monotonic() >= deadline
            if late or self._is_ending or not may_try_again:
                break
            may_try_again = False
        self._link.count_error("deadline" if late else "unavailable")
        self._link.mark_lost()
        # Raised without the cause, whose frames would keep views of the caller's buffers.
        raise (RemoteLate if late else RemoteError)(f"{self._link.address}: {why}")

    def _try_once(self, batch: Transfer, deadline: float) -> list[_T]:
        if time.monotonic() >= self._give_up_at:
            self._drop_connection()
        connection = self._connection
        if connection is None and not self._is_ending:
            connection = self._connection = self._link.connect(deadline)
            self._set_fallback_time(connection)
        if connection is None or self._is_ending:  # `close` may have been called meanwhile
            self._drop_connection()
            raise ConnectionLost("the tier was closed")
        before = connection.corrupt_blocks
        try:
            return self._move(connection, batch, deadline)
        except BaseException:
            self._drop_connection()
            raise
        finally:
            self.corrupt_blocks += connection.corrupt_blocks - before

    def _set_fallback_time(self, connection: BlockConnection) -> None:
        if not connection.is_fallback:
            self._fallback_seconds, self._give_up_at = _FALLBACK_SECONDS, float("inf")
            return
        self._give_up_at = time.monotonic() + self._fallback_seconds
        self._fallback_seconds = min(2 * self._fallback_seconds, _LONGEST_FALLBACK_SECONDS)

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def check_buffers(
    layout: BlockLayout, keys: Sequence[bytes], buffers: Sequence[memoryview]
) -> None:
    """Raise InvalidBlock unless each key has a buffer that is large enough for a block."""
    if len(keys) != len(buffers):
        raise InvalidBlock(f"{len(keys)} keys came with {len(buffers)} buffers")
    for buffer in buffers:
        if buffer.nbytes < layout.page_bytes:
            raise InvalidBlock(
                f"a block takes {layout.page_bytes} bytes, the buffer has {buffer.nbytes}"
            )


def as_bytes(buffer: memoryview) -> memoryview:
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
