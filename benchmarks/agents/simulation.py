# SPDX-License-Identifier: Apache-2.0
"""A simulation of agents' jobs in virtual time, with an engine's scheduler and cache manager.

Scheduler, cache manager, policies and pins are the engine's own. No model is computed: a step takes
a fixed time and a fixed time for each token, and the job defines the length of each answer. The CPU
tier is a list of block keys, of which the oldest is evicted first. One link copies the tier's
blocks at a fixed rate."""

from __future__ import annotations

import gzip
import heapq
import itertools
import random
import zlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, cast
from unittest.mock import patch

import msgspec
import numpy as np

from ...connector.base import KVConnectorScheduler, RequestView, StoresAhead
from ...connector.messages import (
    NO_MATCH,
    NOTHING_TO_MOVE,
    ConnectorMetadata,
    ConnectorWorkerOutput,
    EvictedBlock,
    GroupBlockIds,
    LoadReport,
    Match,
    MatchKind,
)
from ...engine.cache.block_hash import make_block_hasher
from ...engine.cache.kv_cache_manager import KVCacheManager
from ...engine.config.engine_config import SchedulerConfig
from ...engine.request.request import Request
from ...engine.request.sampling_params import SamplingParams
from ...engine.scheduler import request_states, scheduler
from ...engine.scheduler.output import ModelRunnerOutput
from ...engine.scheduler.scheduler import Scheduler
from ...tiers.block import Identity
from ..harness.comparison import WrongWork
from ..trace.formats import TraceError

BLOCK_SIZE = 16
# A 16-bit model of 8B parameters on a GPU: 2 MiB per block, 25 GB/s, 10,000 tokens/s of prefill.
STEP_SECONDS = 0.010
TOKEN_SECONDS = 0.0001
BLOCK_SECONDS = 2 * 2**20 / 25e9
_TOKEN = 7
SCALE = 512 // BLOCK_SIZE  # blocks per block of a recorded trace, which has 512 tokens
MOST_TURNS = 40  # the most turns that are read from a recorded session
_GROUP = (0).to_bytes(2, "little")


class Turn(NamedTuple):
    """One request of a job: the length of its answer, and the seconds of the tool call after the
    answer. The prompt is `prompt` if a trace records the prompt, and otherwise the text so far and
    `new_tokens` random tokens."""

    new_tokens: int
    output_tokens: int
    tool: str
    tool_seconds: float
    prompt: Sequence[int] | None = None

    def prompt_behind(self, text: Sequence[int], rng: random.Random) -> np.ndarray[Any, Any]:
        """Return the prompt's token ids, int32 `[num_tokens]`, after the text so far, `text`."""
        if self.prompt is not None:
            return np.array(self.prompt, np.int32)
        new = [rng.randrange(1, 50_000) for _ in range(self.new_tokens)]
        return np.array([*text, *new], np.int32)


class Job(NamedTuple):
    """The job of one agent: its time of arrival, and its turns, one after the other."""

    job_id: str
    arrival_seconds: float
    prefix: Sequence[int]  # other jobs may begin with the same prefix
    turns: Sequence[Turn]


@dataclass
class Outcome:
    """The results of one run."""

    prompt_tokens: int = 0
    recomputed_tokens: int = 0  # in whole blocks that the previous turn had computed
    reloaded_tokens: int = 0  # loaded from the tier again
    first_token_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def p99(self) -> float:
        """The 99th percentile of the seconds to the first token."""
        return float(np.percentile(self.first_token_seconds, 99))


