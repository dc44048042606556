# SPDX-License-Identifier: Apache-2.0
"""Several steps in flight: they come back in order, fail together, and nobody notices otherwise."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest

from stratakv.connector.base import NullConnector
from stratakv.engine.config.engine_config import SchedulerConfig
from stratakv.engine.models.layer_attention import LayerAttention, chunk, full, window
from stratakv.engine.observer import StepMade
from stratakv.engine.request.request import RequestStatus
from stratakv.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from stratakv.engine.scheduler.step import StepBuilder
from stratakv.engine.trace.records import DecisionRecord, read_records
from stratakv.engine.trace.step_trace import StepTrace

from ...recorder import Recorder
from ...stepping import noted
from .conftest import Engine, MakeEngine, reference
from .dict_tiers import SIZE, DictTiers

DEPTH = 2
# Half of the lives are of groups that do not attend to everything, or share blocks.
PLANS: list[tuple[LayerAttention, ...]] = [
    (full(),),
    (full(), full()),
    (full(),),
    (window(6),),
    (full(),),
    (window(9), full(), chunk(8)),
    (full(),),
    (full(), full(), window(3), window(3)),
]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 50), k=length)


class Pipeline:
    """Runs steps as soon as they are made and takes them in up to `DEPTH - 1` steps later. As the
    model runner does, it refuses those that were made before it was known that one had failed; only
    their copies begin."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput | None]] = deque()

    def begin(self, *, fails: bool = False) -> SchedulerOutput:
        engine = self.engine
        output = engine.scheduler.schedule()
        engine.tiers and engine.tiers.tick()
        is_refused = any(result is None for _, result in self.in_flight)
        fails = fails or is_refused
        if fails:
            if not is_refused:
                if engine.num_state_pages:
                    engine._restore_states(output)
                engine.follow(output)
            engine._store()
            engine._store_ahead()
        self.in_flight.append((output, None if fails else engine.run(output)))
        return output

    def end(self) -> None:
        output, result = self.in_flight.popleft()
        scheduler = self.engine.scheduler
        if result is not None:
            self.engine.take(scheduler.update_from_output(output, result))
            return
        self.engine.has_failed = True
        self.engine.take(scheduler.fail_step(output, "no more memory"))
        while self.in_flight:
            self.engine.take(scheduler.give_up_step(*self.in_flight.popleft()))

    def run_all(self) -> None:
        scheduler = self.engine.scheduler
        for _ in range(3000):
            if not scheduler.requests and not self.in_flight:
                return
            if scheduler.has_runnable_work() and len(self.in_flight) < DEPTH:
                self.begin()
            elif self.in_flight:
                self.end()
            elif self.engine.tiers is None or not self.engine.tiers.tick():
                scheduler._retry_at = 0.0
        raise AssertionError("not done")


def test_no_more_are_made_than_may_be(make_engine: MakeEngine) -> None:
    engine = make_engine(max_steps_in_flight=DEPTH, max_num_batched_tokens=8)
    engine.add("a", prompt(40))
    line = Pipeline(engine)
    first, second = line.begin(), line.begin()
    assert second.step_id == first.step_id + 1
    with pytest.raises(RuntimeError, match="must be updated or failed"):
        engine.scheduler.schedule()
    with pytest.raises(RuntimeError, match="the oldest first"):
        engine.scheduler.update_from_output(second, ModelRunnerOutput({}))
    line.end()
    line.begin()


def test_who_waits_for_a_token_has_no_part_in_the_next_step(make_engine: MakeEngine) -> None:
    engine = make_engine(max_steps_in_flight=DEPTH)
    engine.add("a", prompt(6))
    line = Pipeline(engine)
    assert line.begin().num_scheduled_tokens == {"a": 6}
    engine.add("b", prompt(9, 1))
    assert line.begin().num_scheduled_tokens == {"b": 9}
    line.end()
    assert line.begin().num_scheduled_tokens == {"a": 1}
    line.run_all()
    assert engine.said("a") == reference(prompt(6), 5)
    assert engine.said("b") == reference(prompt(9, 1), 5)


