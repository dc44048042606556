# SPDX-License-Identifier: Apache-2.0
"""The weights of a decoder, read from tensors with Hugging Face's names and joined.

Query, key and value matrices become one matrix, so that a step makes one call instead of three and
rotates queries and keys together. With `joins_gate`, an MLP's gate and up matrices become one
matrix too, which saves a kernel launch on a GPU. On the CPU gate and up stay separate: a joined
matrix measured no faster and needs a copy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..families import HeadNorms
from ..model_spec import ModelSpec
from ..rope import turning_order
from ..spec.multipliers import Multipliers
from .checkpoint import CPU, Checkpoint
from .random_tensors import RandomTensors
from .state_weights import StateWeights, read_state_in, read_state_weights
from .tensor_shapes import (
    ATTENTION_OUT,
    EMBEDDING,
    EXPERT,
    EXPERTS_DOWN,
    EXPERTS_GATE_UP,
    FUSION,
    FUSION_BIAS,
    GATE_UP,
    HEAD,
    KEY_NORM,
    NORM,
    QKV,
    QUERY_NORM,
    ROUTER,
    SHARED,
    SHARED_GATE,
    STATE_OUT,
    expected_tensors,
    in_layer,
    layer_tensors,
    name_of,
    norm_names,
)

logger = logging.getLogger(__name__)


class Source(Protocol):
    """A source of tensors: a checkpoint, or random numbers."""

    device: torch.device

    def read(self, name: str, dtype: torch.dtype) -> Tensor: ...

    def has_tensor(self, name: str) -> bool: ...


@dataclass(slots=True)
class DenseWeights:
    """An MLP that every token uses. Matrices are `[out, in]`; a missing gate or bias is None."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    # Gate and up as one matrix, of which `gate` and `up` are views. None: the two are separate.
    gate_up: Tensor | None = None
    gate_up_bias: Tensor | None = None

    def join_gate(self) -> None:
        """Join the gate and up matrices to one matrix, and their biases to one vector."""
        if self.gate is None:
            return
        self.gate_up = torch.cat((self.gate, self.up))
        self.gate, self.up = self.gate_up.chunk(2)
        if self.gate_bias is not None and self.up_bias is not None:
            self.gate_up_bias = torch.cat((self.gate_bias, self.up_bias))
            self.gate_bias, self.up_bias = self.gate_up_bias.chunk(2)


@dataclass(slots=True)
class ExpertWeights:
    """The weights of a mixture of experts; each expert has the three matrices of `DenseWeights`."""

    router: Tensor  # [experts, hidden]
    gates: Sequence[Tensor]
    ups: Sequence[Tensor]
    downs: Sequence[Tensor]
    shared: DenseWeights | None = None  # an expert that every token uses, times its gate
    shared_gate: Tensor | None = None  # [1, hidden]
    # All experts in one tensor, of which the lists above are views. None: the experts are separate.
    gate_ups: Tensor | None = None  # [experts, 2 * size, hidden]
    all_downs: Tensor | None = None  # [experts, hidden, size]

    def join_gate(self) -> None:
        """Join the matrices of all experts to two tensors."""
        if self.gate_ups is None:
            self.gate_ups = torch.stack(
                [torch.cat(pair) for pair in zip(self.gates, self.ups, strict=True)]
            )
            self.all_downs = torch.stack(list(self.downs))
            self.downs = self.all_downs.unbind()
            self.gates, self.ups = zip(
                *(both.chunk(2) for both in self.gate_ups.unbind()), strict=True
            )
        if self.shared is not None:
            self.shared.join_gate()


@dataclass(slots=True)
class AttentionWeights:
    """Weights of queries, keys and values. Matrices are `[out, in]`; a bias or norm may be None."""

    qkv: Tensor  # [(heads + 2 kv heads) * head_dim, hidden]: queries, keys, values
    qkv_bias: Tensor | None
    # [heads + kv heads, head_dim]: weights for queries, then for keys. `HeadNorms` says whether a
    # norm covers one head, or all query heads or all key heads together.
    head_norms: Tensor | None
    # [heads * head_dim, hidden]: the matrix of a gate that multiplies the attention's output.
    gate: Tensor | None = None
    gate_bias: Tensor | None = None


