# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints made with transformers, and its greedy answers in float64.

The checkpoints are drawn with large weights, so that greedy text wanders instead of repeating one
token, and a wrong position or a missing block shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 199

# Heads of 16 numbers, so that the compiled kernels take them wherever there are some.
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

# Model types whose norms have one added to their weights, but for those of a linear attention.
CENTRED = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one key head, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "every head, biases": {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True},
    "narrow heads": {"head_dim": 8},  # which the compiled kernels leave to the plain path
    "wide heads": {"head_dim": 32, "num_hidden_layers": 2},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "linear rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    },
}


def make_llama(directory: Path, variant: str = "grouped", seed: int = 0, **changes: Any) -> Path:
    """Save a random checkpoint of `variant` in `directory`, in float32; the directory."""
    return make_model(directory, "llama", seed, **(VARIANTS[variant] | changes))


def make_model(
    directory: Path,
    model_type: str,
    seed: int = 0,
    *,
    max_shard_size: str = "1GB",
    **changes: Any,
) -> Path:
    """Save a random checkpoint of a family, BASE with `changes`, in float32; the directory."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(BASE | changes))
    model = AutoModelForCausalLM.from_config(config)
    draw_weights(model, model_type)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def draw_weights(model: PreTrainedModel, model_type: str) -> None:
    """Make the weights of a new model large, and its norms different from each other."""
    # A Gemma multiplies its embeddings, and adds to them what norms have bounded.
    is_gemma = model_type in ("gemma2", "gemma3_text")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0 if "embed" not in name else 0.5 if is_gemma else 2.0)
            elif name.endswith("A_log"):
                # Heads that forget at once, and heads that remember all of a prompt.
                parameter.uniform_(-5.0, 2.0)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1)
            else:
                # Norms, which start as ones, or as zeros where one is added.
                is_centred = model_type in CENTRED and "linear_attn" not in name
                parameter.normal_(0.0 if is_centred else 1.0, 0.1)


@lru_cache(maxsize=4)
def load_reference(directory: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The checkpoint in transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.set_experts_implementation("eager")  # the others know no float64
    return model.eval()


def greedy_reference(
    directory: Path, prompt: Sequence[int], num_tokens: int, guess: Sequence[int] = ()
) -> list[int]:
    """What transformers answers greedily in float64, end-of-text ids not being special. Where a
    guess is right, one pass over prompt and guess says so, instead of one for each token. An answer
    is computed once."""
    asked = directory, tuple(prompt), num_tokens
    if asked not in _ANSWERS:
        _ANSWERS[asked] = _greedy_answer(directory, prompt, num_tokens, guess)
    return _ANSWERS[asked].copy()


_ANSWERS: dict[tuple[Path, tuple[int, ...], int], list[int]] = {}


@torch.inference_mode()
def _greedy_answer(
    directory: Path, prompt: Sequence[int], num_tokens: int, guess: Sequence[int]
) -> list[int]:
    model = load_reference(directory)
    guess = list(guess[: num_tokens - 1])
    out = model(torch.tensor([[*prompt, *guess]]), use_cache=True)
    # The best token behind the prompt, and behind each token of the guess.
    answer: list[int] = out.logits[0, len(prompt) - 1 :].argmax(dim=-1).tolist()
    for place, token in enumerate(guess):
        if answer[place] != token:
            known = answer[: place + 1]
            return known + _greedy_answer(directory, [*prompt, *known], num_tokens - len(known), ())
    while len(answer) < num_tokens:
        out = model(torch.tensor([answer[-1:]]), past_key_values=out.past_key_values)
        answer.append(int(out.logits[0, -1].argmax()))
    return answer


@torch.inference_mode()
def reference_logits(directory: Path, token_ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """transformers' logits `[tokens, vocab]` of one pass over a whole sequence."""
    logits: torch.Tensor = load_reference(directory, dtype)(torch.tensor([list(token_ids)])).logits
    return logits[0]
