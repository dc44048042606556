# SPDX-License-Identifier: Apache-2.0
"""Decoder: the forward pass of every model family, over one flat batch of tokens.

Norms are computed in float32 or wider, as in transformers. Float64 is never rounded to float32:
rounding would make results depend on the order of additions. A bias or a norm that is None in the
weights is not computed. This module has no requests, blocks or sampling; the caller passes
positions and the attention plan.

    embed ─► each layer: attention ─► rest (output matrix, MLP) ─► last norm ─► logits"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.cpu.matrix import PackedMatrix
from ...kernels.cpu.network import CpuNetwork, NetworkLayer
from ...kernels.layer.rotate_write import Rotary
from .checkpoint.checkpoint import CPU
from .checkpoint.weights import DecoderWeights, load_weights, random_weights
from .families import HeadNorms
from .layer import take_layers
from .layers import LIBRARY_ACTIVATIONS, Elementwise, Linear
from .lora.model_slots import ModelSlots
from .mixers import Attention as Attention
from .mixers import MixerStep
from .mixers import Plan as Plan
from .mixers import QkvAttention as QkvAttention
from .model_spec import ModelSpec
from .rope import growth_of, turns_of
from .states.state_plan import StateStep

PLAIN = Elementwise()


class AuxStates:
    """The hidden states that a forward pass collects: the inputs of the layers in `layers`, for the
    rows that the caller requests. In `layers`, 0 is the embedding, and the model's number of layers
    is the input of the last norm. A forward pass stores the states in `found`."""

    __slots__ = ("found", "layers")

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = frozenset(layers)
        self.found: dict[int, Tensor] = {}  # layer -> [rows, hidden]

    def capture_states(
        self, x: Tensor, layer: int, wanted: Tensor | None, *, is_overwritten: bool = False
    ) -> None:
        """Keep `x` `[tokens, hidden]` if the layer is requested; copy it if `x` will change."""
        if layer in self.layers:
            kept = x if wanted is None else x[wanted]
            self.found[layer] = kept.clone() if is_overwritten and kept is x else kept


class Embeds(NamedTuple):
    """Embeddings that replace the token ids of some rows of a step."""

    rows: Tensor | None  # int64 [n], no row twice; None: all rows of the step, in order
    values: Tensor  # [n, hidden], not changed by other code

    def joined_with(self, other: Embeds) -> Embeds:
        """Return an `Embeds` with the rows of `self` and of `other`. `rows` None is not allowed."""
        assert self.rows is not None and other.rows is not None
        values = torch.cat((self.values, other.values.to(self.values.dtype)))
        return Embeds(torch.cat((self.rows, other.rows)), values)

    def to(self, device: torch.device) -> Embeds:
        """Return the embeddings unchanged, since they are on the step's device already."""
        return self


class PictureRows(NamedTuple):
    """The inputs of a step that depend on pictures, besides the embeddings of their rows."""

    rows: Tensor  # int64 [n]: the rows of pictures
    # [n, layers, hidden]: added to `rows` after each of the first layers; None: nothing is added.
    deep: Tensor | None
    # int64 [3, tokens]: time, height and width of each row, for rotary positions by axis; None: all
    # three are the row's position.
    grid: Tensor | None


