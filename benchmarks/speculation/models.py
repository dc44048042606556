# SPDX-License-Identifier: Apache-2.0
"""Models for speculation with draft models, among them a draft model that is never right.

The pair of models is constructed, because nothing is downloaded. The target is the embedded model
with added layers that change nothing: it gives the embedded model's tokens and takes DEPTH times as
long. With the embedded model as draft model, every draft is right, and the gain is the largest for
a draft model of this size. The gain of pairs in real use is between this gain and that of a draft
model with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.config.engine_options import EMBEDDED_MODEL

if TYPE_CHECKING:
    from torch import Tensor

DEPTH = 8  # the target's layers, as a multiple of the embedded model's layers
_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_ADDS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def make_deep(folder: Path) -> Path:
    """Write the embedded model with DEPTH times as many layers; added layers change nothing."""
    from safetensors.torch import load_file

    tensors = load_file(EMBEDDED_MODEL / "model.safetensors")
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    for name, tensor in list(tensors.items()):
        if not name.startswith("model.layers."):
            continue
        *before, number, after = name.split(".", 3)
        for turn in range(1, DEPTH):
            added = tensor * 0 if after in _ADDS else tensor.clone()
            tensors[".".join([*before, str(int(number) + turn * num_layers), after])] = added
    config["num_hidden_layers"] = DEPTH * num_layers
    return _save(folder, config, tensors)


def make_unrelated(folder: Path) -> Path:
    """Write a model of the embedded model's shape and vocabulary with random weights."""
    import torch
    from safetensors.torch import load_file

    random = torch.Generator().manual_seed(5)
    tensors = load_file(EMBEDDED_MODEL / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = torch.randn(tensor.shape, generator=random) * tensor.std()
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    return _save(folder, config, tensors)


def make_random_head(folder: Path) -> Path:
    """Write an EAGLE head of one layer, of the embedded model's shape, with random weights."""
    import torch
    from safetensors.torch import load_file

    random = torch.Generator().manual_seed(5)
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    tensors = {"fc.weight": torch.randn(
        config["hidden_size"], 2 * config["hidden_size"], generator=random
    ) * (2 * config["hidden_size"]) ** -0.5}  # fmt: skip
    for name, tensor in load_file(EMBEDDED_MODEL / "model.safetensors").items():
        own = name.removeprefix("model.")
        if own.startswith("layers.0.") and own != "layers.0.input_layernorm.weight":
            is_matrix = tensor.dim() == 2
            tensors[own] = (
                torch.randn(tensor.shape, generator=random) * tensor.std() if is_matrix else tensor
            )
    config |= {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    return _save(folder, config, tensors)


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    for name in _FILES:
        shutil.copy(EMBEDDED_MODEL / name, folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
