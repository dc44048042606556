# SPDX-License-Identifier: Apache-2.0
"""ModelSpec: the shape of a model (sizes, layers, positions) as an immutable value.
`spec/spec_parser.py` reads a ModelSpec from the config.json of a Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...tiers.block import DTYPE_BYTES, BlockLayout
from ...tiers.settings.values import ConfigError
from .families import FAMILIES, Family
from .layer_attention import LayerAttention, full, no_attention, state, window
from .spec.expert_spec import ExpertSpec
from .spec.multipliers import Multipliers
from .spec.rope_spec import STILL, RopeSpec, stable_length
from .states.state_spec import StateSpec
from .vision.vision_spec import VisionSpec


@dataclass(frozen=True, slots=True)
class Scales:
    """The factors of a family that scales embeddings, scores, residuals and logits (Granite)."""

    embedding: float
    attention: float  # factor of scores, instead of 1 / root of head_dim
    residual: float  # factor of the results that attention and MLP add
    logits: float  # divisor of logits


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a model, from its config.json. Counts are in elements, lengths are in tokens."""

    architecture: str  # a key of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    attention_bias: bool  # whether queries, keys and values have biases
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    sliding_window: int | None = None  # width of the window of `sliding_layers`
    stored_dtype: str | None = None  # the checkpoint's number type; None if not supported
    sliding_layers: tuple[int, ...] | None = None  # layers with the window; None without a window
    local_rope: RopeSpec | None = None  # for `sliding_layers`; None: `rope` is for all layers
    query_scalar: float | None = None  # scores are divided by its root; None: by that of head_dim
    logits_softcap: float | None = None  # logits stay within plus and minus this cap
    is_text_part: bool = False  # of a multimodal checkpoint; tensor names have a prefix
    is_eagle: bool | None = None  # an EAGLE head, which reads another model's hidden states
    experts: ExpertSpec | None = None
    scales: Scales | None = None
    score_softcap: float | None = None  # attention scores stay within plus and minus this cap
    still_layers: tuple[int, ...] | None = None  # layers without rotary positions
    # Factor of queries at position p: 1 + query_growth * ln(1 + floor(p / original_max_positions)).
    query_growth: float | None = None
    turning_dim: int | None = None  # elements of a head that rotate; None: all
    state: StateSpec | None = None  # for layers that carry a state; None: no layer does
    attention_layers: tuple[int, ...] | None = None  # with K and V; None: all without a state
    mlp_layers: tuple[int, ...] | None = None  # layers with an MLP; None: all
    vision: VisionSpec | None = None  # the picture encoder; None: the model reads only text
    # The axis by whose position each element of half a head rotates: 0 time, 1 height, 2 width;
    # None: all elements rotate by the token's position.
    rope_axes: tuple[int, ...] | None = None
    multipliers: Multipliers | None = None  # factors from config.json; `scales` is made from them

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @property
    def output_bias(self) -> bool:
        return self.attention_bias and self.family.output_bias

    @property
    def layer_attention(self) -> tuple[LayerAttention, ...]:
        """The attention of each layer. A sliding window that is not shorter than `max_context`
        counts as full attention."""
        sees_all = tuple(self._attention_of(layer) for layer in range(self.num_layers))
        if self.sliding_window is None or self.sliding_window >= self.max_context:
            return sees_all
        sliding = set(self.sliding_layers or ())
        local = window(self.sliding_window)
        return tuple(local if i in sliding else kind for i, kind in enumerate(sees_all))

    def _attention_of(self, layer: int) -> LayerAttention:
        if self.has_attention(layer):
            return full()
        return state() if self.has_state(layer) else no_attention()

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        if self.still_layers is not None:
            return (self.rope, STILL)
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def rope_of_layers(self) -> tuple[int, ...]:
        """The index in `ropes` of each layer's rotary positions."""
        second = self.still_layers
        if second is None:
            second = () if self.local_rope is None else self.sliding_layers or ()
        return tuple(int(layer in second) for layer in range(self.num_layers))

    @property
    def attention_scale(self) -> float:
        if self.scales is not None:
            return self.scales.attention
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def embedding_scale(self) -> float:
        """Factor by which embeddings are multiplied; Gemma models round it to the type of the
        embeddings.

        Some families multiply the results of attention and MLP by a factor r before the addition to
        the hidden states. Here the hidden states are kept divided by r instead, so the results need
        no factor. A norm of divided hidden states has the same result if its eps is divided to
        match (`stream_eps`)."""
        if self.scales is not None:
            return self.scales.embedding / self.scales.residual
        return float(self.hidden_size**0.5) if self.family.scaled_embeddings else 1.0

    @property
    def stream_eps(self) -> float:
        """Eps for norms of hidden states, adapted to their scale (`embedding_scale`)."""
        residual = 1.0 if self.scales is None else self.scales.residual
        return self.rms_norm_eps / residual**2

    def has_state(self, layer: int) -> bool:
        return self.state is not None and layer in self.state.layers

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has K and V; such a layer may also carry a state."""
        if self.attention_layers is None:
            return not self.has_state(layer)
        return layer in self.attention_layers

    def has_mixer(self, layer: int) -> bool:
        return self.has_attention(layer) or self.has_state(layer)

    def has_mlp(self, layer: int) -> bool:
        return self.mlp_layers is None or layer in self.mlp_layers

    @property
    def num_kv_layers(self) -> int:
        return sum(self.has_attention(layer) for layer in range(self.num_layers))

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers

    @property
    def widest_mlp(self) -> int:
        """The largest number of intermediate elements that a layer's MLP or its experts compute for
        a token."""
        if self.experts is None:
            return self.intermediate_size
        mixture = self.experts.num_per_token * self.experts.size + self.experts.shared_size
        is_mixed = len(self.experts.layers) < self.num_layers
        return max(mixture, self.intermediate_size if is_mixed else 0)

    @property
    def max_context(self) -> int:
        """The longest sequence, in tokens, that is computed as in training. Up to this length, a
        token's K and V do not depend on the final length, so they can be cached."""
        return min(stable_length(rope, self.max_positions) for rope in self.ropes)

    def layout(self, block_size: int, kv_dtype: str) -> BlockLayout:
        """Return the layout of a block of K and V; only the layers that have K and V count."""
        return BlockLayout(
            self.num_kv_layers, block_size, self.num_kv_heads, self.head_dim, kv_dtype
        )

    def draft_layout(self, block_size: int, kv_dtype: str, dtype: str) -> BlockLayout:
        """Return the layout of a draft model's part of a block. For an EAGLE head, the layout has
        additional layers after the head's own layers; the additional layers store the hidden
        states, of type `dtype`, that the head reads."""
        layout = self.layout(block_size, kv_dtype)
        if not self.is_eagle:
            return layout
        hidden_bytes = block_size * self.hidden_size * DTYPE_BYTES[dtype]
        return replace(layout, num_layers=self.num_layers - (-hidden_bytes // layout.place_bytes))


def resolve_max_model_len(spec: ModelSpec, wanted: int | None) -> int:
    """Return the maximum context length to serve: `wanted`, or the model's maximum if `wanted` is
    None. Raise ConfigError if `wanted` exceeds the model's maximum."""
    if wanted is None:
        return spec.max_context
    if wanted <= spec.max_context:
        return wanted
    reason = f"the model's max_position_embeddings is {spec.max_positions}"
    if spec.max_context < spec.max_positions:
        reason = (
            f"beyond {spec.max_context} tokens its longrope positions depend on the length of the "
            "whole sequence, so its blocks could not be shared"
        )
    elif spec.max_context > spec.max_positions:
        reason += (
            f", and its yarn stretches original_max_position_embeddings "
            f"{spec.rope.original_max_positions} by a factor of {spec.rope.factor:g}"
        )
    raise ConfigError(
        f"--max-model-len {wanted} is too long because {reason}; use at most {spec.max_context}"
    )
