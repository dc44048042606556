# SPDX-License-Identifier: Apache-2.0
"""A state machine: users of a scheduler with several cache groups, tiers, faults and pauses, with
priorities, jobs whose turns are kept, reservations, forks, draft tokens, states that layers carry
and prompts that come in parts, against a slow model of what each request says, what it holds and
what it finds.

The worker (`conftest.py`) checks every slot that a group's layers see. The model beside it computes
each answer alone, searches all lengths for a hit, and counts.

A life is a list of whole numbers, each of which says what is done next and with what: Hypothesis
draws and shrinks it at a quarter of what its `RuleBasedStateMachine` takes, which draws every rule
and every argument by itself. 0 does nothing, so that a shrunk life is short; a failure shows in
words what was done. The long form is
`pytest tests/engine/scheduler/test_model_machine.py --scale long`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TypeVar
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from stratakv.connector.messages import EvictedBlock
from stratakv.connector.page_keys import group_suffix
from stratakv.engine.cache.kv_block import GroupBlocks, KVCacheBlock
from stratakv.engine.core.continued import prompt_sessions as sessions_module
from stratakv.engine.models.layer_attention import LayerAttention, chunk, full, window
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler import request_states as states_module
from stratakv.engine.scheduler import scheduler as scheduler_module
from stratakv.engine.scheduler.output import SchedulerOutput
from stratakv.engine.scheduler.pins import PIN_SECONDS, Pin
from stratakv.engine.scheduler.scheduler import Pause

from ...clock import Clock
from .conftest import HASHER, build_engine, digest_of, fingerprint, reference, salted
from .dict_tiers import SIZE, DictTiers, Load
from .session_users import SessionUsers, owner_of

STEPS = 60
# Lives of each seed, and seeds: Hypothesis remembers all lives of one.
RUNS = {"ci": (400, 1), "long": (1_000, 100)}
WAYS = 3 * 3 * 3 * 4 * 3
# Up to here Hypothesis draws evenly.
LAST = 2**24 - 1
MAX_MODEL_LEN = 40
DOCUMENTS = [[(7 * i + 11 * d) % 49 + 1 for i in range(MAX_MODEL_LEN)] for d in range(3)]
PLANS: list[tuple[LayerAttention, ...]] = [
    (full(),),
    (full(), full()),
    (full(), window(6)),
    (window(9), full(), chunk(8)),
    (window(5), window(5)),
    (full(), window(3), window(13), chunk(12)),
    (full(), full(), window(6), window(6)),
]


T = TypeVar("T")


class Number:
    """A whole number, taken apart into choices."""

    def __init__(self, number: int) -> None:
        self._rest = number

    def below(self, end: int) -> int:
        self._rest, choice = divmod(self._rest, end)
        return choice

    def of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]


class Life:
    """The users, and the model that they compare with. `ways` decides who runs next."""

    def __init__(self, number: Number, ways: Number, clock: Clock) -> None:
        self.clock = clock
        policy = ways.of(["fcfs", "priority", "continuum"])
        reserve = ways.of(["none", "prompt", "full"])
        most_drafts, looks_ahead = ways.of([(0, False), (4, False), (4, True)])
        num_state_pages, interval = ways.of([0, 0, 1, 3]), ways.of([0, 4, 12])
        attention, spare = number.of(PLANS), number.of([0, 1, 3, 12])
        budget = 3 + number.below(28)
        pressure = number.of([(1.0, 1.0), (0.8, 0.95), (0.3, 0.3)])
        known, luck = 0.3 + 0.1 * number.below(8), number.below(2**10)
        note(f"{[*map(str, attention)]}, {spare=}, {budget=}, {pressure=}, {known=}, {luck=}")
        note(f"{num_state_pages=}, {interval=}")
        note(f"{policy=}, {reserve=}, {most_drafts=}, {looks_ahead=}")
        most = sum(kind.most_blocks(MAX_MODEL_LEN, SIZE, budget) for kind in attention)
        self.attention = attention
        self.most_step_tokens = budget
        # Slots for later drafts are given behind a step's tokens, from blocks to spare.
        self.most_room = most_drafts if looks_ahead else 0
        self.tiers = DictTiers(attention=attention)
        # What the connector was told since the last act.
        self.evicted: list[EvictedBlock] = []
        self.dropped: list[EvictedBlock] = []
        self.tiers.names_dropped = self.dropped.extend  # type: ignore[method-assign]
        self.engine = build_engine(
            1 + most + num_state_pages + spare,
            tiers=self.tiers,
            attention=attention,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            max_num_seqs=3,
            admit_below=pressure[0],
            preempt_above=pressure[1],
            policy=policy,
            reserve=reserve,
            most_drafts=most_drafts,
            looks_ahead=looks_ahead,
            num_state_pages=num_state_pages,
            state_interval=interval,
        )
        self.scheduler = self.engine.scheduler
        self.num_wishes = 0
        self.expected: dict[str, list[int]] = {}
        self.cut_short: set[str] = set()
        self.without_grammar: list[Request] = []
        self.order: list[str] = []  # of those that have never run nor loaded, as they were added
        # Of those that run, by name and the times that they were sent back.
        self.tables: dict[tuple[str, int], Sequence[Sequence[int]]] = {}
        # Of the steps since the last act: request, cache group, place, and the page that was there.
        self.copied: set[tuple[str, int, int, int]] = set()
        self.num_steps = self.num_tokens = self.num_aborted = 0
        self.sessions = SessionUsers(
            self.engine, MAX_MODEL_LEN, clock.monotonic, self.expected, self.cut_short
        )
        rng = random.Random(luck)
        for document in DOCUMENTS:
            held = fingerprint(document)
            for index in range(MAX_MODEL_LEN // SIZE):
                name = digest_of(document, index)
                self.engine.contents[name] = held[SIZE * index : SIZE * (index + 1)]
                for group in range(len(attention)):
                    if rng.random() < known:
                        self.keep(name, group)
                if num_state_pages and rng.random() < known:
                    self.keep_states(name)
        self.find = self.engine.manager.get_computed_blocks
        self.engine.manager.get_computed_blocks = self.checked_hit  # type: ignore[method-assign]
        self.computed = self.computed_keys()
        self.schedule = self.scheduler.schedule
        self.scheduler.schedule = self.checked_order  # type: ignore[method-assign]

    def keep(self, name: bytes, group: int) -> None:
        held = self.engine.contents[name]
        self.tiers.kept[name + group_suffix(group)] = [salted(state, group) for state in held]

    def keep_states(self, name: bytes) -> None:
        """The states behind a block; each piece tells the last token."""
        last = self.engine.contents[name][-1]
        for group in self.state_groups:
            self.tiers.kept[name + group_suffix(group)] = [salted(last, group)] * SIZE

    @property
    def state_groups(self) -> range:
        """A group for each piece of a checkpoint."""
        return range(len(self.attention), len(self.attention) + self.engine.num_state_pages)

    # What users do.

    def do(self, number: Number) -> None:
        """One of these, or nothing; then all must be true."""
        act: Callable[[Number], None] | None = number.of(
            [
                *(None, self.step, self.step, self.step, self.add, self.add, self.add),
                *(self.abort, self.fail, self.pause, self.reset, self.lose, self.forget),
                *(self.wait, self.open_session, self.feed, self.feed, self.compile_grammar),
            ]
        )
        if act is None:
            return
        act(number)
        self.keys_go_as_the_connector_is_told(is_reset=act == self.reset)
        self.blocks_are_owned_as_tables_say()
        self.tables_only_grow_and_forget()
        self.answers_and_counts_are_those_of_the_model()
        self.sessions.check_parts()

    def add(self, number: Number) -> None:
        document, length = number.of(DOCUMENTS), 1 + number.below(MAX_MODEL_LEN - 2)
        own, max_tokens = number.below(4), 1 + number.below(10)
        name = f"r{self.num_wishes}"
        prompt = [*document[:length], *[40 + self.num_wishes % 9] * own][: MAX_MODEL_LEN - 1]
        self.num_wishes += 1
        skips, priority = number.below(6) == 5, number.below(3) - 1
        job, is_last = number.of(["", "j1", "j2", "j3"]), number.below(2) == 1
        num_forks = number.of([0, 0, 0, 0, 0, 0, 1, 3])
        awaits_grammar = number.below(6) == 5
        unread = ", without reading the cache" if skips else ""
        turn = f", {'the last turn' if is_last else 'a turn'} of {job}" if job else ""
        note(f"add {name}: {len(prompt)} tokens, {max_tokens=}, {priority=}{unread}{turn}")
        note(f"and {num_forks} forks of it{', each with a grammar' if awaits_grammar else ''}")
        first = None
        for fork in range(1 + num_forks):
            own_name, seed = (f"{name}-{fork}", fork) if fork else (name, None)
            self.expected[own_name] = reference(prompt, max_tokens, MAX_MODEL_LEN, seed=seed)
            request = Request(
                own_name,
                prompt,
                SamplingParams(max_tokens=max_tokens, seed=seed),
                block_hasher=HASHER,
                skip_reading_prefix_cache=skips,
                priority=priority,
                job_id=job,
                is_last_step=is_last and bool(job),
                fork_of=first,
            )
            self.scheduler.add_request(request, awaits_grammar=awaits_grammar)
            first = first or request
            if awaits_grammar:
                self.without_grammar.append(request)
            else:
                self.order.append(own_name)

    def compile_grammar(self, number: Number) -> None:
        """The grammar of a request is there; it may have ended since."""
        if self.without_grammar:
            request = self.without_grammar.pop(number.below(len(self.without_grammar)))
            note(f"the grammar of {request.request_id} is there")
            self.scheduler.grammar_ready(request)

    def open_session(self, number: Number) -> None:
        document, length = number.of(DOCUMENTS), 1 + number.below(12)
        name, max_tokens = f"s{self.num_wishes}", 1 + number.below(10)
        self.num_wishes += 1
        note(f"open {name}: {length} tokens, {max_tokens=}")
        self.sessions.begin(name, document[:length], max_tokens)

    def feed(self, number: Number) -> None:
        """Of a session that is open, mostly, the next part: of a document, or of its own."""
        opened = sorted(self.sessions.open) or sorted(self.expected)
        if number.below(16) == 15:
            opened = sorted(self.expected)
        if not opened:
            return
        name, document, length = number.of(opened), number.of(DOCUMENTS), number.below(9)
        is_last, keeps = number.below(3) == 2, number.below(6) == 5
        sent = self.sessions.open.get(name)
        known = 0 if sent is None else len(sent.tokens)
        num_kept = max(1, known - 1 - number.below(9)) if keeps else -1
        start = known if num_kept < 0 else num_kept
        part = document[start : start + max(length, 1 - is_last)] or [1] * (1 - is_last)
        note(f"feed {name}: {len(part)} tokens behind {known}, {is_last=}, {num_kept=}")
        self.sessions.feed(name, part, is_last=is_last, num_kept=num_kept)

    def step(self, number: Number) -> None:
        count = 1 + number.below(8)
        note(f"step {count} times")
        for _ in range(count):
            self.tiers.tick()
            self.scheduler._retry_at = 0.0 if self.scheduler._retry_at is not None else None
            if not self.scheduler.has_runnable_work():
                return
            before = self.num_told()
            self.note_copies(self.engine.step())
            assert all(pin.until > self.clock.now for pin in self.pins())
            self.num_steps += 1
            self.num_tokens += self.num_told() - before

    def note_copies(self, output: SchedulerOutput) -> None:
        for copy in output.block_copies:
            self.copied.add((copy.request_id, copy.group_id, copy.place, copy.source))

    def abort(self, number: Number) -> None:
        names = sorted({owner_of(each) for each in (*self.scheduler.requests, *self.sessions.open)})
        if not names:
            return
        name = number.of(names)
        note(f"abort {name}")
        if name not in self.scheduler.requests:
            self.sessions.leave(name)
            return
        self.cut_short.add(name)
        self.num_aborted += 1
        self.engine.take(self.scheduler.finish_requests([name]))

    def fail(self, number: Number) -> None:
        """The worker raises: whoever was in the step ends, and nothing it wrote is found."""
        if not self.scheduler.requests:
            return
        output = self.scheduler.schedule()
        note(f"fail a step of {sorted(output.num_scheduled_tokens)}")
        self.num_steps += 1
        self.engine.has_failed = True
        if self.engine.num_state_pages:
            self.engine._restore_states(output)
        self.engine.follow(output)
        self.engine._store()
        self.note_copies(output)
        self.cut_short.update(map(owner_of, output.num_scheduled_tokens))
        self.cut_short.update(owner_of(new.request_id) for new in output.new_requests)
        if output.num_scheduled_tokens:
            self.engine.take(self.scheduler.fail_step(output, "boom"))

    def pause(self, number: Number) -> None:
        which = number.of([None, *Pause])
        note(f"pause: {which}")
        if which is None:
            self.scheduler.resume()
        else:
            self.scheduler.pause(which)

    def wait(self, number: Number) -> None:
        seconds = number.of([0.5, PIN_SECONDS / 2, PIN_SECONDS])
        note(f"wait {seconds:g} s")
        self.clock.now += seconds
        self.sessions.go_on()

    def reset(self, number: Number) -> None:
        """Turns of jobs that are kept are in nobody's way, and so are blocks between parts."""
        tiers_too = number.of([False, True])
        note(f"reset, {tiers_too=}")
        kept = {*self.holders()}
        tables = [table for name, each in self.now().items() if name not in kept for table in each]
        holds = any(block for table in tables for block in table)
        states = self.engine.manager.states
        if states is not None:  # of loads, and of tokens that are not known
            holds = holds or len(states.held) > sum(map(len, states._pinned.values()))
        assert self.scheduler.reset_prefix_cache(tiers_too) is not holds

    def lose(self, number: Number) -> None:
        """From now on so many positions of a load come at most."""
        most = 8 - number.below(9)
        note(f"lose what is behind {most} positions of a load" if most < 8 else "lose nothing")

        def outcome(load: Load) -> int:
            return min(most, len(load.keys))

        self.tiers.outcome = outcome if most < 8 else lambda load: len(load.keys)

    def forget(self, number: Number) -> None:
        """A tier has lost a block of one group."""
        if self.tiers.kept and not self.tiers.is_busy:
            key = number.of(sorted(self.tiers.kept))
            note(f"forget {key.hex()}")
            del self.tiers.kept[key]

    # What must be true at any time.

    def checked_hit(self, request: Request) -> tuple[GroupBlocks, int]:
        hits, num_tokens = self.find(request)
        keys = set(self.engine.manager.pool.list_keys())
        expected = 0
        for num_blocks in range((request.num_tokens - 1) // SIZE, 0, -1):
            if request.skip_reading_prefix_cache:
                break
            if all(
                request.block_hashes[position // SIZE] + group_suffix(group) in keys
                for group, kind in enumerate(self.attention)
                for position in range(kind.first_seen(num_blocks * SIZE), num_blocks * SIZE)
            ) and self.has_states(request.block_hashes[num_blocks - 1]):
                expected = num_blocks * SIZE
                break
        assert num_tokens == expected
        return hits, num_tokens

    def has_states(self, digest: bytes) -> bool:
        """Whether the pool has a whole checkpoint behind a block, written by a step before."""
        pool = self.engine.manager.pool
        keys = [digest + group_suffix(group) for group in self.state_groups]
        return all(pool.has(key) and not pool.is_due(pool.cached_block(key)) for key in keys)

    def checked_order(self) -> SchedulerOutput:
        """No request runs before its grammar is there. Who begins overtakes no equal, unless that
        one stands aside. Who is away for a load holds nothing that a step has yet to write."""
        output, states = self.schedule(), self.scheduler._states
        self.evicted += self.tiers.stores
        tables = self.engine.manager.tables
        requests, loading = self.scheduler.requests, states.loads.blocking
        for each in loading:
            assert each.is_finished or all(map(self.are_written, tables(each.request_id)))
        aside = {each.request_id for queue in (states.deferred, states.skipped) for each in queue}
        aside |= {each.request_id for each in loading}
        for other in requests.values():
            aside |= {each.request_id for each in other.progress.forks}
        self.order = [name for name in self.order if name in requests and name not in aside]
        without = {each.request_id for each in self.without_grammar}
        assert without.isdisjoint(each.request_id for each in output.new_requests)
        for name in (each.request_id for each in output.new_requests):
            if name in self.order:
                at = self.order.index(name)
                one = requests[self.order.pop(at)]
                assert not any(self.are_equal(requests[other], one) for other in self.order[:at])
        return output

    def are_written(self, blocks: Iterable[KVCacheBlock]) -> bool:
        return self.engine.manager.pool._uncomputed.keys().isdisjoint(blocks)

    def are_equal(self, one: Request, other: Request) -> bool:
        policy = self.scheduler.config.policy
        return policy == "fcfs" or (policy == "priority" and one.priority == other.priority)

    def now(self) -> dict[str, Sequence[Sequence[int]]]:
        """The tables of all who may hold blocks."""
        states = self.scheduler._states
        names = {*states.requests, *self.holders()}
        return {name: self.engine.manager.get_block_ids(name) for name in sorted(names)}

    def pins(self) -> list[Pin]:
        pins = self.scheduler._states.pins
        return [] if pins is None else list(pins.jobs.values())

    def holders(self) -> list[str]:
        """The names under which blocks are kept that no request holds."""
        return [*[pin.holder for pin in self.pins()], *self.sessions.holders()]

    def num_told(self) -> int:
        outputs = self.engine.outputs.values()
        told = sum(len(each.new_token_ids) for told in outputs for each in told)
        return told + self.sessions.num_tokens

    def computed_keys(self) -> set[tuple[int, bytes]]:
        """By block."""
        pool = self.engine.manager.pool
        cached = [block for block in pool.blocks if block.block_hash]
        return {(b.block_id, b.block_hash or b"") for b in cached if b not in pool._uncomputed}

    def keys_go_as_the_connector_is_told(self, *, is_reset: bool) -> None:
        """Whoever stores blocks hears of every name that is lost, and whole; and only a reset takes
        names otherwise than by evicting them from blocks that were computed before."""
        width, before = self.engine.manager.pool.width, self.computed
        self.computed = self.computed_keys()
        assert all(block.num_pages == width for block in (*self.evicted, *self.dropped))
        evicted = {(block.block_id, block.key) for block in self.evicted}
        dropped = {(block.block_id, block.key) for block in self.dropped}
        assert before - self.computed <= evicted | dropped
        assert is_reset or not (dropped & before) - evicted
        self.evicted.clear()
        self.dropped.clear()

    def blocks_are_owned_as_tables_say(self) -> None:
        pool, tables = self.engine.manager.pool, self.now()
        references = [0] * pool.num_blocks
        for table in (table for each in tables.values() for table in each):
            for block in table:
                references[block] += block > 0
        states = self.engine.manager.states
        held = [] if states is None else [block.block_id for block in states.held]
        for page in held:
            references[page] += 1
        # All pages of a block are held by the same requests.
        counts = [block.ref_cnt for block in pool.blocks[1:] for _ in range(pool.width)]
        assert counts == references[1 : pool.num_usable + 1]
        free = sorted(block.block_id for block in pool.free_queue)
        assert free == [b.block_id for b in pool.blocks[1:] if not references[b.block_id]]
        assert not any(references[pool.num_usable + 1 :])
        assert pool.null_block.block_hash is None
        kept = Counter(
            block for name in self.holders() for table in tables[name] for block in table if block
        )
        if states is not None:
            kept.update(block.block_id for each in states._pinned.values() for block in each)
        alone = [block for block, count in kept.items() if references[block] == count]
        assert pool.num_reclaimable == len(alone)
        for key, found in pool._cached.items():
            blocks = found.values() if isinstance(found, dict) else [found]
            assert all(block.block_hash == key for block in blocks)

    def tables_only_grow_and_forget(self) -> None:
        """While a request runs, a place of its table keeps its block or loses it, or gets a copy of
        one that it shares. What the next token reads is held, and of a window no more than it, a
        step and the room for drafts."""
        before, self.tables = self.tables, {}
        copied, self.copied = self.copied, set()
        for request in self.scheduler._states.running:
            tables = self.engine.manager.get_block_ids(request.request_id)
            run = request.request_id, request.num_preemptions
            self.tables[run] = tables
            assert self.engine.manager.can_go_on(request, request.num_computed_tokens)
            was = before.get(run, [()] * len(tables))
            for group, (kind, table, old) in enumerate(
                zip(self.attention, tables, was, strict=True)
            ):
                num_needed = -(-request.num_tokens // SIZE)  # what is behind them was for drafts
                assert len(table) >= min(len(old), num_needed)
                for place, (block, new) in enumerate(zip(old, table, strict=False)):
                    is_copy = (request.request_id, group, place, block) in copied
                    assert new in (block, 0) or is_copy or place >= num_needed - 1
                num_tokens = self.most_step_tokens + self.most_room
                most = kind.most_blocks(MAX_MODEL_LEN, SIZE, num_tokens)
                assert len([block for block in table if block]) <= most

    def answers_and_counts_are_those_of_the_model(self) -> None:
        for name, expected in self.expected.items():
            if name not in self.cut_short and (said := self.engine.said(name)):
                assert said == expected[: len(said)]
        counts = self.scheduler.counts
        assert counts["steps"] == self.num_steps
        assert counts["generated_tokens"] == self.num_tokens
        assert counts["ended_abort"] == self.num_aborted + self.sessions.num_aborted
        if self.scheduler.config.reserve == "full":
            assert counts["preemptions"] == 0

    def end(self) -> None:
        """Everybody ends, with the whole answer, and nothing is left."""
        self.scheduler.resume()
        self.sessions.end_all()
        while self.without_grammar:
            self.compile_grammar(Number(0))
        self.engine.run_all()
        self.sessions.check_nothing_left()
        self.clock.now += PIN_SECONDS
        self.engine.follow(self.scheduler.schedule())
        for name, expected in self.expected.items():
            said = self.engine.said(name)
            whole = expected[: len(said)] if name in self.cut_short else expected
            assert said == whole
        assert self.engine.manager.pool.is_idle
        assert self.now() == {}
        assert self.engine.states == {}


@pytest.mark.timeout(3_600)
def test_a_scheduler_is_what_its_model_says(seed: int, scale: str) -> None:
    lives, seeds = RUNS[scale]

    @settings(
        max_examples=lives, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        start=st.integers(0, LAST),
        ways=st.integers(0, WAYS - 1),
        acts=st.lists(st.integers(0, LAST), min_size=STEPS, max_size=STEPS),
    )
    def live(start: int, ways: int, acts: list[int]) -> None:
        clock = Clock()
        with ExitStack() as patches:
            for module in (states_module, scheduler_module, sessions_module):
                patches.enter_context(patch.object(module, "time", clock))
            life = Life(Number(start), Number(ways), clock)
            for act in acts:
                life.do(Number(act))
            life.end()

    for each in range(seed, seed + seeds):
        seeded(each)(live)()
