# SPDX-License-Identifier: Apache-2.0
"""The names and shapes of the tensors that a checkpoint must have according to its `ModelSpec`.
This module does not import torch, so memory plans and error messages need no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from ..families import HeadNorms, Norms
from ..model_spec import ModelSpec
from ..spec.expert_spec import ExpertSpec
from ..spec.state_layers import Projections
from ..states.state_spec import OutputNorm, StateKind, StateSpec

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
QUERY_NORM = "self_attn.q_norm.weight"
KEY_NORM = "self_attn.k_norm.weight"
ATTENTION_OUT = "self_attn.o_proj"
# Joined tensors of families with joined projections: queries, keys and values; gate and up.
QKV = "self_attn.qkv_proj.weight"
GATE_UP = "mlp.gate_up_proj.weight"
# Tensors of a layer with experts: the router; all experts as one tensor `[experts, out, in]`, with
# the rows of the gate before those of up; the matrices of one expert.
ROUTER = "mlp.gate.weight"
EXPERTS_GATE_UP = "mlp.experts.gate_up_proj"
EXPERTS_DOWN = "mlp.experts.down_proj"
EXPERT = "mlp.experts.{}.{}_proj.weight"
SHARED = "mlp.shared_expert.{}_proj.weight"
SHARED_GATE = "mlp.shared_expert_gate.weight"
# Tensors of a layer that carries a state: its input matrix, its convolution, its output matrix.
STATE_IN = "mixer.in_proj.weight"
STATE_IN_BIAS = "mixer.in_proj.bias"
STATE_CONV = "mixer.conv1d.weight"
STATE_CONV_BIAS = "mixer.conv1d.bias"
STATE_OUT = "mixer.out_proj"
# Tensors of a recurrence: the logarithm of the decay, the bias of time steps, the output's norm.
STATE_DECAY = "mixer.A_log"
STATE_TIME_BIAS = "mixer.dt_bias"
STATE_NORM = "mixer.norm.weight"
STATE_SKIP = "mixer.D"  # of Mamba-2 only
# Separate input matrices of a layer that carries a state: `BY_GROUP` has one for queries, keys,
# values and gate, and one for each head's scalars (beta, time step); `APART` has more.
STATE_IN_PARTS = {
    Projections.BY_GROUP: ("mixer.in_proj_qkvz.weight", "mixer.in_proj_ba.weight"),
    Projections.APART: tuple(f"mixer.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
}
# The matrix of an EAGLE head that multiplies an embedding joined to a hidden state.
FUSION = "fc.weight"
FUSION_BIAS = "fc.bias"


# For multimodal checkpoints: the stored prefixes of the text part's tensor names, and this
# project's prefixes. Tensors of other parts are ignored.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
# Parts of tensor names in layers with experts: as stored by some families, and in this project.
_EXPERT_PARTS = (
    ("block_sparse_moe.gate.", "mlp.gate."),
    ("block_sparse_moe.router.layer.", "mlp.gate."),
    ("block_sparse_moe.router.", "mlp.gate."),
    ("block_sparse_moe.input_linear.weight", EXPERTS_GATE_UP),
    ("block_sparse_moe.output_linear.weight", EXPERTS_DOWN),
    ("block_sparse_moe.", "mlp."),
)
_EXPERT_MATRICES = ((".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."))
_OTHER_PARTS = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in (
        "vision_tower.",
        "multi_modal_projector.",
        "visual.",
        "vision_model.",
        "connector.",
    )
)


def family_name(spec: ModelSpec, stored: str) -> str | None:
    """Map a tensor's stored name, which depends on the model family, to its name in this project.
    Return None if the tensor is ignored."""
    family = spec.family
    if family.left_alone and stored.startswith(family.left_alone):
        return None
    name = stored
    for theirs, ours in family.tensor_names:
        name = name.replace(theirs, ours)
    name = plain_name(name)
    if family.experts is None:
        return name
    # In some families with experts, a model without experts stores its MLP as the shared expert.
    name = expert_name(name)
    return name if spec.experts is not None else name.replace(".mlp.shared_expert.", ".mlp.")


def plain_name(stored: str) -> str:
    """Map the stored name of a tensor in a text-only checkpoint to its name in this project. A
    checkpoint that was saved without the output matrix has names without the prefix `model.`."""
    bare = stored.startswith(("embed_tokens.", "layers.")) or stored == "norm.weight"
    return f"model.{stored}" if bare else stored


def expert_name(stored: str) -> str:
    """Map the stored name of a tensor in a model with experts to its name in this project. The
    stored names differ between families."""
    name = plain_name(stored)
    for theirs, ours in _EXPERT_PARTS:
        if theirs in name:
            name = name.replace(theirs, ours)
            break
    else:
        return name
    for theirs, ours in _EXPERT_MATRICES:
        name = name.replace(theirs, ours)
    return name


def text_part_name(stored: str) -> str | None:
    """Map the stored name of a tensor in a multimodal checkpoint to its name in a text-only
    checkpoint. Return None for a tensor outside the text part."""
    if stored.startswith(_OTHER_PARTS):
        return None
    for prefix, ours in _TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return ours + stored.removeprefix(prefix)
    return stored


def eagle_name(stored: str) -> str | None:
    """Map the stored name of a tensor in an EAGLE head to its name in this project. The result is
    None for an embedding and an output matrix, because a head uses those of its model."""
    name = plain_name(stored)
    if name in (EMBEDDING, HEAD):
        return None
    return name.removeprefix("model.") if name.startswith("model.fc.") else name


def name_of(spec: ModelSpec) -> Callable[[str], str | None]:
    """Return the function that maps stored tensor names of this model to the names in this
    project."""
    if spec.is_eagle:
        return eagle_name
    if not spec.is_text_part:
        return partial(family_name, spec)

    def name_in_text_part(stored: str) -> str | None:
        name = text_part_name(stored)
        return None if name is None else family_name(spec, name)

    return name_in_text_part


def expected_tensors(spec: ModelSpec, stored: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the checkpoint must have. An output matrix that is tied
    to the embedding is included only if `stored` names it. A layer's experts are expected as joined
    tensors, unless `stored` has separate tensors for each expert."""
    if spec.is_eagle:
        return _eagle_tensors(spec, stored)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    shapes |= _all_layers(spec, stored)
    shapes[NORM] = (spec.hidden_size,)
    if not spec.tied_embeddings or HEAD in stored:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def in_layer(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


def _all_layers(spec: ModelSpec, stored: Collection[str]) -> dict[str, tuple[int, ...]]:
    return {
        in_layer(layer, name): shape
        for layer in range(spec.num_layers)
        for name, shape in layer_tensors(
            spec, layer, is_apart=has_experts_apart(layer, stored)
        ).items()
    }


def has_experts_apart(layer: int, stored: Collection[str]) -> bool:
    """Whether `stored` has separate tensors for each expert of a layer. The result is False if
    `stored` is empty."""
    return bool(stored) and in_layer(layer, EXPERTS_GATE_UP) not in stored


def _eagle_tensors(spec: ModelSpec, stored: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each tensor of an EAGLE head. A head has no embedding, and no
    norm or output matrix after its layers."""
    shapes: dict[str, tuple[int, ...]] = {FUSION: (spec.hidden_size, 2 * spec.hidden_size)}
    if FUSION_BIAS in stored:
        shapes[FUSION_BIAS] = (spec.hidden_size,)
    return shapes | _all_layers(spec, stored)


def layer_tensors(
    spec: ModelSpec, layer: int, *, is_apart: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each tensor of a layer. With `is_apart`, each expert has
    separate tensors."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    joins = spec.family.joins_gate
    shapes: dict[str, tuple[int, ...]] = {
        name: (hidden,) for name in norm_names(spec, layer) if name is not None
    }
    matrices: dict[str, tuple[int, ...]] = {}
    if spec.state is not None and spec.has_state(layer):
        assert spec.family.states is not None
        shapes |= _state_tensors(spec.state, spec.family.states.projections, hidden)
    if spec.has_attention(layer):
        shapes |= _attention_norms(spec)
        matrices |= _attention_matrices(spec)
    if spec.experts is not None and spec.has_experts(layer):
        assert spec.family.experts is not None
        shapes |= _expert_tensors(spec.experts, hidden, is_apart=is_apart)
        shapes |= _shared_tensors(
            spec.experts.shared_size, hidden, joins=joins, is_gated=spec.family.experts.gates_shared
        )
    elif spec.has_mlp(layer):
        if joins:
            shapes[GATE_UP] = (2 * mlp, hidden)
        else:
            if spec.family.activation.has_gate:
                matrices["mlp.gate_proj"] = (mlp, hidden)
            matrices["mlp.up_proj"] = (mlp, hidden)
        matrices["mlp.down_proj"] = (hidden, mlp)
    for name, shape in matrices.items():
        shapes[name + ".weight"] = shape
        if _has_bias(spec, name):
            shapes[name + ".bias"] = shape[:1]
    return shapes


def _attention_norms(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if spec.family.head_norms is HeadNorms.EACH:
        return dict.fromkeys((QUERY_NORM, KEY_NORM), (spec.head_dim,))
    if spec.family.head_norms is HeadNorms.ALL:
        return {QUERY_NORM: (queries,), KEY_NORM: (keys,)}
    return {}


def _attention_matrices(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the attention matrices, by names without `.weight`."""
    hidden = spec.hidden_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices: dict[str, tuple[int, ...]] = {ATTENTION_OUT: (hidden, queries)}
    if spec.family.joins_projections:
        return matrices | {QKV.removesuffix(".weight"): (queries + 2 * keys, hidden)}
    # The gate of an attention has as many rows as the queries.
    rows = {"q": queries * (2 if spec.family.gates_attention else 1), "k": keys, "v": keys}
    return matrices | {f"self_attn.{part}_proj": (rows[part], hidden) for part in rows}


def _state_tensors(
    state: StateSpec, projections: Projections, hidden: int
) -> dict[str, tuple[int, ...]]:
    heads, inner = state.num_heads, state.inner_size
    shapes: dict[str, tuple[int, ...]] = {
        STATE_CONV: (state.conv_channels, 1, state.conv_width),
        f"{STATE_OUT}.weight": (hidden, inner),
    }
    if projections is Projections.ONE:
        shapes[STATE_IN] = (state.in_size, hidden)
    else:
        sizes: tuple[int, ...] = (state.conv_channels, inner, heads, heads)
        if projections is Projections.BY_GROUP:
            sizes = (state.conv_channels + inner, 2 * heads)
        names = STATE_IN_PARTS[projections]
        shapes |= {name: (size, hidden) for name, size in zip(names, sizes, strict=True)}
    if state.kind is not StateKind.SHORT_CONV:
        shapes |= dict.fromkeys((STATE_DECAY, STATE_TIME_BIAS), (heads,))
        is_mamba = state.kind is StateKind.MAMBA2
        if state.output_norm is not OutputNorm.NONE:
            shapes[STATE_NORM] = (inner if is_mamba else state.head_dim,)
        if is_mamba:
            shapes[STATE_SKIP] = (heads,)
    if state.has_conv_bias:
        shapes[STATE_CONV_BIAS] = (state.conv_channels,)
    if state.has_bias:
        shapes |= {STATE_IN_BIAS: (state.in_size,), f"{STATE_OUT}.bias": (hidden,)}
    return shapes


def _expert_tensors(
    experts: ExpertSpec, hidden: int, *, is_apart: bool
) -> dict[str, tuple[int, ...]]:
    count, size = experts.num_experts, experts.size
    shapes: dict[str, tuple[int, ...]] = {ROUTER: (count, hidden)}
    if is_apart:
        for expert in range(count):
            for part in ("gate", "up"):
                shapes[EXPERT.format(expert, part)] = (size, hidden)
            shapes[EXPERT.format(expert, "down")] = (hidden, size)
    else:
        shapes[EXPERTS_GATE_UP] = (count, 2 * size, hidden)
        shapes[EXPERTS_DOWN] = (count, hidden, size)
    return shapes


def _shared_tensors(
    size: int, hidden: int, *, joins: bool, is_gated: bool
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the shared expert, which every token uses. The result is empty if
    `size` is 0."""
    if not size:
        return {}
    shapes: dict[str, tuple[int, ...]] = {SHARED.format("down"): (hidden, size)}
    if joins:
        shapes[SHARED.format("gate_up")] = (2 * size, hidden)
    else:
        shapes |= dict.fromkeys((SHARED.format("gate"), SHARED.format("up")), (size, hidden))
    if is_gated:
        shapes[SHARED_GATE] = (1, hidden)
    return shapes


class NormNames(NamedTuple):
    """The names of a layer's norms, in the order in which they are computed; the name of a norm
    that the layer lacks is None."""

    attention: str | None
    after_attention: str | None
    mlp: str | None
    after_mlp: str | None


def norm_names(spec: ModelSpec, layer: int) -> NormNames:
    """Return the names of a layer's norms. In most families, `post_attention_layernorm` is the norm
    before the MLP; in families with a norm after the attention, it names that norm. The first layer
    of an EAGLE head has no norm before its attention. A layer that is only a mixer or only an MLP
    has one norm."""
    if spec.family.norms is Norms.SINGLE:
        name = "norm.weight"
        has_mixer = spec.has_mixer(layer)
        return NormNames(name if has_mixer else None, None, None if has_mixer else name, None)
    before, behind = "input_layernorm.weight", "post_attention_layernorm.weight"
    if spec.is_eagle and layer == 0:
        return NormNames(None, None, behind, None)
    if spec.family.norms is Norms.BEFORE:
        return NormNames(before, None, behind, None)
    after_mlp = "post_feedforward_layernorm.weight"
    if spec.family.norms is Norms.BEHIND:
        return NormNames(None, behind, None, after_mlp)
    return NormNames(before, behind, "pre_feedforward_layernorm.weight", after_mlp)


def _has_bias(spec: ModelSpec, matrix: str) -> bool:
    if matrix.startswith("mlp"):
        return spec.mlp_bias
    return spec.output_bias if matrix == ATTENTION_OUT else spec.attention_bias
