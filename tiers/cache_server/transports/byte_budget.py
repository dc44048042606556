# SPDX-License-Identifier: Apache-2.0
"""Bytes in flight, bounded: who wants some waits in line until others have given theirs back.

For one event loop. Knows nothing of what the bytes are.
"""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """`total` bytes. Served in the order of asking, so that a large wish is not passed over."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def in_use(self) -> int:
        """Bytes that somebody has."""
        return self._total - self._free

    async def take(self, wish: int) -> int:
        """Wait for `wish` bytes, but no more than there are in all; how many it was. They must be
        given back."""
        wish = min(wish, self._total)
        if not self._line and wish <= self._free:
            self._free -= wish
            return wish
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((wish, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._serve()  # those behind us may have waited for us alone
            else:  # our turn came in the same moment
                self.give_back(wish)
            raise
        return wish

    def give_back(self, taken: int) -> None:
        """What `take` returned."""
        self._free += taken
        self._serve()

    def _serve(self) -> None:
        while self._line:
            wish, turn = self._line[0]
            if not turn.cancelled():
                if wish > self._free:
                    return
                self._free -= wish
                turn.set_result(None)
            self._line.popleft()
