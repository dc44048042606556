# SPDX-License-Identifier: Apache-2.0
"""The weights of a decoder: their names in Hugging Face's form, and the matrices made of them.

Query, key and value become one matrix, so that a step rotates queries and keys together and makes
one call for three. Gate and up stay apart: fusing them was measured to gain nothing, and apart they
need no copy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..spec import ModelSpec
from .checkpoint import CPU, Checkpoint

logger = logging.getLogger(__name__)

SEED = 20261
SPREAD = 0.02  # what models are initialised with


class RandomTensors:
    """Random weights, read like a checkpoint's and made on the device, for benchmarks and trials: a
    directory with only a config.json is then a model.

    The order of the reads decides the numbers. They are the same in every start on one kind of
    device, so blocks in the tiers stay valid, and differ between kinds.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, norm: float = 1.0
    ) -> None:
        """`norm` is the weight of every norm, as a checkpoint stores it."""
        self.device, self._norm = device, norm
        self._shapes = shapes
        self._generator = torch.Generator(device).manual_seed(SEED)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One number for a norm, zeros for a bias, normal numbers for a matrix."""
        shape = self._shapes[name]
        if len(shape) == 1:
            fill = 0.0 if name.endswith(".bias") else self._norm
            return torch.full(shape, fill, dtype=dtype, device=self.device)
        made = torch.empty(shape, dtype=dtype, device=self.device)
        return made.normal_(0.0, SPREAD, generator=self._generator)


EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
QUERY_NORM = "self_attn.q_norm.weight"
KEY_NORM = "self_attn.k_norm.weight"


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


class Source(Protocol):
    """A source of tensors: a checkpoint, or chance."""

    device: torch.device

    def read(self, name: str, dtype: torch.dtype) -> Tensor: ...


@dataclass(slots=True)
class LayerWeights:
    """One layer. Matrices are `[out, in]`; a bias or norm is None where the model has none."""

    attention_norm: Tensor
    qkv: Tensor  # [(heads + 2 kv heads) * head_dim, hidden]: queries, keys, values
    qkv_bias: Tensor | None
    head_norms: Tensor | None  # [heads + kv heads, head_dim]: of queries, then of keys
    out: Tensor
    out_bias: Tensor | None
    after_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate: Tensor
    gate_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    after_mlp_norm: Tensor | None


@dataclass(slots=True)
class DecoderWeights:
    """A whole model; `head` is `embedding` itself where they are tied."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor  # [vocab, hidden]


def load_weights(
    path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device = CPU
) -> DecoderWeights:
    """Map, check and cast the weights under `path`, on `device`.

    Raises ConfigError naming the tensor or file that is missing, unknown or of the wrong shape.
    """
    name_of = text_part_name if spec.is_text_part else plain_name
    with Checkpoint(path, device, name_of) as checkpoint:
        expected = expected_tensors(spec)
        if spec.tied_embeddings and HEAD in checkpoint.names:
            expected[HEAD] = expected[EMBEDDING]
        checkpoint.check(expected)
        embedding = checkpoint.read(EMBEDDING, dtype)
        head = checkpoint.read(HEAD, dtype) if HEAD in expected else embedding
        if spec.tied_embeddings and head is not embedding:
            if not torch.equal(head, embedding):
                # As transformers and vLLM have it.
                logger.warning(
                    "%s: %s differs from %s and is not used, since config.json says that they are "
                    "one (tie_word_embeddings)",
                    path,
                    HEAD,
                    EMBEDDING,
                )
            head = embedding
        return DecoderWeights(embedding, *_load_rest(checkpoint, spec, dtype), head)


def random_weights(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device = CPU
) -> DecoderWeights:
    """A model of this shape that has learnt nothing."""
    norm = 0.0 if spec.family.centred_norms else 1.0
    tensors = RandomTensors(expected_tensors(spec), device, norm)
    embedding = tensors.read(EMBEDDING, dtype)
    head = embedding if spec.tied_embeddings else tensors.read(HEAD, dtype)
    return DecoderWeights(embedding, *_load_rest(tensors, spec, dtype), head)


