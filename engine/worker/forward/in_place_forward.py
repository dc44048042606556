# SPDX-License-Identifier: Apache-2.0
"""Forward passes on the CPU whose attention reads the KV pool without gathering, by the library of
`kernels/cpu/`.

This attention needs no padding: for each request it reads a row of the block table, the length, and
the request's rows of the step. One call computes all layers of a model. If the library cannot
compute a part of the model, each layer calls it to write new K and V and to compute attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....kernels.cpu.network import MAX_VIEWS
from ....kernels.cpu.paged_attention import CpuAttentionStep, reason_against
from ....kernels.cpu.workspace import Workspace
from ....tiers.block import BlockLayout
from ...batch.batch_update import IntArray
from ...models.decoder import Decoder
from ...models.dtypes import pool_dtype
from ..block_table import BlockTable
from ..kv_pool import ModelPages
from .forward import Launch, StepInputs, launch_of
from .grouped_attention import LayerViews


def reason_against_in_place(layout: BlockLayout, compute: torch.dtype) -> str | None:
    """Return why the library cannot compute attention over a pool with `layout`; None if it can."""
    return reason_against(compute, layout.head_dim, pool_dtype=pool_dtype(layout.kv_dtype))


@dataclass(frozen=True, slots=True)
class InPlacePlan:
    """The attention plan of a step, for all layers of a view."""

    step: CpuAttentionStep


class InPlacePlanner:
    """Plans the attention of steps over one KV pool."""

    def __init__(
        self,
        pool: Tensor,
        num_heads: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        """`pool` is `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`. `window` is
        the number of positions that a token sees, including its own (None: all). `softcap` is the
        bound of attention scores (None: no bound). Several planners may share a workspace, since
        layers are computed one by one."""
        self._layer = pool[:, 0]
        self._num_heads, self._scale = num_heads, scale
        self._window, self._softcap = window, softcap
        self._workspace = Workspace() if workspace is None else workspace

    def plan_in_place(
        self,
        table: BlockTable,
        rows: IntArray,
        computed: IntArray,
        counts: IntArray,
        slots: IntArray,
    ) -> InPlacePlan:
        """Plan a step in which each of `rows` of the batch has `computed` tokens already and
        computes `counts` tokens. The tokens of the step and the `slots` of their K and V are in the
        order of `rows`."""
        lengths = computed + counts
        width = -(-int(lengths.max()) // table.block_size)
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        return InPlacePlan(
            CpuAttentionStep(
                self._layer,
                # A copy, because the batch may change while the step is computed.
                torch.from_numpy(table.array[rows, :width]),
                torch.from_numpy(lengths.astype(np.int32)),
                torch.from_numpy(starts),
                num_tokens=len(slots),
                num_heads=self._num_heads,
                scale=self._scale,
                workspace=self._workspace,
                window=self._window,
                softcap=self._softcap,
                slots=torch.from_numpy(slots),
            )
        )


class InPlaceAttention:
    """The attention of one model over one KV pool, by one call of the library for each layer."""

    def __init__(self, pool: Tensor) -> None:
        """`pool` has the shape `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`"""
        self._layers = [pool[:, layer] for layer in range(pool.shape[1])]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: InPlacePlan) -> Tensor:
        """Write `k` and `v` `[tokens, kv heads, head_dim]` to the pool, then compute attention for
        `q` `[tokens, heads, head_dim]`. Return `[tokens, heads * head_dim]`."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        plan.step.run(q, self._layers[layer], out, (k, v))
        return out.view(len(q), -1)


class InPlaceForward:
    """A model whose attention reads the KV pool without gathering. The input tensors share memory
    with the step's arrays."""

    def __init__(self, model: Decoder, pages: ModelPages) -> None:
        self._model = model
        spec, pool = model.spec, pages.tensor
        views = LayerViews(pages.places, spec.layer_attention)
        workspace = Workspace()
        pools = [pool[:, place] for _, place in views.places]
        self._network = None
        if len(views.views) <= MAX_VIEWS:
            self._network = model.in_library(pools, [view for view, _ in views.places])
        # One planner for each view, with the group whose table it reads.
        self._planners = [
            (
                view.group,
                InPlacePlanner(
                    pool,
                    spec.num_heads,
                    spec.attention_scale,
                    view.window,
                    spec.score_softcap,
                    workspace,
                ),
            )
            for view in views.views
        ]
        self._plan_of = views.plan_of
        self._attention = views.attention_over(InPlaceAttention(pool))

    def prepare_step(self, step: StepInputs) -> Launch:
        plans = [
            planner.plan_in_place(
                step.tables[group], step.rows, step.computed, step.counts, step.slots[group]
            )
            for group, planner in self._planners
        ]
        if self._network is None or step.pictures is not None:
            return launch_of(self._model, self._attention, self._plan_of(plans), step)
        return launch_of(self._model, self._network, [plan.step for plan in plans], step)
