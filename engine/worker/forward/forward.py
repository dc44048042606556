# SPDX-License-Identifier: Apache-2.0
"""The interface of the classes that compute a step's forward pass, each with another attention.

    in place   the CPU library's kernels read the pool without a copy: `in_place_forward.py`
    gather     torch's attention over gathered blocks, on a CPU without the library (this module)
    kernels    the kernels of `kernels/` over permanent buffers: `kernel_forward.py`
All three take the same `StepInputs` and return the same hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....kernels.attention.gathered_prefill import MIN_ROWS
from ....kernels.cpu.network import CpuNetwork
from ...batch.batch_update import IntArray
from ...models.attention import PagedAttention
from ...models.checkpoint.checkpoint import CPU
from ...models.decoder import Attention, AuxStates, Decoder, Embeds, PictureRows, Plan
from ...models.states.state_plan import StateStep
from ...request.prompt_embeds import EmbedArray
from ...sampling.copies import to_device
from ..block_table import BlockTable
from ..kv_pool import ModelPages
from .attention_metadata import AttentionPlanner
from .grouped_attention import LayerViews


class HostEmbeds(NamedTuple):
    """Input embeddings, in host memory, that replace the token ids of some rows of a step."""

    rows: IntArray
    values: EmbedArray  # [rows, hidden]

    def to(self, device: torch.device) -> Embeds:
        return Embeds(to_device(self.rows, device), to_device(self.values, device))


@dataclass(frozen=True, slots=True)
class LateTokens:
    """Tokens whose ids only the device has, since the previous step still samples them."""

    places: IntArray  # [n] their places in the step
    chosen: Tensor  # int64, on the device
    index: IntArray  # [n] their indices in `chosen`

    def put(self, token_ids: Tensor) -> None:
        """Queue a write of the ids to the step's `token_ids`, after the work that chooses them."""
        index, places = (to_device(array, token_ids.device) for array in (self.index, self.places))
        token_ids.index_copy_(0, places, self.chosen.index_select(0, index))


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The input of one forward pass, in host memory. `[requests]` arrays are in the order of the
    step; `[tokens]` arrays have the tokens of the first request, then those of the second, and so
    on.

    Requests with one token come first, then short chunks, then long chunks, so that each kind is
    contiguous."""

    tables: Sequence[BlockTable]  # one for each cache group
    rows: IntArray  # [requests] of the batch and its block tables
    computed: IntArray  # [requests] tokens that have K and V already
    counts: IntArray  # [requests] tokens to compute after them
    token_ids: IntArray  # [tokens]
    positions: IntArray  # [tokens]
    slots: Sequence[IntArray]  # for each group, [tokens] slots of K and V; -1: not written
    wanted: IntArray | None  # rows of the step whose hidden states are returned; None: all
    embeds: HostEmbeds | Embeds | None = None  # rows whose input is embeddings, not token ids
    aux: AuxStates | None = None  # to store hidden states of inner layers
    late: LateTokens | None = None  # tokens whose ids in `token_ids` are not valid yet
    states: StateStep | None = None  # for layers that carry states
    pictures: PictureRows | None = None  # what pictures change besides `embeds`
    # int32 [tokens]: the slots of the adapters, -1 for none; None: no token has one
    adapters: npt.NDArray[np.int32] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_decodes(self) -> int:
        return int(np.count_nonzero(self.counts == 1))


def step_order(rows: IntArray, counts: IntArray) -> IntArray:
    """Return the order of the requests in a step: single tokens, short chunks, long chunks, each by
    row."""
    return np.lexsort((rows, counts >= MIN_ROWS, counts > 1))


Launch = Callable[[], Tensor]


class StepForward(Protocol):
    """A model over one KV pool."""

    def prepare_step(self, step: StepInputs) -> Launch:
        """Plan a step, and return a function that launches it. The function must be called once,
        before the next `prepare_step`. The function returns hidden states `[len(step.wanted),
        hidden]`, or the hidden states of all tokens if `wanted` is None."""


class GatherForward:
    """A model whose attention torch computes over gathered blocks. The input tensors share memory
    with the step's arrays."""

    def __init__(
        self,
        model: Decoder,
        pages: ModelPages,
        dtype: torch.dtype,
        max_model_len: int,
    ) -> None:
        self._model = model
        spec, layout = model.spec, pages.layout
        views = LayerViews(pages.places, spec.layer_attention)
        # One planner for each view, with the group whose table it reads.
        self._planners = [
            (view.group, AttentionPlanner(layout, dtype, max_model_len, view.window))
            for view in views.views
        ]
        self.max_group_blocks = max(planner.max_group_blocks for _, planner in self._planners)
        attention = PagedAttention(
            pages.tensor,
            layout,
            spec.num_heads,
            self.max_group_blocks,
            spec.attention_scale,
            spec.score_softcap,
        )
        self._plan_of = views.plan_of
        self._attention = views.attention_over(attention)

    def prepare_step(self, step: StepInputs) -> Launch:
        plan = self._plan_of(
            [
                planner.plan_attention(
                    step.tables[group], step.rows, step.computed, step.counts, step.slots[group]
                )
                for group, planner in self._planners
            ]
        )
        return launch_of(self._model, self._attention, plan, step)


def launch_of(
    model: Decoder, attention: Attention[Plan] | CpuNetwork, plan: Plan, step: StepInputs
) -> Launch:
    """Return the function that launches a step on the CPU. Input tensors share memory with the
    step's arrays."""
    token_ids = torch.from_numpy(step.token_ids)
    if step.late is not None:
        step.late.put(token_ids)

    def launch() -> Tensor:
        return model.forward(
            token_ids,
            torch.from_numpy(step.positions),
            attention,
            plan,
            None if step.wanted is None else torch.from_numpy(step.wanted),
            embeds=None if step.embeds is None else step.embeds.to(CPU),
            aux=step.aux,
            states=step.states,
            slots=None if step.adapters is None else torch.from_numpy(step.adapters),
            pictures=step.pictures,
        )

    return launch
