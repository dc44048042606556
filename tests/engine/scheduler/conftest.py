# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: a real scheduler, a worker that writes down what each slot holds, and
tiers in a dict.

The K and V of a position depend on all tokens up to it, so the worker writes a fingerprint of those
tokens into the slot, and before it answers it checks every slot its requests would attend to. A
block that was shared, evicted, loaded or resumed wrongly is therefore noticed at its first use. The
next token follows from the fingerprint, so what a request says can be computed without an engine.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import pytest

from stratakv.connector.messages import EvictedBlock
from stratakv.connector.page_keys import pages_of
from stratakv.engine.cache.block_hash import make_block_hasher
from stratakv.engine.cache.group_spec import NUM_SPARE_STATES
from stratakv.engine.cache.kv_block import BlockCopy
from stratakv.engine.cache.kv_cache_manager import KVCacheManager
from stratakv.engine.config.engine_config import SchedulerConfig
from stratakv.engine.models.layer_attention import LayerAttention, full
from stratakv.engine.observer import Observer
from stratakv.engine.request.adapter import Adapter
from stratakv.engine.request.core_messages import TokenOutput
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from stratakv.engine.scheduler.scheduler import Scheduler
from stratakv.engine.scheduler.speculation import Speculation
from stratakv.engine.scheduler.step import Pipelining

from .dict_tiers import SIZE, DictTiers

VOCAB = 50
EOS = 0
HASHER = make_block_hasher(b"r" * 32, SIZE)
NO_WISHES = SamplingParams(max_tokens=1)  # of a request that is made for its digests only


def fingerprint(
    tokens: Sequence[int], known: Sequence[int] = (), adapter: bytes = b""
) -> list[int]:
    """Return a number for each position, which depends on all tokens up to it and on the adapter.
    `known` are the first numbers."""
    numbers = list(known)
    state = numbers[-1] if numbers else 17 + int.from_bytes(adapter[:4], "little")
    for token in tokens[len(numbers) :]:
        state = (state * 1_000_003 + int(token) + 1) % (2**61 - 1)
        numbers.append(state)
    return numbers


def salted(state: int, group: int) -> int:
    """What stands in a slot: no group's block passes for another's."""
    return state + group * 2**61


def next_token(state: int, seed: int | None = None) -> int:
    """Requests with other seeds say something else."""
    return (state + (seed or 0)) % VOCAB


def reference(
    prompt: Sequence[int],
    max_tokens: int,
    max_model_len: int = 10**9,
    ignore_eos: bool = False,
    seed: int | None = None,
    adapter: bytes = b"",
) -> list[int]:
    """What a request says, computed alone and without a cache."""
    tokens = list(prompt)
    numbers: list[int] = []
    said: list[int] = []
    while len(said) < max_tokens and len(tokens) < max_model_len:
        numbers = fingerprint(tokens, numbers, adapter)
        said.append(next_token(numbers[-1], seed))
        tokens.append(said[-1])
        if said[-1] == EOS and not ignore_eos:
            break
    return said


