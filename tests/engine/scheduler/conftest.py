# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: a real scheduler, a worker that writes down what each slot holds, and
tiers in a dict.

The K and V of a position depend on all tokens up to it, so the worker writes a fingerprint of those
tokens into the slot, and before it answers it checks every slot its requests would attend to. A
block that was shared, evicted, loaded or resumed wrongly is therefore noticed at its first use. The
next token follows from the fingerprint, so what a request says can be computed without an engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from stratakv.connector.base import (
    ConnectorMetadata,
    ConnectorWorkerOutput,
    CopyJob,
    EvictedBlock,
    FrontState,
    KVConnectorScheduler,
    LoadReport,
    Match,
    MatchKind,
    RequestView,
)
from stratakv.engine.cache.block_hash import make_block_hasher
from stratakv.engine.cache.kv_cache_manager import KVCacheManager
from stratakv.engine.config import SchedulerConfig
from stratakv.engine.request import Request
from stratakv.engine.sampling_params import SamplingParams
from stratakv.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from stratakv.engine.scheduler.scheduler import Scheduler
from stratakv.engine.wire import TokenOutput

SIZE = 4
VOCAB = 50
EOS = 0
HASHER = make_block_hasher(b"r" * 32, SIZE)


def fingerprint(tokens: Sequence[int]) -> list[int]:
    """One number for each position, which depends on all tokens up to it."""
    numbers = []
    state = 17
    for token in tokens:
        state = (state * 1_000_003 + int(token) + 1) % (2**61 - 1)
        numbers.append(state)
    return numbers


def next_token(state: int) -> int:
    return state % VOCAB


def reference(
    prompt: Sequence[int], max_tokens: int, max_model_len: int = 10**9, ignore_eos: bool = False
) -> list[int]:
    """What a request says, computed alone and without a cache."""
    tokens = list(prompt)
    said: list[int] = []
    while len(said) < max_tokens and len(tokens) < max_model_len:
        said.append(next_token(fingerprint(tokens)[-1]))
        tokens.append(said[-1])
        if said[-1] == EOS and not ignore_eos:
            break
    return said


@dataclass
class WorkerState:
    """What the worker remembers of one request."""

    tokens: list[int]
    table: list[int]
    in_batch: bool = True


@dataclass
class Load:
    """A load under way."""

    request_id: str
    block_ids: list[int]
    keys: list[bytes]
    ticks: int


@dataclass
class Copy:
    """Blocks `start` to `end` of a load from the back, being written to."""

    start: int
    end: int
    ticks: int
    fails: bool


@dataclass
class BackLoad:
    """A load from the back. All are indices of its blocks."""

    first_token: int
    block_ids: list[int]
    keys: list[bytes]
    loaded_from: int
    next_end: int  # from here on blocks were copied, or have failed
    front: int = 0
    copies: list[Copy] = field(default_factory=list)
    is_over: bool = False
    has_failed: bool = False

    @property
    def lowest(self) -> int:
        return min([copy.start for copy in self.copies], default=self.loaded_from)