class Decoder:
    """A model's weights in memory, and its forward pass. The tables of rotary positions have
    `max_model_len` entries.

    The constructor empties `weights.layers`, so that only one layer at a time is in memory twice.
    """

    slots: ModelSlots | None = None  # None: adapters are not allowed

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        max_model_len: int,
        dtype: torch.dtype,
        elementwise: Elementwise = PLAIN,
    ) -> None:
        self.spec = spec
        self._ops = elementwise
        self._element_bytes = weights.embedding.element_size()
        self._layers = take_layers(spec, weights.layers, elementwise)
        self._last_norm: Tensor | None = weights.norm
        # A tied matrix is in memory once, in packed form; embeddings are looked up in this form.
        is_tied = weights.head is weights.embedding
        self._head = Linear(weights.head, is_kept=is_tied)
        packed = self._head.packed if is_tied else None
        self._embedding = weights.embedding if packed is None else packed
        self._logits_softcap = spec.logits_softcap
        self._logits_divisor = 1.0 if spec.scales is None else spec.scales.logits
        scale = spec.embedding_scale
        if spec.family.scaled_embeddings:
            # Rounded to `dtype` first, as in transformers: 55.4256 is 55.5 in bfloat16.
            scale = float(torch.tensor(scale, dtype=dtype))
        self._embedding_scale = None if scale == 1.0 else scale
        # int32 `[layers with experts, tokens, num_per_token]`, the experts of each row, filled by
        # each step that computes all rows; None: experts are not recorded.
        self.chosen_experts: Tensor | None = None
        self._tables = turns_of(spec, max_model_len, dtype, weights.embedding.device)
        self._growth = growth_of(spec, max_model_len, dtype, weights.embedding.device)
        self._table_of = spec.rope_of_layers
        # int64 `[head_dim // 2]`: the grid axis whose position rotates each element.
        self._axes: Tensor | None = None
        if spec.rope_axes is not None:
            self._axes = torch.tensor(spec.rope_axes, device=weights.embedding.device)

    @classmethod
    def load(
        cls,
        path: Path,
        spec: ModelSpec,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        elementwise: Elementwise = PLAIN,
        *,
        is_random: bool = False,
    ) -> Decoder:
        """Read the weights under `path` directly to `device`, or make random weights. Raise
        ConfigError if the weights do not fit `spec`."""
        joins_gate = elementwise.is_kernels
        weights = (
            random_weights(spec, dtype, device, joins_gate=joins_gate)
            if is_random
            else load_weights(path, spec, dtype, device, joins_gate=joins_gate)
        )
        return cls(spec, weights, max_model_len, dtype, elementwise)

    @property
    def element_bytes(self) -> int:
        return self._element_bytes

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the computation and of the hidden states."""
        return self._tables[0][0].dtype

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention[Plan] | CpuNetwork,
        plan: Plan,
        wanted: Tensor | None,
        *,
        embeds: Embeds | None = None,
        aux: AuxStates | None = None,
        states: StateStep | None = None,
        slots: Tensor | None = None,
        pictures: PictureRows | None = None,
    ) -> Tensor:
        """Call `embed`, then `run`. `token_ids` and `positions` are int64 `[tokens]`."""
        x = self.embed(token_ids, embeds)
        return self.run(
            x, positions, attention, plan, wanted, aux, states=states, slots=slots,
            pictures=pictures,
        )  # fmt: skip

    def embed(self, token_ids: Tensor, embeds: Embeds | None = None) -> Tensor:
        """Return the embeddings `[tokens, hidden]`. `embeds` may replace some embeddings; the token
        ids of replaced rows only have to be in the vocabulary."""
        if embeds is not None and embeds.rows is None:
            return embeds.values
        matrix = self._embedding
        if isinstance(matrix, PackedMatrix):
            x = matrix.gather_rows(token_ids)
        else:
            x = F.embedding(token_ids, matrix)
        if self._embedding_scale is not None:
            x *= self._embedding_scale
        if embeds is not None and embeds.rows is not None:
            x.index_copy_(0, embeds.rows, embeds.values.to(x.dtype))
        return x

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        attention: Attention[Plan] | CpuNetwork,
        plan: Plan,
        wanted: Tensor | None,
        aux: AuxStates | None = None,
        *,
        states: StateStep | None = None,
        slots: Tensor | None = None,
        pictures: PictureRows | None = None,
    ) -> Tensor:
        """Compute a step from its embeddings `x` `[tokens, hidden]`. Return the hidden states after
        the last norm, `[len(wanted), hidden]`, of the rows `wanted` (int64; None: all rows), for
        `logits`.

        K and V of all tokens are written to the pool; with `states`, the new states are written
        too. After the last mixer only the rows `wanted` are computed. An `attention` from
        `in_library` computes all layers; its `plan` has one plan per view. Kernels overwrite `x`.
        `slots`, int32 `[tokens]`, has the adapter slot of each row, -1 for none; None: no row has
        an adapter. An attention from `in_library` takes no `pictures`."""
        if self.slots is not None:
            self.slots.rows.slots = slots
        elif slots is not None:
            raise ValueError("a step has adapters, but the model was loaded without slots")
        if self.spec.state is not None and states is None:
            raise ValueError("a model with layers that carry a state takes a step's states")
        if isinstance(attention, CpuNetwork):
            chosen = self.chosen_experts
            return _run_in_library(attention, x, positions, plan, wanted, aux, chosen, slots)
        has_kernels = self._ops.is_kernels
        of_qkv: QkvAttention[Plan] | None = None
        growth = None if self._growth is None else self._growth[positions]
        turns_itself = growth is None and self.spec.family.head_norms is not HeadNorms.ALL
        grid = None if pictures is None else pictures.grid
        deep = None if pictures is None else pictures.deep
        if has_kernels and turns_itself and grid is None:
            of_qkv = getattr(attention, "of_qkv", None)
        rotaries: list[Rotary] = []
        turns: list[tuple[Tensor, Tensor]] = []
        if of_qkv is not None:
            rotaries = [Rotary(positions, cos[:, 0], sin[:, 0]) for cos, sin in self._tables]
        else:
            turns = [self._turns_at(positions, grid, *tables) for tables in self._tables]
        step = MixerStep(attention, plan, turns, rotaries, of_qkv, growth, states)
        count = len(self._layers)
        last = next(n for n in reversed(range(count)) if self._layers[n].has_mixer)
        for index, layer in enumerate(self._layers):
            if aux is not None:
                aux.capture_states(x, index, wanted, is_overwritten=has_kernels)
            mixed = layer.mix(x, step)
            if index == last and mixed is not None and wanted is not None:
                if self.slots is not None:
                    self.slots.rows.narrow(wanted)
                x, mixed, wanted = x[wanted], mixed[wanted], None
            x = layer.rest(x, mixed)
            if pictures is not None and deep is not None and index < deep.shape[1]:
                x.index_add_(0, pictures.rows, deep[:, index].to(x.dtype))
        if aux is not None:
            aux.capture_states(x, count, None)
        if self._last_norm is None:
            return x
        return self._ops.norm(x, self._last_norm, self.spec.stream_eps)

    def _turns_at(
        self, positions: Tensor, grid: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[tokens, 1, head_dim // 2]`. With `grid`, each element of a
        head rotates by its position on one of the three axes."""
        if grid is None:
            return cos[positions], sin[positions]
        assert self._axes is not None
        rows = grid.to(cos.device)[self._axes].T  # [tokens, head_dim // 2]
        elements = torch.arange(cos.shape[2], device=cos.device)
        return cos[rows, 0, elements][:, None], sin[rows, 0, elements][:, None]

    def in_library(self, pools: Sequence[Tensor], views: Sequence[int]) -> CpuNetwork | None:
        """Return a `CpuNetwork`, which computes all layers in one call of the library of
        `kernels/cpu/` with the same results as `run`. Return None if the library cannot compute
        this model. `pools` and `views` have an entry for each layer; see `Layer.in_library`."""
        if self._last_norm is None or self.spec.state is not None:
            return None
        layers: list[NetworkLayer] = []
        for index, layer in enumerate(self._layers):
            cos, sin = (table[:, 0] for table in self._tables[self._table_of[index]])
            made = layer.in_library(cos, sin, pools[index], views[index])
            if made is None:
                return None
            layers.append(made)
        spec = self.spec
        sizes = {layer.down.ins for layer in layers if layer.down is not None}
        if len(sizes) > 1 and any(size % 2 for size in sizes):
            return None
        return CpuNetwork(
            layers,
            self._last_norm,
            num_heads=spec.num_heads,
            eps=spec.stream_eps,
            activation=LIBRARY_ACTIVATIONS[spec.family.activation],
        )

    def allow_adapters(self, num_slots: int, max_rank: int) -> ModelSlots:
        """Make slots for adapters of rank `max_rank` or less. To be called before `in_library`."""
        products = [layer.adapted_products() for layer in self._layers]
        self.slots = ModelSlots(self.spec, products, num_slots, max_rank)
        return self.slots

    def record_experts(self, max_tokens: int) -> None:
        """Make steps of `max_tokens` tokens or less record each row's `chosen_experts`."""
        experts = self.spec.experts
        assert experts is not None
        shape = (len(experts.layers), max_tokens, experts.num_per_token)
        device = self._tables[0][0].device
        self.chosen_experts = torch.zeros(shape, dtype=torch.int32, device=device)
        for number, layer in enumerate(experts.layers):
            self._layers[layer].record_experts(self.chosen_experts[number])

    @property
    def can_record(self) -> bool:
        """Whether a CUDA graph can capture a step, that is, whether no layer waits for the host."""
        return all(layer.can_record for layer in self._layers)

    @property
    def can_leave_logits_out(self) -> bool:
        """Whether `logits` may skip tokens that are not in `wanted`."""
        return self._head.packed is not None

    def logits(self, hidden: Tensor, wanted: npt.NDArray[np.uint32] | None = None) -> Tensor:
        """Compute logits `[rows, vocab]` from the result of `forward`. `logits` is a separate call,
        so that the logits of a long prompt can be computed in parts. The logit of token t may be 0
        instead of computed if bit `t % 32` of word `t // 32` in `wanted` is 0. The result has the
        computation's type, or is float32 rounded to it."""
        is_last = self._logits_softcap is None and self._logits_divisor == 1.0
        logits = self._head(hidden, wanted, is_wide=is_last)
        if self._logits_divisor != 1.0:
            logits /= self._logits_divisor
        if self._logits_softcap is not None:
            logits = (logits / self._logits_softcap).tanh_() * self._logits_softcap
        return logits


def _run_in_library(
    network: CpuNetwork,
    x: Tensor,
    positions: Tensor,
    plan: Any,
    wanted: Tensor | None,
    aux: AuxStates | None,
    chosen: Tensor | None,
    slots: Tensor | None,
) -> Tensor:
    asked = () if aux is None else aux.layers
    hidden, found = network.run(x, positions, plan, wanted, asked, chosen, slots)
    if aux is not None:
        for layer, states in found.items():
            aux.capture_states(states, layer, None if layer == network.num_layers else wanted)
    return hidden
