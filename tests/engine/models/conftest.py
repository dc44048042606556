# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama directory written by hand, for tests to damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stratakv.engine.models.checkpoint.weights import expected_tensors
from stratakv.engine.models.spec.spec_parser import load_model_spec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


class ModelDirectory:
    """`config` and `tensors` may be changed; `write` puts them on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = dict(CONFIG)
        self.write_config()
        generator = torch.Generator().manual_seed(3)
        self.tensors = {
            name: torch.randn(shape, generator=generator)
            for name, shape in expected_tensors(load_model_spec(path)).items()
        }

    def write_config(self, **changes: Any) -> Path:
        """Changes of None remove a key."""
        self.config = {k: v for k, v in {**self.config, **changes}.items() if v is not None}
        (self.path / "config.json").write_text(json.dumps(self.config))
        return self.path

    def write_single(self) -> Path:
        save_file(self.tensors, self.path / "model.safetensors")
        return self.path

    def write_sharded(self) -> Path:
        """Every second tensor in each of two files."""
        files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        weight_map = {name: files[i % 2] for i, name in enumerate(self.tensors)}
        for file in files:
            held = {n: t for n, t in self.tensors.items() if weight_map[n] == file}
            save_file(held, self.path / file)
        self.write_index(weight_map)
        return self.path

    def write_index(self, weight_map: Any) -> None:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (self.path / "model.safetensors.index.json").write_text(text)


@pytest.fixture
def directory(tmp_path: Path) -> ModelDirectory:
    return ModelDirectory(tmp_path)


@pytest.fixture
def spec_with(directory: ModelDirectory) -> Callable[..., Any]:
    """`spec_with(**changes)`: the specification read back from a changed config.json."""

    def load(**changes: Any) -> Any:
        return load_model_spec(directory.write_config(**changes))

    return load
