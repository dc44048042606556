# SPDX-License-Identifier: Apache-2.0
"""Makes the low-rank additions to the matrix products of each layer from the modules of an adapter.

`checkpoint/weights.py` joins, splits and reorders the matrices of a layer; for example, queries,
keys and values become one matrix. Only output rows are moved, so the same code converts `lora_B`:
it reads `[out, rank]` where a model has `[out, in]`. Modules with the same input become one
product, in which each module has its own ranks. The output rows of a tensor without an adapter are
0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..checkpoint.checkpoint import CPU
from ..checkpoint.tensor_shapes import (
    ATTENTION_OUT,
    EXPERT,
    EXPERTS_DOWN,
    EXPERTS_GATE_UP,
    STATE_OUT,
    in_layer,
    layer_tensors,
)
from ..checkpoint.weights import LayerReader
from ..model_spec import ModelSpec
from .adapted_names import (
    MLP_DOWN,
    MLP_IN,
    QKV_IN,
    SHARED_DOWN,
    SHARED_IN,
    STATES_IN,
    WITH_ONE_INPUT,
)
from .adapter_file import AdapterFile, Module
from .low_rank import LayerAdapter, LowRank, Target


def _block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    made = blocks[0].new_zeros(sum(map(len, blocks)), sum(each.shape[1] for each in blocks))
    row = column = 0
    for each in blocks:
        made[row : row + len(each), column : column + each.shape[1]] = each
        row, column = row + len(each), column + each.shape[1]
    return made


def layer_adapters(file: AdapterFile, spec: ModelSpec, dtype: torch.dtype) -> list[LayerAdapter]:
    """Return the additions of an adapter to each layer, in `dtype`."""
    return [
        _LayerMaker(file.modules, spec, layer, dtype).make() for layer in range(spec.num_layers)
    ]


class _Columns:
    """A source of tensors `[out, ranks]` for `LayerReader`, instead of a model's `[out, in]`."""

    device = CPU

    def __init__(
        self, modules: Mapping[str, Module], spec: ModelSpec, layer: int, dtype: torch.dtype
    ) -> None:
        self._shapes = {
            in_layer(layer, name): shape for name, shape in layer_tensors(spec, layer).items()
        }
        self._modules = modules
        self._dtype = dtype
        self._columns: dict[str, tuple[int, int]] = {}  # name → first column, columns in all
        for group in WITH_ONE_INPUT:
            names = [in_layer(layer, name) for name in group]
            firsts, total = {}, 0
            for name in names:
                if name in modules:
                    firsts[name], total = total, total + len(modules[name].ins)
            for name in names:
                self._columns[name] = (firsts.get(name, 0), total)

    def ins_of(self, names: Iterable[str]) -> Tensor | None:
        """Return the joined `lora_A`, `[ranks, in]`, of modules with one input, or None."""
        parts = [
            self._modules[name].ins.to(torch.float64) * self._modules[name].scale
            for name in names
            if name in self._modules
        ]
        return torch.cat(parts).to(self._dtype) if parts else None

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        rows = self._shapes[name][0]
        if name not in self._columns:  # a bias; no adapter changes a bias
            return torch.zeros(self._shapes[name], dtype=dtype)
        first, total = self._columns[name]
        made = torch.zeros(rows, total, dtype=dtype)
        if (module := self._modules.get(name)) is not None:
            made[:, first : first + len(module.ins)] = module.outs
        return made

    def has_tensor(self, name: str) -> bool:
        return name in self._shapes