class DictTiers(KVConnectorScheduler):
    """Tiers in a dict, with loads that take some ticks, fail, or come in part; some from the back.

    `evicted` of the present step lies in `stores` until the worker has read those blocks, what is
    to be stored ahead in `ahead` until the forward pass is over.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng
        self.kept: dict[bytes, list[int]] = {}
        self.loads: list[Load] = []
        self.back_loads: dict[str, BackLoad] = {}
        self.from_back = False
        self.piece_fails: Callable[[Copy], bool] = lambda copy: False
        self.has_news = False
        self.stores: list[EvictedBlock] = []
        self.ahead: list[EvictedBlock] = []
        self.asked_again: dict[str, int] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.load_ticks = 2
        self.outcome: Callable[[Load], int] = lambda load: len(load.keys)
        self.wakeup: Callable[[], None] | None = None
        self.num_metas = 0

    @property
    def busy_blocks(self) -> set[int]:
        return {block for load in self.loads for block in load.block_ids} | {
            block
            for load in self.back_loads.values()
            for copy in load.copies
            for block in load.block_ids[copy.start : copy.end]
        }

    @property
    def is_busy(self) -> bool:
        """Whether anything writes to the pool."""
        return bool(self.busy_blocks)

    def tick(self) -> bool:
        """Time passes on the disk; whether anything is under way there."""
        for load in (*self.loads, *[c for b in self.back_loads.values() for c in b.copies]):
            load.ticks -= 1
        return self.is_busy

    def get_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        assert num_computed_tokens % SIZE == 0
        first = num_computed_tokens // SIZE
        end = first
        for digest in request.block_hashes[first : (request.num_tokens - 1) // SIZE]:
            if digest + b"\0\0" not in self.kept:
                break
            end += 1
        if end == first:
            return Match(0, MatchKind.NONE)
        if self.rng is not None and self.rng.random() < 0.2:
            return Match(0, MatchKind.RETRY)
        from_back = self.from_back if self.rng is None else self.rng.random() < 0.5
        return Match((end - first) * SIZE, MatchKind.BOTH if from_back else MatchKind.LOAD)

    def update_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        assert len(block_ids) * SIZE == num_external_tokens > 0
        assert request.request_id not in {load.request_id for load in self.loads}
        first = request.num_computed_tokens // SIZE  # type: ignore[attr-defined]
        digests = request.block_hashes[first : first + len(block_ids)]
        ticks = self.load_ticks if self.rng is None else self.rng.randint(0, 4)
        keys = [digest + b"\0\0" for digest in digests]
        self.loads.append(Load(request.request_id, list(block_ids), keys, ticks))

    def begin_back_load(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        assert len(block_ids) * SIZE == num_external_tokens > 0
        first_token = request.num_computed_tokens  # type: ignore[attr-defined]
        digests = request.block_hashes[first_token // SIZE :][: len(block_ids)]
        keys = [digest + b"\0\0" for digest in digests]
        count = len(keys)
        load = BackLoad(first_token, list(block_ids), keys, count, count)
        assert self.back_loads.setdefault(request.request_id, load) is load

    def front_state(self, request_id: str, num_computed_tokens: int) -> FrontState:
        load = self.back_loads[request_id]
        chunk = SIZE if self.rng is None else self.rng.randint(1, 3 * SIZE)
        bound = load.first_token + SIZE * load.lowest
        assert num_computed_tokens <= bound
        limit = min(bound, num_computed_tokens + chunk)
        load.front = max(load.front, -(-(limit - load.first_token) // SIZE))
        return FrontState(limit, load.first_token + SIZE * load.loaded_from, bool(load.copies))

    def end_back_load(self, request_id: str) -> LoadReport | None:
        load = self.back_loads[request_id]
        load.is_over = True
        if load.copies:
            return None
        del self.back_loads[request_id]
        tokens = SIZE * (len(load.keys) - load.loaded_from)
        return LoadReport(request_id, tokens, {"cpu": tokens} if tokens else {})

    def num_wanted_ahead(self) -> int:
        return 0 if self.rng is None else self.rng.choice([0, 0, 2])

    def build_meta(
        self, evicted: Sequence[EvictedBlock], cold: Sequence[EvictedBlock] = ()
    ) -> ConnectorMetadata:
        self.num_metas += 1
        self.stores = list(evicted)
        self.ahead = list(cold)
        self.has_news = False
        for load in self.back_loads.values():
            self._copy_more(load)
        jobs = [CopyJob(1, [block.block_id for block in evicted], [])] if evicted else []
        return ConnectorMetadata(stores=jobs)

    def update_from_worker(self, output: ConnectorWorkerOutput) -> list[LoadReport]:
        reports = []
        for load in [load for load in self.loads if load.ticks <= 0]:
            self.loads.remove(load)
            count = self.outcome(load) if self.rng is None else self._luck(load)
            for block, key in list(zip(load.block_ids, load.keys, strict=True))[:count]:
                for offset, state in enumerate(self.kept[key]):
                    self.slots[block, offset] = state
            by_tier = {"cpu": count * SIZE} if count else {}
            reports.append(LoadReport(load.request_id, count * SIZE, by_tier, 0.5))
        for request_id, back_load in list(self.back_loads.items()):
            self._land(back_load)
            if back_load.is_over and not back_load.copies:
                del self.back_loads[request_id]
                reports.append(LoadReport(request_id, 0))
        return reports

    def has_pending_work(self) -> bool:
        copies = [load.copies[0] for load in self.back_loads.values() if load.copies]
        return self.has_news or any(load.ticks <= 0 for load in (*self.loads, *copies))

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self.wakeup = wakeup

    def reset(self) -> None:
        self.kept.clear()

    def stats(self) -> dict[str, object]:
        return {}

    def shutdown(self, timeout_seconds: float) -> None:
        self.loads.clear()

    def _copy_more(self, load: BackLoad) -> None:
        """Begin to write to blocks that the front has not claimed."""
        most = load.next_end - load.front
        if most <= 0 or load.is_over or load.has_failed or len(load.copies) == 2:
            return
        if self.rng is not None and self.rng.random() < 0.4:
            return
        size = 1 if self.rng is None else self.rng.randint(1, most)
        ticks = self.load_ticks if self.rng is None else self.rng.randint(0, 3)
        copy = Copy(load.next_end - size, load.next_end, ticks, fails=False)
        copy.fails = self.piece_fails(copy) if self.rng is None else self.rng.random() < 0.15
        load.next_end = copy.start
        load.copies.append(copy)

    def begin_copies(self) -> None:
        """Nothing is left of what was in these blocks, once those of the step are stored."""
        for block in self.busy_blocks:
            for offset in range(SIZE):
                self.slots[block, offset] = -1

    def _land(self, load: BackLoad) -> None:
        while load.copies and load.copies[0].ticks <= 0:
            copy = load.copies.pop(0)
            self.has_news = True
            if copy.fails:
                load.has_failed = True
                continue
            # It writes when it ends, whoever has the blocks by then.
            for index in range(copy.start, copy.end):
                for offset, state in enumerate(self.kept[load.keys[index]]):
                    self.slots[load.block_ids[index], offset] = state
            if copy.end == load.loaded_from:
                load.loaded_from = copy.start

    def _luck(self, load: Load) -> int:
        assert self.rng is not None
        if self.rng.random() < 0.6:
            return len(load.keys)
        return self.rng.randint(0, len(load.keys))


@dataclass
class Engine:
    """A scheduler with its worker; `outputs` collects what each request was told."""

    scheduler: Scheduler
    tiers: DictTiers | None = None
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    states: dict[str, WorkerState] = field(default_factory=dict)
    outputs: dict[str, list[TokenOutput]] = field(default_factory=dict)
    names: dict[bytes, list[int]] = field(default_factory=dict)  # digest → what its block holds
    bad: set[str] = field(default_factory=set)  # requests whose logits are not finite

    @property
    def manager(self) -> KVCacheManager:
        return self.scheduler.manager

    def add(self, name: str, prompt: Sequence[int], **options: object) -> Request:
        """Queue a request; options are those of SamplingParams."""
        params = SamplingParams(**{"max_tokens": 5, **options})  # type: ignore[arg-type]
        request = Request(name, prompt, params, block_hasher=HASHER)
        self.scheduler.add_request(request)
        return request

    def table(self, name: str) -> list[int]:
        return self.manager.get_block_ids(name)[0]

    def step(self) -> SchedulerOutput:
        """Schedule, run and update once."""
        output = self.scheduler.schedule()
        self.take(self.scheduler.update_from_output(output, self.run(output)))
        return output

    def take(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def said(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, []) for token in output.new_token_ids]

    def finish_reason(self, name: str) -> str | None:
        return self.outputs[name][-1].finish_reason

    def run_all(self, limit: int = 2_000) -> None:
        """Step until nothing is unfinished; fails if the engine sleeps with nobody to wake it."""
        for _ in range(limit):
            if not self.scheduler.requests and not (self.tiers and self.tiers.is_busy):
                return
            if self.scheduler.has_runnable_work():
                self.step()
            elif self.tiers is None or not self.tiers.tick():
                self.scheduler._retry_at = 0.0  # type: ignore[assignment]
                assert self.scheduler.has_runnable_work(), "everybody waits, for nothing"
        raise AssertionError(f"not done after {limit} steps")

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One forward pass: stores, then all writes, then all reads."""
        self.follow(output)
        self._store()
        positions = {}
        for request_id, count in output.num_scheduled_tokens.items():
            computed = self._computed[request_id]
            positions[request_id] = (computed, computed + count)
            self._write(request_id, *positions[request_id])
        sampled = {}
        for request_id, (_, end) in positions.items():
            state = self._check(request_id, end)
            done = end == len(self.states[request_id].tokens)
            sampled[request_id] = [next_token(state)] if done else []
            self.states[request_id].tokens += sampled[request_id]
        self._store_ahead()
        return ModelRunnerOutput(sampled, nan_request_ids=self.bad & sampled.keys())

    def follow(self, output: SchedulerOutput) -> None:
        """Bring the worker's view of the requests up to date from the differences."""
        for request_id in output.finished_request_ids:
            self.states.pop(request_id, None)
        for request_id in output.preempted_request_ids:
            if request_id in self.states:
                self.states[request_id].in_batch = False
        self._computed = {}
        for new in output.new_requests:
            assert new.request_id not in self.states
            tokens = [int(token) for token in new.prompt_token_ids]
            self.states[new.request_id] = WorkerState(tokens, list(new.block_ids[0]))
            self._computed[new.request_id] = new.num_computed_tokens
        cached = output.cached_requests
        for request_id, ids, computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self.states[request_id]
            if request_id in cached.resumed_request_ids:
                assert ids is not None
                assert not state.in_batch
                said = cached.output_token_ids[request_id]
                assert state.tokens[len(state.tokens) - len(said) :] == said
                state.table = list(ids[0])
                state.in_batch = True
            elif ids is not None:
                state.table += ids[0]
            assert state.in_batch
            self._computed[request_id] = computed
        assert list(output.num_scheduled_tokens.values()).count(0) == 0
        assert output.num_scheduled_tokens.keys() == self._computed.keys()
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())

    def _store(self) -> None:
        """Evicted blocks still hold what their names promise: nothing uncomputed gets here."""
        if self.tiers is None:
            return
        self._read(self.tiers.stores)
        self.tiers.stores = []
        self.tiers.begin_copies()

    def _store_ahead(self) -> None:
        """The last moment for blocks stored ahead: this pass must have left them alone."""
        if self.tiers is not None:
            self._read(self.tiers.ahead)
            self.tiers.ahead = []

    def _read(self, blocks: Sequence[EvictedBlock]) -> None:
        assert self.tiers is not None
        for block_id, key in blocks:
            held = [self.slots.get((block_id, offset)) for offset in range(SIZE)]
            assert held == self.names[key[:32]]
            self.tiers.kept[key] = self.names[key[:32]]

    def _write(self, request_id: str, start: int, end: int) -> None:
        state = self.states[request_id]
        states = fingerprint(state.tokens)
        assert end <= len(state.tokens)
        busy = self.tiers.busy_blocks if self.tiers else set()
        for position in range(start, end):
            block = state.table[position // SIZE]
            assert block != 0
            assert block not in busy, "written while a load is writing to it"
            self.slots[block, position % SIZE] = states[position]

    def _check(self, request_id: str, end: int) -> int:
        state = self.states[request_id]
        expected = fingerprint(state.tokens)[:end]
        held = [self.slots.get((state.table[p // SIZE], p % SIZE)) for p in range(end)]
        assert held == expected, f"{request_id} would read what is not its own"
        for index in range(end // SIZE):
            name = digest_of(state.tokens, index)
            self.names[name] = expected[index * SIZE : (index + 1) * SIZE]
        return expected[-1]


_names: dict[tuple[int, ...], bytes] = {}


def digest_of(tokens: Sequence[int], index: int) -> bytes:
    """The digest of a block, from the tokens alone."""
    key = tuple(tokens[: (index + 1) * SIZE])
    if key not in _names:
        request = Request("names", key, SamplingParams(max_tokens=1), block_hasher=HASHER)
        _names[key] = request.block_hashes[-1]
    return _names[key]


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> MakeEngine:
    """Builds an engine: `num_blocks` of 4 tokens, options of SchedulerConfig."""

    def make(
        num_blocks: int = 100,
        *,
        tiers: DictTiers | None = None,
        max_model_len: int = 200,
        watermark: float = 0.0,
        caching: bool = True,
        **options: object,
    ) -> Engine:
        config = SchedulerConfig(
            **{  # type: ignore[arg-type]
                "max_num_batched_tokens": 64,
                "max_num_seqs": 8,
                "admit_below": 1.0,  # off, unless it is what a test is about
                "preempt_above": 1.0,
                **options,
            }
        )
        manager = KVCacheManager(
            num_blocks, SIZE, max_model_len, enable_caching=caching, watermark=watermark
        )
        scheduler = Scheduler(
            config,
            manager,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            connector=tiers,
        )
        engine = Engine(scheduler, tiers)
        if tiers is not None:
            tiers.slots = engine.slots
        return engine

    return make


@pytest.fixture
def make_tiers() -> type[DictTiers]:
    return DictTiers


@pytest.fixture
def say() -> Callable[..., list[int]]:
    """What a request says when computed alone: arguments as of `reference`."""
    return reference
