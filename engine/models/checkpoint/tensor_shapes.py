# SPDX-License-Identifier: Apache-2.0
"""The tensors that a checkpoint must hold, by name and shape, as its specification says. Needs no
torch, so that a plan and a refusal need none."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

from ..model_spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
QUERY_NORM = "self_attn.q_norm.weight"
KEY_NORM = "self_attn.k_norm.weight"
# Of an EAGLE head: the matrix over an embedding and a hidden state.
FUSION = "fc.weight"
FUSION_BIAS = "fc.bias"


# Of a checkpoint with more than text, in each of the two spellings: how names of the text part
# begin, and what they begin with here; and the other parts, which are left alone.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_OTHER_PARTS = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in ("vision_tower.", "multi_modal_projector.")
)


def plain_name(stored: str) -> str:
    """What a tensor of a checkpoint of text is called here. One that was saved without its head has
    names without a prefix."""
    bare = stored.startswith(("embed_tokens.", "layers.")) or stored == "norm.weight"
    return f"model.{stored}" if bare else stored


def text_part_name(stored: str) -> str | None:
    """What a tensor of a checkpoint with more than text is called here; None: it is not text."""
    if stored.startswith(_OTHER_PARTS):
        return None
    for prefix, ours in _TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return ours + stored.removeprefix(prefix)
    return stored


def eagle_name(stored: str) -> str | None:
    """The name here of a tensor of an EAGLE head; None for an embedding and an output matrix, in
    whose place the model's are taken."""
    name = plain_name(stored)
    if name in (EMBEDDING, HEAD):
        return None
    return name.removeprefix("model.") if name.startswith("model.fc.") else name


def name_of(spec: ModelSpec) -> Callable[[str], str | None]:
    """What names a stored tensor as it is called here."""
    if spec.is_eagle:
        return eagle_name
    return text_part_name if spec.is_text_part else plain_name


def expected_tensors(spec: ModelSpec, stored: Container[str] = ()) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape. A head that is the embedding is among them
    only where it is among the names of `stored` ones."""
    if spec.is_eagle:
        return _eagle_tensors(spec, stored)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    shapes |= _all_layers(spec)
    shapes[NORM] = (spec.hidden_size,)
    if not spec.tied_embeddings or HEAD in stored:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def _all_layers(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(spec.num_layers)
        for name, shape in layer_tensors(spec, layer).items()
    }


def _eagle_tensors(spec: ModelSpec, stored: Container[str]) -> dict[str, tuple[int, ...]]:
    """The tensors of an EAGLE head: no embedding, and neither a norm nor a matrix behind its
    layers."""
    shapes: dict[str, tuple[int, ...]] = {FUSION: (spec.hidden_size, 2 * spec.hidden_size)}
    if FUSION_BIAS in stored:
        shapes[FUSION_BIAS] = (spec.hidden_size,)
    return shapes | _all_layers(spec)


def layer_tensors(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, by their names in it."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    shapes: dict[str, tuple[int, ...]] = {
        name: (hidden,) for name in norm_names(spec, layer) if name is not None
    }
    if spec.family.head_norms:
        shapes |= dict.fromkeys((QUERY_NORM, KEY_NORM), (spec.head_dim,))
    for name, shape in matrices.items():
        shapes[name + ".weight"] = shape
        if _has_bias(spec, name):
            shapes[name + ".bias"] = shape[:1]
    return shapes


class NormNames(NamedTuple):
    """The norms of a layer, in the order in which they are computed."""

    attention: str | None
    after_attention: str | None
    mlp: str
    after_mlp: str | None


def norm_names(spec: ModelSpec, layer: int) -> NormNames:
    """A layer's norms by name: one that is called post_attention_layernorm is the MLP's in most
    families, and lies behind the attention in those with a norm there. The first layer of an EAGLE
    head has none before its attention."""
    before, behind = "input_layernorm.weight", "post_attention_layernorm.weight"
    if spec.is_eagle and layer == 0:
        return NormNames(None, None, behind, None)
    if not spec.family.sandwich_norms:
        return NormNames(before, None, behind, None)
    mlp = "pre_feedforward_layernorm.weight"
    return NormNames(before, behind, mlp, "post_feedforward_layernorm.weight")


def _has_bias(spec: ModelSpec, matrix: str) -> bool:
    if matrix.startswith("mlp"):
        return spec.mlp_bias
    return spec.output_bias if matrix == "self_attn.o_proj" else spec.attention_bias
