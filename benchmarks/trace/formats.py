# SPDX-License-Identifier: Apache-2.0
"""Request traces, read from files or generated. A file has JSON Lines, plain or gzip, with the
fields of Mooncake's FAST'25 traces.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}

`timestamp` is in milliseconds and never decreases. An id in `hash_ids` stands for a block of 512
tokens and all earlier blocks of the prompt. The last block of a prompt may be partial or be left
out. Other fields (`session_id` of the agent traces) are not used. All values have limits, because
traces are not trusted; an error names the line.

Blocks are numbered from 0 in the order of their first use, so that block numbers can index an
array. Policies get 40-byte keys, as long and as evenly distributed as the product's keys.

Generated traces are sessions of turns, with the cache behaviour of chats or of coding agents.
Sessions start at random times. Each session begins with one of a few shared system prompts. After
each turn, the session continues, after a gap, with a probability that depends on the number of
turns so far. A turn adds blocks to the blocks of the previous turn; some turns branch off at an
earlier place. The values of `CHAT` and `AGENTS` are measured on public traces."""

from __future__ import annotations

import gzip
import hashlib
import heapq
import math
import random
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec

BLOCK_TOKENS = 512
KEY_BYTES = 40


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: its arrival, its blocks in order, and the number of their tokens."""

    arrival_seconds: float
    chain: Sequence[int]
    tokens: int


@dataclass(frozen=True)
class Trace:
    """Prompts whose blocks are prefix-chained: in all prompts, a block has the same predecessor."""

    name: str
    prompts: Sequence[Prompt]

    @cached_property
    def num_accesses(self) -> int:
        """The number of blocks of all prompts, with repetitions."""
        return sum(len(prompt.chain) for prompt in self.prompts)

    @cached_property
    def num_blocks(self) -> int:
        """The number of distinct blocks, which are numbered from 0."""
        return 1 + max((max(prompt.chain, default=-1) for prompt in self.prompts), default=-1)

    @property
    def seconds(self) -> float:
        return self.prompts[-1].arrival_seconds - self.prompts[0].arrival_seconds

    @cached_property
    def keyed_chains(self) -> list[list[bytes]]:
        """The chains of blocks as keys. Equal keys are one object, for cheap comparisons."""
        keys = [key_of(block) for block in range(self.num_blocks)]
        return [[keys[block] for block in prompt.chain] for prompt in self.prompts]

    @cached_property
    def next_uses(self) -> list[array[int]]:
        """The index of the next prompt with the same block, for each block of each prompt; the
        number of prompts if no later prompt has the block."""
        coming = array("q", [len(self.prompts)]) * self.num_blocks
        result: list[array[int]] = []
        for index in range(len(self.prompts) - 1, -1, -1):
            chain = self.prompts[index].chain
            result.append(array("q", [coming[block] for block in chain]))
            for block in chain:
                coming[block] = index
        result.reverse()
        return result

    def capacity_blocks(self, percent: float) -> int:
        """Return the number of blocks that is `percent` % of the distinct blocks, at least 1."""
        return max(1, int(self.num_blocks * percent / 100))


def key_of(block: int) -> bytes:
    return hashlib.blake2b(block.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()


SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_FILES = 64
MAX_LINE_BYTES = 2 * 2**20
MAX_FILE_BYTES = 2 * 2**30  # limit of a file's unpacked bytes
MAX_REQUESTS = 2_000_000
MAX_CHAIN_BLOCKS = 2**16
MAX_ACCESSES = 50_000_000

_Id = Annotated[int, msgspec.Meta(ge=0)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHAIN_BLOCKS * BLOCK_TOKENS)]


class TraceError(ValueError):
    """A path or line is no trace; the message has the expected and the actual value."""


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=2**53)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: Annotated[list[_Id], msgspec.Meta(max_length=MAX_CHAIN_BLOCKS)]


def trace_files(paths: list[Path]) -> list[Path]:
    """Return the trace files of the paths; a folder stands for all traces below. Raises
    TraceError."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            below = [each for each in sorted(path.rglob("*")) if is_trace(each)]
            if not below:
                raise TraceError(f"{path} holds no file named *{' or *'.join(SUFFIXES)}")
            found += below
        elif not path.is_file():
            raise TraceError(f"{path} is neither a file nor a folder; give a trace or its folder")
        elif not is_trace(path):
            raise TraceError(f"{path.name} is not named *{' or *'.join(SUFFIXES)}, as traces are")
        else:
            found.append(path)
    found = list(dict.fromkeys(found))
    if len(found) > MAX_FILES:
        raise TraceError(f"{len(found)} traces are too many; name at most {MAX_FILES}")
    return found


def is_trace(path: Path) -> bool:
    """Whether the path is a file with the name extension of a trace."""
    return path.name.endswith(SUFFIXES) and path.is_file()


