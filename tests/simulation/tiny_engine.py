# SPDX-License-Identifier: Apache-2.0
"""The engine core without a model: the real scheduler and the real connector over a pool of bytes.

The worker is the one of the scheduler's tests: it writes a fingerprint of all tokens up to a
position into that position's slot, and checks every slot that it reads. Here the slots are bytes of
a pool that a copy device moves to a slab and back, so a block that was torn, lost or mixed up on
its way is noticed at its first use. Beside it the product's persistent batch follows every step,
and must agree; the product's code also takes in forks, draft tokens and what became of those.
`spoil` has a pass write a number that stands for NaN: whoever attends to it gets no token, and what
it writes itself is no better.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stratakv.connector.messages import ConnectorMetadata
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.offload_worker import OffloadWorker
from stratakv.engine.batch.batch_update import BatchUpdate
from stratakv.engine.cache.kv_cache_manager import KVCacheManager
from stratakv.engine.config.engine_config import SchedulerConfig
from stratakv.engine.models.layer_attention import LayerAttention, full
from stratakv.engine.sampling.sampler import Sampled
from stratakv.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from stratakv.engine.scheduler.scheduler import Scheduler
from stratakv.engine.scheduler.speculation import Speculation
from stratakv.engine.worker.block_table import BlockTable, MultiGroupBlockTable
from stratakv.engine.worker.input_batch import InputBatch
from stratakv.engine.worker.speculation.drafted_rows import DraftedRows
from stratakv.engine.worker.speculation.step_drafts import StepDrafts
from stratakv.engine.worker.step_batch import StepBatch
from stratakv.tiers.block import BlockLayout

from ..engine.scheduler.conftest import (
    EOS,
    SIZE,
    Engine,
    check_copies,
    next_token,
    salted,
)
from ..leftovers import check_ended

LAYOUT = BlockLayout(1, SIZE, 1, 1, "float32")  # 32 bytes: one number of eight for each token


NAN = -1


class InjectedFault(Exception):
    """The worker was to fail."""


class FaultyTable(BlockTable):
    """Refuses a row where `fails` says so."""

    fails: Callable[[], bool]

    def add_row(self, block_ids: Sequence[int], row: int) -> None:
        super().add_row(block_ids, row)
        if self.fails():
            raise InjectedFault("a row was to be refused")


class Rows:
    """What a sampler would keep: which request is in which row, from BatchUpdates alone."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}  # a row's prompt

    def take(self, update: BatchUpdate) -> None:
        for row in update.removed:
            self.held.pop(row, None)
        for added in update.added:
            self.held[added.row] = [int(token) for token in added.prompt_token_ids]
        for source, target in update.moved:
            self.held[target] = self.held.pop(source)