def test_who_runs_ahead_does_not_wait_for_a_token(make_engine: MakeEngine) -> None:
    engine = make_engine(max_steps_in_flight=DEPTH, runs_ahead=True)
    request = engine.add("a", prompt(6), max_tokens=3, ignore_eos=True)
    line = Pipeline(engine)
    assert line.begin().num_scheduled_tokens == {"a": 6}
    output = line.begin()
    assert output.num_scheduled_tokens == {"a": 1}
    assert output.cached_requests.request_ids == [], "it goes on where it ended"
    assert (request.num_tokens, request.num_computed_tokens) == (6, 7)
    line.end()
    assert (request.num_tokens, request.num_placeholders) == (7, 1)
    assert line.begin().num_scheduled_tokens == {"a": 1}
    line.end()
    # The third token ends it whatever it is, so that no step goes on behind it.
    assert line.begin().num_scheduled_tokens == {}
    line.run_all()
    assert engine.said("a") == reference(prompt(6), 3, ignore_eos=True)


def test_what_was_computed_behind_the_end_is_nobodys(make_engine: MakeEngine) -> None:
    """A token ends the request while the next step goes on behind it: that one's token is told to
    nobody, and all blocks come back."""
    engine = make_engine(max_steps_in_flight=DEPTH, runs_ahead=True)
    text = prompt(6)
    first, second, *_ = reference(text, 9, ignore_eos=True)
    engine.add("a", text, max_tokens=9, ignore_eos=True, stop_token_ids=[second])
    line = Pipeline(engine)
    line.run_all()
    assert engine.said("a") == [first, second]
    assert engine.finish_reason("a") == "stop"
    assert engine.manager.pool.is_idle


def test_blocks_of_those_who_run_ahead_are_found_as_those_of_others(
    make_engine: MakeEngine,
) -> None:
    """A block that an unknown token completes is cached when the token is known."""
    found = {}
    for runs_ahead in (False, True):
        for count in range(1, 2 * SIZE + 2):
            engine = make_engine(max_steps_in_flight=DEPTH, runs_ahead=runs_ahead)
            text = prompt(6)
            engine.add("a", text, max_tokens=count, ignore_eos=True)
            Pipeline(engine).run_all()
            again = engine.add("again", [*text, *engine.said("a"), 1])
            found[runs_ahead, count] = engine.manager.get_computed_blocks(again)[1]
    assert all(found[True, count] == found[False, count] for _, count in found)


def test_blocks_are_trusted_when_their_own_step_has_come_back(make_engine: MakeEngine) -> None:
    engine = make_engine(max_steps_in_flight=DEPTH, max_num_batched_tokens=8)
    engine.add("a", prompt(16))
    line = Pipeline(engine)
    line.begin(), line.begin()
    pool = engine.manager.pool
    table = [pool.blocks[i] for i in engine.table("a")]
    assert [pool.all_computed([block]) for block in table] == [False] * 4
    line.end()
    assert [pool.all_computed([block]) for block in table] == [True, True, False, False]
    line.end()
    assert pool.all_computed(table)


def test_a_step_that_fails_takes_the_next_one_with_it(make_engine: MakeEngine) -> None:
    engine = make_engine(max_steps_in_flight=DEPTH, max_num_batched_tokens=8)
    engine.add("before", prompt(8, 1), max_tokens=1)
    line = Pipeline(engine)
    line.begin(), line.end()
    engine.add("a", prompt(16))
    engine.add("later", prompt(12, 2))
    failed = line.begin(fails=True)
    follower = line.begin(fails=True)
    line.end()
    assert failed.num_scheduled_tokens == follower.num_scheduled_tokens == {"a": 8}
    (last,) = engine.outputs["a"]
    assert (last.finish_reason, "no more memory" in (last.error or "")) == ("error", True)
    # What neither of them can be trusted to have written is found by nobody.
    again = engine.add("again", prompt(16))
    assert engine.manager.get_computed_blocks(again)[1] == 0
    assert engine.scheduler._last_failed_id == follower.step_id
    assert line.begin().last_failed_id == follower.step_id
    line.run_all()
    assert engine.said("later") == reference(prompt(12, 2), 5)
    assert engine.said("again") == reference(prompt(16), 5)


