# SPDX-License-Identifier: Apache-2.0
"""Replays a trace with an eviction policy, in one tier or two tiers, without moving bytes.

A prompt's hits are the leading run of its resident blocks (the prefix rule). The prompt's missing
blocks are then stored, as in the CPU slab: the policy evicts blocks, but no block of the same
prompt, and the last blocks are left out if there is still no space. Requests run one by one, only
prompts' blocks are stored, and tiers start empty.

Of two tiers, the upper tier is small (the pool or the slab), the lower tier is larger, and writes
to the lower tier are counted:

    write-through  every block is stored in the two tiers at the same time
    write-back     the upper tier's victims are stored below if the filter admits them; a block that
                   is promoted keeps its copy below, and is not written again while the copy exists
    exclusive      like write-back, but a promoted block is removed from the lower tier

The hits are the leading run of blocks that are in one of the two tiers; a block in the two tiers
counts as a hit of the upper tier. For the lower tier's policy, a block is used when it is promoted
and when the upper tier evicts it.

A cell of the tables is one replay, in this process or in a worker process. A cell object has only a
few plain values, so that it can be sent to a worker, which reads or generates the trace again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from pathlib import Path

from ...tiers.admission import AdmissionFilter, AdmitAll, make_filter
from ...tiers.policies.base import EvictionPolicy
from ...tiers.policies.known_policies import policy_factory
from ...tiers.processes.python_command import spawn_context
from .formats import BLOCK_TOKENS, SHAPES, Trace, generate, read_trace

_WEIGHT_FLOPS = 2 * 8.0e9  # operations per token
_ATTENTION_FLOPS = 4 * 32 * 4096  # operations per pair of tokens: 32 layers, hidden size 4096
_ATTENTION_PER_BLOCK = _ATTENTION_FLOPS * BLOCK_TOKENS / _WEIGHT_FLOPS


def prefill_work(blocks: int) -> float:
    """Return the prefill work of a prompt's first `blocks` blocks."""
    return blocks + _ATTENTION_PER_BLOCK * blocks * blocks / 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The shares of a trace that were hits of a tier."""

    hit_percent: float  # percent of the prompts' blocks
    work_percent: float  # percent of the prefill work


class ReplayTier:
    """A tier that handles keys like `CpuSlab`, without bytes."""

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int) -> None:
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.resident: set[bytes] = set()

    def leading_hits(self, chain: Sequence[bytes]) -> int:
        """Return the number of resident blocks at the start of `chain`; no state changes."""
        resident = self.resident
        for index, key in enumerate(chain):
            if key not in resident:
                return index
        return len(chain)

    def make_room(
        self, count: int, wanted: Sequence[bytes], coming: Sequence[bytes] | None = None
    ) -> list[bytes]:
        """Evict blocks until `count` blocks fit, or fewer if the policy prefers resident blocks to
        blocks of `coming`. No block of `wanted` is evicted. `coming` defaults to the blocks of
        `wanted` that are not resident. Return the victims."""
        excess = count - (self.capacity_blocks - len(self.resident))
        if excess <= 0:
            return []
        kept = frozenset(wanted)
        if coming is None:
            coming = [key for key in wanted if key not in self.resident]
        victims = self.policy.displaced_by(coming, excess, lambda key: key not in kept)
        self.policy.remove(victims)
        self.resident.difference_update(victims)
        return victims

    def take_in(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Store as many of the first new blocks of `keys` as fit; return the stored blocks."""
        kept = keys[: self.capacity_blocks - len(self.resident)]
        self.resident.update(kept)
        return kept


def replay(trace: Trace, policy: EvictionPolicy, capacity_blocks: int) -> Outcome:
    """Replay a trace with an empty tier of `capacity_blocks` blocks."""
    tier = ReplayTier(policy, capacity_blocks)
    resident = tier.resident
    hits_by_prompt = []
    for prompt, chain in zip(trace.prompts, trace.keyed_chains, strict=True):
        policy.observe(chain, prompt.arrival_seconds)
        hits = tier.leading_hits(chain)
        hits_by_prompt.append(hits)
        missing = [key for key in chain[hits:] if key not in resident]
        tier.make_room(len(missing), chain)
        kept = tier.take_in(missing)
        # The last blocks of a prompt are inserted first, so that they are evicted first. Hits are
        # touched after new blocks are inserted, so that hits are evicted later.
        policy.insert(reversed(kept))
        policy.touch(reversed(chain[:hits]))
    return outcome(trace, hits_by_prompt)


