# SPDX-License-Identifier: Apache-2.0
"""Small EAGLE heads: random ones for any model, and ones that always say what their model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CIRCLE = 96  # tokens of a model that counts, and numbers of its hidden states


def make_eagle(
    directory: Path, model: Path, seed: int = 0, *, has_bias: bool = False, **changes: Any
) -> Path:
    """Save a random head for the model in a directory, of one layer, in float32; its directory.
    `changes` are those of its config.json."""
    given = json.loads((model / "config.json").read_text())
    hidden = given["hidden_size"]
    config: dict[str, Any] = {
        "architectures": ["EagleLlamaForCausalLM"],
        "model_type": "eagle",
        "hidden_size": hidden,
        "vocab_size": given["vocab_size"],
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
    } | changes
    draw = torch.Generator().manual_seed(seed)

    def matrix(outs: int, ins: int) -> torch.Tensor:
        return torch.randn(outs, ins, generator=draw) * ins**-0.5

    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    mlp = config["intermediate_size"]
    tensors = {"fc.weight": matrix(hidden, 2 * hidden)}
    if has_bias:
        tensors["fc.bias"] = matrix(1, hidden)[0]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        if layer:
            tensors[prefix + "input_layernorm.weight"] = torch.ones(hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = torch.ones(hidden)
        for name, shape in {
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }.items():  # fmt: skip
            tensors[f"{prefix}{name}.weight"] = matrix(*shape)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def make_counting_model(directory: Path) -> Path:
    """Save a Llama whose layers add nothing: behind token t it says t + 1, after the last the first
    one. Its directory."""
    from .tiny_models import make_llama

    make_llama(directory, vocab_size=CIRCLE, hidden_size=CIRCLE)
    rewrite(directory, {
        "model.embed_tokens.weight": torch.eye(CIRCLE) * CIRCLE**0.5,
        "model.norm.weight": torch.ones(CIRCLE),
        "lm_head.weight": torch.eye(CIRCLE).roll(1, 0),
    }, silent=("o_proj.weight", "down_proj.weight"))  # fmt: skip
    return directory


def make_counting_head(directory: Path, model: Path, *, by: str) -> Path:
    """Save a head that says what the counting model says: by the `hidden` state before the token
    alone, or by the `token`; its own states then have a hundredth of the state before in them, and
    differ from the model's. Its directory."""
    make_eagle(directory, model)
    one, none = torch.eye(CIRCLE), torch.zeros(CIRCLE, CIRCLE)
    noise = 0.01 * torch.randn(CIRCLE, CIRCLE, generator=torch.Generator().manual_seed(1))
    halves = (one, noise) if by == "token" else (none, one.roll(1, 0))
    fusion = torch.cat(halves, 1)
    rewrite(directory, {"fc.weight": fusion}, silent=("o_proj.weight", "down_proj.weight"))
    return directory


def rewrite(
    directory: Path, tensors: dict[str, torch.Tensor], silent: tuple[str, ...] = ()
) -> None:
    """Put tensors in the place of those of a checkpoint, and zeros where names end in `silent`."""
    from safetensors.torch import load_file

    file = directory / "model.safetensors"
    stored = load_file(file) | tensors
    for name in stored:
        if silent and name.endswith(silent):
            stored[name] = torch.zeros_like(stored[name])
    save_file({name: each.contiguous() for name, each in stored.items()}, file)