def _load_rest(
    source: Source, spec: ModelSpec, dtype: torch.dtype
) -> tuple[list[LayerWeights], Tensor]:
    """The layers and the norm after them."""
    layers = [_load_layer(source, spec, dtype, i) for i in range(spec.num_layers)]
    return layers, _read_norm(source, spec, dtype, NORM)


def _read_norm(source: Source, spec: ModelSpec, dtype: torch.dtype, name: str) -> Tensor:
    """The weights of a norm: those that are stored less one in float32 at least, for near one a
    half type is too coarse."""
    stored = source.read(name, dtype)
    if not spec.family.centred_norms:
        return stored
    return stored.to(torch.promote_types(dtype, torch.float32)) + 1.0


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in _layer_tensors(spec).items():
            shapes[prefix + name] = shape
    shapes[NORM] = (spec.hidden_size,)
    if not spec.tied_embeddings:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def _layer_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
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
        name: (hidden,) for name in _norm_names(spec) if name is not None
    }
    if spec.family.head_norms:
        shapes |= dict.fromkeys((QUERY_NORM, KEY_NORM), (spec.head_dim,))
    for name, shape in matrices.items():
        shapes[name + ".weight"] = shape
        if _has_bias(spec, name):
            shapes[name + ".bias"] = shape[:1]
    return shapes


class _NormNames(NamedTuple):
    """The norms of a layer, in the order in which they are computed."""

    attention: str
    after_attention: str | None
    mlp: str
    after_mlp: str | None


def _norm_names(spec: ModelSpec) -> _NormNames:
    """A layer's norms by name: one that is called post_attention_layernorm is the MLP's in most
    families, and lies behind the attention in those with a norm there."""
    before, behind = "input_layernorm.weight", "post_attention_layernorm.weight"
    if not spec.family.sandwich_norms:
        return _NormNames(before, None, behind, None)
    mlp = "pre_feedforward_layernorm.weight"
    return _NormNames(before, behind, mlp, "post_feedforward_layernorm.weight")


def _has_bias(spec: ModelSpec, matrix: str) -> bool:
    if matrix.startswith("mlp"):
        return spec.mlp_bias
    return spec.output_bias if matrix == "self_attn.o_proj" else spec.attention_bias


def _load_layer(source: Source, spec: ModelSpec, dtype: torch.dtype, layer: int) -> LayerWeights:
    names = _layer_tensors(spec)

    def read(name: str) -> Tensor:
        return source.read(f"model.layers.{layer}.{name}", dtype)

    def norm(name: str) -> Tensor:
        return _read_norm(source, spec, dtype, f"model.layers.{layer}.{name}")

    def bias(name: str) -> Tensor | None:
        return read(name) if name in names else None

    def stacked(kind: str) -> Tensor:
        parts = [f"self_attn.{part}_proj.{kind}" for part in "qkv"]
        shape = (sum(names[part][0] for part in parts), *names[parts[0]][1:])
        whole = torch.empty(shape, dtype=dtype, device=source.device)
        row = 0
        for part in parts:
            rows = names[part][0]
            whole[row : row + rows] = read(part)
            row += rows
        return whole

    def head_norms() -> Tensor:
        counts = {QUERY_NORM: spec.num_heads, KEY_NORM: spec.num_kv_heads}
        return torch.cat([norm(name).expand(count, -1) for name, count in counts.items()])

    norms = _norm_names(spec)
    return LayerWeights(
        attention_norm=norm(norms.attention),
        qkv=stacked("weight"),
        qkv_bias=stacked("bias") if spec.attention_bias else None,
        head_norms=head_norms() if spec.family.head_norms else None,
        out=read("self_attn.o_proj.weight"),
        out_bias=bias("self_attn.o_proj.bias"),
        after_attention_norm=norm(norms.after_attention) if norms.after_attention else None,
        mlp_norm=norm(norms.mlp),
        gate=read("mlp.gate_proj.weight"),
        gate_bias=bias("mlp.gate_proj.bias"),
        up=read("mlp.up_proj.weight"),
        up_bias=bias("mlp.up_proj.bias"),
        down=read("mlp.down_proj.weight"),
        down_bias=bias("mlp.down_proj.bias"),
        after_mlp_norm=norm(norms.after_mlp) if norms.after_mlp else None,
    )
