# SPDX-License-Identifier: Apache-2.0
"""The buffers that a step is read from on the device: made once, filled anew for every step.

    step's arrays ──► staging memory of the host ──► buffers of the device ──► model and kernels

A graph keeps the addresses of what it was recorded over, so these never move. Staging memory is
written only after the device has copied what it held before. Rows that only fill up a batch are
nobody's: length 0, slot -1 (nothing is written), the null block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..runtime.device_runtime import DeviceRuntime, Mark
from .forward import StepInputs
from .kernel_attention import Chunks, Decodes, KernelPlan

# The slot of a row that only fills up the batch: nothing is written for it.
_NO_SLOT = -1


class _Buffer(NamedTuple):
    """One array in three views: to write, to copy from, to read on the device."""

    array: npt.NDArray[np.integer]
    staged: Tensor
    there: Tensor


class InputBuffers:
    """Room for steps of up to `max_tokens` tokens of up to `max_requests` requests."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        *,
        max_tokens: int,
        max_requests: int,
        max_blocks: int,
        num_groups: int = 1,
    ) -> None:
        """`max_blocks` is the width of a block table; each cache group has one."""
        self._runtime = runtime

        def make(*shape: int, dtype: torch.dtype = torch.int64) -> _Buffer:
            staged = runtime.staging(shape, dtype)
            there = torch.zeros(shape, dtype=dtype, device=runtime.device)
            return _Buffer(staged.numpy(), staged, there)

        self._token_ids = make(max_tokens)
        self._positions = make(max_tokens)
        # Every token of a prompt whose log-probabilities are asked for, and each request's last.
        self._wanted = make(max_tokens + max_requests)
        self._seq_lens = make(max_requests, dtype=torch.int32)
        self._query_starts = make(max_requests + 1, dtype=torch.int32)
        # Slots and block table of each group.
        self._groups = [
            (make(max_tokens), make(max_requests, max_blocks, dtype=torch.int32))
            for _ in range(num_groups)
        ]
        # Beside each what a row that is nobody's has in it.
        self._by_token = (
            (self._token_ids, 0),
            (self._positions, 0),
            *[(slots, _NO_SLOT) for slots, _ in self._groups],
        )
        self._by_request = (self._seq_lens, *[table for _, table in self._groups])
        self._copied: Mark | None = None

    @property
    def token_ids(self) -> Tensor:
        """int64 `[max_tokens]`, on the device."""
        return self._token_ids.there

    @property
    def positions(self) -> Tensor:
        """int64 `[max_tokens]`, on the device."""
        return self._positions.there

    @property
    def wanted(self) -> Tensor:
        """int64 `[max_tokens + max_requests]`, on the device."""
        return self._wanted.there

    def fill(self, step: StepInputs | None, num_rows: int) -> None:
        """Send a step to the device, filled up with nobody's rows to `num_rows` tokens; None is a
        step of nobody. Only a step of decodes may be filled up."""
        if self._copied is not None:
            self._copied.wait()
        tokens = requests = 0
        if step is not None:
            tokens, requests = step.num_tokens, len(step.rows)
            self._stage(step, tokens, requests)
        padded = requests + num_rows - tokens
        for buffer, nobody in self._by_token:
            buffer.array[tokens:num_rows] = nobody
            _send(buffer, num_rows)
        for buffer in self._by_request:
            buffer.array[requests:padded] = 0
            _send(buffer, padded)
        self._copied = self._runtime.mark()

    def decode_plans(self, num_requests: int) -> list[KernelPlan]:
        """A step of one token for each of the first `num_requests`, in each cache group."""
        return [
            KernelPlan(slots.there[:num_requests], self._decodes(table, num_requests), None)
            for slots, table in self._groups
        ]

    def plans(self, step: StepInputs) -> list[KernelPlan]:
        """The step that was filled in last, in each cache group."""
        decodes, requests = step.num_decodes, len(step.rows)
        if decodes == requests:
            return self.decode_plans(requests)
        seq_lens = self._seq_lens.there[decodes:requests]
        query_starts = self._query_starts.there[: requests - decodes + 1]
        longest = int(step.counts[decodes:].max())
        return [
            KernelPlan(
                slots.there[: step.num_tokens],
                self._decodes(table, decodes) if decodes else None,
                Chunks(table.there[decodes:requests], seq_lens, query_starts, longest),
            )
            for slots, table in self._groups
        ]

    def _decodes(self, table: _Buffer, count: int) -> Decodes:
        return Decodes(table.there[:count], self._seq_lens.there[:count])

    def _stage(self, step: StepInputs, tokens: int, requests: int) -> None:
        self._token_ids.array[:tokens] = step.token_ids
        self._positions.array[:tokens] = step.positions
        lengths = step.computed + step.counts
        self._seq_lens.array[:requests] = lengths
        # Beyond a request's own blocks nothing is read, so only as much as the longest one has.
        width = -(-int(lengths.max()) // step.tables[0].block_size)
        for (slots, blocks), table, given in zip(
            self._groups, step.tables, step.slots, strict=True
        ):
            slots.array[:tokens] = given
            blocks.array[:requests, :width] = table.array[step.rows, :width]
        if step.wanted is not None:
            self._wanted.array[: len(step.wanted)] = step.wanted
            _send(self._wanted, len(step.wanted))
        if tokens > requests:
            chunks = step.counts[step.num_decodes :]
            self._query_starts.array[0] = 0
            np.cumsum(chunks, out=self._query_starts.array[1 : len(chunks) + 1])
            _send(self._query_starts, len(chunks) + 1)


def _send(buffer: _Buffer, count: int) -> None:
    """The first `count` of its first axis, in one piece."""
    buffer.there[:count].copy_(buffer.staged[:count], non_blocking=True)