@dataclass
class WorkerState:
    """What the worker remembers of one request."""

    tokens: list[int]
    tables: list[list[int]]  # of each cache group
    num_prompt: int
    seed: int | None = None
    adapter: bytes = b""
    in_batch: bool = True
    end: int = 0  # of its last step
    numbers: list[int] = field(default_factory=list)  # of its first tokens
    num_cached: int = 0  # blocks, the first of them

    def start_again(self, said: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """With the prompt and these tokens."""
        self.tokens = self.tokens[: self.num_prompt] + list(said)
        self.tables = [list(each) for each in tables]
        self.in_batch = True
        self.numbers, self.num_cached = [], 0

    def accept(self, num_drafts: int, start: int, end: int) -> list[int]:
        """What it says where a step has computed the tokens from `start` to `end`, the last of them
        drafts; those that it does not say are forgotten again, and what was computed of them."""
        num_verified = len(self.tokens) - num_drafts
        if end < len(self.tokens):
            assert num_drafts == 0
            return []
        numbers, said = self.fingerprint(), []
        for place in range(num_verified - 1, end):
            said.append(next_token(numbers[place], self.seed))
            if place + 1 < end and self.tokens[place + 1] != said[-1]:
                break
        self.keep_accepted(num_drafts, said)
        return said

    def keep_accepted(self, num_drafts: int, said: Sequence[int]) -> None:
        """A step has ended with these tokens, none of them where its last verified token is to be
        computed again; what it computed behind them was for drafts."""
        num_kept = len(self.tokens) - num_drafts + len(said) - 1
        newest = said[-1] if said else self.tokens[num_kept]
        self.tokens = [*self.tokens[:num_kept], newest]
        self.numbers = self.numbers[:num_kept]
        self.num_cached = min(self.num_cached, num_kept // SIZE)
        self.end = num_kept

    def trim(self) -> None:
        """Blocks behind its tokens, which drafts were given, are its own no longer."""
        for table in self.tables:
            del table[-(-len(self.tokens) // SIZE) :]

    def propose(self, rng: random.Random, most: int) -> list[int]:
        """Draft tokens, some of which are what it will say."""
        drafts: list[int] = []
        for _ in range(rng.randint(0, most)):
            numbers = fingerprint([*self.tokens, *drafts], self.numbers, self.adapter)
            coming = next_token(numbers[-1], self.seed)
            drafts.append(coming if rng.random() < 0.7 else rng.randrange(VOCAB))
        return drafts

    def fingerprint(self) -> list[int]:
        """That of its tokens, to which some may have been added since it was asked last."""
        if len(self.numbers) != len(self.tokens):
            self.numbers = fingerprint(self.tokens, self.numbers, self.adapter)
        return self.numbers


@dataclass
class Engine:
    """A scheduler with its worker; `outputs` collects what each request was told."""

    scheduler: Scheduler
    tiers: DictTiers | None = None
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    states: dict[str, WorkerState] = field(default_factory=dict)
    outputs: dict[str, list[TokenOutput]] = field(default_factory=dict)
    contents: dict[bytes, list[int]] = field(default_factory=dict)  # digest → what its block holds
    has_failed: bool = False  # a step failed, so that it may know requests that start anew
    bad: set[str] = field(default_factory=set)  # requests whose logits are not finite
    attention: Sequence[LayerAttention] = (full(),)
    num_copied: int = 0  # pages
    # Of layers that carry states, of whose checkpoints each has so many pages: by request, the
    # states that the worker has, by the tokens before them. They move on with what it computes.
    num_state_pages: int = 0
    running: dict[str, dict[int, int]] = field(default_factory=dict)
    num_restored: int = 0
    num_saved: int = 0
    drafts: random.Random = field(default_factory=lambda: random.Random(0))  # for `propose`

    @property
    def manager(self) -> KVCacheManager:
        return self.scheduler.manager

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        fork_of: Request | None = None,
        adapter: Adapter | None = None,
        priority: int = 0,
        **options: object,
    ) -> Request:
        """Queue a request; options are those of SamplingParams."""
        params = SamplingParams(**{"max_tokens": 5, **options})  # type: ignore[arg-type]
        request = Request(
            name,
            prompt,
            params,
            block_hasher=HASHER,
            fork_of=fork_of,
            adapter=adapter,
            priority=priority,
        )
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
        if self.num_state_pages:
            self._restore_states(output)  # before a load may begin to write
        self.follow(output)
        self._store()
        self._copy(output)
        positions = {}
        for request_id, drafts in output.draft_token_ids.items():
            assert 0 < len(drafts) < output.num_scheduled_tokens[request_id]
            self.states[request_id].tokens += drafts
        for request_id, count in output.num_scheduled_tokens.items():
            computed = self._computed[request_id]
            positions[request_id] = (computed, computed + count)
            self._write(request_id, *positions[request_id])
            if self.num_state_pages:
                num_drafts = len(output.draft_token_ids.get(request_id, ()))
                self._move_states(request_id, *positions[request_id], num_drafts)
        sampled = {}
        for request_id, (start, end) in positions.items():
            self._check(request_id, start, end)
            num_drafts = len(output.draft_token_ids.get(request_id, ()))
            sampled[request_id] = self.states[request_id].accept(num_drafts, start, end)
            if num_drafts and request_id not in output.wanted_drafts:
                self.states[request_id].trim()
        for new in output.new_requests:
            if new.fork_of:
                assert sampled[new.fork_of], "the one that it is forked from says nothing"
                state = self.states[new.request_id]
                assert new.num_computed_tokens == state.num_prompt == state.end
                self._check(new.request_id, state.num_prompt - 1, state.num_prompt)
                sampled[new.request_id] = state.accept(0, state.num_prompt, state.num_prompt)
                if self.num_state_pages:
                    self.running[new.request_id] = dict(self.running[new.fork_of])
        if self.num_state_pages:
            self._save_states(output)
        self._store_ahead()
        proposed = {}
        speculation = self.scheduler.speculation
        for request_id, most in output.wanted_drafts.items():
            if sampled[request_id]:
                if speculation is not None and speculation.looks_ahead:
                    self._check_room(request_id, most)
                proposed[request_id] = self.propose(self.states[request_id], most)
            self.states[request_id].trim()
        return ModelRunnerOutput(
            sampled,
            nan_request_ids=self.bad & sampled.keys(),
            draft_token_ids={name: drafts for name, drafts in proposed.items() if drafts},
        )

    def _check_room(self, request_id: str, most: int) -> None:
        """A draft model writes where the newest token and all drafts but the last will lie, which
        is in blocks that no other request reads. At the longest length it proposes fewer."""
        state = self.states[request_id]
        first = len(state.tokens) - 1
        end = min(first + most, self.manager.max_model_len)
        for group, table in enumerate(state.tables):
            assert len(table) * SIZE >= end
            written = set(table[first // SIZE : (end - 1) // SIZE + 1])
            if not written <= set(self.manager.get_block_ids(request_id)[group]):
                continue  # sent back, or ended, since the step was made
            for name in self.scheduler.requests:
                if name != request_id:
                    assert not written & set(self.manager.get_block_ids(name)[group])

    def propose(self, state: WorkerState, most: int) -> list[int]:
        """Draft tokens; a test may put its own in this place."""
        return state.propose(self.drafts, most)

    def follow(self, output: SchedulerOutput) -> None:
        """Bring the worker's view of the requests up to date from the differences."""
        for request_id in output.finished_request_ids:
            self.states.pop(request_id, None)
        for request_id in output.preempted_request_ids:
            if request_id in self.states:
                self.states[request_id].in_batch = False
        told: dict[str, int] = {}
        for new in output.new_requests:
            assert new.request_id not in self.states or self.has_failed
            tokens = [int(token) for token in new.prompt_token_ids]
            self.states[new.request_id] = WorkerState(
                tokens + new.output_token_ids,
                [list(ids) for ids in new.block_ids],
                len(tokens),
                new.sampling_params.seed,
                new.adapter,
            )
            if new.fork_of:
                assert new.request_id not in output.num_scheduled_tokens
                self.states[new.request_id].end = new.num_computed_tokens
                continue
            told[new.request_id] = new.num_computed_tokens
        cached = output.cached_requests
        for request_id, ids, computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self.states[request_id]
            if request_id in cached.resumed_request_ids:
                assert ids is not None
                assert not state.in_batch
                said = cached.output_token_ids[request_id]
                known = state.tokens[state.num_prompt :]
                assert known[: len(said)] == said
                # Of steps that came back after it had been sent back.
                speculation = self.scheduler.speculation
                each = 1 if speculation is None else 1 + speculation.most_drafts
                assert len(known) - len(said) <= each * (self.scheduler._max_steps_in_flight - 1)
                state.start_again(said, ids)
            elif ids is not None:
                for table, more in zip(state.tables, ids, strict=True):
                    table += more
            assert state.in_batch
            told[request_id] = computed
        for copy in output.block_copies:
            assert copy.request_id in output.num_scheduled_tokens
            table = self.states[copy.request_id].tables[copy.group_id]
            # One that starts is told of its table as it is after the copy.
            is_new = any(new.request_id == copy.request_id for new in output.new_requests)
            assert table[copy.place] == (copy.target if is_new else copy.source)
            table[copy.place] = copy.target
        assert told.keys() <= output.num_scheduled_tokens.keys()
        self._computed = {}
        for request_id, count in output.num_scheduled_tokens.items():
            state = self.states[request_id]
            assert state.in_batch
            self._computed[request_id] = told.get(request_id, state.end)
            state.end = self._computed[request_id] + count
        assert list(output.num_scheduled_tokens.values()).count(0) == 0
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())

    def _restore_states(self, output: SchedulerOutput) -> None:
        """Requests that start read their states from pages, or begin with none."""
        cached = output.cached_requests
        for request_id in (*output.finished_request_ids, *output.preempted_request_ids):
            self.running.pop(request_id, None)
        starting = [(new.request_id, new.state_page_ids) for new in output.new_requests]
        resumed = cached.resumed_request_ids
        starting += [(each, cached.state_page_ids.get(each, [])) for each in resumed]
        told = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        told |= {new.request_id: new.num_computed_tokens for new in output.new_requests}
        forks = {new.request_id for new in output.new_requests if new.fork_of}
        for request_id, page_ids in starting:
            computed = told[request_id]
            if request_id in forks:
                assert not page_ids
                continue
            assert len(page_ids) == (self.num_state_pages if computed else 0)
            self.running[request_id] = {}
            if not page_ids:
                continue
            self.num_restored += 1
            held = set()
            for group, page in enumerate(page_ids, len(self.attention)):
                numbers = {self.slots.get((page, offset)) for offset in range(SIZE)}
                assert len(numbers) == 1
                number = numbers.pop()
                assert number is not None
                held.add(number - group * 2**61)
            assert len(held) == 1, "pieces of several checkpoints"
            self.running[request_id][computed] = held.pop()

    def _move_states(self, request_id: str, start: int, end: int, num_drafts: int) -> None:
        states = self.running[request_id]
        numbers = self.states[request_id].fingerprint()
        if start:
            assert states[start] == numbers[start - 1], f"{request_id} goes on from other states"
        first = end - num_drafts if num_drafts else end
        kept = {start: states[start]} if start else {}
        behind = {place: numbers[place - 1] for place in range(first, end + 1)}
        self.running[request_id] = kept | behind

    def _save_states(self, output: SchedulerOutput) -> None:
        busy = self.tiers.busy_blocks if self.tiers else set()
        num_free = self.scheduler.config.max_num_seqs - len(self.running)
        written = [
            page for saves in output.state_saves.values() for _, pages in saves for page in pages
        ]
        assert len(written) == len(set(written)), "the order of checkpoints would matter"
        for request_id, saves in output.state_saves.items():
            numbers = self.states[request_id].fingerprint()
            within = 0
            for position, page_ids in saves:
                computed = self._computed[request_id]
                end = computed + output.num_scheduled_tokens[request_id]
                assert computed < position <= end
                within += position < end
                assert len(page_ids) == self.num_state_pages
                for group, page in enumerate(page_ids, len(self.attention)):
                    assert page != 0
                    assert page not in busy
                    for offset in range(SIZE):
                        self.slots[page, offset] = salted(numbers[position - 1], group)
                self.num_saved += 1
        assert sum(
            position < self.states[each].end - len(output.draft_token_ids.get(each, ()))
            for each, saves in output.state_saves.items()
            for position, _ in saves
        ) <= NUM_SPARE_STATES + num_free  # fmt: skip

    def _store(self) -> None:
        """Evicted blocks still hold what their keys promise: nothing uncomputed gets here."""
        if self.tiers is None:
            return
        self._read(self.tiers.stores)
        self.tiers.stores = []
        self.tiers.begin_copies()

    def _copy(self, output: SchedulerOutput) -> None:
        """All at once, as a device may."""
        check_copies(output.block_copies, self.tiers.busy_blocks if self.tiers else set())
        for each in output.block_copies:
            for offset in range(SIZE):
                held = self.slots.get((each.source, offset))
                if held is None:
                    self.slots.pop((each.target, offset), None)
                else:
                    self.slots[each.target, offset] = held
            self.num_copied += 1

    def _store_ahead(self) -> None:
        """The last moment for blocks stored ahead: this pass must have left them alone."""
        if self.tiers is not None:
            self._read(self.tiers.ahead)
            self.tiers.ahead = []

    def _read(self, blocks: Sequence[EvictedBlock]) -> None:
        assert self.tiers is not None
        for block_id, key, _ in pages_of(blocks):
            held = [self.slots.get((block_id, offset)) for offset in range(SIZE)]
            group = int.from_bytes(key[32:], "little")
            numbers = self.contents[key[:32]]
            if group >= len(self.attention):  # a piece of the states behind the block
                numbers = numbers[-1:] * SIZE
            assert held == [salted(state, group) for state in numbers]
            self.tiers.kept[key] = [state for state in held if state is not None]

    def _write(self, request_id: str, start: int, end: int) -> None:
        state = self.states[request_id]
        states = state.fingerprint()
        assert end <= len(state.tokens)
        busy = self.tiers.busy_blocks if self.tiers else set()
        for position in range(start, end):
            for group, table in enumerate(state.tables):
                block = table[position // SIZE]
                assert block != 0
                assert block not in busy, "written while a load is writing to it"
                self.slots[block, position % SIZE] = salted(states[position], group)

    def _check(self, request_id: str, start: int, end: int) -> None:
        """Of each group what the tokens from `start` to `end` see of those before them."""
        state = self.states[request_id]
        expected = state.fingerprint()[:end]
        for group, (table, attention) in enumerate(zip(state.tables, self.attention, strict=True)):
            first = attention.first_seen(start)
            blocks = table[first // SIZE : -(-end // SIZE)]
            found = list(map(self.slots.get, itertools.product(blocks, range(SIZE))))
            held = found[first % SIZE :][: end - first]
            wanted = [salted(number, group) for number in expected[first:]]
            assert held == wanted, f"{request_id} would read what is not its own"
        self.note_contents(state, end)

    def note_contents(self, state: WorkerState, end: int) -> None:
        """Write down what the full blocks up to `end` hold."""
        numbers = state.fingerprint()
        count = end // SIZE
        if count > state.num_cached:
            digests = digests_of(tuple(state.tokens[: count * SIZE]), state.adapter)
            for index in range(state.num_cached, count):
                self.contents[digests[index]] = numbers[index * SIZE : (index + 1) * SIZE]
            state.num_cached = count


def check_copies(copies: Sequence[BlockCopy], busy: Set[int]) -> None:
    """The copies of a step may be made in any order, and beside loads that write to the blocks
    `busy`."""
    targets, sources = [{getattr(each, side) for each in copies} for side in ("target", "source")]
    assert len(targets) == len(copies)
    assert not targets & sources
    assert not busy & (targets | sources), "copied while a load is writing to it"


@functools.lru_cache(maxsize=10_000)
def digests_of(tokens: tuple[int, ...], adapter: bytes = b"") -> list[bytes]:
    """Return the digests of all full blocks, from the tokens and the adapter alone."""
    adapted = Adapter("any", adapter) if adapter else None
    request = Request("digests", tokens, NO_WISHES, block_hasher=HASHER, adapter=adapted)
    return list(request.block_hashes)


def digest_of(tokens: Sequence[int], index: int) -> bytes:
    """The digest of one block."""
    return digests_of(tuple(tokens[: (index + 1) * SIZE]))[-1]


MakeEngine = Callable[..., Engine]


def build_engine(
    num_blocks: int = 100,
    *,
    tiers: DictTiers | None = None,
    max_model_len: int = 200,
    watermark: float = 0.0,
    caching: bool = True,
    fails_with_load: bool = False,
    max_steps_in_flight: int = 1,
    runs_ahead: bool = False,
    observer: Observer | None = None,
    more_observers: Sequence[Observer] = (),
    attention: Sequence[LayerAttention] = (full(),),
    most_drafts: int = 0,
    is_adaptive: bool = False,
    looks_ahead: bool = False,
    num_state_pages: int = 0,
    state_interval: int = 0,
    **options: object,
) -> Engine:
    """An engine: `num_blocks` of 4 tokens, options of SchedulerConfig."""
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
        num_blocks,
        SIZE,
        max_model_len,
        enable_caching=caching,
        watermark=watermark,
        attention=attention,
        most_step_tokens=config.most_step_tokens,
        num_state_pages=num_state_pages,
        state_interval=state_interval,
    )
    scheduler = Scheduler(
        config,
        manager,
        eos_token_ids=frozenset({EOS}),
        connector=tiers,
        fails_with_load=fails_with_load,
        pipelining=Pipelining(max_steps_in_flight, runs_ahead),
        speculation=Speculation(most_drafts, is_adaptive, looks_ahead) if most_drafts else None,
        observers=[*([] if observer is None else [observer]), *more_observers],
    )
    engine = Engine(
        scheduler,
        tiers,
        attention=attention,
        drafts=random.Random(most_drafts),
        num_state_pages=num_state_pages,
    )
    if tiers is not None:
        tiers.num_state_pages = num_state_pages
        tiers.slots = engine.slots
    return engine


@pytest.fixture
def make_engine() -> MakeEngine:
    """See `build_engine`."""
    return build_engine


@pytest.fixture
def make_tiers() -> type[DictTiers]:
    return DictTiers


@pytest.fixture
def say() -> Callable[..., list[int]]:
    """What a request says when computed alone: arguments as of `reference`."""
    return reference
