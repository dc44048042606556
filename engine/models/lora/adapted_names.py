# SPDX-License-Identifier: Apache-2.0
"""The names, as in a checkpoint, of a layer's tensors that LoRA adapters can change."""

from __future__ import annotations

from ..checkpoint.tensor_shapes import (
    ATTENTION_OUT,
    EXPERT,
    EXPERTS_DOWN,
    EXPERTS_GATE_UP,
    GATE_UP,
    QKV,
    SHARED,
    STATE_IN,
    STATE_IN_PARTS,
    STATE_OUT,
    in_layer,
    layer_tensors,
)
from ..model_spec import ModelSpec
from .low_rank import Target

QKV_IN = (QKV, *(f"self_attn.{part}_proj.weight" for part in "qkv"))
ATTENTION_RESULT = (f"{ATTENTION_OUT}.weight",)
STATES_IN = (STATE_IN, *(name for names in STATE_IN_PARTS.values() for name in names))
STATE_RESULT = (f"{STATE_OUT}.weight",)
MLP_IN = (GATE_UP, "mlp.gate_proj.weight", "mlp.up_proj.weight")
MLP_DOWN = ("mlp.down_proj.weight",)
SHARED_IN = tuple(SHARED.format(part) for part in ("gate_up", "gate", "up"))
SHARED_DOWN = (SHARED.format("down"),)
# Groups of tensors with the same input; an adapter's additions to a group are one product.
WITH_ONE_INPUT = (
    QKV_IN, ATTENTION_RESULT, STATES_IN, STATE_RESULT, MLP_IN, MLP_DOWN, SHARED_IN, SHARED_DOWN,
)  # fmt: skip
_OF_TARGETS = {
    Target.QKV: QKV_IN,
    Target.ATTENTION_GATE: QKV_IN,
    Target.STATE_IN: STATES_IN,
    Target.OUT: (*ATTENTION_RESULT, *STATE_RESULT),
    Target.GATE_UP: MLP_IN,
    Target.DOWN: MLP_DOWN,
    Target.SHARED_GATE_UP: SHARED_IN,
    Target.SHARED_DOWN: SHARED_DOWN,
}


def ranks_of(spec: ModelSpec, layer: int, max_rank: int) -> dict[Target, int]:
    """Return the largest rank of an adapter in each product of a layer, except experts'
    products."""
    names = layer_tensors(spec, layer)
    counts = {target: sum(each in names for each in group) for target, group in _OF_TARGETS.items()}
    return {target: max_rank * count for target, count in counts.items() if count}


def adapted_tensors(spec: ModelSpec) -> set[str]:
    """Return the names of all tensors that an adapter may change."""
    return {
        in_layer(layer, name) for layer in range(spec.num_layers) for name in _of_layer(spec, layer)
    }


def _of_layer(spec: ModelSpec, layer: int) -> set[str]:
    known = {name for group in WITH_ONE_INPUT for name in group}
    names = known & set(layer_tensors(spec, layer))
    if spec.experts is not None and spec.has_experts(layer):
        names |= {EXPERTS_GATE_UP, EXPERTS_DOWN}
        for number in range(spec.experts.num_experts):
            names |= {EXPERT.format(number, part) for part in ("gate", "up", "down")}
    return names
