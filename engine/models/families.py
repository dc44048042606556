# SPDX-License-Identifier: Apache-2.0
"""The model families that are served, and what tells them apart: one row each.

All are one decoder: RMS norms, rotary positions, grouped attention, a gated MLP with SiLU. A row
holds what the code of a family fixes, and what its configuration class takes where config.json is
silent.
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


class MlpKind(Enum):
    """How the part of a layer behind its attention is computed (`mlp.py`)."""

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
}
ARCHITECTURES = tuple(FAMILIES)
