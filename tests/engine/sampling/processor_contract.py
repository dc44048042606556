# SPDX-License-Identifier: Apache-2.0
"""The promise of `LogitsProcessor` as a function that every implementation has to pass."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from stratakv.engine.sampling.processors.base import LogitsProcessor, ProcessorContext

from .batches import RandomBatch, added, row_of

MAX_ROWS = 8
CONTEXT = ProcessorContext(max_rows=MAX_ROWS, vocab_size=20, eos_token_ids=(2, 3))
PLAIN: dict[str, Any] = {"temperature": 1.0}


def check_processor(
    make: Callable[[ProcessorContext], LogitsProcessor],
    wishes: Sequence[dict[str, Any]],
    rng: random.Random,
    *,
    steps: int = 150,
) -> None:
    """`wishes` are sampling parameters each of which asks this processor for something, at the
    latest after a few tokens."""
    _does_something(make(CONTEXT), wishes, rng)
    _follows_its_requests(make, wishes, rng, steps)
    _forgets(make(CONTEXT), wishes, rng)
    check_drafts(make, wishes, rng, steps)


def _logits(rng: random.Random, num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    logits = torch.randn(num_rows, CONTEXT.vocab_size, generator=generator, dtype=torch.float64)
    return (3 * logits).to(dtype)


def _does_something(
    processor: LogitsProcessor, wishes: Sequence[dict[str, Any]], rng: random.Random
) -> None:
    """Each wish changes its row, for both types, and lifts no ban; a processor that calls itself
    argmax-invariant leaves the best where it was."""
    for wish in wishes:
        processor.update_state(added(row_of(5, wish, prompt=(4, 5, 6), output=(5, 6))))
        assert processor.is_active
        for dtype in (torch.float32, torch.float64):
            logits = _logits(rng, 1, dtype)
            result = processor.apply(logits.clone(), np.array([5]))
            assert result.shape == logits.shape and result.dtype == dtype
            assert not torch.equal(result, logits)
            logits[0, 7::3] = -torch.inf
            result = processor.apply(logits.clone(), np.array([5]))
            assert bool((result[0, 7::3] == -torch.inf).all())
            if processor.is_argmax_invariant:
                assert torch.equal(result.argmax(-1), logits.argmax(-1))


def _follows_its_requests(
    make: Callable[[ProcessorContext], LogitsProcessor],
    wishes: Sequence[dict[str, Any]],
    rng: random.Random,
    steps: int,
) -> None:
    """After any updates it does what one does that was told of the same rows all at once; plain
    rows come back bit for bit; logits that are not given stay as they are."""
    processor = make(CONTEXT)
    batch = RandomBatch(rng, MAX_ROWS, CONTEXT.vocab_size)
    for _ in range(steps):
        processor.update_state(batch.change([*wishes, PLAIN]))
        fresh = make(CONTEXT)
        fresh.update_state(batch.now())
        rows = np.array(rng.sample(sorted(batch.rows), rng.randint(0, len(batch.rows))), np.int64)
        whole = _logits(rng, len(rows) + 1)
        before = whole.clone()
        expected = fresh.apply(before[:-1].clone(), rows) if fresh.is_active else before[:-1]
        result = processor.apply(whole[:-1], rows) if processor.is_active else whole[:-1]
        assert torch.equal(result, expected)
        assert torch.equal(whole[-1], before[-1])
        plain = [not _asks(batch.rows[row].params, wishes) for row in rows.tolist()]
        assert torch.equal(result[plain].view(torch.int32), before[:-1][plain].view(torch.int32))
        _does_not_look_at_other_rows(processor, rows, before[:-1], result)
        batch.grow()


def _asks(params: object, wishes: Sequence[dict[str, Any]]) -> bool:
    return any(all(getattr(params, k) == v for k, v in wish.items()) for wish in wishes)


def _does_not_look_at_other_rows(
    processor: LogitsProcessor, rows: np.ndarray, logits: torch.Tensor, result: torch.Tensor
) -> None:
    for index in range(len(rows)):
        one = slice(index, index + 1)
        assert torch.equal(processor.apply(logits[one].clone(), rows[one]), result[one])


def _forgets(
    processor: LogitsProcessor, wishes: Sequence[dict[str, Any]], rng: random.Random
) -> None:
    """Nothing is kept of rows that are gone."""
    batch = RandomBatch(rng, MAX_ROWS, CONTEXT.vocab_size)
    watched = []
    for _ in range(20):
        processor.update_state(batch.change(wishes))
        watched += [weakref.ref(one.output_token_ids) for one in batch.rows.values()]
    processor.update_state(batch.clear())
    assert not processor.is_active
    gc.collect()
    assert watched and all(reference() is None for reference in watched)


def check_drafts(
    make: Callable[[ProcessorContext], LogitsProcessor],
    wishes: Sequence[dict[str, Any]],
    rng: random.Random,
    steps: int,
) -> None:
    """A row behind draft tokens becomes what it does where they are the end of the output, bit for
    bit in float64, and nothing of them is kept."""
    processor = make(CONTEXT)
    batch = RandomBatch(rng, MAX_ROWS, CONTEXT.vocab_size)
    for _ in range(steps):
        processor.update_state(batch.change([*wishes, PLAIN]))
        rows, offsets, drafts = draft_rows(batch, rng)
        logits = _logits(rng, len(rows), torch.float64)
        without = processor.apply(logits.clone(), rows)
        result = processor.apply(logits.clone(), rows, offsets, drafts)
        for index, row in enumerate(rows.tolist()):
            one = batch.rows[row]
            output = [*one.output_token_ids, *drafts[index][: offsets[index]]]
            really = make(CONTEXT)
            really.update_state(added(one._replace(row=0, output_token_ids=output)))
            expected = really.apply(logits[index : index + 1].clone(), np.array([0]))
            assert torch.equal(result[index : index + 1], expected)
        assert torch.equal(processor.apply(logits.clone(), rows), without)
        assert torch.equal(processor.apply(logits.clone(), rows, 0 * offsets, drafts), without)
        batch.grow()


def draft_rows(
    batch: RandomBatch, rng: random.Random
) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Rows of logits in any order: none, one or several for each row of the batch."""
    found: list[tuple[int, int, list[int]]] = []
    for row in batch.rows:
        # Few ids, so that sequences complete, and one that no vocabulary has.
        draft = [rng.choice([2, 4, 5, 6, 6, 8, 999]) for _ in range(rng.randint(0, 5))]
        offsets = rng.sample(range(len(draft) + 1), rng.randint(0, len(draft) + 1))
        found += [(row, offset, draft) for offset in offsets]
    rng.shuffle(found)
    rows, offsets = (np.array([one[i] for one in found], np.int64) for i in (0, 1))
    return rows, offsets, [one[2] for one in found]
