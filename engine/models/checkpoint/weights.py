# SPDX-License-Identifier: Apache-2.0
"""The weights of a decoder: their names in Hugging Face's form, and the matrices made of them.

Query, key and value become one matrix, so that a step rotates queries and keys together and makes
one call for three. Gate and up become one where that is asked for, which is one launch less on a
GPU. On the CPU they stay apart: one matrix was measured to gain nothing there, and apart they need
no copy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..model_spec import ModelSpec
from .checkpoint import CPU, Checkpoint
from .tensor_shapes import (
    EMBEDDING,
    FUSION,
    FUSION_BIAS,
    HEAD,
    KEY_NORM,
    NORM,
    QUERY_NORM,
    expected_tensors,
    layer_tensors,
    name_of,
    norm_names,
)

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


class Source(Protocol):
    """A source of tensors: a checkpoint, or chance."""

    device: torch.device

    def read(self, name: str, dtype: torch.dtype) -> Tensor: ...


@dataclass(slots=True)
class LayerWeights:
    """One layer. Matrices are `[out, in]`; a bias or norm is None where the model has none."""

    attention_norm: Tensor | None
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
    # Gate and up as one, of which these two are views; None where they are apart.
    gate_up: Tensor | None = None
    gate_up_bias: Tensor | None = None

    def join_gate(self) -> None:
        """Make gate and up one matrix, and of their biases one vector."""
        self.gate_up = torch.cat((self.gate, self.up))
        self.gate, self.up = self.gate_up.chunk(2)
        if self.gate_bias is not None and self.up_bias is not None:
            self.gate_up_bias = torch.cat((self.gate_bias, self.up_bias))
            self.gate_bias, self.up_bias = self.gate_up_bias.chunk(2)


@dataclass(slots=True)
class DecoderWeights:
    """A whole model; `head` is `embedding` itself where they are tied."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor  # [vocab, hidden]


@dataclass(slots=True)
class EagleWeights:
    """An EAGLE head: a matrix over an embedding and a hidden state, and the layers behind it."""

    fusion: Tensor  # [hidden, 2 * hidden]
    fusion_bias: Tensor | None
    layers: list[LayerWeights]


def load_weights(
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    joins_gate: bool = False,
) -> DecoderWeights:
    """Map, check and cast the weights under `path`, on `device`; with `joins_gate`, gate and up of
    a layer are one matrix.

    Raises ConfigError naming the tensor or file that is missing, unknown or of the wrong shape.
    """
    with Checkpoint(path, device, name_of(spec)) as checkpoint:
        expected = expected_tensors(spec, checkpoint.tensor_names)
        checkpoint.check_expected(expected)
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
        return DecoderWeights(embedding, *_load_rest(checkpoint, spec, dtype, joins_gate), head)


def load_eagle_weights(
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    joins_gate: bool = False,
    is_random: bool = False,
) -> EagleWeights:
    """The weights of the EAGLE head under `path`, or random ones; raises ConfigError as
    `load_weights` does."""
    if is_random:
        tensors = RandomTensors(expected_tensors(spec), device)
        return _load_eagle(tensors, spec, dtype, joins_gate, has_bias=False)
    with Checkpoint(path, device, name_of(spec)) as checkpoint:
        expected = expected_tensors(spec, checkpoint.tensor_names)
        checkpoint.check_expected(expected)
        return _load_eagle(checkpoint, spec, dtype, joins_gate, has_bias=FUSION_BIAS in expected)


def random_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    joins_gate: bool = False,
) -> DecoderWeights:
    """A model of this shape that has learnt nothing, as `load_weights` makes one."""
    norm = 0.0 if spec.family.centred_norms else 1.0
    tensors = RandomTensors(expected_tensors(spec), device, norm)
    embedding = tensors.read(EMBEDDING, dtype)
    head = embedding if spec.tied_embeddings else tensors.read(HEAD, dtype)
    return DecoderWeights(embedding, *_load_rest(tensors, spec, dtype, joins_gate), head)


def _load_eagle(
    source: Source, spec: ModelSpec, dtype: torch.dtype, joins_gate: bool, *, has_bias: bool
) -> EagleWeights:
    fusion = source.read(FUSION, dtype)
    bias = source.read(FUSION_BIAS, dtype) if has_bias else None
    return EagleWeights(fusion, bias, _load_layers(source, spec, dtype, joins_gate))


def _load_rest(
    source: Source, spec: ModelSpec, dtype: torch.dtype, joins_gate: bool
) -> tuple[list[LayerWeights], Tensor]:
    layers = _load_layers(source, spec, dtype, joins_gate)
    return layers, _read_norm(source, spec, dtype, NORM)


def _load_layers(
    source: Source, spec: ModelSpec, dtype: torch.dtype, joins_gate: bool
) -> list[LayerWeights]:
    layers = []
    for index in range(spec.num_layers):
        layer = _load_layer(source, spec, dtype, index)
        if joins_gate:  # before the next one is read, so that few lie in memory twice
            layer.join_gate()
        layers.append(layer)
    return layers


def _read_norm(source: Source, spec: ModelSpec, dtype: torch.dtype, name: str) -> Tensor:
    """The weights of a norm: those that are stored less one in float32 at least, for near one a
    half type is too coarse."""
    stored = source.read(name, dtype)
    if not spec.family.centred_norms:
        return stored
    return stored.to(torch.promote_types(dtype, torch.float32)) + 1.0


def _load_layer(source: Source, spec: ModelSpec, dtype: torch.dtype, layer: int) -> LayerWeights:
    names = layer_tensors(spec, layer)

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

    norms = norm_names(spec, layer)
    return LayerWeights(
        attention_norm=norm(norms.attention) if norms.attention else None,
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