def test_what_was_computed_before_the_failed_step_is_kept(make_engine: MakeEngine) -> None:
    engine = make_engine(max_steps_in_flight=DEPTH, max_num_batched_tokens=8)
    engine.add("a", prompt(24), max_tokens=1)
    line = Pipeline(engine)
    line.begin(), line.end()
    line.begin(fails=True), line.end()
    again = engine.add("again", prompt(24))
    assert engine.manager.get_computed_blocks(again)[1] == 8


def test_a_request_that_ended_while_its_step_ran_gets_nothing_of_it(
    make_engine: MakeEngine,
) -> None:
    """Nor does another one of the same id."""
    engine = make_engine(max_steps_in_flight=DEPTH)
    engine.add("a", prompt(6))
    line = Pipeline(engine)
    line.begin()
    engine.scheduler.finish_requests(["a"])
    engine.add("a", prompt(7, 1), max_tokens=3)
    line.begin()
    line.end()
    assert engine.said("a") == []
    line.run_all()
    assert engine.said("a") == reference(prompt(7, 1), 3)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
@pytest.mark.parametrize("case", range(6))
def test_random_lives_two_steps_deep(
    make_engine: MakeEngine, case: int, seed: int, scale: str, runs_ahead: bool, tmp_path: Path
) -> None:
    """Little room, aborts, tiers and failing steps: who is not told otherwise says what it would
    alone."""
    for turn in range(8 if scale == "ci" else 2_000):
        with noted(f"this was the life of seed {seed + turn}"):
            rng = random.Random(seed + turn)
            # A trace has a thread, so one life of eight has one.
            path = None if turn else tmp_path / "trace.jsonl"
            plan = PLANS[(case // 2 + turn) % len(PLANS)]
            check_life(
                make_engine, rng, path, plan, with_tiers=case % 2 == 1, runs_ahead=runs_ahead
            )


class Traced(StepTrace):
    """Keeps what it was told."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SchedulerConfig(), NullConnector())
        self.path, self.made = path, list[StepMade]()

    def step(self, made: StepMade) -> None:
        super().step(made)
        self.made.append(made)

    def check(self) -> None:
        """What was written is that, also where ids were encoded for an earlier step."""
        self.close()
        written = [r for r in read_records(self.path) if isinstance(r, DecisionRecord)]
        assert [(r.step, r.num_scheduled_tokens) for r in written] == [
            (made.step_id, made.num_tokens) for made in self.made
        ]


def check_life(
    make_engine: MakeEngine,
    rng: random.Random,
    trace_path: Path | None,
    attention: Sequence[LayerAttention],
    *,
    with_tiers: bool,
    runs_ahead: bool,
) -> None:
    trace = None if trace_path is None else Traced(trace_path)
    tiers = DictTiers(rng, attention) if with_tiers else None
    recorder = Recorder(SIZE)
    num_state_pages = rng.choice([0, 0, 1, 3])
    engine = make_engine(
        # A third more than one request may hold: it has 44 tokens at most.
        1 + 4 * sum(kind.most_blocks(44, SIZE, 16) for kind in attention) // 3 + num_state_pages,
        tiers=tiers,
        attention=attention,
        max_steps_in_flight=DEPTH,
        runs_ahead=runs_ahead,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        observer=recorder,
        more_observers=[trace] if trace else [],
        reserve=rng.choice(["none", "full"]),
        most_drafts=rng.choice([0, 0, 2, 5]),
        is_adaptive=rng.random() < 0.5,
        num_state_pages=num_state_pages,
        state_interval=rng.choice([0, SIZE, 3 * SIZE]),
    )
    line = Pipeline(engine)
    stems = [prompt(SIZE * 4, i) for i in range(3)]
    asked: dict[str, tuple[list[int], int, int | None]] = {}
    for number in range(150):
        action = rng.random()
        if action < 0.3:
            text = rng.choice(stems)[: rng.randrange(1, 17)] + prompt(rng.randrange(1, 9), number)
            name, count = f"r{number}", rng.randrange(1, 20)
            asked[name] = text, count, None
            first = engine.add(name, text, max_tokens=count, ignore_eos=True)
            for fork in range(rng.choice([0] * 8 + [1, 3])):
                own, seed = f"{name}-{fork}", rng.randint(1, 3)
                asked[own] = text, count, seed
                engine.add(own, text, fork_of=first, max_tokens=count, seed=seed, ignore_eos=True)
        elif action < 0.34 and engine.scheduler.requests:
            name = rng.choice(list(engine.scheduler.requests))
            engine.scheduler.finish_requests([name])
            del asked[name]
        elif len(line.in_flight) < DEPTH and engine.scheduler.has_runnable_work():
            line.begin(fails=rng.random() < 0.03)
        elif line.in_flight:
            line.end()
    line.run_all()
    if engine.scheduler.config.reserve == "full":
        assert engine.scheduler.counts["preemptions"] == 0
    assert not engine.manager.shared_tails.families
    for name, (text, count, own_seed) in asked.items():
        expected = reference(text, count, ignore_eos=True, seed=own_seed)
        said = engine.said(name)
        last = engine.outputs[name][-1]
        if last.finish_reason == "error":
            assert "no more memory" in (last.error or ""), last
            assert said == expected[: len(said)], name
        else:
            assert said == expected, name
    assert engine.manager.pool.is_idle
    assert not engine.manager.pool._uncomputed
    recorder.check_keys(engine.scheduler)
    recorder.check_all_ended(engine.scheduler)
    if trace:
        trace.check()


def test_a_request_is_taken_back_out_of_a_step(make_engine: MakeEngine) -> None:
    """Budget, blocks, keys and counters are those of a step that never had the request."""
    engine = make_engine(max_num_batched_tokens=64)
    request = engine.add("a", prompt(30), max_tokens=9)
    other = engine.add("b", prompt(10, 1), max_tokens=9)
    engine.step()
    manager, pool = engine.manager, engine.manager.pool
    before = engine.table("a"), pool.num_free, request.num_computed_tokens
    pool.begin_step(100)
    step = StepBuilder(manager, 100, 64)
    request.append_output_token(7)  # fills a block
    for one in (request, other):
        count = one.num_tokens - one.num_computed_tokens
        step.go_on(one, count, manager.allocate_slots(one, count))
    assert step.budget == 64 - 3
    step.revoke(request)
    assert step.budget == 64 - 1
    assert (engine.table("a"), pool.num_free, request.num_computed_tokens) == before
    assert not any(pool.blocks[i].block_hash for i in before[0][request.num_computed_tokens // 4 :])
    assert list(step.build_output(set(), set(), None).num_scheduled_tokens) == ["b"]
    with pytest.raises(KeyError):
        step.revoke(request)
    # It gets the same again, key included.
    step.go_on(request, 2, manager.allocate_slots(request, 2))
    assert pool.get_cached_prefix(request.block_hashes)[0][-1].block_id == engine.table("a")[7]


def test_what_another_request_has_found_is_not_taken_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    owner = engine.add("owner", prompt(9))
    reader = engine.add("reader", prompt(9))
    manager = engine.manager
    manager.pool.begin_step(50)
    step = StepBuilder(manager, 50, 64)
    manager.allocate_slots(owner, 9)
    step.start(owner, 9)
    hits, num_hit = manager.get_computed_blocks(reader)
    assert num_hit == 8
    manager.allocate_slots(reader, 1, num_hit, hits)
    reader.num_computed_tokens = num_hit
    step.start(reader, 1)
    with pytest.raises(RuntimeError, match="were found by other requests"):
        step.revoke(owner)
    assert [entry.request for entry in step.entries] == [owner, reader]
    step.revoke(reader)
    step.revoke(owner)
    assert manager.pool.is_idle
    assert (owner.num_computed_tokens, reader.num_computed_tokens) == (0, 0)
    assert manager.get_computed_blocks(owner)[1] == 0
    assert owner.status is RequestStatus.WAITING
