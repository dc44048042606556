# SPDX-License-Identifier: Apache-2.0
"""ExpertMlp: the mixture of experts that a layer has instead of an MLP.

    router    scores of all experts ──► the best experts of each row, and their weights
    experts   rows of each chosen expert ──► its MLP
    mix       results of a row's experts, each times its weight, added up

Rows are sorted by expert, so that the matrices of each expert are read once. On a GPU, one grouped
matrix product computes all experts. The borders of the groups stay on the device, so the product
never waits for the host, and a CUDA graph can capture the step. On the CPU, each expert that has
rows is computed by a separate product, which costs one read of the expert's matrices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.cpu.network import NetworkExperts
from .checkpoint.weights import DenseWeights, ExpertWeights
from .families import Activation
from .layers import DenseMlp, Elementwise, Linear
from .lora.low_rank import Adaptable, LowRank, Target
from .lora.row_slots import RowSlots
from .spec.expert_spec import ExpertSpec

# The dtypes of torch's grouped matrix product.
_GROUPED_TYPES = (torch.bfloat16, torch.float16, torch.float32)
# An adapter's rank in a grouped product is a multiple of this: rows are multiples of 16 bytes.
_RANKS_TOGETHER = 8


class ExpertMlp:
    """The experts of one layer; maps `[rows, hidden]` to `[rows, hidden]`."""

    __slots__ = (
        "_adapters", "_down", "_experts", "_gate_up", "_gated", "_gates_shared", "_router", "_rows",
        "_spec", "record", "shared",
    )  # fmt: skip

    def __init__(
        self,
        spec: ExpertSpec,
        weights: ExpertWeights,
        activation: Activation,
        elementwise: Elementwise,
    ) -> None:
        self._spec = spec
        self._rows: RowSlots | None = None  # None: no row has an adapter
        self._adapters: dict[Target, GroupedAdapters] = {}
        # int32 `[tokens, num_per_token]`: the experts of each row; None: experts are not recorded.
        self.record: Tensor | None = None
        router = weights.router
        self.shared: DenseMlp | None = None
        if weights.shared is not None:
            self.shared = DenseMlp(weights.shared, activation, elementwise)
        self._gates_shared = weights.shared_gate is not None
        if weights.shared_gate is not None:
            # One product for router and shared expert's gate: the last score is the gate's.
            router = torch.cat((router, weights.shared_gate))
        self._router = Linear(router)
        self._gated = elementwise.gated_by(activation)
        self._experts: list[DenseMlp] = []
        self._gate_up: Tensor | None = None
        self._down: Tensor | None = None
        joined, downs = weights.gate_ups, weights.all_downs
        is_grouped = elementwise.is_kernels and weights.router.dtype in _GROUPED_TYPES
        if is_grouped and joined is not None and downs is not None:
            self._gate_up, self._down = joined.transpose(1, 2), downs.transpose(1, 2)
            return
        matrices = zip(weights.gates, weights.ups, weights.downs, strict=True)
        self._experts = [
            DenseMlp(DenseWeights(*three), activation, elementwise) for three in matrices
        ]

    def __call__(self, x: Tensor, /) -> Tensor:
        scores = self._router(x)
        chosen, weights = choose_experts(scores[:, : self._spec.num_experts], self._spec)
        if self.record is not None:
            self.record[: len(x)] = chosen
        experts, order = chosen.view(-1).sort(stable=True)
        rows = x[order // self._spec.num_per_token]
        numbers = torch.arange(self._spec.num_experts, device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        slots = None
        if self._rows is not None and self._rows.slots is not None:
            slots = self._rows.slots[order // self._spec.num_per_token]
        if self._gate_up is None:
            results = self._one_by_one(rows, ends.tolist(), slots)
        else:
            results = self._grouped(rows, ends, slots)
        mixed = mix(results, order, weights)
        if self.shared is None:
            return mixed
        if not self._gates_shared:
            return mixed.add_(self.shared(x))
        return mixed.addcmul_(self.shared(x), scores[:, -1:].sigmoid())

    @property
    def can_record(self) -> bool:
        """Whether a CUDA graph can capture this mixture, that is, whether it never waits for the
        host. Torch accepts group borders on the device for bfloat16 only."""
        return self._gate_up is not None and self._gate_up.dtype is torch.bfloat16

    def in_library(self) -> NetworkExperts | None:
        """Return the experts in the form that the library of `kernels/cpu/` takes, or None if the
        library cannot compute them."""
        if self.shared is not None and not self._gates_shared:
            return None
        router = self._router.packed
        gate_ups = [expert.gate_up for expert in self._experts if expert.gate_up is not None]
        downs = [each.down.packed for each in self._experts if each.down.packed is not None]
        count = self._spec.num_experts
        if router is None or len(gate_ups) < count or len(downs) < count:
            return None
        spec = self._spec
        return NetworkExperts(router, gate_ups, downs, spec.num_per_token, spec.normalises)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        out += self(x)

    def adapted_products(self) -> dict[Target, Adaptable]:
        found: dict[Target, Adaptable] = {}
        if self.shared is not None:
            shared = self.shared.adapted_products()
            found = {
                Target.SHARED_GATE_UP: shared[Target.GATE_UP],
                Target.SHARED_DOWN: shared[Target.DOWN],
            }
        if self._gate_up is not None and self._down is not None:
            self._adapters = {
                Target.EXPERTS_GATE_UP: GroupedAdapters(self, self._gate_up),
                Target.EXPERTS_DOWN: GroupedAdapters(self, self._down),
            }
            return found | self._adapters
        each = [expert.adapted_products() for expert in self._experts]
        for target, own in (
            (Target.EXPERTS_GATE_UP, Target.GATE_UP), (Target.EXPERTS_DOWN, Target.DOWN),
        ):  # fmt: skip
            found[target] = _AllExperts(self, [products[own] for products in each])
        return found

    def follow_rows(self, rows: RowSlots) -> None:
        """Read the adapter slot of each row from `rows`."""
        self._rows = rows

    def _one_by_one(self, rows: Tensor, ends: list[int], slots: Tensor | None) -> Tensor:
        """Compute `[sorted rows, hidden]`, one expert after another; `ends` has the end of each
        expert's rows."""
        results, first = torch.empty_like(rows), 0
        for expert, end in zip(self._experts, ends, strict=True):
            if end > first:
                if slots is None or self._rows is None:
                    results[first:end] = expert(rows[first:end])
                else:
                    with self._rows.replaced(slots[first:end]):
                        results[first:end] = expert(rows[first:end])
            first = end
        return results

    def _grouped(self, rows: Tensor, ends: Tensor, slots: Tensor | None) -> Tensor:
        assert self._gate_up is not None and self._down is not None
        both = F.grouped_mm(rows, self._gate_up, offs=ends)
        if slots is not None:
            self._adapters[Target.EXPERTS_GATE_UP].add_to(both, rows, ends, slots)
        gate, up = both.chunk(2, dim=-1)
        gated = self._gated(gate, up)
        results = F.grouped_mm(gated, self._down, offs=ends)
        if slots is not None:
            self._adapters[Target.EXPERTS_DOWN].add_to(results, gated, ends, slots)
        return results


