# SPDX-License-Identifier: Apache-2.0
"""Layer: one layer of a decoder, that is, a mixer (attention, a state, or both) and an MLP."""

from __future__ import annotations

from torch import Tensor

from ...kernels.cpu.network import NetworkExperts, NetworkLayer
from .checkpoint.state_weights import StateWeights
from .checkpoint.weights import DenseWeights, LayerWeights, ParallelWeights
from .experts import ExpertMlp
from .families import HeadNorms
from .layers import DenseMlp, Elementwise, Linear, Mlp, SquaredMlp
from .lora.low_rank import Adaptable, Target
from .mixers import AttentionMixer, Mixer, MixerStep, ParallelMixer, Plan
from .model_spec import ModelSpec
from .states.state_mixer import make_state_mixer


class Layer:
    """The weights of one layer, its mixer and its MLP; the mixer or the MLP may be missing."""

    __slots__ = (
        "_after_attention_norm", "_after_mlp_norm", "_attention_norm", "_mixer", "_mlp",
        "_mlp_norm", "_ops", "_out", "_spec",
    )  # fmt: skip

    def __init__(
        self, spec: ModelSpec, number: int, weights: LayerWeights, elementwise: Elementwise
    ) -> None:
        self._spec, self._ops = spec, elementwise
        self._attention_norm = weights.attention_norm
        self._mixer = _make_mixer(spec, number, weights, elementwise)
        out = weights.out
        self._out = None if out is None else Linear(out, weights.out_bias)
        self._after_attention_norm = weights.after_attention_norm
        self._mlp_norm = weights.mlp_norm
        self._mlp = _make_mlp(spec, weights, elementwise)
        self._after_mlp_norm = weights.after_mlp_norm

    @property
    def has_mixer(self) -> bool:
        return self._mixer is not None

    def mix(self, x: Tensor, step: MixerStep[Plan]) -> Tensor | None:
        """Run the mixer over `x` `[tokens, hidden]`. Return `[tokens, inner]`, the input of the
        output matrix; return None if the layer has no mixer."""
        if self._mixer is None:
            return None
        return self._mixer(self._norm(x, self._attention_norm), step)

    def adapted_products(self) -> dict[Target, Adaptable]:
        """Return the matrix products that LoRA adapters can change."""
        found: dict[Target, Adaptable] = {}
        if self._mixer is not None:
            found |= self._mixer.adapted_products()
        if self._out is not None:
            found[Target.OUT] = self._out
        return found if self._mlp is None else found | self._mlp.adapted_products()

    @property
    def can_record(self) -> bool:
        if self._mixer is not None and not isinstance(self._mixer, AttentionMixer):
            return False
        return not isinstance(self._mlp, ExpertMlp) or self._mlp.can_record

    def record_experts(self, record: Tensor) -> None:
        assert isinstance(self._mlp, ExpertMlp)
        self._mlp.record = record

    def in_library(self, cos: Tensor, sin: Tensor, pool: Tensor, view: int) -> NetworkLayer | None:
        """Return the layer in the form that the library of `kernels/cpu/` takes; None if the
        library cannot compute the layer. `cos` and `sin` are `[positions, head_dim // 2]`, `pool`
        is the layer's part of the KV pool, and `view` is the index of its attention plan."""
        spec, mixer = self._spec, self._mixer
        if not isinstance(mixer, AttentionMixer) or mixer.is_gated:
            return None
        qkv = mixer.qkv.packed
        out = None if self._out is None else self._out.packed
        if qkv is None or out is None or not self._ops.is_plain:
            return None
        if self._attention_norm is None or self._mlp_norm is None:
            return None
        if spec.family.head_norms is HeadNorms.ALL or spec.query_growth is not None:
            return None
        dense = self._mlp
        experts: NetworkExperts | None = None
        if isinstance(dense, ExpertMlp):
            experts, dense = dense.in_library(), dense.shared
            if experts is None:
                return None
        gate_up = down = None
        if isinstance(dense, DenseMlp):
            gate_up, down = dense.gate_up, dense.down.packed
            if gate_up is None or down is None:
                return None
        elif dense is not None:
            return None
        return NetworkLayer(
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
            attention_norm=self._attention_norm,
            head_norms=mixer.head_norms,
            after_attention_norm=self._after_attention_norm,
            mlp_norm=self._mlp_norm,
            after_mlp_norm=self._after_mlp_norm,
            cos=cos,
            sin=sin,
            keys_and_values=pool,
            view=view,
            experts=experts,
        )

    def rest(self, x: Tensor, mixed: Tensor | None) -> Tensor:
        """Compute the layer's output `[rows, hidden]` from rows of its input and of the result of
        `mix`. If the elementwise functions are kernels (`is_kernels`), `x` is overwritten."""
        if self._ops.is_kernels:
            self._add_rest(x, mixed)
            return x
        if self._out is not None and mixed is not None:
            x = x + self._norm(self._out(mixed), self._after_attention_norm)
        if self._mlp is None:
            return x
        added = self._mlp(self._norm(x, self._mlp_norm))
        return x + self._norm(added, self._after_mlp_norm)

    def _add_rest(self, x: Tensor, mixed: Tensor | None) -> None:
        """Add the results of the mixer and the MLP to `x` in place. A matrix product without a norm
        after it adds its result to `x` directly."""
        if self._out is not None and mixed is not None:
            if self._after_attention_norm is None:
                self._out.add_to(x, mixed)
            else:
                x += self._norm(self._out(mixed), self._after_attention_norm)
        if self._mlp is None:
            return
        normed = self._norm(x, self._mlp_norm)
        if self._after_mlp_norm is None:
            self._mlp.add_to(x, normed)
        else:
            x += self._norm(self._mlp(normed), self._after_mlp_norm)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._ops.norm(x, weight, self._spec.stream_eps)


def _make_mixer(
    spec: ModelSpec, number: int, weights: LayerWeights, elementwise: Elementwise
) -> Mixer | None:
    if weights.mixer is None:
        return None
    if isinstance(weights.mixer, ParallelWeights):
        attention = AttentionMixer(spec, number, weights.mixer.attention, elementwise)
        state = make_state_mixer(spec, number, weights.mixer.state)
        return ParallelMixer(attention, state, weights.mixer.attention_factor)
    if isinstance(weights.mixer, StateWeights):
        return make_state_mixer(spec, number, weights.mixer)
    return AttentionMixer(spec, number, weights.mixer, elementwise)


def _make_mlp(spec: ModelSpec, weights: LayerWeights, elementwise: Elementwise) -> Mlp | None:
    activation, mlp = spec.family.activation, weights.mlp
    if mlp is None:
        return None
    if isinstance(mlp, DenseWeights):
        if not activation.has_gate:
            return SquaredMlp(mlp)
        return DenseMlp(mlp, activation, elementwise)
    assert spec.experts is not None
    return ExpertMlp(spec.experts, mlp, activation, elementwise)


def take_layers(
    spec: ModelSpec, weights: list[LayerWeights], elementwise: Elementwise
) -> list[Layer]:
    """Make the layers from the list `weights`. The weights of a layer are removed from the list
    before the layer is made, so that only one layer at a time is in memory twice."""
    layers: list[Layer] = []
    while weights:
        layers.append(Layer(spec, len(layers), weights.pop(0), elementwise))
    return layers
