# SPDX-License-Identifier: Apache-2.0
"""Adapters in PEFT's format, written by hand for tests to load, to compare and to damage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stratakv.engine.models.checkpoint.tensor_shapes import expected_tensors
from stratakv.engine.models.model_spec import ModelSpec
from stratakv.engine.models.spec.spec_parser import load_model_spec

TARGETS = ("self_attn.q_proj", "mlp.down_proj")
PREFIX = "base_model.model."


@lru_cache
def spec_of(model: Path) -> ModelSpec:
    return load_model_spec(model)


def make_tensors(
    spec: ModelSpec, seed: int = 0, rank: int = 4, targets: Sequence[str] = TARGETS
) -> dict[str, Tensor]:
    """Matrices of an adapter of every layer, so large that it says something else."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in expected_tensors(spec).items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(targets)):
            for half, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                made[f"{PREFIX}{module}.lora_{half}.weight"] = torch.randn(
                    size, generator=generator
                )
    return made


def config_of(rank: int = 4, **fields: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **fields}


def write_adapter(
    folder: Path,
    model: Path,
    seed: int = 0,
    rank: int = 4,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    **fields: Any,
) -> Path:
    """Write an adapter of a model; `fields` of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = make_tensors(spec_of(model), seed, rank)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config_of(rank, **fields)))
    return folder
