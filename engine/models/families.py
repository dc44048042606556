# SPDX-License-Identifier: Apache-2.0
"""The model families that are served, and what tells them apart: one row each.

All are one decoder: RMS norms, rotary positions, grouped attention, a gated MLP. A row holds what
the code of a family fixes, and what its configuration class takes where config.json is silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Windows(Enum):
    """Which layers of a family may see only the last `sliding_window` positions."""

    NONE = "none"
    EVERY_LAYER = "every layer"  # wherever sliding_window is set
    SOME_LAYERS = "some layers"  # use_sliding_window switches, layer_types or max_window_layers say
    MOST_LAYERS = "most layers"  # layer_types says, or all but each sliding_window_pattern-th


class Activation(Enum):
    """What the gate of an MLP goes through; the values are Hugging Face's names."""

    SILU = ("silu", "swish")
    GELU_TANH = ("gelu_pytorch_tanh",)


class MlpKind(Enum):
    """The part of a layer behind its attention (`layers.py`)."""

    DENSE = "dense"  # the same matrices for every token


@dataclass(frozen=True, slots=True)
class Family:
    """One family. An optional default of None means that the value follows from others."""

    model_type: str
    # Biases of queries, keys and values; None: as config.json's attention_bias says.
    attention_bias: bool | None = None
    output_bias: bool = True  # whether the output matrix has a bias where those have
    mlp_bias: bool = False  # whether config.json's mlp_bias is heeded; else there are none
    head_norms: bool = False  # a norm over each head of the queries and of the keys
    windows: Windows = Windows.NONE
    mlp: MlpKind = MlpKind.DENSE
    activation: Activation = Activation.SILU
    activation_key: str = "hidden_act"  # where config.json says it
    sandwich_norms: bool = False  # norms behind the attention and the MLP, beside those before
    centred_norms: bool = False  # a norm's weights are what is stored, plus one
    scaled_embeddings: bool = False  # embeddings are multiplied by the root of hidden_size
    # Scores are divided by the root of config.json's query_pre_attn_scalar, which is this where
    # config.json is silent; None: by that of head_dim.
    query_scalar: float | None = None
    softcaps_logits: bool = False  # whether config.json's final_logit_softcapping is heeded
    # theta of layers that see all, and of layers with a window, which have rotary positions of
    # their own; None: all layers have the same.
    default_thetas: tuple[float, float] | None = None
    default_tied: bool = False  # whether the head is the embedding
    default_vocab_size: int | None = None  # None: config.json must say
    default_heads: int | None = None  # None: config.json must say
    default_kv_heads: int | None = None  # None: as many as there are heads
    default_head_dim: int | None = None  # None: hidden_size over the heads
    default_max_positions: int | None = None  # None: config.json must say


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
        head_norms=True,
        windows=Windows.SOME_LAYERS,
        default_kv_heads=32,
        default_head_dim=128,
        default_max_positions=32768,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        head_norms=True,
        windows=Windows.MOST_LAYERS,
        activation=Activation.GELU_TANH,
        activation_key="hidden_activation",
        sandwich_norms=True,
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
}
ARCHITECTURES = tuple(FAMILIES)


@dataclass(frozen=True, slots=True)
class TextPart:
    """The part of a model of text and more that is served: config.json has it under `text_config`,
    and its tensors have a prefix (`checkpoint/weights.py`)."""

    model_type: str  # of the whole
    architecture: str  # a row of FAMILIES


TEXT_PARTS: Mapping[str, TextPart] = {
    "Gemma3ForConditionalGeneration": TextPart("gemma3", "Gemma3ForCausalLM"),
}
