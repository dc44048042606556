# SPDX-License-Identifier: Apache-2.0
"""Adapters in PEFT's format, of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 8
MODULES = ("q_proj", "k_proj", "v_proj")


def make_adapter(
    folder: Path, seed: int, *, outs: tuple[int, ...] = (4, 2, 2), ins: int = 4, layers: int = 1,
    **fields: Any,
) -> Path:  # fmt: skip
    """Write an adapter of the attention's projections, over one that is there. `outs` are the
    numbers of outputs of the modules, `fields` other values of its configuration."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for module, num_outs in zip(MODULES, outs, strict=True):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = 0.2 * torch.randn(RANK, ins, generator=random)
            tensors[f"{name}.lora_B.weight"] = 0.2 * torch.randn(num_outs, RANK, generator=random)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / "fresh"
    save_file(tensors, str(fresh))
    fresh.replace(folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(MODULES),
        "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/model",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder
