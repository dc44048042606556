# SPDX-License-Identifier: Apache-2.0
"""Who gets draft tokens: those whom they pay for, in batches that they pay for; and what they may
take of a step and of the pool."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.output import (
    CachedRequestData,
    ModelRunnerOutput,
    SchedulerOutput,
)
from stratakv.engine.scheduler.speculation import Speculation

from .conftest import VOCAB, MakeEngine, WorkerState, fingerprint, next_token, reference
from .dict_tiers import SIZE
from .test_steps_in_flight import DEPTH, Pipeline


def request_of(num_tokens: int = 8, max_tokens: int = 1000) -> Request:
    return Request("r", range(1, 1 + num_tokens), SamplingParams(max_tokens=max_tokens))


def step_of(tokens: Sequence[int], drafts: int, *, wanted: bool = True) -> tuple:
    """A step of requests that get so many tokens each, the first of which had `drafts`."""
    names = [f"r{number}" for number in range(len(tokens))]
    counts = dict.fromkeys(names, 1)
    counts["r0"] += drafts
    output = SchedulerOutput(
        [], CachedRequestData(), counts, sum(counts.values()), set(), set(),
        draft_token_ids={"r0": [1] * drafts} if drafts else {},
        wanted_drafts=dict.fromkeys(names, 4) if wanted else {},
    )  # fmt: skip
    said = {name: [1] * count for name, count in zip(names, tokens, strict=True)}
    return output, ModelRunnerOutput(said)


def begin(speculation: Speculation, num_running: int, seconds: float) -> None:
    """The steps without drafts that a batch size begins with."""
    for _ in range(4):
        speculation.begin_step(num_running)
        assert speculation.most_drafts_of(request_of()) == 0
        speculation.note_step(*step_of([1] * num_running, 0, wanted=False), seconds)
    speculation.begin_step(num_running)


def test_a_request_whose_drafts_are_all_accepted_gets_more_of_them() -> None:
    speculation, request = Speculation(16), request_of()
    begin(speculation, 1, 1.0)
    got = []
    for _ in range(4):
        got.append(speculation.most_drafts_of(request))
        speculation.note_accepted(request, got[-1], got[-1])
    assert got == [4, 8, 16, 16]
    speculation.note_accepted(request, 16, 2)
    assert speculation.most_drafts_of(request) == 3
    assert speculation.num_draft_tokens == 60 and speculation.num_accepted_tokens == 46
    assert speculation.accepted_at[:6] == [5, 5, 4, 4, 3, 3]


def test_a_request_whose_drafts_are_not_accepted_pauses_longer_each_time() -> None:
    speculation, request = Speculation(4), request_of(max_tokens=100_000)
    begin(speculation, 1, 1.0)
    pauses = []
    for _ in range(4):
        for _ in range(10):
            if not speculation.most_drafts_of(request):
                break
            speculation.note_accepted(request, 4, 0)
        assert speculation.most_drafts_of(request) == 0
        record = request.progress.drafting
        assert record is not None
        pauses.append(record.resume_at - request.num_tokens)
        while request.num_tokens < record.resume_at:
            assert speculation.most_drafts_of(request) == 0
            request.append_output_token(1)
        assert speculation.most_drafts_of(request) > 0
    assert pauses == [16, 32, 64, 128]
    for _ in range(8):
        speculation.note_accepted(request, 4, 4)
    record = request.progress.drafting
    assert record is not None and record.num_pauses == 0


def test_a_batch_size_at_which_drafts_do_not_pay_gets_none_for_a_while() -> None:
    speculation, request = Speculation(4), request_of()
    begin(speculation, 16, 1.0)
    for _ in range(16):
        assert speculation.most_drafts_of(request) > 0
        speculation.note_step(*step_of([2] + [1] * 15, 4), 1.5)
        speculation.begin_step(16)
    assert speculation.most_drafts_of(request) == 0 and speculation.num_switched_off == 1
    # Others go on, and it is tried again.
    begin(speculation, 2, 1.0)
    assert speculation.most_drafts_of(request) > 0
    for _ in range(63):
        speculation.begin_step(16)
        assert speculation.most_drafts_of(request) == 0
    speculation.begin_step(16)
    assert speculation.most_drafts_of(request) > 0


def test_where_they_pay_they_stay() -> None:
    speculation, request = Speculation(4), request_of()
    begin(speculation, 2, 1.0)
    for _ in range(400):
        assert speculation.most_drafts_of(request) > 0
        speculation.note_step(*step_of([4, 1], 4), 1.5)
        speculation.begin_step(2)
    assert speculation.num_switched_off == 0
    assert speculation.stats()["gain"]["2"] == pytest.approx(2.5 / 1.5)


def test_steps_with_prompts_say_nothing() -> None:
    speculation = Speculation(4)
    begin(speculation, 2, 1.0)
    output, result = step_of([1, 1], 4)
    output.total_num_scheduled_tokens += 100
    for _ in range(40):
        speculation.note_step(output, result, 50.0)
    assert speculation.stats()["gain"]["2"] == 1.0


def test_a_batch_size_that_never_only_decodes_gets_drafts_all_the_same() -> None:
    speculation, request = Speculation(4), request_of()
    steps = 0
    while not speculation.most_drafts_of(request):
        speculation.begin_step(3)
        steps += 1
        assert steps < 40


def test_without_measuring_everybody_gets_all() -> None:
    speculation, request = Speculation(7, is_adaptive=False), request_of()
    for _ in range(20):
        speculation.begin_step(1)
        assert speculation.most_drafts_of(request) == 7
        speculation.note_accepted(request, 7, 0)


def test_no_draft_stands_where_nothing_is_computed() -> None:
    """The last token is chosen and never computed."""
    speculation = Speculation(8, is_adaptive=False)
    assert [speculation.most_drafts_of(request_of(4, left)) for left in (1, 2, 3, 5, 50)] == [
        0, 0, 1, 3, 8,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="at least one draft"):
        Speculation(0)


def test_drafts_take_what_the_step_has_left(make_engine: MakeEngine) -> None:
    """Each running request has its token before any has a draft."""
    engine = make_engine(most_drafts=6, max_num_batched_tokens=9, max_num_seqs=8)
    for number in range(5):
        engine.add(f"r{number}", [1 + number, 2, 3], max_tokens=30, ignore_eos=True)
    while engine.scheduler.requests:
        running = engine.scheduler.num_running
        output = engine.step()
        assert running <= len(output.num_scheduled_tokens)
        assert output.total_num_scheduled_tokens <= 9
    assert engine.scheduler.speculation.num_accepted_tokens > 0
    for number in range(5):
        assert engine.said(f"r{number}") == reference([1 + number, 2, 3], 30, ignore_eos=True)


def test_drafts_never_send_anybody_back(make_engine: MakeEngine) -> None:
    """The pool has room for all that the requests come to, and nothing more."""
    engine = make_engine(1 + 2 * 5, most_drafts=6, max_model_len=20)
    for name in "ab":
        engine.add(name, [ord(name) % 50, 2, 3], max_tokens=17, ignore_eos=True)
    engine.run_all()
    assert engine.scheduler.counts["preemptions"] == 0
    assert engine.scheduler.speculation.num_accepted_tokens > 0


def test_blocks_of_accepted_drafts_are_found_again(make_engine: MakeEngine) -> None:
    engine = make_engine(most_drafts=8)
    text = [7, 8, 9]
    engine.add("a", text, max_tokens=40, ignore_eos=True)
    engine.run_all()
    assert engine.scheduler.speculation.num_accepted_tokens > 10
    again = [*text, *engine.said("a")]
    request = engine.add("b", again[:-1], max_tokens=2, ignore_eos=True)
    engine.run_all()
    # All that "a" had computed: its last token was only chosen.
    assert request.num_cached_tokens == (len(again) - 2) // SIZE * SIZE


def test_drafts_may_be_dropped_before_the_step_that_would_check_them(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(most_drafts=8)
    engine.add("a", [7, 8, 9], max_tokens=30, ignore_eos=True)
    while engine.scheduler.requests:
        engine.scheduler.drop_drafts("a")
        engine.scheduler.drop_drafts("nobody")
        assert engine.step().draft_token_ids == {}
    assert engine.said("a") == reference([7, 8, 9], 30, ignore_eos=True)


def test_drafts_wait_for_prompts(make_engine: MakeEngine) -> None:
    """What a step has goes to those who decode, then to prompts, then to drafts."""
    engine = make_engine(most_drafts=12, max_num_batched_tokens=24, max_num_seqs=8)
    for number in range(4):
        engine.add(f"r{number}", [1 + number, 2, 3], max_tokens=100, ignore_eos=True)
    for _ in range(4):
        engine.step()
    engine.add("late", list(range(1, 41)), max_tokens=4, ignore_eos=True)
    first, second = engine.step(), engine.step()
    assert (first.num_scheduled_tokens["late"], second.num_scheduled_tokens["late"]) == (20, 20)
    assert first.draft_token_ids == {}
    engine.run_all()
    assert engine.said("late") == reference(list(range(1, 41)), 4, ignore_eos=True)


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.8, 0.95)])
@pytest.mark.parametrize("depth", [1, DEPTH])
def test_rejected_drafts_send_nobody_back(
    make_engine: MakeEngine, depth: int, thresholds: tuple[float, float]
) -> None:
    """In pools that are about to be full: who is sent back with drafts is so without. With steps in
    flight, one is made while drafts of another hold blocks."""
    admit_below, preempt_above = thresholds
    preempted = []
    for most_drafts in (0, 16):
        rng, count = random.Random(5), 0
        for _ in range(60):
            engine = make_engine(
                rng.randint(11, 30), most_drafts=most_drafts, max_num_seqs=3, max_model_len=40,
                admit_below=admit_below, preempt_above=preempt_above, max_steps_in_flight=depth,
            )  # fmt: skip
            engine.propose = wrong
            for name in "abc":
                prompt = rng.choices(range(1, 50), k=rng.randint(1, 12))
                engine.add(name, prompt, max_tokens=rng.randint(1, 25), ignore_eos=True)
            (engine if depth == 1 else Pipeline(engine)).run_all()
            count += engine.scheduler.counts["preemptions"]
        preempted.append(count)
    assert preempted[0] == preempted[1] > 0


def wrong(state: WorkerState, most: int) -> list[int]:
    """Drafts none of which is accepted."""
    coming = next_token(fingerprint(state.tokens, state.numbers)[-1])
    return [(coming + 1) % VOCAB] * most


def test_drafts_of_another_request_of_the_same_id_are_nobodys(make_engine: MakeEngine) -> None:
    engine = make_engine(most_drafts=4, max_steps_in_flight=2, runs_ahead=True)
    engine.add("x", [1, 2, 3], max_tokens=30, ignore_eos=True)
    first = engine.scheduler.schedule()
    of_first = engine.run(first)
    engine.take(engine.scheduler.finish_requests(["x"]))
    engine.outputs.clear()
    engine.has_failed = True  # it may know the id
    engine.add("x", [7, 8, 9], max_tokens=2, ignore_eos=True)
    second = engine.scheduler.schedule()
    of_second = engine.run(second)
    of_first.draft_token_ids["x"] = [11, 12]
    engine.take(engine.scheduler.update_from_output(first, of_first))
    third = engine.scheduler.schedule()
    assert third.draft_token_ids == {}
    of_third = engine.run(third)
    engine.take(engine.scheduler.update_from_output(second, of_second))
    engine.take(engine.scheduler.update_from_output(third, of_third))
    engine.run_all()
    assert engine.said("x") == reference([7, 8, 9], 2, ignore_eos=True)
