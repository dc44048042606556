# SPDX-License-Identifier: Apache-2.0
"""ByteBudget: limits the bytes in flight. A stream waits in a queue until other streams have
returned enough bytes. Only one event loop may use a budget."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """Grants `total` bytes in order of arrival: small requests overtake no large request."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._line: deque[tuple[int, asyncio.Future[int]]] = deque()

    @property
    def in_use(self) -> int:
        return self._total - self._free

    async def take_bytes(self, wish: int) -> int:
        """Wait for `wish` bytes, `total` at most. Return the number that must be returned later."""
        wish = min(wish, self._total)
        if not self._line and wish <= self._free:
            self._free -= wish
            return wish
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._line.append((wish, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._serve()  # later requests may fit, although this request did not
            else:  # the bytes were granted meanwhile
                self.give_back_bytes(turn.result())
            raise

    def resize(self, total: int) -> None:
        """Change the total. Granted bytes stay granted until they are returned."""
        self._free += total - self._total
        self._total = total
        self._serve()

    def give_back_bytes(self, taken: int) -> None:
        self._free += taken
        self._serve()

    def _serve(self) -> None:
        while self._line:
            wish, turn = self._line[0]
            if not turn.cancelled():
                wish = min(wish, self._total)  # the total may have shrunk
                if wish > self._free:
                    return
                self._free -= wish
                turn.set_result(wish)
            self._line.popleft()
