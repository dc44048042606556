# SPDX-License-Identifier: Apache-2.0
"""The budget for thinking tokens: scenarios and tables one by one, and random streams with drafts
against a model that reads everything anew, with nothing but slices.

The scenarios are those of seed 002, chapter 13, tables O.1 to O.3, appendices D and T2; where that
document miscounts, the test says so.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from stratakv.engine.batch.batch_update import BatchUpdate
from stratakv.engine.request.reasoning_marks import Mark, ThoughtCounter, ThoughtTracker
from stratakv.engine.sampling.processors.base import ProcessorContext
from stratakv.engine.sampling.processors.thinking import FORCED_LOGIT, ThinkingBudget
from stratakv.engine.sampling.sampler import Sampler

from .batches import VOCAB, added, row_of

START, END = (3, 4), (7, 8, 9)
CONTEXT = ProcessorContext(max_rows=64, vocab_size=VOCAB)


def slow_forced(
    prompt: Sequence[int],
    output: Sequence[int],
    budget: int,
    start: Sequence[int],
    end: Sequence[int],
) -> int | None:
    """The token that has to come, None where any may."""
    thought = slow_thought(prompt, output, start, end)
    if thought is None or len(thought) < budget:
        return None
    begun = [n for n in range(len(end)) if thought[len(thought) - n :] == list(end[:n])]
    return end[max(begun)]


def slow_thought(
    prompt: Sequence[int], output: Sequence[int], start: Sequence[int], end: Sequence[int]
) -> list[int] | None:
    """The tokens of the thought that is open at the end."""
    text = [*prompt, *output]
    open_at, last = None, 0
    for at in range(1, len(text) + 1):
        before_start, before_end = at - len(start), at - len(end)
        renews = at <= len(prompt)  # a second start mark counts in a prompt alone
        if (
            before_start >= last
            and text[before_start:at] == list(start)
            and (open_at is None or renews)
        ):
            open_at = last = at
        elif open_at is not None and before_end >= last and text[before_end:at] == list(end):
            open_at, last = None, at
    return None if open_at is None else text[open_at:]


def wishes(budget: int | None, start: Sequence[int] = START, end: Sequence[int] = END) -> Any:
    return {
        "thinking_token_budget": budget,
        "reasoning_start_token_ids": tuple(start),
        "reasoning_end_token_ids": tuple(end),
    }


def forced_in(
    asked: dict[str, Any],
    prompt: Sequence[int],
    output: Sequence[int] = (),
    drafts: Sequence[int] | None = None,
) -> list[int | None]:
    """The token that is forced in each row of logits, one behind the output and one behind each
    draft token; None for rows that are left alone."""
    processor = ThinkingBudget(CONTEXT)
    processor.update_state(added(row_of(2, asked, prompt=prompt, output=output)))
    count = 1 if drafts is None else 1 + len(drafts)
    rows = np.full(count, 2, np.int64)
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1))
    if drafts is None:
        result = processor.apply(logits.clone(), rows)
    else:
        result = processor.apply(logits.clone(), rows, np.arange(count), [list(drafts)] * count)
    return [forced_of(before, after) for before, after in zip(logits, result, strict=True)]


def forced_of(before: torch.Tensor, after: torch.Tensor) -> int | None:
    if torch.equal(before.view(torch.int32), after.view(torch.int32)):
        return None
    assert bool(torch.isfinite(after).all()), "a large logit, and none that is infinite"
    token = int(after.argmax())
    assert float(after[token]) == FORCED_LOGIT
    return token


# Where a thought stands (13.7, O.1, O.2)


@pytest.mark.parametrize(
    ("prompt", "output", "forced"),
    [
        ([], [], None),  # no prompt: outside
        ([1, 2], [], None),
        ([1, 2], [5, 5, 5, 5], None),  # never began
        ([1, 3, 4], [], None),
        ([1, 3, 4], [5], None),
        ([1, 3, 4], [5, 5], None),
        ([1, 3, 4], [5, 5, 5], 7),  # begun in the prompt, used up in the output
        ([1, 3, 4, 5, 5], [], None),
        ([1, 3, 4, 5, 5, 5], [], 7),  # used up in the prompt
        ([1, 3, 4, 5, 5, 5, 5, 5], [], 7),  # and more than that
        ([1, 3], [4], None),  # the start mark half in the prompt, half in the output
        ([1, 3], [4, 5, 5, 5], 7),
        ([3, 4, 5, 7, 8, 9], [], None),  # ended in the prompt
        ([3, 4, 5, 7, 8, 9], [5, 5, 5, 5], None),
        ([3, 4, 5, 5, 7, 8], [], 9),  # the end mark half written: it goes on
        ([3, 4, 5, 5, 5, 7, 8], [9, 5, 5, 5, 5], None),
        ([7, 8, 9, 3, 4], [5, 5, 5], 7),  # an end mark before the start mark
        ([3, 4, 5, 5, 5, 5, 3, 4], [], None),  # the last start mark of a prompt counts
        ([3, 4, 5, 5, 5, 5, 3, 4], [5, 5, 5], 7),
        ([1], [3, 4, 5, 5], None),  # begun in the output
        ([1], [3, 4, 5, 5, 5], 7),
        ([1], [3, 4, 5, 5, 5, 7], 8),
        ([1], [3, 4, 5, 5, 5, 7, 8], 9),
        ([1], [3, 4, 5, 5, 5, 7, 8, 9], None),
        ([1], [3, 4, 5, 5, 5, 7, 5], 7),  # a forced token that was not taken: from the start
        ([1], [3, 4, 5, 5, 5, 7, 7], 8),
        ([1], [3, 4, 5, 3, 4], 7),  # a start mark in a thought of the output renews nothing
        ([1], [3, 4, 5, 7, 8, 9, 5, 5, 5, 5], None),  # ended by itself
        ([1], [3, 4, 5, 5, 5, 7, 8, 9, 1, 3, 4, 5, 5], None),  # renewed
        ([1], [3, 4, 5, 5, 5, 7, 8, 9, 1, 3, 4, 5, 5, 5], 7),
    ],
)
def test_a_budget_of_three(prompt: list[int], output: list[int], forced: int | None) -> None:
    assert forced_in(wishes(3), prompt, output) == [forced]
    assert slow_forced(prompt, output, 3, START, END) == forced


def test_a_budget_of_nothing_ends_each_thought_at_once() -> None:
    assert forced_in(wishes(0), [3, 4]) == [7]
    assert forced_in(wishes(0), [1], [3, 4, 7, 8]) == [9]
    assert forced_in(wishes(0), [1], [5]) == [None]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"thinking_token_budget": 0},  # no mark is known
        {**wishes(None)},
        wishes(0, (3, 4), (7, VOCAB)),  # an end mark that the model cannot write
    ],
)
def test_nothing_happens_without_a_budget_or_marks(asked: dict[str, Any]) -> None:
    assert forced_in(asked, [3, 4, 5, 5]) == [None]
    processor = ThinkingBudget(CONTEXT)
    processor.update_state(added(row_of(0, asked, prompt=[3, 4])))
    assert not processor.is_active


# The place where forcing begins among draft tokens (O.3, appendix D)


@pytest.mark.parametrize(
    ("count", "drafts", "forced"),
    [
        (10, [5, 5, 5], [9, 9, 9, 9]),  # nothing remains: from the first row on
        (12, [5, 5, 5], [9, 9, 9, 9]),
        (8, [5, 5, 5], [None, None, 9, 9]),  # the picture of O.3
        # There the row behind all drafts is forced in any case. Where the third draft token is the
        # end mark, the thought is over, and a second one would be wrong.
        (8, [5, 5, 9], [None, None, 9, None]),
        (7, [5, 5, 5], [None, None, None, 9]),  # as many remain as there are drafts
        # The formula forces there too where more remain, which would be too early.
        (6, [5, 5, 5], [None, None, None, None]),
        (2, [5, 5, 5], [None, None, None, None]),
        (2, [9, 5, 5], [None, None, None, None]),
        (10, [], [9]),
        (9, [], [None]),
        (9, [9], [None, None]),  # ended by itself with the last token of the budget
        (9, [5], [None, 9]),
    ],
)
def test_a_budget_of_ten_and_drafts(
    count: int, drafts: list[int], forced: list[int | None]
) -> None:
    one = wishes(10, (3,), (9,))
    assert forced_in(one, [1, 3, *[5] * count], [], drafts) == forced
    assert forced_in(one, [1, 3], [5] * count, drafts) == forced
    assert forced_in(one, [1], [3, *[5] * count], drafts) == forced


@pytest.mark.parametrize(
    ("drafts", "forced"),
    [
        # Every row gets its own token of the mark; the document has the same one in all.
        ([7, 8], [7, 8, 9]),
        ([7, 8, 9], [7, 8, 9, None]),
        ([7, 8, 9, 3, 4, 5], [7, 8, 9, None, None, None, None]),
        ([7, 5, 5], [7, 8, 7, 7]),
        ([5, 7, 8], [7, 7, 8, 9]),
        ([7, 7, 8], [7, 8, 8, 9]),
        ([7, 8, 5, 7], [7, 8, 9, 7, 8]),
    ],
)
def test_a_mark_of_several_tokens_and_drafts(drafts: list[int], forced: list[int | None]) -> None:
    assert forced_in(wishes(2), [3, 4, 5], [5], drafts) == forced


def test_a_budget_that_ends_inside_a_mark_of_the_model_lets_it_end() -> None:
    """The first token of the end mark was the last of the budget."""
    assert forced_in(wishes(3), [3, 4], [5, 5, 7]) == [8]
    assert forced_in(wishes(3), [3, 4], [5, 5], [7, 8]) == [None, 8, 9]


def test_nothing_is_kept_of_drafts() -> None:
    """Accepted in part, rejected at once, or rejected where the token was forced."""
    processor = ThinkingBudget(CONTEXT)
    row = row_of(0, wishes(2), prompt=[3, 4], output=[5])
    processor.update_state(added(row))

    def forced(drafts: list[int] | None = None) -> list[int | None]:
        count = 1 + len(drafts or ())
        logits, rows = torch.zeros(count, VOCAB), np.zeros(count, np.int64)
        where = () if drafts is None else (np.arange(count), [drafts] * count)
        result = processor.apply(logits.clone(), rows, *where)
        return [forced_of(*pair) for pair in zip(logits, result, strict=True)]

    assert forced() == [None]
    assert forced([5, 7, 8, 9]) == [None, 7, 8, 9, None]
    assert forced() == [None], "rejected, all of them"
    row.output_token_ids.extend([5, 7])
    assert forced([8, 9]) == [8, 9, None]
    row.output_token_ids.append(6)
    assert forced() == [7], "a forced token was rejected, and another one taken"
    row.output_token_ids.extend([7, 8, 9])
    assert forced() == [None]
    assert forced([3, 4, 5, 5]) == [None, None, None, None, 7]


# Into the logits (13.10, T2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_outweighs_a_forced_token(dtype: torch.dtype) -> None:
    """Not what penalties, biases and the model can make of the others, nor the temperature."""
    largest = torch.finfo(dtype).max
    asked = {"temperature": 100.0, "seed": 1, "repetition_penalty": 1e-38,
             "logit_bias": {7: -100.0, 5: 100.0}, **wishes(0)}  # fmt: skip
    sampler = Sampler(4, VOCAB)
    sampler.apply_batch_update(added(row_of(0, asked, prompt=[3, 4]), row_of(1, {}, prompt=[3, 4])))
    for value in (0.0, 1e9, 1e30, largest / 20):
        logits = torch.zeros(2, VOCAB, dtype=dtype)
        logits[:, 5], logits[:, 7] = value, -value
        sampled = sampler.sample(logits, np.array([0, 1]))
        assert sampled.token_ids[0] == 7
        assert sampled.has_choice == [True, True]


def test_it_comes_last_whatever_the_order() -> None:
    """Nothing weakens what it forces, and min-p, top-k and top-p leave it."""
    asked = {"temperature": 1.0, "min_p": 1.0, "top_k": 1, "top_p": 0.01, "presence_penalty": 2.0,
             "frequency_penalty": 2.0, **wishes(0)}  # fmt: skip
    sampler = Sampler(1, VOCAB, seed=3)
    row = row_of(0, asked, prompt=[3, 4])
    sampler.apply_batch_update(added(row))
    for token in END:
        [found] = sampler.sample(torch.randn(1, VOCAB), np.array([0])).token_ids
        assert found == token
        row.output_token_ids.append(found)
    names = [type(one).__name__ for one in sampler._processors._before_choice]
    assert names[-1] == "ThinkingBudget"


def test_a_banned_token_stays_banned() -> None:
    """As the promise of a processor has it. Nothing is forced then, and the end comes when it may:
    here min_tokens bans it for two tokens."""
    sampler = Sampler(1, VOCAB)
    asked = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (7,), **wishes(0)}
    row = row_of(0, asked, prompt=[3, 4])
    sampler.apply_batch_update(added(row))
    for wanted in (5, 5, 7, 8, 9, 5):
        logits = torch.zeros(1, VOCAB)
        logits[0, 5] = 1.0
        [found] = sampler.sample(logits, np.array([0])).token_ids
        assert found == wanted
        row.output_token_ids.append(found)


def test_an_idle_processor_costs_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget in the batch it is not applied, and looks at no prompt and no output."""
    touched: list[str] = []
    for owner, name in (
        (ThinkingBudget, "apply"), (ThoughtTracker, "behind"), (ThoughtTracker, "track_token"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, lambda *_, n=name, **__: touched.append(n))
    sampler = Sampler(4, VOCAB)
    rows = [row_of(row, {"temperature": 0.0}, prompt=[3, 4]) for row in range(4)]
    sampler.apply_batch_update(added(*rows))
    for _ in range(3):
        sampler.sample(torch.randn(4, VOCAB), np.arange(4))
    assert not touched


# Random streams


class Stream(NamedTuple):
    """One request and what is known of it."""

    asked: dict[str, Any]
    prompt: list[int]
    output: list[int]  # the row's own list
    budget: int
    start: list[int]
    end: list[int]

    def forced(self, drafts: Sequence[int] = ()) -> int | None:
        return slow_forced(self.prompt, [*self.output, *drafts], self.budget, self.start, self.end)

    def check_lengths(self) -> None:
        """No thought is longer than the budget and the end mark."""
        for at in range(len(self.output) + 1):
            thought = slow_thought(self.prompt, self.output[:at], self.start, self.end)
            in_prompt = len(slow_thought(self.prompt, [], self.start, self.end) or ())
            if thought is not None:
                # The whole mark is no part of an open thought.
                assert len(thought) < max(self.budget, in_prompt) + len(self.end)


def streams(rng: random.Random, count: int) -> list[Stream]:
    """Few ids, so that marks come about by chance, in whole and in part."""
    found: list[Stream] = []
    while len(found) < count:
        start, end = (rng.choices([3, 4, 5], k=rng.randint(1, 3)) for _ in range(2))
        budget = rng.randint(0, 7)
        prompt = rng.choices([1, 3, 4, 5], k=rng.randint(1, 9))
        temperature = {"temperature": rng.choice([0.0, 1.0]), "seed": rng.randrange(99)}
        try:
            row = row_of(0, wishes(budget, start, end) | temperature, prompt=prompt)
        except ValueError:  # a mark that contains the other
            continue
        asked = wishes(budget, start, end) | temperature
        found.append(Stream(asked, prompt, row.output_token_ids, budget, start, end))
    return found


def thoughtful_logits(rng: random.Random, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    logits = 2 * torch.randn(count, VOCAB, generator=generator)
    logits[:, 3:6] += 3.0
    return logits


@pytest.mark.parametrize("with_drafts", [False, True])
def test_random_streams_never_exceed_their_budget(
    with_drafts: bool, rng: random.Random, scale: str
) -> None:
    """500 of them in each way, against the slow model: row by row the same token is forced, and
    rows that are not come back bit for bit. Draft tokens are accepted as long as they are what is
    sampled; sometimes fewer are taken, as where a step is lost or a request is preempted."""
    rounds, steps = (10, 12) if scale == "ci" else (100, 40)
    num_forced = 0
    for _ in range(rounds):
        batch = streams(rng, 50)
        sampler, processor = Sampler(64, VOCAB), ThinkingBudget(CONTEXT)
        for target in (sampler.apply_batch_update, processor.update_state):
            target(batch_of(batch, range(50)))
        for _ in range(steps):
            if rng.random() < 0.2:  # some go, and come back in other rows
                places = rng.sample(range(50), 50)
                batch = [batch[place] for place in places]
                for target in (sampler.apply_batch_update, processor.update_state):
                    target(batch_of(batch, range(50)))
            num_forced += one_step(batch, sampler, processor, rng, with_drafts=with_drafts)
        for stream in batch:
            stream.check_lengths()
    assert num_forced > 20 * rounds


def batch_of(batch: list[Stream], rows: Sequence[int]) -> BatchUpdate:
    made = [
        row_of(row, stream.asked, prompt=stream.prompt)._replace(output_token_ids=stream.output)
        for row, stream in zip(rows, batch, strict=True)
    ]
    return BatchUpdate(len(batch), tuple(sorted(rows, reverse=True)), tuple(made), ())


def one_step(
    batch: list[Stream],
    sampler: Sampler,
    processor: ThinkingBudget,
    rng: random.Random,
    *,
    with_drafts: bool,
) -> int:
    """How many rows were forced."""
    drafts = [guess(stream, rng) if with_drafts else [] for stream in batch]
    counts = [len(draft) + 1 for draft in drafts]
    rows = np.repeat(np.arange(len(batch)), counts)
    offsets = np.concatenate([np.arange(count) for count in counts])
    of_rows = [drafts[row] for row in rows.tolist()]
    logits = thoughtful_logits(rng, len(rows))
    where = (offsets, of_rows) if with_drafts else (None, None)
    result = processor.apply(logits.clone(), rows, *where)
    expected = [
        batch[row].forced(drafts[row][:offset])
        for row, offset in zip(rows.tolist(), offsets.tolist(), strict=True)
    ]
    for index, wanted in enumerate(expected):
        assert forced_of(logits[index], result[index]) == wanted
    sampled = sampler.sample(logits, rows, offsets=where[0], drafts=where[1]).token_ids
    for token, wanted in zip(sampled, expected, strict=True):
        assert wanted is None or token == wanted
    at = 0
    for stream, draft, count in zip(batch, drafts, counts, strict=True):
        of_stream = sampled[at : at + count]
        at += count
        accepted = 0
        while accepted < len(draft) and draft[accepted] == of_stream[accepted]:
            accepted += 1
        # Now and then not all of it is taken, or nothing.
        taken = accepted + 1 if rng.random() < 0.8 else rng.randint(0, accepted + 1)
        stream.output.extend(of_stream[:taken])
    return len(rows) - expected.count(None)


def guess(stream: Stream, rng: random.Random) -> list[int]:
    """Draft tokens that are sometimes right: what will be forced, or any."""
    draft: list[int] = []
    for _ in range(rng.randint(0, 4)):
        forced = stream.forced(draft)
        is_wild = forced is None or rng.random() < 0.2
        draft.append(rng.choice([3, 4, 5, 6]) if is_wild else forced)
    return draft


# The tracker and the counter


def test_long_prompts_are_read_as_short_ones(rng: random.Random) -> None:
    """By array operations; token by token gives the same."""
    for _ in range(300):
        start, end = (rng.choices([3, 4, 5], k=rng.randint(1, 3)) for _ in range(2))
        if contains(start, end) or contains(end, start):
            continue
        prompt = rng.choices([3, 4, 5, 6], k=rng.randint(0, 30))
        tracker = ThoughtTracker.behind(np.array(prompt, np.int32), Mark(start), Mark(end))
        thought = slow_thought(prompt, [], start, end)
        assert tracker.is_inside == (thought is not None)
        assert tracker.length == len(thought or ())


def contains(short: list[int], long: list[int]) -> bool:
    return any(long[at:][: len(short)] == short for at in range(len(long)))


def test_tokens_of_thoughts_are_counted_without_their_marks(rng: random.Random) -> None:
    for _ in range(200):
        output = rng.choices([3, 4, 5, 7, 8, 9], k=rng.randint(0, 40), weights=[4, 4, 1, 4, 4, 4])
        counter = ThoughtCounter(Mark((3, 4)), Mark((7, 8)), is_inside=False)
        total, rest = 0, output
        while rest:
            piece, rest = rest[: (size := rng.randint(1, 3))], rest[size:]
            more = counter.count_thoughts(piece, is_last=not rest)
            assert more >= 0
            total += more
        assert total == slow_count(output, [3, 4], [7, 8])


def slow_count(output: list[int], start: list[int], end: list[int]) -> int:
    count, at = 0, 0
    while at < len(output):
        if output[at : at + 2] != start:
            at += 1
            continue
        at += 2
        while at < len(output) and output[at : at + 2] != end:
            count, at = count + 1, at + 1
        at += 2
    return count
