# SPDX-License-Identifier: Apache-2.0
"""InputBuffers: the buffers of a step's input on the device, which are allocated once and filled
for every step.

    step's arrays ──► staging memory of the host ──► buffers of the device ──► model and kernels
    changes of block tables ──► tables of the device, rows of the step ──►

A CUDA graph keeps the addresses of its buffers, so the buffers never move. There are two sets of
staging memory: the host can fill one set while the device still has to copy the other. The host
writes to a set only after the device has copied the set's old content. Padding rows belong to no
request: they have length 0, slot -1 (not written) and the null block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....kernels.attention.split_plan import PlanArray, SplitPlan, SplitPlanner
from ...sampling.copies import to_device
from ..block_table import BlockTable
from ..runtime.device_runtime import DeviceRuntime, Mark
from .forward import StepInputs
from .grouped_attention import View
from .kernel_attention import Chunks, ChunkSize, Decodes, KernelPlan

# The slot of padding rows: their K and V are not written.
_NO_SLOT = -1

_BLOCKS_ALIGNED = 4  # a table row has a multiple of so many block ids, of 4 bytes each

# Sets of staging memory: for the present step and the step before it.
_TURNS = 2


class InputBuffers:
    """Input buffers for steps of up to `max_tokens` tokens of up to `max_requests` requests."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        *,
        max_tokens: int,
        max_requests: int,
        max_blocks: int,
        views: Sequence[View] = (View(0, None),),
        split_planner: SplitPlanner | None = None,
    ) -> None:
        """`max_blocks` is the minimum width of the block tables; there is one table for each cache
        group. `views` are the model's views (see `grouped_attention.py`). `split_planner` plans how
        programs share the contexts of decodes (None: no plan is needed)."""
        self._runtime = runtime
        self._views = tuple(views)
        # Table rows are aligned to 16 bytes. Triton would compile kernels again for other
        # alignments, and a step's chunks may begin in any row.
        max_blocks = -(-max_blocks // _BLOCKS_ALIGNED) * _BLOCKS_ALIGNED

        def make(size: int, dtype: torch.dtype = torch.int64) -> _Buffer:
            staged = tuple([runtime.staging((size,), dtype) for _ in range(_TURNS)])
            there = torch.zeros(size, dtype=dtype, device=runtime.device)
            return _Buffer(tuple([tensor.numpy() for tensor in staged]), staged, there)

        self._token_ids = make(max_tokens)
        self._positions = make(max_tokens)
        # For all tokens of prompts with log-probabilities, and the last token of each request.
        self._wanted = make(max_tokens + max_requests)
        self._seq_lens = make(max_requests, dtype=torch.int32)
        self._query_starts = make(max_requests + 1, dtype=torch.int32)
        self._rows = make(max_requests)
        # Slots and block table of each group.
        self._groups = [
            (make(max_tokens), _DeviceTable(runtime.device, max_requests, max_blocks))
            for _ in range(1 + max(view.group for view in views))
        ]
        self._splits = [
            None
            if split_planner is None
            else _Splits(split_planner, max_requests, view.window, make)
            for view in views
        ]
        # Buffers by token, with the value for rows of padding.
        self._by_token = (
            (self._token_ids, 0),
            (self._positions, 0),
            *[(slots, _NO_SLOT) for slots, _ in self._groups],
        )
        self._turn = 0
        self._copied: list[Mark | None] = [None] * _TURNS  # one mark after the copies of each set

    @property
    def token_ids(self) -> Tensor:
        """Token ids, int64 `[max_tokens]`, on the device."""
        return self._token_ids.there

    @property
    def positions(self) -> Tensor:
        """Positions, int64 `[max_tokens]`, on the device."""
        return self._positions.there

    @property
    def wanted(self) -> Tensor:
        """Rows of the step whose hidden states are returned: int64 `[max_tokens + max_requests]`,
        on the device."""
        return self._wanted.there

    def fill(self, step: StepInputs | None, num_rows: int, num_requests: int | None = None) -> None:
        """Copy a step's input to the device, padded to `num_rows` tokens. By default, each padding
        token is a request of its own. With `num_requests`, which is given for chunks, the step has
        this number of requests instead, and the padding follows the last one's tokens. If `step` is
        None, all rows are padding."""
        self._turn = (self._turn + 1) % _TURNS
        if (copied := self._copied[self._turn]) is not None:
            copied.wait()
        tokens = requests = 0
        if step is not None:
            tokens, requests = step.num_tokens, len(step.rows)
            self._stage(step, tokens, requests)
        padded = requests + num_rows - tokens if num_requests is None else num_requests
        for buffer, padding in self._by_token:
            buffer.arrays[self._turn][tokens:num_rows] = padding
            self._copy_to_device(buffer, num_rows)
        lengths = self._seq_lens.arrays[self._turn]
        lengths[requests:padded] = 0
        self._copy_to_device(self._seq_lens, padded)
        if num_requests is None:
            decodes = padded if step is None else padded - requests + step.num_decodes
            self._plan_splits(lengths[:decodes])
        self._lay_down_tables(step, requests, padded)
        if step is not None and step.late is not None:
            step.late.put(self.token_ids)
        self._copied[self._turn] = self._runtime.mark()

    def decode_plans(self, num_requests: int) -> list[KernelPlan]:
        """Return the plan of each view for a step with one token for each of the first
        `num_requests` requests."""
        plans = []
        for view, (group, window) in enumerate(self._views):
            slots, table = self._groups[group]
            decodes = self._decodes(view, table, num_requests)
            plans.append(KernelPlan(slots.there[:num_requests], decodes, None, window))
        return plans

    def chunk_plans(self, num_tokens: int) -> list[KernelPlan]:
        """Return the plan of each view for a step with one chunk of up to `num_tokens` tokens."""
        lengths, starts = self._seq_lens.there[:1], self._query_starts.there[:2]
        plans = []
        for group, window in self._views:
            slots, table = self._groups[group]
            chunks = Chunks(table.rows[:1], lengths, starts, num_tokens)
            plans.append(KernelPlan(slots.there[:num_tokens], None, chunks, window))
        return plans

    def plans(self, step: StepInputs) -> list[KernelPlan]:
        """Return the plan of each view for the step that the last `fill` copied."""
        decodes, requests = step.num_decodes, len(step.rows)
        if decodes == requests:
            return self.decode_plans(requests)
        seq_lens = self._seq_lens.there[decodes:requests]
        query_starts = self._query_starts.there[: requests - decodes + 1]
        counts = step.counts[decodes:]
        lengths = (step.computed[decodes:] + counts).tolist()
        sizes = [ChunkSize(*size) for size in zip(counts.tolist(), lengths, strict=True)]
        longest = int(counts.max())
        plans = []
        for view, (group, window) in enumerate(self._views):
            slots, table = self._groups[group]
            singles = self._decodes(view, table, decodes) if decodes else None
            tables = table.rows[decodes:requests]
            chunks = Chunks(tables, seq_lens, query_starts, longest, sizes)
            plans.append(KernelPlan(slots.there[: step.num_tokens], singles, chunks, window))
        return plans

    def _decodes(self, view: int, table: _DeviceTable, count: int) -> Decodes:
        splits = self._splits[view]
        plan = None if splits is None else splits.view_device_plan(count)
        return Decodes(table.rows[:count], self._seq_lens.there[:count], plan)

    def _plan_splits(self, lengths: npt.NDArray[np.integer]) -> None:
        if len(lengths):
            for splits in self._splits:
                if splits is not None and splits.lay_down(lengths, self._turn):
                    self._copy_to_device(splits.buffer, len(splits.buffer.there))

    def _stage(self, step: StepInputs, tokens: int, requests: int) -> None:
        turn = self._turn
        self._token_ids.arrays[turn][:tokens] = step.token_ids
        self._positions.arrays[turn][:tokens] = step.positions
        self._seq_lens.arrays[turn][:requests] = step.computed + step.counts
        self._rows.arrays[turn][:requests] = step.rows
        self._copy_to_device(self._rows, requests)
        for (slots, _), given in zip(self._groups, step.slots, strict=False):
            slots.arrays[turn][:tokens] = given
        if step.wanted is not None:
            self._wanted.arrays[turn][: len(step.wanted)] = step.wanted
            self._copy_to_device(self._wanted, len(step.wanted))
        if tokens > requests:
            chunks = step.counts[step.num_decodes :]
            starts = self._query_starts.arrays[turn]
            starts[0] = 0
            np.cumsum(chunks, out=starts[1 : len(chunks) + 1])
            self._copy_to_device(self._query_starts, len(chunks) + 1)

    def _lay_down_tables(self, step: StepInputs | None, requests: int, padded: int) -> None:
        width = 0
        if step is not None:
            longest = int((step.computed + step.counts).max())
            width = -(-longest // step.tables[0].block_size)
        rows = self._rows.there[:requests]
        for index, (_, table) in enumerate(self._groups):
            if step is not None:
                table.upload_changes(step.tables[index])
            table.lay_down(rows, width, padded)

    def _copy_to_device(self, buffer: _Buffer, count: int) -> None:
        """Queue one copy of the first `count` values to the device."""
        staged = buffer.staged[self._turn]
        buffer.there[:count].copy_(staged[:count], non_blocking=True)


class _Buffer(NamedTuple):
    """A buffer on the device, and its arrays in staging memory, one for each of the two sets."""

    arrays: tuple[npt.NDArray[np.integer], ...]
    staged: tuple[Tensor, ...]
    there: Tensor


class _DeviceTable:
    """The block table of one cache group on the device, by rows of the batch and by rows of the
    step."""

    def __init__(self, device: torch.device, max_requests: int, max_blocks: int) -> None:
        shape = max_requests, max_blocks
        self.rows = torch.zeros(shape, dtype=torch.int32, device=device)
        self._batch = torch.zeros(shape, dtype=torch.int32, device=device)

    def upload_changes(self, table: BlockTable) -> None:
        """Copy the changed entries of the host's table to the device."""
        rows, places, blocks = table.take_changes(self)
        if len(rows):
            there = [to_device(array, self._batch.device) for array in (rows, places, blocks)]
            self._batch.index_put_((there[0], there[1]), there[2])

    def lay_down(self, rows: Tensor, width: int, padded: int) -> None:
        """Copy the first `width` blocks of the batch's `rows` to the first rows of the step. Set
        the following rows of the step, up to `padded`, to zero."""
        # Kernels read no block after a request's own blocks.
        self.rows[: len(rows), :width].copy_(self._batch[:, :width].index_select(0, rows))
        self.rows[len(rows) : padded].zero_()


class _Splits:
    """The split plan of one view: how programs share the contexts of decodes. The plan is copied to
    the device again only if the number of tiles of a request changes."""

    def __init__(
        self,
        planner: SplitPlanner,
        max_requests: int,
        window: int | None,
        make: Callable[[int, torch.dtype], _Buffer],
    ) -> None:
        self.buffer = make(planner.num_words(max_requests), torch.int32)
        self._planner, self._window = planner, window
        self._array = PlanArray(planner, max_requests)
        self._tiles = b""  # of the plan on the device

    def lay_down(self, lengths: npt.NDArray[np.integer], turn: int) -> bool:
        """Write the plan for these request lengths to staging memory. Return False if the device
        has the same plan already."""
        tiles = self._planner.tiles(lengths, self._window)
        if tiles.tobytes() == self._tiles:
            return False
        self._tiles = tiles.tobytes()
        self._array.lay_down(self.buffer.arrays[turn], tiles)
        return True

    def view_device_plan(self, count: int) -> SplitPlan:
        """Return the plan of the first `count` requests, on the device."""
        return self._array.view_plan(self.buffer.there, count)