@dataclass(slots=True)
class ParallelWeights:
    """Attention and state mixer side by side; their output matrix has columns in this order."""

    attention: AttentionWeights
    state: StateWeights
    attention_factor: float  # factor of the attention's output


@dataclass(slots=True)
class LayerWeights:
    """The weights of a layer. Matrices are `[out, in]`. A bias or norm may be None. The MLP may be
    None, and so may the mixer together with its output matrix."""

    attention_norm: Tensor | None
    mixer: AttentionWeights | StateWeights | ParallelWeights | None
    out: Tensor | None
    out_bias: Tensor | None
    after_attention_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: DenseWeights | ExpertWeights | None
    after_mlp_norm: Tensor | None


@dataclass(slots=True)
class DecoderWeights:
    """The weights of a model. Tied weights: `head` and `embedding` are the same tensor."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor  # [vocab, hidden]


@dataclass(slots=True)
class EagleWeights:
    """An EAGLE head: the matrix over an embedding and a hidden state, and the layers."""

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
    """Read the weights under `path` to `device`, check their names and shapes, and convert them to
    `dtype`. With `joins_gate`, the gate and up matrices of a layer become one matrix.

    Raises ConfigError with the name of a missing, unknown or misshapen tensor or file."""
    with Checkpoint(path, device, name_of(spec)) as checkpoint:
        expected = expected_tensors(spec, checkpoint.tensor_names)
        checkpoint.check_expected(expected)
        embedding = checkpoint.read(EMBEDDING, dtype)
        head = checkpoint.read(HEAD, dtype) if HEAD in expected else embedding
        if spec.tied_embeddings and head is not embedding:
            if torch.equal(head, embedding):
                head = embedding
            else:
                logger.warning(
                    "%s: config.json says that %s and %s are one (tie_word_embeddings), but they "
                    "differ; both are used, as in transformers 5",
                    path,
                    HEAD,
                    EMBEDDING,
                )
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
    """Load the weights of the EAGLE head under `path`, or make random ones. Raises ConfigError like
    `load_weights`."""
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
    """Make random weights for this specification, in the form of `load_weights`."""
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
        if joins_gate and layer.mlp is not None:
            layer.mlp.join_gate()  # here, so that only one layer is in memory twice
        layers.append(layer)
    return layers


def _read_norm(source: Source, spec: ModelSpec, dtype: torch.dtype, name: str) -> Tensor:
    """Read the weights of a norm. For `wide_norms` and `centred_norms` (weights stored minus one)
    the result is float32 or wider, since 16-bit types are too coarse near one."""
    wide = torch.promote_types(dtype, torch.float32)
    if spec.family.wide_norms:
        return source.read(name, wide)
    stored = source.read(name, dtype)
    return stored.to(wide) + 1.0 if spec.family.centred_norms else stored


def _load_layer(source: Source, spec: ModelSpec, dtype: torch.dtype, layer: int) -> LayerWeights:
    reader = LayerReader(source, spec, dtype, layer)
    norms = norm_names(spec, layer)
    return LayerWeights(
        attention_norm=reader.norm(norms.attention),
        mixer=reader.mixer(),
        out=reader.out(),
        out_bias=reader.out_bias(),
        after_attention_norm=reader.norm(norms.after_attention),
        mlp_norm=reader.norm(norms.mlp, reader.factors.gate),
        mlp=reader.mlp() if spec.has_mlp(layer) else None,
        after_mlp_norm=reader.norm(norms.after_mlp),
    )


class LayerReader:
    """Reads the tensors of one layer and makes the layer's weights from them. A source may have
    matrices with any number of columns: an adapter's have one for each rank."""

    def __init__(self, source: Source, spec: ModelSpec, dtype: torch.dtype, layer: int) -> None:
        self._source, self._spec, self._dtype, self._layer = source, spec, dtype, layer
        self._names = layer_tensors(spec, layer)
        self.factors = spec.multipliers or Multipliers()

    def read(self, name: str) -> Tensor:
        return self._source.read(in_layer(self._layer, name), self._dtype)

    def read_wide(self, name: str) -> Tensor:
        """Read a tensor as float32 or wider, for a recurrence."""
        wide = torch.promote_types(self._dtype, torch.float32)
        return self._source.read(in_layer(self._layer, name), wide)

    def bias(self, matrix: str, factor: float = 1.0) -> Tensor | None:
        name = f"{matrix}.bias"
        if name not in self._names:
            return None
        return self.read(name) if factor == 1.0 else self.read(name) * factor

    def norm(self, name: str | None, factor: float = 1.0) -> Tensor | None:
        if name is None:
            return None
        name = in_layer(self._layer, name)
        weights = _read_norm(self._source, self._spec, self._dtype, name)
        if factor == 1.0:
            return weights
        return weights.to(torch.promote_types(self._dtype, torch.float32)) * factor

    def mixer(self) -> AttentionWeights | StateWeights | ParallelWeights | None:
        spec = self._spec
        attention = self.attention() if spec.has_attention(self._layer) else None
        if spec.state is None or not spec.has_state(self._layer):
            return attention
        assert spec.family.states is not None
        state = read_state_weights(self.read, self.read_wide, spec.state, spec.family.states)
        if spec.multipliers is not None:
            state.multiply(spec.multipliers, spec.state)
        if attention is None:
            return state
        return ParallelWeights(attention, state, self.factors.attended)

    def out(self) -> Tensor | None:
        """Read the mixer's output matrix, or the joined output matrices of two mixers."""
        matrices = [self.read(f"{name}.weight") for name in self._outs()]
        return torch.cat(matrices, 1) if len(matrices) > 1 else next(iter(matrices), None)

    def out_bias(self) -> Tensor | None:
        total: Tensor | None = None
        for name, factor in self._outs().items():
            bias = self.bias(name, factor)
            if bias is not None:
                total = bias if total is None else total + bias
        return total

    def _outs(self) -> dict[str, float]:
        """Return the name of each mixer's output matrix, with the factor of the matrix's bias."""
        outs: dict[str, float] = {}
        if self._spec.has_attention(self._layer):
            outs[ATTENTION_OUT] = self.factors.attention_out_bias
        if self._spec.has_state(self._layer):
            outs[STATE_OUT] = self.factors.state_output
        return outs

    def attention(self) -> AttentionWeights:
        spec = self._spec
        gate = gate_bias = None
        if spec.family.gates_attention:
            gate = self.gated_queries("weight")[1]
            gate_bias = self.gated_queries("bias")[1] if spec.attention_bias else None
        bias = self.qkv("bias") if spec.attention_bias else None
        if bias is not None and self.factors.attention_in != 1.0:
            bias = bias / self.factors.attention_in
        return AttentionWeights(
            qkv=self.qkv("weight"),
            qkv_bias=bias,
            head_norms=self.head_norms(),
            gate=gate,
            gate_bias=gate_bias,
        )

    def gated_queries(self, kind: str) -> tuple[Tensor, Tensor]:
        """Read copies of the queries and of their gate, which are stored together for each head."""
        whole = self.read(f"self_attn.q_proj.{kind}")
        heads = whole.view(self._spec.num_heads, 2, self._spec.head_dim, *whole.shape[1:])
        return heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1)

    def qkv(self, kind: str) -> Tensor:
        """Read queries, keys and values as one matrix. Rows are reordered so that rotary positions
        rotate element i of a head's first half with element i of its second half."""
        spec = self._spec
        if spec.family.joins_projections:
            whole = self.read(QKV)
        else:
            names = [f"self_attn.{part}_proj.{kind}" for part in "qkv"]
            if spec.family.gates_attention:
                parts = [self.gated_queries(kind)[0], *map(self.read, names[1:])]
            else:
                parts = [*map(self.read, names)]
            whole = torch.cat(parts)
        if spec.turning_dim is None:
            return whole
        turning = spec.num_heads + spec.num_kv_heads
        heads = whole.view(-1, spec.head_dim, *whole.shape[1:])
        order = turning_order(spec.head_dim, spec.turning_dim).to(whole.device)
        return torch.cat((heads[:turning, order], heads[turning:])).view(whole.shape)

    def head_norms(self) -> Tensor | None:
        spec = self._spec
        if spec.family.head_norms is HeadNorms.NONE:
            return None
        counts = {QUERY_NORM: spec.num_heads, KEY_NORM: spec.num_kv_heads}
        parts = []
        for name, count in counts.items():
            weight = self.norm(name)
            assert weight is not None
            parts.append(weight.view(-1, spec.head_dim).expand(count, -1))
        whole = torch.cat(parts)
        if spec.turning_dim is None:
            return whole
        return whole[:, turning_order(spec.head_dim, spec.turning_dim).to(whole.device)]

    def mlp(self) -> DenseWeights | ExpertWeights:
        return self.experts() if self._spec.has_experts(self._layer) else self.dense()

    def state_in(self) -> Tensor:
        """Read the input matrix of a state mixer."""
        assert self._spec.state is not None and self._spec.family.states is not None
        return read_state_in(self.read, self._spec.state, self._spec.family.states)

    def gate_up(self) -> tuple[Tensor, ...]:
        """Read gate and up, or up alone in an MLP without a gate."""
        if self._spec.family.joins_gate:
            return self.read(GATE_UP).chunk(2)
        parts = ("gate", "up") if self._spec.family.activation.has_gate else ("up",)
        return tuple([self.read(f"mlp.{part}_proj.weight") for part in parts])

    def down(self) -> tuple[Tensor]:
        return (self.read("mlp.down_proj.weight"),)

    def shared_gate_up(self) -> tuple[Tensor, ...]:
        """Read gate and up of the shared expert."""
        if self._spec.family.joins_gate:
            return self.read(SHARED.format("gate_up")).chunk(2)
        return tuple([self.read(SHARED.format(part)) for part in ("gate", "up")])

    def shared_down(self) -> tuple[Tensor]:
        return (self.read(SHARED.format("down")),)

    def dense(self) -> DenseWeights:
        *gates, up = self.gate_up()
        factor = self.factors.gate
        return DenseWeights(
            gates[0] if gates else None,
            up,
            *self.down(),
            self.bias("mlp.gate_proj", factor),
            self.bias("mlp.up_proj", factor),
            self.bias("mlp.down_proj", factor),
        )

    def experts(self) -> ExpertWeights:
        assert self._spec.experts is not None
        made = ExpertWeights(self.read(ROUTER), (), (), ())
        if not self._source.has_tensor(in_layer(self._layer, EXPERTS_GATE_UP)):
            numbers = range(self._spec.experts.num_experts)
            made.gates, made.ups, made.downs = (
                [self.read(EXPERT.format(number, part)) for number in numbers]
                for part in ("gate", "up", "down")
            )
        else:
            made.gate_ups, made.all_downs = self.read(EXPERTS_GATE_UP), self.read(EXPERTS_DOWN)
            made.downs = made.all_downs.unbind()
            made.gates, made.ups = zip(
                *(both.chunk(2) for both in made.gate_ups.unbind()), strict=True
            )
        if self._spec.experts.shared_size:
            gate, up = self.shared_gate_up()
            made.shared = DenseWeights(gate, up, *self.shared_down())
            if SHARED_GATE in self._names:
                made.shared_gate = self.read(SHARED_GATE)
        return made