class _AllExperts:
    """A product (such as gate and up) of all experts, for experts whose matrices are separate."""

    def __init__(self, experts: ExpertMlp, products: list[Adaptable]) -> None:
        self._experts, self._products = experts, products

    def allow_adapters(self, rows: RowSlots, rank: int) -> None:
        self._experts.follow_rows(rows)
        for each in self._products:
            each.allow_adapters(rows, rank)

    def prepare_adapter(self, adapter: LowRank) -> list[Any]:
        return [
            product.prepare_adapter(
                LowRank(adapter.ins[number], tuple([each[number] for each in adapter.outs]))
            )
            for number, product in enumerate(self._products)
        ]

    def put_adapter(self, slot: int, prepared: list[Any] | None) -> None:
        for number, product in enumerate(self._products):
            product.put_adapter(slot, None if prepared is None else prepared[number])


class GroupedAdapters:
    """The adapters of one grouped product. An adapter takes memory only in a slot. A CUDA graph
    cannot capture a step with adapters, since the host decides which are multiplied."""

    def __init__(self, experts: ExpertMlp, weight: Tensor) -> None:
        """`weight` is `[experts, in, out]`."""
        self._experts, self._weight = experts, weight
        self._by_slot: dict[int, tuple[Tensor, Tensor]] = {}

    def allow_adapters(self, rows: RowSlots, rank: int) -> None:
        self._experts.follow_rows(rows)

    def prepare_adapter(self, adapter: LowRank) -> LowRank:
        """Pad the rank, since grouped products need rows whose bytes are a multiple of 16."""
        outs = torch.cat(adapter.outs, 1)
        missing = -adapter.ins.shape[1] % _RANKS_TOGETHER
        return LowRank(F.pad(adapter.ins, (0, 0, 0, missing)), (F.pad(outs, (0, missing)),))

    def put_adapter(self, slot: int, prepared: LowRank | None) -> None:
        self._by_slot.pop(slot, None)
        if prepared is not None:
            ins, outs = (each.to(self._weight) for each in (prepared.ins, prepared.outs[0]))
            self._by_slot[slot] = (ins.transpose(1, 2), outs.transpose(1, 2))

    def add_to(self, out: Tensor, x: Tensor, ends: Tensor, slots: Tensor) -> None:
        """Add the adapters of the sorted rows `x` to `out`; `slots` has the slot of each row."""
        for slot, (ins, outs) in self._by_slot.items():
            inner = F.grouped_mm(x, ins, offs=ends)
            inner.masked_fill_((slots != slot)[:, None], 0)
            out += F.grouped_mm(inner, outs, offs=ends)


def choose_experts(scores: Tensor, spec: ExpertSpec) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row by `scores` `[rows, experts]`. Return the experts of each row,
    int64 `[rows, num_per_token]` with the best first, and their weights in the same shape, in
    float32 or wider."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights, chosen = scores.softmax(-1, wide).topk(spec.num_per_token, -1)
    if spec.normalises:
        weights /= weights.sum(-1, keepdim=True)
    return chosen, weights


def mix(results: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return `[rows, hidden]`: the sum of the weighted results of each row's experts, added in the
    order in which the experts were chosen. `results[i]` belongs to choice `order[i]`, and choice
    `row * num_per_token + j` has weight `weights[row, j]`."""
    by_choice = torch.empty_like(results)
    by_choice[order] = results
    by_row = by_choice.view(*weights.shape, results.shape[-1])
    return (by_row * weights[..., None]).sum(1).to(results.dtype)