class _LayerMaker:
    """The maker of an adapter's additions to one layer."""

    def __init__(
        self, modules: Mapping[str, Module], spec: ModelSpec, layer: int, dtype: torch.dtype
    ) -> None:
        self._modules, self._spec, self._layer, self._dtype = modules, spec, layer, dtype
        self._columns = _Columns(modules, spec, layer, dtype)
        self._reader = LayerReader(self._columns, spec, dtype, layer)

    def make(self) -> LayerAdapter:
        made: dict[Target, LowRank] = {}
        spec, layer, reader = self._spec, self._layer, self._reader
        if (ins := self._ins(QKV_IN)) is not None:
            made[Target.QKV] = LowRank(ins, (reader.qkv("weight"),))
            if spec.family.gates_attention:
                gate = reader.gated_queries("weight")[1].contiguous()
                made[Target.ATTENTION_GATE] = LowRank(ins, (gate,))
        if (ins := self._ins(STATES_IN)) is not None:
            made[Target.STATE_IN] = LowRank(ins, (reader.state_in(),))
        self._add_out(made)
        if spec.has_experts(layer):
            self._add_experts(made)
            for target, names, parts in (
                (Target.SHARED_GATE_UP, SHARED_IN, reader.shared_gate_up),
                (Target.SHARED_DOWN, SHARED_DOWN, reader.shared_down),
            ):
                if (ins := self._ins(names)) is not None:
                    made[target] = LowRank(ins, parts())
        elif spec.has_mlp(layer):
            for target, names, parts in (
                (Target.GATE_UP, MLP_IN, reader.gate_up),
                (Target.DOWN, MLP_DOWN, reader.down),
            ):
                if (ins := self._ins(names)) is not None:
                    made[target] = LowRank(ins, parts())
        return made

    def _ins(self, names: Sequence[str]) -> Tensor | None:
        return self._columns.ins_of(in_layer(self._layer, name) for name in names)

    def _add_out(self, made: dict[Target, LowRank]) -> None:
        """Make the addition to the output matrix, which two mixers side by side may share."""
        spec, layer = self._spec, self._layer
        names = [ATTENTION_OUT] * spec.has_attention(layer) + [STATE_OUT] * spec.has_state(layer)
        shapes = layer_tensors(spec, layer)
        blocks = []
        for name in names:
            ins = self._ins((f"{name}.weight",))
            width = shapes[f"{name}.weight"][1]
            blocks.append(torch.zeros(0, width, dtype=self._dtype) if ins is None else ins)
        if any(map(len, blocks)):
            outs = self._reader.out()
            assert outs is not None
            made[Target.OUT] = LowRank(_block_diagonal(blocks), (outs,))

    def _add_experts(self, made: dict[Target, LowRank]) -> None:
        joined = self._modules.get(in_layer(self._layer, EXPERTS_GATE_UP))
        if joined is not None:
            gate, up = joined.outs.to(self._dtype).chunk(2, 1)
            made[Target.EXPERTS_GATE_UP] = LowRank(self._scaled(joined), (gate, up))
        joined = self._modules.get(in_layer(self._layer, EXPERTS_DOWN))
        if joined is not None:
            made[Target.EXPERTS_DOWN] = LowRank(
                self._scaled(joined), (joined.outs.to(self._dtype),)
            )
        for target, parts in (
            (Target.EXPERTS_GATE_UP, ("gate", "up")), (Target.EXPERTS_DOWN, ("down",)),
        ):  # fmt: skip
            apart = self._apart(parts)
            if apart is not None:
                made[target] = apart

    def _scaled(self, module: Module) -> Tensor:
        return (module.ins.to(torch.float64) * module.scale).to(self._dtype)

    def _apart(self, parts: Sequence[str]) -> LowRank | None:
        """Join the modules of separate experts to one addition. Each of `parts` has its own ranks;
        an expert without a module gets zeros."""
        assert self._spec.experts is not None
        count, size = self._spec.experts.num_experts, self._spec.experts.size
        found = {
            (number, part): module
            for number in range(count)
            for part in parts
            if (module := self._modules.get(in_layer(self._layer, EXPERT.format(number, part))))
        }
        if not found:
            return None
        hidden = self._spec.hidden_size
        num_ins, num_outs = (size, hidden) if parts == ("down",) else (hidden, size)
        most = {part: max((len(m.ins) for (_, p), m in found.items() if p == part), default=0)
                for part in parts}  # fmt: skip
        total = sum(most.values())
        ins = torch.zeros(count, total, num_ins, dtype=self._dtype)
        outs = [torch.zeros(count, num_outs, total, dtype=self._dtype) for _ in parts]
        first = 0
        for part, of_part in zip(parts, outs, strict=True):
            for number in range(count):
                module = found.get((number, part))
                if module is not None:
                    own = slice(first, first + len(module.ins))
                    ins[number, own] = self._scaled(module)
                    of_part[number, :, own] = module.outs
            first += most[part]
        return LowRank(ins, tuple(outs))
