# SPDX-License-Identifier: Apache-2.0
"""The supported model families, one table entry each, with the constants in which they differ.

All families use the same decoder: RMS norms, rotary positions, grouped-query attention, and a gated
MLP or a mixture of such MLPs. An entry has the constants of the family's code in transformers, and
its defaults for keys that config.json lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .spec.expert_spec import ExpertFamily
from .spec.rope_spec import DEFAULT_THETA, Sections
from .spec.state_layers import MambaKeys, Projections, StateFamily
from .states.state_spec import StateKind


class Windows(Enum):
    """The rule by which a family decides which layers have a window of `sliding_window` tokens."""

    NONE = "none"
    EVERY_LAYER = "every layer"  # if sliding_window is set
    SWITCHED = "switched"  # every layer, if use_sliding_window is true
    SOME_LAYERS = "some layers"  # if use_sliding_window: by layer_types or max_window_layers
    MOST_LAYERS = "most layers"  # by layer_types, or all but each sliding_window_pattern-th
    OTHER_LAYERS = "other layers"  # by layer_types, or each second one, beginning with the first
    BY_TYPE = "by type"  # by layer_types, or none


class Activation(Enum):
    """The activation function of an MLP, by Hugging Face's names. The function is applied to the
    gate's output; an MLP with squared ReLU has no gate, and applies it to the output of `up`."""

    SILU = ("silu", "swish")
    GELU_TANH = ("gelu_pytorch_tanh",)
    RELU_SQUARED = ("relu2",)

    @property
    def has_gate(self) -> bool:
        return self is not Activation.RELU_SQUARED


class Norms(Enum):
    """The positions of a layer's norms. Attention and MLP each add to their input."""

    BEFORE = "before"  # before each part
    AROUND = "around"  # before and after each part
    BEHIND = "behind"  # after each part
    SINGLE = "single"  # before the only part: the layer is a mixer or an MLP alone


