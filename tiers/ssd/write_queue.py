# SPDX-License-Identifier: Apache-2.0
"""The blocks on their way to the disk: waiting, or being written, each with all who asked for it.

Everything here is called under the state's lock. Knows nothing of slots, files or threads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..base import Stored
from ..tag import Proof
from .state import Job


@dataclass(slots=True, eq=False)
class Write:
    """One block on its way to the disk, and all who asked for it."""

    key: bytes
    payload: memoryview  # `page_bytes` long
    proof: Proof | None  # what the payload has to be
    waiters: list[tuple[Job[Stored], int]] = field(default_factory=list)
    dropped: bool = False  # forgotten meanwhile: not to be kept
    is_damaged: bool = False  # the payload is not what its proof says: not to be kept


class WriteQueue:
    """First in, first out; a block that is on its way already is not queued twice."""

    def __init__(self) -> None:
        self._waiting: deque[Write] = deque()
        self._pending: dict[bytes, Write] = {}  # waiting or being written
        self.num_blocks = 0  # waiting or being written; the owner bounds it

    def __len__(self) -> int:
        """Blocks that wait."""
        return len(self._waiting)

    def __contains__(self, key: object) -> bool:
        """Whether a block is on its way, and to be kept."""
        write = self._pending.get(key)  # type: ignore[call-overload]
        return write is not None and not write.dropped

    def add(
        self,
        key: bytes,
        payload: memoryview,
        proof: Proof | None,
        job: Job[Stored],
        position: int,
    ) -> None:
        """Queue a block, or wait for the write of it that is on its way."""
        write = self._pending.get(key)
        if write is None or write.dropped:
            write = self._pending[key] = Write(key, payload, proof)
            self._waiting.append(write)
            self.num_blocks += 1
        write.waiters.append((job, position))

    def cancel(self, key: bytes) -> bool:
        """Forget a block on its way; False if it is not."""
        if key not in self:
            return False
        self._pending[key].dropped = True
        return True

    def cancel_all(self) -> None:
        """Forget every block on its way."""
        for write in self._pending.values():
            write.dropped = True

    def take(self, count: int) -> list[Write]:
        """Up to `count` blocks, to be written now; each ends with `settle` or `abandon`."""
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    def settle(self, write: Write, is_kept: bool) -> list[Job[Stored]]:
        """A block has been written, or will not be; the calls that are done by that."""
        outcome = Stored.KEPT if is_kept else Stored.REFUSED
        if write.is_damaged:
            outcome = Stored.DAMAGED
        for job, position in write.waiters:
            job.settle(position, outcome)
        return self._leave(write)

    def abandon(self, write: Write) -> list[Job[Stored]]:
        """A block gets no answer; the calls that are done by that."""
        for job, _position in write.waiters:
            job.abandon()
        return self._leave(write)

    def _leave(self, write: Write) -> list[Job[Stored]]:
        self.num_blocks -= 1
        # A block that was dropped and stored again has a second write, which is the pending one.
        if self._pending.get(write.key) is write:
            del self._pending[write.key]
        return list({id(job): job for job, _ in write.waiters if not job.waiting_for}.values())
