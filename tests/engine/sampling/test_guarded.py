# SPDX-License-Identifier: Apache-2.0
"""Processors of other packages beside the built-in ones: each request gets what it would get alone,
and one that raises fails the requests that it raised for, by name, and nobody else."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from stratakv.engine.batch.batch_update import AddedRow, BatchUpdate
from stratakv.engine.sampling.processor_loading import LoadedProcessor
from stratakv.engine.sampling.processor_set import LogitsRows, ProcessorSet
from stratakv.engine.sampling.processors.base import LogitsProcessor, ProcessorContext
from stratakv.engine.sampling.processors.guarded import GuardedProcessor
from stratakv.engine.sampling.sampler import Sampler
from stratakv.tiers.settings.values import ConfigError

from .batches import VOCAB, RandomBatch, added, row_of
from .other_processors import Boom, Callables, Halve, LastCounts, arg, expected_row
from .processor_contract import check_processor, draft_rows

MAX_ROWS = 8
ENDS = (2, 3)
CONTEXT = ProcessorContext(MAX_ROWS, VOCAB, ENDS)
LOADED = [LoadedProcessor(kind.__name__, kind) for kind in (Halve, LastCounts, Callables)]


def logits_of(rng: random.Random, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    return 3 * torch.randn(count, VOCAB, generator=generator, dtype=torch.float64)


def wishes_of(rng: random.Random, booms: Sequence[str] = ()) -> dict[str, Any]:
    """Any mixture of what the built-in processors and the others can be asked for."""
    wishes: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7])}
    for name, values in {
        "repetition_penalty": (0.5, 1.7),
        "presence_penalty": (-1.5, 2.0),
        "frequency_penalty": (-0.7, 1.1),
        "min_tokens": (2, 6),
        "stop_token_ids": ((7,),),
        "logit_bias": ({4: 3.0}, {5: -100.0, 6: 1.5}),
        "bad_words_token_ids": (((4,), (5, 6)), ((8,) * 4,)),
        "min_p": (0.05, 0.5),
    }.items():
        if rng.random() < 0.3:
            wishes[name] = rng.choice(values)
    args: dict[str, Any] = {}
    for name, asked in {"halve": (2.0, 4.0), "last": (1.5,), "two": (4,), "three": (True,)}.items():
        if rng.random() < 0.3:
            args[name] = rng.choice(asked)
    if booms and rng.random() < 0.25:
        args |= {"halve": 2.0, "boom": rng.choice(booms)}
    if args:
        wishes["extra_args"] = args
    return wishes


def built_in_row(row: AddedRow, output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """What the four built-in processors before the choice do to one row, token by token."""
    params, values = row.params, logits.tolist()
    if len(output) < params.min_tokens:
        for token in (*params.stop_token_ids, *ENDS):
            values[token] = -math.inf
    text = [*row.prompt_token_ids.tolist(), *output]
    for *prefix, last in params.bad_words_token_ids:
        if text[len(text) - len(prefix) :] == prefix:
            values[last] = -math.inf
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in range(VOCAB):
        count = output.count(token)
        if params.repetition_penalty != 1.0 and token in text:
            is_divided = values[token] > 0
            penalty = params.repetition_penalty
            values[token] = values[token] / penalty if is_divided else values[token] * penalty
        values[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return torch.tensor(values, dtype=torch.float64)


def check_against_naive(
    processors: ProcessorSet, batch: RandomBatch, rng: random.Random, failed: dict[int, str]
) -> int:
    """One step, with or without drafts, of the rows that have not failed; how many there were."""
    rows, offsets, drafts = draft_rows(batch, rng)
    if rng.random() < 0.5:
        offsets, drafts = np.zeros_like(offsets), [[] for _ in drafts]
        belongs = LogitsRows(rows)
    else:
        belongs = LogitsRows(rows, offsets, drafts)
    logits = logits_of(rng, len(rows))
    result = processors.before_choice(logits.clone(), belongs)
    failed.update(processors.failures(np.arange(MAX_ROWS)))
    for index, row in enumerate(rows.tolist()):
        if row in failed:
            continue
        one = batch.rows[row]
        output = [*one.output_token_ids, *drafts[index][: offsets[index]]]
        expected = built_in_row(one, output, logits[index])
        expected = expected_row(one.params, one.prompt_token_ids.tolist(), output, expected)
        torch.testing.assert_close(result[index], expected, rtol=1e-12, atol=1e-12)
    return len(rows)


def test_every_request_gets_what_it_would_get_alone(rng, scale):
    processors = ProcessorSet.built_in(CONTEXT, LOADED)
    batch = RandomBatch(rng, MAX_ROWS, VOCAB)
    num_rows = 0
    for _ in range(150 if scale == "ci" else 20_000):
        processors.update_state(batch.change([wishes_of(rng) for _ in range(4)]))
        while any(len(one.output_token_ids) > 20 for one in batch.rows.values()):
            processors.update_state(batch.clear())  # `Counting` raises beyond
        num_rows += check_against_naive(processors, batch, rng, {})
        assert processors.failures(np.arange(MAX_ROWS)) == {}
        batch.grow()
    assert num_rows > 500


def test_only_the_requests_that_it_raises_for_fail(rng, scale):
    """Again and again, in `update_state` and in `apply`: all others get the logits that they would
    have got, in the same step and in those that follow."""
    processors = ProcessorSet.built_in(CONTEXT, LOADED)
    batch = RandomBatch(rng, MAX_ROWS, VOCAB)
    num_failed = 0
    for _ in range(120 if scale == "ci" else 10_000):
        update = batch.change([wishes_of(rng, ("update", "apply")) for _ in range(4)])
        processors.update_state(update)
        failed: dict[int, str] = {}
        check_against_naive(processors, batch, rng, failed)
        for row, error in failed.items():
            assert row in batch.rows
            params = batch.rows[row].params
            assert arg(params, "boom") or len(batch.rows[row].output_token_ids) > 24
            name = "Halve" if arg(params, "boom") else "Callables"
            assert error.startswith(f"the logits processor {name} failed on this request: Boom: ")
        num_failed += len(failed)
        gone = sorted(failed, reverse=True)  # the scheduler ends them before the next step
        for row in gone:
            del batch.rows[row]
        processors.update_state(BatchUpdate(len(batch.rows), gone, (), ()))
        assert processors.failures(np.arange(MAX_ROWS)) == {}
        batch.grow()
    assert num_failed > 20


def test_a_failure_follows_its_request_until_another_takes_the_row():
    processors = ProcessorSet.built_in(CONTEXT, LOADED)
    boom = {"extra_args": {"halve": 2.0, "boom": "update"}}
    processors.update_state(BatchUpdate(2, (), (row_of(0, {}), row_of(1, boom)), ()))
    assert list(processors.failures(np.array([0, 1]))) == [1]
    processors.update_state(BatchUpdate(2, (0,), (), ((1, 0),)))  # type: ignore[arg-type]
    assert list(processors.failures(np.array([0, 1]))) == [0]
    processors.update_state(added(row_of(0, {"extra_args": {"halve": 2.0}})))
    assert processors.failures(np.array([0, 1])) == {}


@pytest.mark.parametrize(
    ("kind", "wishes"),
    [
        (Halve, [{"extra_args": {"halve": 2.0}}, {"extra_args": {"halve": 4.0}}]),
        (LastCounts, [{"extra_args": {"last": 1.5}}, {"extra_args": {"last": -2.0}}]),
        (Callables, [{"extra_args": {"two": 4}}, {"extra_args": {"three": True}}]),
    ],
)
def test_a_guard_keeps_the_promise_of_what_it_guards(kind, wishes, rng):
    def make(context: ProcessorContext) -> LogitsProcessor:
        return GuardedProcessor(kind.__name__, kind, context, fails)

    def fails(row: int, error: str) -> None:
        raise AssertionError(error)

    check_processor(make, wishes, rng, steps=20)


class Idle(Halve):
    """Applies to everybody, has nothing to do, and counts how often it is asked."""

    checks = 0
    others = 0

    @classmethod
    def applies_to(cls, params: Any) -> bool:
        return True

    @property
    def is_active(self) -> bool:
        Idle.checks += 1
        return False

    def concerns(self, rows: Any) -> Any:
        Idle.others += 1
        return super().concerns(rows)


def test_an_idle_processor_costs_one_check_a_step():
    sampler = Sampler(MAX_ROWS, VOCAB, ENDS, [LoadedProcessor("idle", Idle)])
    sampler.apply_batch_update(
        added(row_of(0, {"temperature": 0.0}), row_of(1, {"temperature": 0.0}))
    )
    Idle.checks = Idle.others = 0
    for _ in range(5):
        sampler.sample(torch.randn(2, VOCAB), np.array([0, 1]))
    assert (Idle.checks, Idle.others) == (5, 0)


class Raises(Halve):
    """Raises wherever it is told to."""

    where = ""

    @property
    def is_active(self) -> bool:
        return self._may("is_active", super().is_active)

    def concerns(self, rows: Any) -> Any:
        return self._may("concerns", super().concerns(rows))

    def apply(self, logits: Any, rows: Any, *drafts: Any) -> Any:
        result = super().apply(logits, rows, *drafts)
        kinds = {"type": None, "shape": result[:, 1:], "dtype": result.int()}
        return self._may("apply", kinds.get(self.where, result))

    def _may(self, name: str, value: Any) -> Any:
        if self.where == name:
            raise Boom(name)
        return value


@pytest.mark.parametrize("where", ["is_active", "apply", "type", "shape", "dtype"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_whatever_it_does_wrong_fails_those_it_applies_to(where, temperature, monkeypatch):
    sampler = Sampler(MAX_ROWS, VOCAB, ENDS, [LoadedProcessor("raises", Raises)])
    wishes = {"temperature": temperature, "seed": 1}
    asking = wishes | {"extra_args": {"halve": 2.0}}
    sampler.apply_batch_update(added(row_of(0, asking), row_of(1, wishes), row_of(2, asking)))
    monkeypatch.setattr(Raises, "where", where)
    logits, rows = torch.randn(3, VOCAB), np.array([0, 1, 2])
    sampled = sampler.sample(logits.clone(), rows)
    assert sorted(sampled.failures) == [0, 2]
    assert all("the logits processor raises failed" in one for one in sampled.failures.values())
    alone = Sampler(MAX_ROWS, VOCAB, ENDS)
    alone.apply_batch_update(added(row_of(1, wishes)))
    [token] = alone.sample(logits[1:2], np.array([1])).token_ids
    assert sampled.token_ids[1] == token
    monkeypatch.setattr(Raises, "where", "")  # and the next request is well again
    sampler.apply_batch_update(added(row_of(0, asking)))
    assert sorted(sampler.sample(logits.clone(), rows).failures) == [2]


def test_concerns_that_raises_is_done_without(monkeypatch):
    sampler = Sampler(MAX_ROWS, VOCAB, ENDS, [LoadedProcessor("raises", Raises)])
    sampler.apply_batch_update(added(row_of(0, {"extra_args": {"halve": 2.0}})))
    monkeypatch.setattr(Raises, "where", "concerns")
    assert sampler.sample(torch.randn(1, VOCAB), np.array([0])).failures == {}


class AfterTemperature(Halve):
    """Argmax-invariant; raises in draws."""

    @property
    def is_argmax_invariant(self) -> bool:
        return True


def test_a_fault_after_the_temperature_fails_its_request_alone():
    sampler = Sampler(MAX_ROWS, VOCAB, ENDS, [LoadedProcessor("after", AfterTemperature)])
    boom = {"extra_args": {"halve": 2.0, "boom": "apply"}, "temperature": 1.0}
    sampler.apply_batch_update(
        added(row_of(0, boom), row_of(1, {"extra_args": {"halve": 2.0}}), row_of(2, {}))
    )
    sampled = sampler.sample(torch.randn(3, VOCAB), np.array([0, 1, 2]))
    assert list(sampled.failures) == [0] and len(sampled.token_ids) == 3


class OnlyOnce(Halve):
    """Its class can be made once."""

    made = 0

    def __init__(self, context: ProcessorContext) -> None:
        OnlyOnce.made += 1
        if OnlyOnce.made > 1:
            raise Boom("once is enough")
        super().__init__(context)


def test_one_that_cannot_be_made_again_fails_all_it_applies_to(monkeypatch):
    monkeypatch.setattr(OnlyOnce, "made", 0)
    processors = ProcessorSet.built_in(CONTEXT, [LoadedProcessor("once", OnlyOnce)])
    asking, boom = ({"halve": 2.0}, {"halve": 2.0, "boom": "apply"})
    rows = [row_of(0, {"extra_args": asking}), row_of(1, {"extra_args": boom}), row_of(2, {})]
    processors.update_state(added(*rows))
    processors.before_choice(torch.randn(3, VOCAB), LogitsRows(np.array([0, 1, 2])))
    assert sorted(processors.failures(np.array([0, 1, 2]))) == [0, 1]
    monkeypatch.setattr(OnlyOnce, "made", 0)  # later it can, and serves whoever comes
    processors.update_state(added(row_of(3, {"extra_args": asking})))
    logits = torch.randn(1, VOCAB)
    result = processors.before_choice(logits.clone(), LogitsRows(np.array([3])))
    assert torch.equal(result, logits / 2)


def test_a_constructor_that_raises_is_told_at_start(monkeypatch):
    monkeypatch.setattr(OnlyOnce, "made", 1)
    with pytest.raises(ConfigError, match="processor once cannot be made: Boom: once is enough"):
        Sampler(MAX_ROWS, VOCAB, ENDS, [LoadedProcessor("once", OnlyOnce)])


class Deaf(Halve):
    """Does not look at drafts, and says so."""

    follows_drafts = False


def test_drafts_are_refused_for_the_requests_of_a_processor_that_follows_none():
    sampler = Sampler(MAX_ROWS, VOCAB, ENDS, [LoadedProcessor("deaf", Deaf)])
    sampler.apply_batch_update(added(row_of(0, {"extra_args": {"halve": 2.0}}), row_of(1, {})))
    rows = np.array([0, 1])
    assert sampler.take_drafts(rows).tolist() == [False, True]
    offsets, drafts = np.array([0, 1]), [[], [5]]
    sampler.sample(torch.randn(2, VOCAB), rows, offsets=offsets, drafts=drafts)
    with pytest.raises(ValueError, match="does not follow them"):
        sampler.sample(torch.randn(2, VOCAB), rows, offsets=offsets[::-1], drafts=drafts[::-1])
    assert Sampler(MAX_ROWS, VOCAB, ENDS, LOADED).take_drafts(rows).all()
