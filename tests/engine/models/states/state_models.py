# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints of families with states, and transformers' logits in float64 throughout.

transformers computes norms and recurrences in float32 whatever the model's type is. Here its code
sees float64 wherever it says float32, but in the rotary positions, whose rounding is a model's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny_models import VOCAB, load_reference, make_model

# The bounds of the generation are of no meaning here.
SMALL: dict[str, Any] = {"pad_token_id": 0, "num_hidden_layers": 4}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
KINDS: dict[str, Any] = {"layer_types": ["mamba", "mamba", "attention", "mamba"]}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
    "head_dim": 8,
    "shared_intermediate_size": 40,
}
NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "chunk_size": 16,
    # transformers takes it for a bound of time steps; config.json's time_step_limit has none.
    "time_step_min": 1e-30,
}
FALCON: dict[str, Any] = MAMBA | {
    "mamba_d_ssm": 64,
    "embedding_multiplier": 2.7,
    "lm_head_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.7,
    "key_multiplier": 0.55,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.4,
    # transformers keeps them in float32, so they are such numbers.
    "ssm_multipliers": [0.34375, 1.6875, 0.8125, 0.59375, 1.09375],
    "mlp_multipliers": [0.88, 0.3],
}
# A name's first word is the model type.
STATE_MODELS: dict[str, dict[str, Any]] = {
    "lfm2-state-last": {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_next-experts": DELTA | EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen3_next-one-group-state-last": DELTA
    | {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "layer_types": [
            "linear_attention",
            "full_attention",
            "linear_attention",
            "linear_attention",
        ],
        "num_experts": 0,
    },
    "qwen3_5_text-dense-interval": DELTA | {"full_attention_interval": 2, "attention_bias": True},
    "qwen3_5_moe_text-experts": DELTA | EXPERTS,
    "granitemoehybrid-dense-still": MAMBA | KINDS | GRANITE | {"num_local_experts": 0},
    "granitemoehybrid-experts-rope-groups": MAMBA
    | GRANITE
    | EXPERTS
    | {
        "position_embedding_type": "rope",
        "mamba_n_groups": 4,
        "mamba_proj_bias": True,
        "num_local_experts": 6,
        "intermediate_size": 24,
        "time_step_limit": [0.01, 0.6],
        "layer_types": ["full_attention", "linear_attention"] * 2,
    },
    "bamba-biases": MAMBA
    | {
        "attn_layer_indices": [0, 2],
        "mlp_bias": True,
        "attention_bias": True,
        "mamba_conv_bias": False,
        "mamba_n_groups": 2,
        "intermediate_size": 80,
    }
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "falcon_h1-without-norm": FALCON,
    "falcon_h1-norm-biases-groups": FALCON
    | {
        "mamba_d_ssm": None,
        "mamba_n_groups": 2,
        "mamba_rms_norm": True,
        "seed": 5,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "time_step_limit": [0.01, 0.6],
    },
    "nemotron_h-mlps-last": NEMOTRON
    | {
        "layers_block_type": [
            "linear_attention",
            "mlp",
            "linear_attention",
            "full_attention",
            "mlp",
            "mlp",
        ]
    },
    "nemotron_h-biases-state-last": NEMOTRON
    | {
        "n_groups": 2,
        "use_bias": True,
        "mlp_bias": True,
        "use_conv_bias": False,
        "layers_block_type": ["mlp", "full_attention", "linear_attention", "linear_attention"],
    },
    "lfm2-biases-wide": {
        "full_attn_idxs": [0, 3],
        "conv_bias": True,
        "conv_L_cache": 5,
        "block_multiple_of": 16,
        "tie_word_embeddings": True,
    },
}


def make_state_model(directory: Path, name: str, **changes: Any) -> Path:
    """The checkpoint of one of STATE_MODELS; the directory."""
    options = SMALL | STATE_MODELS[name] | changes
    return make_model(directory, name.split("-")[0], **({"seed": 3} | options))


class _WideTorch:
    """torch, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def _float32_is(module: Any, is_wide: bool) -> Iterator[None]:
    before = module.torch, Tensor.float
    module.torch = _WideTorch() if is_wide else torch
    Tensor.float = Tensor.double if is_wide else _FLOAT  # type: ignore[method-assign]
    try:
        yield
    finally:
        module.torch, Tensor.float = before  # type: ignore[method-assign]


_FLOAT = Tensor.float


def exact_logits(directory: Path, token_ids: list[int]) -> Tensor:
    """transformers' logits `[tokens, vocab]` of one pass over a whole sequence."""
    return exact_logits_of(load_reference(directory), token_ids)


@torch.inference_mode()
def exact_logits_of(model: Any, token_ids: list[int]) -> Tensor:
    """The logits `[tokens, vocab]` of a transformers model in float64, which may have adapters."""
    module = sys.modules[type(model).__module__]
    rotary = getattr(getattr(model.model, "language_model", model.model), "rotary_emb", None)
    if rotary is not None and not hasattr(rotary, "of_class"):
        rotary.of_class = rotary.forward

        def turn(*args: Any, **named: Any) -> Any:
            with _float32_is(module, False):
                return rotary.of_class(*args, **named)

        rotary.forward = turn
    with _float32_is(module, True):
        logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits
    return logits[0]


def random_tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()