def trace_name(path: Path) -> str:
    """Return the name of a trace in the tables: `conversation` for conversation_trace.jsonl.gz."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix("_trace")


def read_trace(path: Path) -> Trace:
    """Return the trace in a file. Raises TraceError."""
    reader = _Reader(path.name)
    try:
        is_packed = path.name.endswith(".gz")
        with cast(BinaryIO, gzip.open(path)) if is_packed else path.open("rb") as file:
            for number, line in enumerate(_lines(file, path.name), start=1):
                reader.take(number, line)
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        raise TraceError(f"{path} cannot be read ({error}); fetch it again") from error
    if not reader.prompts:
        raise TraceError(f"{path} holds no request")
    return Trace(trace_name(path), reader.prompts)


def _lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    total = 0
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        total += len(line)
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{name}, line {number} is longer than {MAX_LINE_BYTES} bytes")
        if total > MAX_FILE_BYTES:
            raise TraceError(f"{name} unpacks to more than {MAX_FILE_BYTES} bytes; cut it")
        yield line


class _Reader:
    """A reader that converts lines to prompts, and checks each line against all earlier lines."""

    def __init__(self, name: str) -> None:
        self.prompts: list[Prompt] = []
        self._name = name
        self._decoder = msgspec.json.Decoder(_Line)
        self._numbers: dict[int, int] = {}  # id → block number
        self._parents: list[int] = []  # predecessor of each block number; -1 for a first block
        self._accesses = 0
        self._last_timestamp = 0.0

    def take(self, number: int, line: bytes) -> None:
        """Convert one line to a prompt; skip an empty line."""
        if not line.strip():
            return
        try:
            fields = self._decoder.decode(line)
            self._check(fields)
            chain = self._number(fields.hash_ids)
        except (msgspec.MsgspecError, UnicodeDecodeError, TraceError) as error:
            raise TraceError(f"{self._name}, line {number}: {error}") from error
        arrival = fields.timestamp / 1e3
        self.prompts.append(Prompt(arrival, chain, fields.input_length))

    def _check(self, fields: _Line) -> None:
        blocks, tokens = len(fields.hash_ids), fields.input_length
        full = tokens // BLOCK_TOKENS
        if not full <= blocks <= full + bool(tokens % BLOCK_TOKENS):
            raise TraceError(
                f"{blocks} hash_ids for input_length {tokens}; expected {full} full blocks of "
                f"{BLOCK_TOKENS} tokens, and at most one partial block more"
            )
        if fields.timestamp < self._last_timestamp:
            raise TraceError(
                f"timestamp {fields.timestamp:g} comes after {self._last_timestamp:g}; "
                "sort the lines by time"
            )
        self._last_timestamp = fields.timestamp
        self._accesses += blocks
        if len(self.prompts) == MAX_REQUESTS or self._accesses > MAX_ACCESSES:
            raise TraceError(
                f"more than {MAX_REQUESTS} requests or {MAX_ACCESSES} blocks in all; cut the trace"
            )

    def _number(self, ids: list[int]) -> list[int]:
        chain: list[int] = []
        parent = -1
        for each in ids:
            block = self._numbers.setdefault(each, len(self._numbers))
            if block == len(self._parents):
                self._parents.append(parent)
            elif self._parents[block] != parent:
                raise TraceError(
                    f"id {each} follows another id than before; hash_ids must be prefix-chained, "
                    "each standing for its block and all before it"
                )
            chain.append(block)
            parent = block
        return chain


_P90 = 1.2815515655446004  # 90th percentile of the standard normal distribution


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A log-normal distribution with the measured median and 90th percentile."""

    p50: float
    p90: float

    def draw(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.p50), math.log(self.p90 / self.p50) / _P90)


@dataclass(frozen=True, slots=True)
class Shape:
    """The distributions of sessions. `continues_by_turn` has the probability of a further turn
    after each turn; the last value is also for all later turns."""

    name: str
    sessions_per_second: float
    continues_by_turn: tuple[float, ...]
    gap_seconds: Quantiles
    first_blocks: Quantiles  # blocks of the first turn, after the system prompt
    added_blocks: Quantiles  # blocks that each later turn adds
    system_prompts: int
    system_blocks: int
    branches: float  # the probability that a turn branches off at an earlier place
    has_partial_blocks: bool  # whether the next turn replaces the last block
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
        self._events: list[tuple[float, int, _Session | None]] = []  # None: a new session

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
        self._serial += 1  # the order of events with equal times
        heapq.heappush(self._events, (when, self._serial, session))

    def _head(self) -> list[int]:
        """Return the blocks of a random system prompt. The n-th prompt has the weight 1/n."""
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
    """Return a trace of `requests` prompts, equal for equal seeds."""
    return _Generator(shape, seed).run(requests)
