# SPDX-License-Identifier: Apache-2.0
"""State by row: after any updates it is that of a batch that came all at once."""

from __future__ import annotations

import numpy as np

from stratakv.engine.batch.batch_update import AddedRow
from stratakv.engine.sampling.row_states import RowStates, RowValues

from .batches import RandomBatch, added, row_of

MAX_ROWS = 9


def seed_of(one: AddedRow) -> int | None:
    return one.params.seed


def test_values_and_states_follow_their_requests(rng):
    batch = RandomBatch(rng, MAX_ROWS, 10)
    values = RowValues(MAX_ROWS, np.float64(-1.0), lambda one: one.params.min_p)
    states = RowStates(MAX_ROWS, seed_of)
    wishes = [{"seed": 3, "min_p": 0.25}, {"seed": 4}, {"min_p": 0.5}]
    for _ in range(300):
        update = batch.change(wishes)
        values.update(update)
        states.update(update)
        expected = [batch.rows[i].params.min_p if i in batch.rows else -1.0 for i in range(9)]
        assert values.values.tolist() == expected
        seeds = {i: one.params.seed for i, one in batch.rows.items() if one.params.seed}
        assert bool(states) == bool(seeds)
        rows = rng.sample(range(MAX_ROWS), 6)
        wanted = [(index, seeds[row]) for index, row in enumerate(rows) if row in seeds]
        assert states.of(np.array(rows)) == wanted


def test_a_state_can_be_given_up_early():
    states = RowStates(MAX_ROWS, seed_of)
    states.update(added(row_of(0, {"seed": 5}), row_of(1, {"seed": 6})))
    states.discard(0)
    assert states.of(np.arange(2)) == [(1, 6)]
    states.discard(1)
    assert not states and states.of(np.arange(2)) == []