def outcome(trace: Trace, hits_by_prompt: Sequence[int]) -> Outcome:
    """Return the shares of hits, from the number of leading resident blocks of each prompt."""
    saved = work = 0.0
    for prompt, hits in zip(trace.prompts, hits_by_prompt, strict=True):
        saved += prefill_work(hits)
        work += prefill_work(len(prompt.chain))
    return Outcome(100 * sum(hits_by_prompt) / trace.num_accesses, 100 * saved / work)


_ABSENT = -1


def replay_opt(trace: Trace, capacity_blocks: int) -> Outcome:
    """Replay a trace with an empty tier and the optimal policy, which uses all later prompts."""
    prompts = trace.prompts
    never = len(prompts)
    depths = 1 + max((len(prompt.chain) for prompt in prompts), default=0)
    # Block → the next prompt with the block. The heap has prompt and depth as one number, the
    # farthest first. An entry is valid only while `kept_for` of its block is the entry's prompt.
    kept_for = array("q", [_ABSENT]) * trace.num_blocks
    farthest: list[int] = []
    num_kept = 0
    hits_by_prompt = []
    for prompt, uses in zip(prompts, trace.next_uses, strict=True):
        hits = 0
        for block in prompt.chain:
            if kept_for[block] == _ABSENT:
                break
            hits += 1
        hits_by_prompt.append(hits)
        for depth, (block, use) in enumerate(zip(prompt.chain, uses, strict=True)):
            if use == never:
                num_kept -= kept_for[block] != _ABSENT
                kept_for[block] = _ABSENT
                continue
            num_kept += kept_for[block] == _ABSENT
            kept_for[block] = use
            heappush(farthest, -(use * depths + depth))
        while num_kept > capacity_blocks:
            use, depth = divmod(-heappop(farthest), depths)
            block = prompts[use].chain[depth]
            if kept_for[block] == use:
                kept_for[block] = _ABSENT
                num_kept -= 1
    return outcome(trace, hits_by_prompt)


def replay_heads_first(trace: Trace, capacity_blocks: int) -> Outcome:
    """Replay a trace with LRU that uses each prompt's blocks one by one, in order."""
    order: OrderedDict[int, None] = OrderedDict()
    hits_by_prompt = []
    for prompt in trace.prompts:
        misses = (depth for depth, block in enumerate(prompt.chain) if block not in order)
        hits_by_prompt.append(next(misses, len(prompt.chain)))
        for block in prompt.chain:
            if block in order:
                order.move_to_end(block)
                continue
            if len(order) == capacity_blocks:
                order.popitem(last=False)
            order[block] = None
    return outcome(trace, hits_by_prompt)


class Arrangement(Enum):
    """The rule by which blocks are stored in the lower of two tiers."""

    WRITE_THROUGH = "write-through"
    WRITE_BACK = "write-back"
    EXCLUSIVE = "exclusive"


@dataclass(frozen=True, slots=True)
class TwoTierOutcome:
    """The share of hits of each tier, and the blocks written to the lower tier."""

    upper_percent: float  # hits in percent of the prompts' blocks
    lower_percent: float
    written_per_block: float  # writes to the lower tier per block of a prompt

    @property
    def hit_percent(self) -> float:
        """The hits of the two tiers together, in percent of the prompts' blocks."""
        return self.upper_percent + self.lower_percent


