# SPDX-License-Identifier: Apache-2.0
"""Makes traces: sessions of turns that look, to a cache, like chats or like coding agents.

Sessions start at random. Each begins with one of a few system prompts that many share, and after
every turn goes on with a probability that depends on how many turns it has had, after a gap. A turn
adds blocks to those of the turn before; now and then it goes back to an earlier place and branches
off. The numbers of `CHAT` and `AGENTS` are measured on public traces of both kinds.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

from .formats import BLOCK_TOKENS, Prompt, Trace

_P90 = 1.2815515655446004  # of the standard normal distribution


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A log-normal distribution, by what is measured of one."""

    p50: float
    p90: float

    def draw(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.p50), math.log(self.p90 / self.p50) / _P90)


@dataclass(frozen=True, slots=True)
class Shape:
    """What sessions are like. Probabilities by turn are from the first; the last one holds on."""

    name: str
    sessions_per_second: float
    continues_by_turn: tuple[float, ...]
    gap_seconds: Quantiles
    first_blocks: Quantiles  # of the first turn, behind the system prompt
    added_blocks: Quantiles  # of each later turn
    system_prompts: int
    system_blocks: int
    branches: float  # the probability that a turn goes back
    has_partial_blocks: bool  # the last block is replaced by the next turn
    max_blocks: int


CHAT = Shape(
    name="chat",
    sessions_per_second=2.2,
    continues_by_turn=(0.26, 0.39, 0.49, 0.56, 0.59, 0.66, 0.78),
    gap_seconds=Quantiles(123, 474),
    first_blocks=Quantiles(10, 49),
    added_blocks=Quantiles(2, 19),
    system_prompts=1,
    system_blocks=1,
    branches=0.05,
    has_partial_blocks=True,
    max_blocks=256,
)
AGENTS = Shape(
    name="agents",
    sessions_per_second=0.007,
    continues_by_turn=(0.971,),
    gap_seconds=Quantiles(16, 111),
    first_blocks=Quantiles(43, 255),
    added_blocks=Quantiles(1, 8),
    system_prompts=12,
    system_blocks=26,
    branches=0.023,
    has_partial_blocks=False,
    max_blocks=1500,
)
SHAPES = {shape.name: shape for shape in (CHAT, AGENTS)}


class _Session:
    def __init__(self, head: list[int]) -> None:
        self.head_blocks = len(head)
        self.chain = head
        self.turn = 0


class _Generator:
    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._rng = random.Random(seed)
        self._heads: dict[int, list[int]] = {}
        self._num_blocks = 0
        self._serial = 0
        self._events: list[tuple[float, int, _Session | None]] = []  # None: a session starts

    def run(self, requests: int) -> Trace:
        self._at(0.0, None)
        prompts: list[Prompt] = []
        while len(prompts) < requests:
            now, _, session = heapq.heappop(self._events)
            if session is None:
                session = _Session(list(self._head()))
                self._at(now + self._rng.expovariate(self._shape.sessions_per_second), None)
            self._take_turn(session)
            prompts.append(Prompt(now, tuple(session.chain), self._tokens(session)))
            by_turn = self._shape.continues_by_turn
            if self._rng.random() < by_turn[min(session.turn, len(by_turn)) - 1]:
                self._at(now + self._shape.gap_seconds.draw(self._rng), session)
        return Trace(self._shape.name, prompts)

    def _at(self, when: float, session: _Session | None) -> None:
        self._serial += 1  # orders events of one moment
        heapq.heappush(self._events, (when, self._serial, session))

    def _head(self) -> list[int]:
        """Of the system prompts the first ones are the most frequent."""
        weights = [1 / rank for rank in range(1, self._shape.system_prompts + 1)]
        [chosen] = self._rng.choices(range(self._shape.system_prompts), weights)
        if chosen not in self._heads:
            self._heads[chosen] = self._fresh(self._shape.system_blocks)
        return self._heads[chosen]

    def _take_turn(self, session: _Session) -> None:
        shape, chain = self._shape, session.chain
        if session.turn == 0:
            added = shape.first_blocks.draw(self._rng)
        else:
            added = shape.added_blocks.draw(self._rng)
            if self._rng.random() < shape.branches:
                del chain[self._rng.randint(session.head_blocks, len(chain)) :]
            elif shape.has_partial_blocks and len(chain) > session.head_blocks:
                chain.pop()
        room = shape.max_blocks - len(chain)
        chain += self._fresh(min(room, max(1, round(added))))
        session.turn += 1

    def _fresh(self, count: int) -> list[int]:
        first = self._num_blocks
        self._num_blocks += count
        return list(range(first, self._num_blocks))

    def _tokens(self, session: _Session) -> int:
        missing = self._rng.randrange(BLOCK_TOKENS) if self._shape.has_partial_blocks else 0
        return len(session.chain) * BLOCK_TOKENS - missing


def generate(shape: Shape, requests: int, seed: int) -> Trace:
    """A trace of so many prompts; the same for the same seed."""
    return _Generator(shape, seed).run(requests)
