# SPDX-License-Identifier: Apache-2.0
"""Loads and stores of one server, each on a lane with a connection of its own.

A connection is opened by the first transfer and kept; one that fails is closed, and where it had
served before, a server that was restarted or a connection that idled too long is tried once more. A
fallback one is given up now and then to try for a better.
"""

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


_FALLBACK_SECONDS, _LONGEST_FALLBACK_SECONDS = 5.0, 600.0  # doubled with each


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks to be loaded or stored: each key with its buffer and, where it is known, its proof."""

    keys: Sequence[bytes]
    buffers: Sequence[memoryview]
    proofs: Proofs

    def batches(self) -> Iterator[Transfer]:
        """As many blocks as one request carries, again and again."""
        for start in range(0, len(self.keys), MAX_BLOCKS):
            part = slice(start, start + MAX_BLOCKS)
            yield Transfer(self.keys[part], self.buffers[part], self.proofs[part])


# Moves one batch through a connection until a deadline; returns an answer for each block.
Move = Callable[[BlockConnection, Transfer, float], "list[_T]"]


class Transfers(Generic[_T]):
    """The transfers in one direction. `size` is that of a block in bytes."""

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
        # The connection is closed by the thread that uses it alone: its descriptor might be another
        # file's by the time that a call under way comes to it.
        self._queue = TransferQueue(f"stratakv-remote-{name}", most_bytes, self._drop_connection)
        self._is_ending = False  # nothing is connected or tried any more
        self._connection: BlockConnection | None = None
        self._fallback_seconds = _FALLBACK_SECONDS
        self._give_up_at = float("inf")
        self.seconds = 0.0  # that transfers took in all
        self.corrupt_blocks = 0

    def submit(self, transfer: Transfer) -> Future[list[_T]]:
        """Have blocks moved; an answer for each, or a RemoteError. Raises TierBusy, TierClosed."""
        return self._queue.submit(
            lambda deadline: self._run(transfer, deadline),
            time.monotonic() + self._seconds,
            len(transfer.keys) * self._size,
        )

    def submit_call(self, call: Callable[[], None]) -> Future[None]:
        """Have something else done when everything before it is done."""
        return self._queue.submit(lambda _: call(), time.monotonic() + self._seconds, 0)

    @property
    def kind(self) -> str | None:
        """How blocks move, where a connection is open."""
        connection = self._connection
        return None if connection is None else connection.kind

    def close(self, deadline: float) -> None:
        """Let transfers end within the time, then end them. Idempotent."""
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
        # Without its cause, whose frames would keep views of the caller's buffers.
        raise (RemoteLate if late else RemoteError)(f"{self._link.address}: {why}")

    def _try_once(self, batch: Transfer, deadline: float) -> list[_T]:
        if time.monotonic() >= self._give_up_at:
            self._drop_connection()
        connection = self._connection
        if connection is None and not self._is_ending:
            connection = self._connection = self._link.connect(deadline)
            self._set_fallback_time(connection)
        if connection is None or self._is_ending:  # perhaps since before there was one to abort
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
    """Raises InvalidBlock unless there is a buffer for each key that holds a block."""
    if len(keys) != len(buffers):
        raise InvalidBlock(f"{len(keys)} keys came with {len(buffers)} buffers")
    for buffer in buffers:
        if buffer.nbytes < layout.page_bytes:
            raise InvalidBlock(
                f"a block takes {layout.page_bytes} bytes, the buffer has {buffer.nbytes}"
            )


def as_bytes(buffer: memoryview) -> memoryview:
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