@dataclass(slots=True)
class TwoTiers:
    """An upper and a lower tier, and the moves of blocks between the two."""

    arrangement: Arrangement
    upper: ReplayTier
    lower: ReplayTier
    admission: AdmissionFilter
    upper_hits: int = 0
    lower_hits: int = 0
    written: int = 0

    def run(self, chain: Sequence[bytes], now: float) -> None:
        """Replay one prompt: count its hits, and store its missing blocks."""
        for policy in (self.upper.policy, self.lower.policy):
            policy.observe(chain, now)
        self.admission.observe(chain, now)
        upper_hits, lower_hits = self._find(chain)
        self.upper_hits += len(upper_hits)
        self.lower_hits += len(lower_hits)
        if self.arrangement is Arrangement.WRITE_THROUGH:
            new = [key for key in chain if key not in self.lower.resident]
            self.lower.policy.insert(reversed(self._make_and_take(new, wanted=chain)))
            self.lower.policy.touch(reversed(upper_hits + lower_hits))
        else:
            self.lower.policy.touch(reversed(lower_hits))
            self.admission.promoted(len(lower_hits))
        self._take_up(chain, upper_hits, now)

    def _find(self, chain: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        upper, lower = self.upper.resident, self.lower.resident
        upper_hits: list[bytes] = []
        lower_hits: list[bytes] = []
        for key in chain:
            if key in upper:
                upper_hits.append(key)
            elif key in lower:
                lower_hits.append(key)
            else:
                break
        return upper_hits, lower_hits

    def _take_up(self, chain: Sequence[bytes], upper_hits: list[bytes], now: float) -> None:
        upper, lower = self.upper, self.lower
        missing = [key for key in chain if key not in upper.resident]
        victims = upper.make_room(len(missing), chain)
        kept = upper.take_in(missing)
        # Blocks that do not fit into the upper tier are offered to the lower tier.
        lost = [*victims, *reversed(missing[len(kept) :])]
        if self.arrangement is Arrangement.EXCLUSIVE:
            moved = [key for key in missing if key in lower.resident]
            lower.policy.remove(moved)
            lower.resident.difference_update(moved)
        if self.arrangement is not Arrangement.WRITE_THROUGH:
            self._give_up(lost, now)
        upper.policy.insert(reversed(kept))
        upper.policy.touch(reversed(upper_hits))

    def _give_up(self, lost: Sequence[bytes], now: float) -> None:
        """Offer blocks that left the upper tier to the lower tier, the coldest first. A block in
        the lower tier is touched; other blocks are written if the filter admits them."""
        copies = {key for key in lost if key in self.lower.resident}
        new = [key for key in lost if key not in copies]
        verdicts = self.admission.admit(new, now)
        admitted = [key for key, admit in zip(new, verdicts, strict=True) if admit]
        written = set(self._make_and_take(admitted[::-1], wanted=lost))
        for key in lost:
            if key in copies:
                self.lower.policy.touch((key,))
            elif key in written:
                self.lower.policy.insert((key,))

    def _make_and_take(self, keys: Sequence[bytes], *, wanted: Sequence[bytes]) -> Sequence[bytes]:
        """Store blocks in the lower tier in order; last blocks are left out if not all fit."""
        self.lower.make_room(len(keys), wanted, keys)
        kept = self.lower.take_in(keys)
        self.written += len(kept)
        return kept


def replay_two_tiers(
    trace: Trace,
    arrangement: Arrangement,
    upper: ReplayTier,
    lower: ReplayTier,
    admission: AdmissionFilter | None = None,
) -> TwoTierOutcome:
    """Replay a trace with two empty tiers. Without a filter, all blocks are admitted."""
    tiers = TwoTiers(arrangement, upper, lower, admission or AdmitAll())
    for prompt, chain in zip(trace.prompts, trace.keyed_chains, strict=True):
        tiers.run(chain, prompt.arrival_seconds)
    blocks = trace.num_accesses
    return TwoTierOutcome(
        100 * tiers.upper_hits / blocks, 100 * tiers.lower_hits / blocks, tiers.written / blocks
    )


LRU = "lru"
ADMIT_ALL = "all"
OPT = "opt"
HEADS_FIRST = "lru, heads first"
MAX_WORKERS = 2
# The least number of block accesses for worker processes, whose start takes about a second.
WORKERS_FROM_ACCESSES = 4_000_000
CELL_SECONDS = 3600.0  # limit for one cell, after which a policy is considered broken


class CellFailed(RuntimeError):
    """A worker process gave no answer."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a trace: a file, or a generator with its seed."""

    name: str
    path: Path | None = None
    requests: int = 0
    seed: int = 0

    def load(self) -> Trace:
        """Read the trace, or generate it from the seed. Raises TraceError."""
        if self.path is not None:
            return Trace(self.name, read_trace(self.path).prompts)
        return generate(SHAPES[self.name], self.requests, self.seed)


@dataclass(frozen=True, slots=True)
class Cell:
    """A replay of one tier: `row` is a policy, or OPT or HEADS_FIRST, at one capacity."""

    trace: str
    row: str
    percent: int

    def run(self, trace: Trace) -> Outcome:
        blocks = trace.capacity_blocks(self.percent)
        if self.row == OPT:
            return replay_opt(trace, blocks)
        if self.row == HEADS_FIRST:
            return replay_heads_first(trace, blocks)
        return replay(trace, policy_factory(self.row)(blocks), blocks)


@dataclass(frozen=True, slots=True)
class PairCell:
    """A replay of two tiers. `lower` is the lower tier's policy; the upper tier's policy is LRU."""

    trace: str
    upper_percent: int
    lower_percent: int
    arrangement: Arrangement
    lower: str = LRU
    admission: str = ADMIT_ALL

    def run(self, trace: Trace) -> TwoTierOutcome:
        upper, lower = (trace.capacity_blocks(p) for p in (self.upper_percent, self.lower_percent))
        return replay_two_tiers(
            trace,
            self.arrangement,
            ReplayTier(policy_factory(LRU)(upper), upper),
            ReplayTier(policy_factory(self.lower)(lower), lower),
            make_filter(self.admission, lower),
        )


AnyCell = Cell | PairCell


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome and the seconds of a cell's replay."""

    cell: AnyCell
    outcome: Outcome | TwoTierOutcome
    seconds: float


def run_cells(
    cells: Sequence[AnyCell], sources: Sequence[Source], traces: Mapping[str, Trace]
) -> Iterator[Answer]:
    """Run the cells; yield answers in the order of completion. Raises CellFailed."""
    accesses = sum(traces[cell.trace].num_accesses for cell in cells)
    workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    if workers < 2 or accesses < WORKERS_FROM_ACCESSES:
        for cell in cells:
            yield _run(cell, traces[cell.trace])
        return
    # Large cells run first, so that no worker runs a large cell alone at the end.
    ordered = sorted(cells, key=lambda cell: -traces[cell.trace].num_accesses)
    # Workers are spawned, not forked, because this process may have threads.
    with spawn_context() as spawn, spawn.Pool(workers, _start_worker, (list(sources),)) as pool:
        answers = pool.imap_unordered(_run_in_worker, ordered)
        for _ in ordered:
            try:
                yield answers.next(CELL_SECONDS)
            except multiprocessing.TimeoutError as error:
                raise CellFailed(
                    f"no replay ended within {CELL_SECONDS:.0f} seconds: a worker was killed, "
                    "perhaps for want of memory, or a policy is far too slow"
                ) from error


def _run(cell: AnyCell, trace: Trace) -> Answer:
    _ = trace.keyed_chains, trace.next_uses  # computed before the timing
    start = time.perf_counter()
    outcome = cell.run(trace)
    return Answer(cell, outcome, time.perf_counter() - start)


_sources: dict[str, Source] = {}
_loaded: dict[str, Trace] = {}  # in a worker: the trace of the last cell


def _start_worker(sources: Sequence[Source]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends the workers
    _sources.update({source.name: source for source in sources})


def _run_in_worker(cell: AnyCell) -> Answer:
    if cell.trace not in _loaded:
        _loaded.clear()
        _loaded[cell.trace] = _sources[cell.trace].load()
    return _run(cell, _loaded[cell.trace])