class Clock:
    """A replacement of the module `time`, whose time is the attribute `now`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class ListedTier(KVConnectorScheduler, StoresAhead):
    """A CPU tier without bytes: a list of block keys, and a link that runs one load at a time."""

    def __init__(self, clock: Clock, num_blocks: int) -> None:
        self.stores_ahead = self
        self._clock = clock
        self._num_blocks = num_blocks
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._free_at = 0.0
        self._loads: deque[tuple[float, LoadReport]] = deque()

    def due_at(self) -> float | None:
        """The time at which the oldest load ends; None if no load is under way."""
        return self._loads[0][0] if self._loads else None

    def get_matched_tokens(
        self,
        request: RequestView,
        num_computed_tokens: int,
        *,
        num_queued_tokens: int = 0,
        num_pool_tokens: int | None = None,
    ) -> Match:
        count, most = 0, (request.num_tokens - 1) // BLOCK_SIZE
        first = num_computed_tokens // BLOCK_SIZE
        for digest in request.block_hashes[first:most]:
            if digest + _GROUP not in self._kept:
                break
            count += 1
        return Match(count * BLOCK_SIZE, MatchKind.LOAD) if count else NO_MATCH

    def begin_load(
        self, request: RequestView, block_ids: GroupBlockIds, num_tokens: int, *, overlapped: bool
    ) -> None:
        count = num_tokens // BLOCK_SIZE
        self._free_at = max(self._free_at, self._clock.now) + count * BLOCK_SECONDS
        report = LoadReport(request.request_id, num_tokens, {"cpu": num_tokens})
        self._loads.append((self._free_at, report))

    def num_wanted_ahead(self) -> int:
        return 64

    def names_dropped(self, blocks: Sequence[EvictedBlock]) -> None:
        pass

    def build_meta(
        self, evicted: Sequence[EvictedBlock], cold: Sequence[EvictedBlock] = ()
    ) -> ConnectorMetadata:
        for block in (*evicted, *cold):
            self._kept[block.key] = None
            self._kept.move_to_end(block.key)
            if len(self._kept) > self._num_blocks:
                self._kept.popitem(last=False)
        return NOTHING_TO_MOVE

    def update_from_worker(self, output: ConnectorWorkerOutput) -> list[LoadReport]:
        reports = []
        while self._loads and self._loads[0][0] <= self._clock.now:
            reports.append(self._loads.popleft()[1])
        return reports

    def has_pending_work(self) -> bool:
        return bool(self._loads) and self._loads[0][0] <= self._clock.now

    def set_wakeup(self, wakeup: Any) -> None:
        pass

    def reset(self) -> None:
        self._kept.clear()

    def stats(self) -> dict[str, object]:
        return {}

    def shutdown(self, timeout_seconds: float) -> None:
        pass


def make_jobs(seed: int, count: int, tools: dict[str, tuple[float, float]]) -> list[Job]:
    """Return jobs that arrive at random times; two thirds of the jobs begin with one of two shared
    prefixes. `tools` has the range of each tool's seconds."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1, 50_000) for _ in range(512)] for _ in range(2)]
    jobs, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(1.2)
        turns = []
        for _ in range(rng.randrange(4, 12)):
            tool = rng.choice(list(tools))
            seconds = rng.uniform(*tools[tool])
            turns.append(Turn(rng.randrange(64, 512), rng.randrange(24, 96), tool, seconds))
        prefix = rng.choice([*prefixes, [rng.randrange(1, 50_000) for _ in range(512)]])
        jobs.append(Job(f"j{number}", now, prefix, turns))
    return jobs


def longest_of(job: Job) -> int:
    """Return the number of tokens of the job's longest request and its answer."""
    grown = len(job.prefix) + sum(turn.new_tokens + turn.output_tokens for turn in job.turns)
    return max(grown, *[len(t.prompt or ()) + t.output_tokens for t in job.turns])


def num_shared(text: Sequence[int], prompt: np.ndarray[Any, Any]) -> int:
    """Return the number of equal tokens at the start of `text` and `prompt`."""
    count = min(len(text), len(prompt))
    differ = np.flatnonzero(np.asarray(text[:count], np.int32) != prompt[:count])
    return int(differ[0]) if len(differ) else count


def read_jobs(path: Path) -> list[Job]:
    """Return the sessions of a recorded trace (JSON Lines with `session_id`, `timestamp` in
    milliseconds, `hash_ids` and `output_length`, plain or gzip). Each hash id becomes one block. A
    tool call takes the time between two requests of its session. Raises TraceError."""
    sessions: dict[str, list[_Recorded]] = {}
    try:
        is_packed = path.name.endswith(".gz")
        with cast(BinaryIO, gzip.open(path)) if is_packed else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = _recorded.decode(line)
                except msgspec.DecodeError as error:
                    raise TraceError(f"line {number} of {path.name}: {error}") from error
                sessions.setdefault(record.session_id, []).append(record)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path} cannot be read ({error}); fetch it again") from error
    return [_job(name, records[:MOST_TURNS]) for name, records in sessions.items()]


_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**27)]


class _Recorded(msgspec.Struct):
    session_id: str
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: Annotated[list[_Id], msgspec.Meta(max_length=8192)]


_recorded = msgspec.json.Decoder(_Recorded)