class Slots:
    """A pool of bytes, seen as the numbers in its slots."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = np.zeros((num_blocks, SIZE), np.int64)

    def __setitem__(self, place: tuple[int, int], number: int) -> None:
        self.pool[place] = number


@dataclass
class EngineParts:
    """The two sides of a connector."""

    side: OffloadScheduler
    worker: OffloadWorker


class TinyEngine(Engine):
    """See above. `targets` are pool blocks that loads may be writing to; `pass_time` is called
    before and after what a pass writes."""

    def __init__(
        self,
        parts: EngineParts,
        slots: Slots,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        watermark: float = 0.0,
        fails_with_load: bool = False,
        targets: Callable[[], set[int]] = set,
        pass_time: Callable[[], None] = lambda: None,
        fails: Callable[[], bool] = lambda: False,
        attention: Sequence[LayerAttention] = (full(),),
        speculation: Speculation | None = None,
        drafts: random.Random | None = None,
    ) -> None:
        manager = KVCacheManager(
            len(slots.pool),
            SIZE,
            max_model_len,
            watermark=watermark,
            attention=attention,
            most_step_tokens=config.most_step_tokens,
        )
        scheduler = Scheduler(
            config,
            manager,
            eos_token_ids=frozenset({EOS}),
            connector=parts.side,
            fails_with_load=fails_with_load,
            speculation=speculation,
        )
        super().__init__(scheduler, slots=slots, attention=attention)  # type: ignore[arg-type]
        if drafts is not None:
            self.drafts = drafts
        self._pool = slots.pool
        self.parts = parts
        self._targets = targets
        self._pass_time = pass_time
        tables = [
            FaultyTable(config.max_num_seqs, -(-max_model_len // SIZE), SIZE) for _ in attention
        ]
        for table in tables:
            table.fails = fails
        batch = InputBatch(config.max_num_seqs, max_model_len, MultiGroupBlockTable(tables))
        self._steps = StepBatch(batch)
        sampler: Any = None  # nothing is asked of one where drafts are proposed here
        self._step_drafts = StepDrafts(batch, sampler, None)
        self._rows = Rows()
        self._to_spoil: str | None = None
        self.nan: set[str] = set()  # requests that attended to such a number

    def spoil(self, request_id: str) -> None:
        """The next pass writes NaN to the first slot that it computes for this request."""
        self._to_spoil = request_id

    def may_hold(self, key: bytes, page: bytes) -> bool:
        """Whether these may be the bytes of a block of this key, wherever it lies. Behind the end
        of a prompt anything may stand."""
        assert key[:32] in self.contents, "a block has the key of what was never computed"
        group = int.from_bytes(key[32:34], "little")
        right = [salted(state, group) for state in self.contents[key[:32]]]
        found = np.frombuffer(page, np.int64)[: len(right)].tolist()
        pairs = zip(found, right, strict=True)
        return found == right or all(number in (NAN, wish) for number, wish in pairs)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step, as the model runner does it."""
        self.begin(output)
        result = self.compute(output)
        result.connector_output = self.parts.worker.poll()
        return result

    def compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The pass."""
        positions: dict[str, tuple[int, int]] = {}
        if output.num_scheduled_tokens:
            self.parts.worker.wait_before_forward()
            self._copy(output)
            self._pass_time()
            for request_id, drafts in output.draft_token_ids.items():
                assert 0 < len(drafts) < output.num_scheduled_tokens[request_id]
                self.states[request_id].tokens += drafts
            for request_id, count in output.num_scheduled_tokens.items():
                computed = self._computed[request_id]
                positions[request_id] = (computed, computed + count)
                self._write(request_id, computed, computed + count)
                batch = self._steps.batch
                batch.num_computed[batch.row_of[request_id]] += count
            self._to_spoil = None
            self._pass_time()
        result = ModelRunnerOutput({})
        choosing: dict[str, int] = {}
        for request_id, (_, end) in positions.items():
            state = self._check(request_id, *positions[request_id])
            result.sampled_token_ids[request_id] = []
            if end == len(self.states[request_id].tokens):
                choosing[request_id] = state
        if (
            output.wanted_drafts
            or output.draft_token_ids
            or any(new.fork_of for new in output.new_requests)
        ):
            self._choose_together(output, choosing, result)
            return result
        for request_id, state in choosing.items():
            if state == NAN:
                result.nan_request_ids.add(request_id)
                self.nan.add(request_id)
            else:
                self._append(request_id, next_token(state, self.states[request_id].seed))
                result.sampled_token_ids[request_id] = self.states[request_id].tokens[-1:]
        return result

    def _copy(self, output: SchedulerOutput) -> None:
        if output.block_copies:
            check_copies(output.block_copies, self._targets())
            for each in output.block_copies:
                self._pool[each.target] = self._pool[each.source]
                self.num_copied += 1

    def _choose_together(
        self, output: SchedulerOutput, choosing: Mapping[str, int], result: ModelRunnerOutput
    ) -> None:
        """The tokens of a step with drafts or forks, as the model runner has them chosen.
        `choosing`: the requests that are at their ends, and what their pass has seen there."""
        batch, names = self._steps.batch, list(choosing)
        rows = np.array([batch.row_of[name] for name in names], np.int64)
        rows, places = self._steps.with_forks(output.new_requests, rows, np.arange(len(rows)))
        for new in output.new_requests:
            if new.fork_of:
                assert new.num_computed_tokens == self.states[new.request_id].num_prompt
                seen = self._check(
                    new.request_id, new.num_computed_tokens - 1, new.num_computed_tokens
                )
                assert seen == choosing[new.fork_of], "a fork sees another prompt"
        if not len(rows):
            return
        self._step_drafts.put_drafts(output.draft_token_ids, rows)
        drafted = DraftedRows.of(batch, rows, output.draft_token_ids)
        expected = batch.expect_tokens(rows, drafted.known_index())
        sampled = Sampled([], [], [], {})
        for request, place in zip(expected.requests, places.tolist(), strict=True):
            num_rows = 1 + len(output.draft_token_ids.get(request.request_id, ()))
            for state in self.states[names[place]].fingerprint()[-num_rows:]:
                sampled.token_ids.append(next_token(state, request.params.seed))
                sampled.is_finite.append(choosing[names[place]] != NAN)
                sampled.has_choice.append(True)
        for request, _ in self._step_drafts.take_checked(expected, drafted, sampled, result):
            result.nan_request_ids.add(request.request_id)
            self.nan.add(request.request_id)
        for request in expected.requests:
            name = request.request_id
            drafts, said = output.draft_token_ids.get(name, ()), result.sampled_token_ids[name]
            if drafts or said:
                self.states[name].keep_accepted(len(drafts), said)
        self._propose_drafts(output, result)
        self._step_drafts.propose(output, expected.requests, result)

    def _propose_drafts(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """As `Engine.run` does it, in place of a proposer of the worker's."""
        speculation = self.scheduler.speculation
        for name, most in output.wanted_drafts.items():
            if result.sampled_token_ids.get(name):
                # Where drafts of this step were accepted, the context may have room for fewer.
                most = min(most, self.manager.max_model_len + 1 - len(self.states[name].tokens))
                if speculation is not None and speculation.looks_ahead:
                    self._check_room(name, most)
                if drafts := self.propose(self.states[name], most):
                    result.draft_token_ids[name] = drafts
        for name in output.wanted_drafts.keys() | output.draft_token_ids.keys():
            self.states[name].trim()

    def _append(self, request_id: str, token: int) -> None:
        self.states[request_id].tokens.append(token)
        batch = self._steps.batch
        batch.take_tokens(batch.expect_tokens(np.array([batch.row_of[request_id]])), [token])

    def begin(self, output: SchedulerOutput) -> None:
        """The part of a step that comes before anything can fail."""
        self.parts.worker.start_step(output.connector_meta or ConnectorMetadata())
        self._steps.apply_step(output, self._rows.take)
        self.follow(output)
        self._check_batch()

    def _check_batch(self) -> None:
        """The batch has each request that is in it once, with what belongs to it."""
        batch = self._steps.batch
        in_batch = {name for name, state in self.states.items() if state.in_batch}
        assert batch.row_of.keys() == in_batch
        assert sorted(batch.row_of.values()) == list(range(len(in_batch))), "a row is shared"
        assert self._rows.held.keys() == set(batch.row_of.values())
        for name, row in batch.row_of.items():
            state = self.states[name]
            assert batch.token_ids[row, : len(state.tokens)].tolist() == state.tokens, name
            assert batch.tables.block_ids(row) == tuple(state.tables), name
            if name in self._computed:
                assert batch.num_computed[row] == self._computed[name]
            held = self._rows.held[row]
            assert held == state.tokens[: len(held)], "the sampler takes it for another request"

    def _write(self, request_id: str, start: int, end: int) -> None:
        state = self.states[request_id]
        assert all(len(table) * SIZE >= end for table in state.tables), "a table is too short"
        places = [divmod(position, SIZE) for position in range(start, end)]
        written = {table[index] for table in state.tables for index, _ in places}
        assert written.isdisjoint(self._targets()), "written while a load is writing to it"
        assert 0 not in written
        numbers = state.fingerprint()[start:end]
        is_nan = request_id == self._to_spoil or self._sees_nan(state.tables, start, start)
        for group, table in enumerate(state.tables):
            for (index, offset), number in zip(places, numbers, strict=True):
                self.slots[table[index], offset] = NAN if is_nan else salted(number, group)

    def _held(self, tables: Sequence[Sequence[int]], start: int, end: int) -> list[list[int]]:
        """Of each group what the tokens from `start` on see, up to `end`."""
        held = []
        for table, kind in zip(tables, self.attention, strict=True):
            first = kind.first_seen(start)
            index, offset = divmod(first, SIZE)
            numbers = self._pool[table[index : -(-end // SIZE)]].ravel().tolist()
            held.append(numbers[offset : offset + end - first])
            assert len(held[-1]) == end - first, "a table is too short"
        return held

    def _sees_nan(self, tables: Sequence[Sequence[int]], start: int, end: int) -> bool:
        return any(NAN in held for held in self._held(tables, start, end))

    def _check(self, request_id: str, start: int, end: int) -> int:
        """As of the engine without tiers; NAN for a request that attends to such a number."""
        state = self.states[request_id]
        expected = state.fingerprint()[:end]
        self.note_contents(state, end)
        sees_nan = False
        for group, held in enumerate(self._held(state.tables, start, end)):
            wishes = [salted(number, group) for number in expected[end - len(held) :]]
            if held != wishes:
                right = [number in (NAN, wish) for number, wish in zip(held, wishes, strict=True)]
                assert all(right), f"{request_id} would read what is not its own"
                sees_nan = True
        return NAN if sees_nan else expected[-1]


def is_busy(engine: TinyEngine) -> bool:
    """Whether something is under way that will end by itself."""
    side: Any = engine.parts.side
    return bool(
        engine.scheduler._states.loads.blocking
        or len(side._outgoing)
        or side._loads.under_way
        or side._hierarchy._is_used()
    )


def shut_down(engine: TinyEngine, timeout_seconds: float) -> None:
    """As the engine core does it."""
    parts = engine.parts
    parts.worker.start_step(parts.side.build_meta(engine.manager.pool.resident()))
    parts.worker.shutdown()
    parts.side.update_from_worker(parts.worker.poll())
    parts.side.shutdown(timeout_seconds)
    assert not parts.side._hierarchy._is_used()


def check_nothing_left(engine: TinyEngine) -> None:
    """All requests have ended, and nothing is under way."""
    side: Any = engine.parts.side
    worker: Any = engine.parts.worker
    check_ended(engine.scheduler, side)
    assert not (worker._stores or worker._loads or worker._ahead or worker._torn)
    slab = side._hierarchy._slab
    for key, slot in slab._slots.items():
        page = bytes(slab.buffer(slot.index)[: slab.layout.page_bytes])
        assert engine.may_hold(key, page), "the slab holds wrong bytes"
