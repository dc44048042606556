# SPDX-License-Identifier: Apache-2.0
"""The persistent batch under random changes, seen through its arrays and through its updates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.engine.batch.batch_update import BatchUpdate
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.worker.block_table import BlockTable, MultiGroupBlockTable
from stratakv.engine.worker.input_batch import InputBatch, WorkerRequest

MAX_ROWS = 6


def make_batch(max_model_len: int = 32) -> InputBatch:
    return InputBatch(MAX_ROWS, max_model_len, MultiGroupBlockTable([BlockTable(MAX_ROWS, 8, 4)]))


def request(name: str, prompt: list[int], output: list[int] | None = None) -> WorkerRequest:
    return WorkerRequest(name, np.array(prompt, np.int32), SamplingParams(), output or [])


class Follower:
    """A reader that knows the batch only through its updates."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}

    def update(self, update: BatchUpdate | None) -> None:
        if update is None:
            return
        assert list(update.removed) == sorted(update.removed, reverse=True)
        for row in update.removed:
            self.outputs.pop(row, None)
        for one in update.added:
            self.outputs[one.row] = one.output_token_ids
        for source, target in update.moved:
            self.outputs[target] = self.outputs.pop(source)
        assert len(self.outputs) == update.batch_size


def test_a_row_that_is_held_keeps_what_its_draft_model_lacks() -> None:
    batch = make_batch()
    batch.add(request("a", [1, 2, 3, 4, 5, 6]), ([1, 2],), 4)
    batch.num_computed[0], batch.num_draft_computed[0] = 6, 5
    batch.refill(batch.held_rows())
    batch.condense_rows()
    assert (batch.num_computed[0], batch.num_draft_computed[0]) == (6, 5)


@given(
    st.lists(
        st.tuples(
            st.sets(st.integers(0, 11), max_size=4), st.lists(st.integers(0, 11), max_size=4)
        ),
        max_size=12,
    )
)
def test_any_order_of_changes_keeps_rows_dense_and_readers_in_step(steps):
    batch, follower = make_batch(), Follower()
    alive: dict[str, WorkerRequest] = {}
    for removed, new in steps:
        for number in removed:
            batch.remove_request(str(number))
            alive.pop(str(number), None)
        for number in new:
            name = str(number)
            if name not in alive and len(alive) < MAX_ROWS:
                alive[name] = request(name, [number] * (number + 1), [number])
                batch.add(alive[name], ([number, number + 1],), number)
        follower.update(batch.condense_rows())
        assert sorted(batch.row_of.values()) == list(range(len(alive))) == sorted(follower.outputs)
        for name, row in batch.row_of.items():
            number = int(name)
            assert batch.requests[row] is alive[name]
            assert follower.outputs[row] is alive[name].output_token_ids
            assert batch.num_computed[row] == number
            assert batch.tables[0].view_row(row).tolist() == [number, number + 1]
            tokens = batch.token_ids[row, : batch.num_tokens[row]]
            assert tokens.tolist() == [number] * (number + 2)


def test_a_hole_is_filled_by_a_new_request_before_anything_moves():
    batch = make_batch()
    for name in "abc":
        batch.add(request(name, [1]), ([1],), 0)
    batch.condense_rows()
    batch.remove_request("b")
    batch.remove_request("a")
    batch.add(request("d", [2]), ([2],), 0)
    update = batch.condense_rows()
    assert update is not None
    assert batch.row_of == {"d": 0, "c": 1}
    assert [one.row for one in update.added] == [0]
    assert [(m.source, m.target) for m in update.moved] == [(2, 1)]
    assert list(update.removed) == []


def append(batch: InputBatch, row: int, token: int) -> None:
    batch.take_tokens(batch.expect_tokens(np.array([row])), [token])


def test_sampled_tokens_reach_the_row_and_the_request():
    batch = make_batch(max_model_len=4)
    one = request("a", [1, 2], [7])
    row = batch.add(one, ([1],), 0)
    append(batch, row, 8)
    assert batch.token_ids[row].tolist() == [1, 2, 7, 8]
    # The context is full: the token counts, and is never computed.
    append(batch, row, 9)
    assert one.output_token_ids == [7, 8, 9]
    assert batch.num_tokens[row] == 5


def test_what_the_batch_has_no_room_for_is_refused():
    batch = make_batch(max_model_len=4)
    with pytest.raises(ValueError, match="has 5 tokens and the batch holds at most 4"):
        batch.add(request("a", [1] * 5), ([1],), 0)
    for i in range(MAX_ROWS):
        batch.add(request(str(i), [1]), ([1],), 0)
    with pytest.raises(ValueError, match="request 0 is in the batch already"):
        batch.add(request("0", [1]), ([1],), 0)
    with pytest.raises(ValueError, match="full with 6 requests"):
        batch.add(request("x", [1]), ([1],), 0)
    batch.condense_rows()
    batch.remove_request("5")
    with pytest.raises(ValueError, match="row 5 of the batch is empty"):
        append(batch, 5, 1)


def test_tokens_that_are_expected_find_their_requests_wherever_they_are():
    """They have moved, left, or left with another one of the same id in their place."""
    batch = make_batch()
    names = ["gone", "moves", "replaced", "stays"]
    requests = {name: request(name, [1, 2]) for name in names}
    for one in requests.values():
        batch.add(one, ([1],), 2)
    batch.condense_rows()
    expected = batch.expect_tokens(np.array([3, 2, 1, 0]))
    assert batch.num_tokens[:4].tolist() == [3] * 4
    assert batch.expected_index[:4].tolist() == [3, 2, 1, 0]
    batch.remove_request("gone")
    batch.remove_request("replaced")
    heir = request("replaced", [5, 6, 7])
    row = batch.add(heir, ([2],), 0)
    batch.condense_rows()
    assert batch.expected_index[row] == -1
    assert batch.expected_index[batch.row_of["moves"]] == 2
    batch.take_tokens(expected, [40, 30, 20, 10])
    assert [requests[name].output_token_ids for name in names] == [[10], [20], [30], [40]]
    for name, token in (("moves", 20), ("stays", 40)):
        assert batch.token_ids[batch.row_of[name], :3].tolist() == [1, 2, token]
    assert batch.token_ids[row, :3].tolist() == [5, 6, 7]
    assert heir.output_token_ids == []
    assert (batch.expected_index == -1).all()


def test_a_token_that_does_not_come_leaves_nothing():
    batch = make_batch()
    requests = [request(name, [1, 2]) for name in "abc"]
    for one in requests:
        batch.add(one, ([1],), 2)
    batch.condense_rows()
    batch.take_tokens(batch.expect_tokens(np.arange(3)), [7, 8, 9], [1])
    assert [one.output_token_ids for one in requests] == [[7], [], [9]]
    assert batch.num_tokens[:3].tolist() == [3, 2, 3]