def _job(name: str, records: Sequence[_Recorded]) -> Job:
    records = [record for record in records if record.hash_ids]
    times = [record.timestamp / 1000 for record in records]
    gaps = [max(0.0, after - before) for before, after in itertools.pairwise(times)]
    turns = [
        Turn(
            0,
            max(1, record.output_length // SCALE),
            "recorded",
            gap,
            [each * BLOCK_SIZE + i for each in record.hash_ids for i in range(BLOCK_SIZE)],
        )
        for record, gap in zip(records, [*gaps, 0.0], strict=True)
    ]
    return Job(name, times[0] if times else 0.0, (), turns)


class Simulation:
    """Runs jobs through one engine. With `tier_blocks` 0 the engine has no tier."""

    def __init__(self, jobs: Sequence[Job], policy: str, num_blocks: int, tier_blocks: int) -> None:
        self._clock = Clock()
        self._tier = ListedTier(self._clock, tier_blocks) if tier_blocks else None
        longest = max(map(longest_of, jobs))
        self._hasher = make_block_hasher(
            Identity("benchmark", "", "bfloat16", "bfloat16", BLOCK_SIZE).root(), BLOCK_SIZE
        )
        with self._patched():
            self._scheduler = Scheduler(
                SchedulerConfig(policy=policy, max_num_seqs=64),
                KVCacheManager(num_blocks, BLOCK_SIZE, longest + 1),
                eos_token_ids=frozenset(),
                connector=self._tier,
            )
        self._rng = random.Random(1)
        self._events: list[tuple[float, int, Job, int]] = []
        for number, job in enumerate(jobs):
            heapq.heappush(self._events, (job.arrival_seconds, number, job, 0))
        self._texts: dict[str, Sequence[int]] = {job.job_id: job.prefix for job in jobs}
        self._known = dict.fromkeys(self._texts, 0)  # computed tokens at the start of each text
        self._turns: dict[str, tuple[Job, int, Request, int]] = {}
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Run until the last job ends. Raises WrongWork if requests wait for an event that will
        never occur, or if blocks are still in use at the end."""
        with self._patched():
            while self._events or self._scheduler.requests:
                self._take_arrivals()
                if self._scheduler.has_runnable_work():
                    self._step()
                else:
                    self._wait()
        self.outcome.seconds = self._clock.now
        pool = self._scheduler.manager.pool
        self._scheduler.reset_prefix_cache(False)
        if not pool.is_idle:
            raise WrongWork("blocks were held after the last job")
        return self.outcome

    def _patched(self) -> ExitStack:
        stack = ExitStack()
        for module in (request_states, scheduler):
            stack.enter_context(patch.object(module, "time", self._clock))
        return stack

    def _take_arrivals(self) -> None:
        while self._events and self._events[0][0] <= self._clock.now:
            arrival, _, job, index = heapq.heappop(self._events)
            turn, text = job.turns[index], self._texts[job.job_id]
            prompt = turn.prompt_behind(text, self._rng)
            known = num_shared(text[: self._known[job.job_id]], prompt)
            name = f"{job.job_id}-{index}"
            request = Request(
                name,
                prompt,
                SamplingParams(max_tokens=turn.output_tokens, ignore_eos=True),
                arrival_seconds=arrival,
                block_hasher=self._hasher,
                job_id=job.job_id,
                is_last_step=index + 1 == len(job.turns),
            )
            self._turns[name] = job, index, request, known
            tool = job.turns[index - 1].tool if index else ""
            self._scheduler.add_request(request, tool=tool)

    def _step(self) -> None:
        output = self._scheduler.schedule()
        sampled = {request.request_id: [_TOKEN] for request in self._scheduler.choosing(output)}
        tokens = output.num_scheduled_tokens
        for new in output.new_requests:
            self._note_start(new.request_id)
        if tokens:
            self._clock.now += STEP_SECONDS + sum(tokens.values()) * TOKEN_SECONDS
        for told in self._scheduler.update_from_output(output, ModelRunnerOutput(sampled)):
            job, index, request, _ = self._turns[told.request_id]
            if request.num_output_tokens == 1:
                seconds = self._clock.now - request.arrival_seconds
                self.outcome.first_token_seconds.append(seconds)
            if told.finish_reason is not None:
                self._end(job, index, request)

    def _note_start(self, name: str) -> None:
        _, _, request, known = self._turns[name]
        self.outcome.prompt_tokens += request.num_prompt_tokens
        self.outcome.reloaded_tokens += request.cached_tokens_by_tier.get("cpu", 0)
        whole = known // BLOCK_SIZE * BLOCK_SIZE
        self.outcome.recomputed_tokens += max(0, whole - request.num_cached_tokens)

    def _end(self, job: Job, index: int, request: Request) -> None:
        del self._turns[request.request_id]
        self._texts[job.job_id] = request.all_token_ids.tolist()
        self._known[job.job_id] = request.num_tokens - 1  # the last token is not computed
        if index + 1 < len(job.turns):
            turn = job.turns[index]
            self._scheduler.tool_called(request.job, turn.tool)
            due = self._clock.now + turn.tool_seconds
            heapq.heappush(self._events, (due, request.number, job, index + 1))

    def _wait(self) -> None:
        times = [self._events[0][0]] if self._events else []
        due = None if self._tier is None else self._tier.due_at()
        if due is not None:
            times.append(due)
        times.append(self._clock.now + self._scheduler.pin_seconds)
        then = min(times)
        if then == float("inf"):
            raise WrongWork(f"nothing goes on, with {sorted(self._scheduler.requests)}")
        self._clock.now = max(self._clock.now, then)