class HeadNorms(Enum):
    """The norms of queries and keys, which are computed before the rotation."""

    NONE = "none"
    EACH = "each"  # each head by itself; one vector for all query heads, one for all key heads
    ALL = "all"  # all query heads together, and all key heads together


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. A default of None means that other values decide."""

    model_type: str
    # Biases of queries, keys and values; None: config.json decides, by `bias_key`.
    attention_bias: bool | None = None
    bias_key: str = "attention_bias"
    default_bias: bool = False
    output_bias: bool = True  # whether the output matrix has a bias if queries, keys and values do
    mlp_bias: bool = False  # whether config.json's mlp_bias is read; else no biases
    head_norms: HeadNorms = HeadNorms.NONE
    windows: Windows = Windows.NONE
    experts: ExpertFamily | None = None  # experts instead of an MLP
    states: StateFamily | None = None  # layers that carry a state
    activation: Activation = Activation.SILU
    activation_key: str = "hidden_act"  # the key in config.json
    norms: Norms = Norms.BEFORE
    centred_norms: bool = False  # stored weights of norms are one less than the weights
    wide_norms: bool = False  # results of norms are rounded after the product with the weights
    scaled_embeddings: bool = False  # embeddings are multiplied by the root of hidden_size
    # Scores are divided by the root of config.json's query_pre_attn_scalar (default: this value);
    # None: by the root of head_dim.
    query_scalar: float | None = None
    softcaps_logits: bool = False  # whether config.json's final_logit_softcapping is read
    # Default caps of logits and of attention scores, for absent keys; a null means no cap. None:
    # the family has no cap for scores.
    default_softcaps: tuple[float, float] | None = None
    # Whether embeddings, scores, additions of a part and logits are scaled by config.json's
    # embedding_multiplier, attention_multiplier, residual_multiplier and 1 / logits_scaling.
    is_scaled: bool = False
    # Whether factors at many places of a layer are read (`spec/multipliers.py`).
    multiplies: bool = False
    joins_projections: bool = False  # one tensor for queries, keys and values
    joins_gate: bool = False  # one tensor for gate and up
    mlp_size_key: str = "intermediate_size"  # key of an MLP's size in config.json
    default_mlp_size: int | None = None  # None: config.json must have it
    turns_partly: bool = False  # whether config.json's partial_rotary_factor is read
    default_turning: float = 1.0  # its default
    fixes_turning: bool = False  # whether a top-level factor must be the default
    # The axes by which rotary positions turn; for text all axes are equal. None: there is one axis.
    sections: Sections | None = None
    # Default for config.json's no_rope_layers: each n-th layer has no rotary positions.
    no_rope_interval: int | None = None
    # Whether layers have rotary positions only if position_embedding_type says so.
    is_still: bool = False
    never_turns: bool = False  # no layer has rotary positions, whatever config.json says
    # theta of layers that see all tokens, and of layers with a window, if these have other rotary
    # positions; None: all layers have the same.
    default_thetas: tuple[float, float] | None = None
    default_theta: float = DEFAULT_THETA
    grows_queries: bool = False  # whether the rotary part's llama_4_scaling_beta is read
    default_tied: bool = False  # whether the head is the embedding by default
    default_vocab_size: int | None = None  # None: config.json must have it
    default_heads: int | None = None  # None: config.json must have it
    default_kv_heads: int | None = None  # None: the number of heads
    default_head_dim: int | None = None  # None: hidden_size / heads
    default_max_positions: int | None = None  # None: config.json must have it
    default_eps: float = 1e-6
    eps_key: str = "rms_norm_eps"  # its key in config.json
    adjusts_mlp: bool = False  # whether config.json's block_auto_adjust_ff_dim is read
    gates_attention: bool = False  # whether a gate multiplies the attention's output
    # Prefixes of tensor names that text does not need.
    left_alone: tuple[str, ...] = ()
    # Parts of tensor names that differ: the family's, the name here.
    tensor_names: tuple[tuple[str, str], ...] = ()
    default_window: int | None = 4096  # default width; None: no window without the key


def _delta_states(projections: Projections) -> StateFamily:
    return StateFamily(
        StateKind.GATED_DELTA,
        ("linear_attention",),
        default_interval=4,
        projections=projections,
    )


# The fields that Qwen3-Next and Qwen3.5 have in common.
_QWEN_HYBRID: dict[str, Any] = {
    "head_norms": HeadNorms.EACH,
    "centred_norms": True,
    "gates_attention": True,
    "turns_partly": True,
    "default_turning": 0.25,
    "left_alone": ("mtp.",),
    "tensor_names": ((".linear_attn.", ".mixer."),),
    "default_heads": 16,
    "default_head_dim": 256,
    "default_max_positions": 32768,
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", mlp_bias=True),
    "MistralForCausalLM": Family(
        "mistral",
        attention_bias=False,
        windows=Windows.EVERY_LAYER,
        default_kv_heads=8,
        default_max_positions=131072,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        attention_bias=True,
        output_bias=False,
        windows=Windows.SOME_LAYERS,
        default_kv_heads=32,
        default_max_positions=32768,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        head_norms=HeadNorms.EACH,
        windows=Windows.SOME_LAYERS,
        default_kv_heads=32,
        default_head_dim=128,
        default_max_positions=32768,
    ),
    "Qwen2_5_VLForCausalLM": Family(
        "qwen2_5_vl_text",
        attention_bias=True,
        output_bias=False,
        windows=Windows.SOME_LAYERS,
        sections=Sections((16, 24, 24), are_joined=True),
        default_eps=1e-5,
        default_kv_heads=8,
        default_max_positions=32768,
        default_theta=1_000_000.0,
    ),
    "Qwen3VLForCausalLM": Family(
        "qwen3_vl_text",
        head_norms=HeadNorms.EACH,
        sections=Sections((24, 20, 20)),
        default_kv_heads=32,
        default_head_dim=128,
        default_max_positions=128000,
        default_theta=500_000.0,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        head_norms=HeadNorms.EACH,
        windows=Windows.MOST_LAYERS,
        activation=Activation.GELU_TANH,
        activation_key="hidden_activation",
        norms=Norms.AROUND,
        centred_norms=True,
        scaled_embeddings=True,
        query_scalar=256.0,
        softcaps_logits=True,
        default_thetas=(1_000_000.0, 10_000.0),
        default_tied=True,
        default_vocab_size=262208,
        default_heads=8,
        default_kv_heads=4,
        default_head_dim=256,
        default_max_positions=131072,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        windows=Windows.OTHER_LAYERS,
        activation=Activation.GELU_TANH,
        activation_key="hidden_activation",
        norms=Norms.AROUND,
        centred_norms=True,
        scaled_embeddings=True,
        query_scalar=256.0,
        softcaps_logits=True,
        default_softcaps=(30.0, 50.0),
        default_tied=True,
        default_vocab_size=256000,
        default_heads=8,
        default_kv_heads=4,
        default_head_dim=256,
        default_max_positions=8192,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        attention_bias=False,
        windows=Windows.EVERY_LAYER,
        joins_projections=True,
        joins_gate=True,
        turns_partly=True,
        default_vocab_size=32064,
        default_heads=32,
        default_max_positions=4096,
        default_eps=1e-5,
        default_window=None,
    ),
    "GraniteForCausalLM": Family(
        "granite",
        mlp_bias=True,
        is_scaled=True,
        default_vocab_size=32000,
        default_heads=32,
        default_max_positions=2048,
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        head_norms=HeadNorms.ALL,
        norms=Norms.BEHIND,
        default_vocab_size=50304,
        default_heads=32,
        default_max_positions=2048,
        default_eps=1e-5,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        mlp_bias=True,
        windows=Windows.BY_TYPE,
        no_rope_interval=4,
        default_theta=2_000_000.0,
        default_tied=True,
        default_vocab_size=128256,
        default_heads=16,
        default_kv_heads=4,
        default_max_positions=32768,
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        attention_bias=False,
        windows=Windows.EVERY_LAYER,
        grows_queries=True,
        default_vocab_size=131072,
        default_heads=32,
        default_kv_heads=8,
        default_head_dim=128,
        default_max_positions=262144,
        default_eps=1e-5,
        default_window=None,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        attention_bias=False,
        windows=Windows.EVERY_LAYER,
        experts=ExpertFamily(8, 2, "intermediate_size", 14336, normalises=True),
        default_theta=1_000_000.0,
        default_vocab_size=32000,
        default_heads=32,
        default_kv_heads=8,
        default_max_positions=131072,
        default_eps=1e-5,
        default_window=None,
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        bias_key="qkv_bias",
        default_bias=True,
        output_bias=False,
        windows=Windows.BY_TYPE,
        experts=ExpertFamily(60, 4, default_size=1408, default_shared_size=5632, mixes_dense=True),
        default_vocab_size=151936,
        default_heads=16,
        default_kv_heads=16,
        default_max_positions=32768,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        head_norms=HeadNorms.EACH,
        windows=Windows.SWITCHED,
        experts=ExpertFamily(128, 8, default_size=768, mixes_dense=True),
        default_vocab_size=151936,
        default_heads=32,
        default_kv_heads=4,
        default_max_positions=32768,
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        head_norms=HeadNorms.ALL,
        experts=ExpertFamily(64, 8, "intermediate_size", 2048),
        default_vocab_size=50304,
        default_heads=16,
        default_max_positions=4096,
        default_eps=1e-5,
    ),
    "GraniteMoeForCausalLM": Family(
        "granitemoe",
        is_scaled=True,
        experts=ExpertFamily(8, 2, "intermediate_size", 11008, normalises=True),
        default_vocab_size=32000,
        default_heads=32,
        default_max_positions=2048,
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        experts=ExpertFamily(
            512,
            10,
            default_size=512,
            default_shared_size=512,
            mixes_dense=True,
            default_normalises=True,
            may_lack=True,
        ),
        states=_delta_states(Projections.BY_GROUP),
        **_QWEN_HYBRID,
        default_vocab_size=151936,
        default_kv_heads=2,
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text",
        states=_delta_states(Projections.APART),
        sections=Sections((24, 20, 20)),
        **_QWEN_HYBRID,
        default_vocab_size=248320,
        default_kv_heads=4,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text",
        experts=ExpertFamily(256, 8, default_size=512, default_shared_size=512, normalises=True),
        states=_delta_states(Projections.APART),
        sections=Sections((24, 20, 20)),
        **_QWEN_HYBRID,
        default_vocab_size=248320,
        default_kv_heads=2,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        is_scaled=True,
        is_still=True,
        joins_gate=True,
        mlp_size_key="shared_intermediate_size",
        default_mlp_size=1024,
        experts=ExpertFamily(
            8,
            2,
            "intermediate_size",
            11008,
            normalises=True,
            default_shared_size=1024,
            shared_size_key="shared_intermediate_size",
            gates_shared=False,
            may_lack=True,
        ),
        states=StateFamily(
            StateKind.MAMBA2,
            ("mamba", "linear_attention"),
            ("attention", "full_attention"),
            is_default=True,
            default_state_size=256,
        ),
        tensor_names=(
            (".mamba.", ".mixer."),
            (".shared_mlp.input_linear.", ".mlp.shared_expert.gate_up_proj."),
            (".shared_mlp.output_linear.", ".mlp.shared_expert.down_proj."),
        ),
        default_vocab_size=32000,
        default_heads=32,
        default_max_positions=2048,
    ),
    "BambaForCausalLM": Family(
        "bamba",
        mlp_bias=True,
        turns_partly=True,
        default_turning=0.5,
        fixes_turning=True,
        states=StateFamily(
            StateKind.MAMBA2,
            ("mamba", "linear_attention"),
            ("attention", "full_attention"),
            attention_layers_key="attn_layer_indices",
            is_default=True,
            default_state_size=256,
        ),
        tensor_names=(
            (".mamba.", ".mixer."),
            ("final_layernorm.", "norm."),
            (".pre_ff_layernorm.", ".post_attention_layernorm."),
            (".feed_forward.", ".mlp."),
        ),
        default_vocab_size=128000,
        default_heads=32,
        default_kv_heads=8,
        default_max_positions=262144,
        default_mlp_size=14336,
        default_eps=1e-5,
    ),
    "FalconH1ForCausalLM": Family(
        "falcon_h1",
        mlp_bias=True,
        multiplies=True,
        states=StateFamily(
            StateKind.MAMBA2,
            (),
            is_beside_attention=True,
            has_own_size=True,
            may_lack_norm=True,
            default_state_size=256,
        ),
        tensor_names=(
            (".mamba.", ".mixer."),
            ("final_layernorm.", "norm."),
            (".pre_ff_layernorm.", ".post_attention_layernorm."),
            (".feed_forward.", ".mlp."),
        ),
        default_vocab_size=128000,
        default_heads=32,
        default_kv_heads=8,
        default_max_positions=8192,
        default_mlp_size=14336,
        default_eps=1e-5,
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h",
        attention_bias=False,
        mlp_bias=True,
        activation=Activation.RELU_SQUARED,
        activation_key="mlp_hidden_act",
        norms=Norms.SINGLE,
        wide_norms=True,
        never_turns=True,
        states=StateFamily(StateKind.MAMBA2, (), keys=MambaKeys.BARE, default_state_size=128),
        left_alone=("mtp.",),
        tensor_names=(
            ("backbone.", "model."),
            ("embeddings.", "embed_tokens."),
            ("norm_f.", "norm."),
            *(
                (f".mixer.{matrix}_proj.", f".{part}.{matrix}_proj.")
                for part, matrices in (("self_attn", "qkvo"), ("mlp", ("up", "down")))
                for matrix in matrices
            ),
        ),
        default_vocab_size=131072,
        default_heads=32,
        default_kv_heads=8,
        default_head_dim=128,
        default_max_positions=4096,
        default_mlp_size=21504,
        default_eps=1e-5,
        eps_key="layer_norm_epsilon",
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2",
        attention_bias=False,
        head_norms=HeadNorms.EACH,
        states=StateFamily(
            StateKind.SHORT_CONV, ("conv",), attention_layers_key="full_attn_idxs", default_width=3
        ),
        adjusts_mlp=True,
        default_theta=1_000_000.0,
        default_tied=True,
        default_vocab_size=65536,
        default_heads=32,
        default_kv_heads=8,
        default_max_positions=128_000,
        default_eps=1e-5,
        eps_key="norm_eps",
        tensor_names=(
            ("embedding_norm.", "norm."),
            (".operator_norm.", ".input_layernorm."),
            (".ffn_norm.", ".post_attention_layernorm."),
            (".conv.conv.", ".mixer.conv1d."),
            (".conv.", ".mixer."),
            (".self_attn.out_proj.", ".self_attn.o_proj."),
            (".q_layernorm.", ".q_norm."),
            (".k_layernorm.", ".k_norm."),
            (".feed_forward.w1.", ".mlp.gate_proj."),
            (".feed_forward.w3.", ".mlp.up_proj."),
            (".feed_forward.w2.", ".mlp.down_proj."),
        ),
    ),
}
ARCHITECTURES = tuple(FAMILIES)
