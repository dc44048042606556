# SPDX-License-Identifier: Apache-2.0
"""The configurations of models that people serve, and small checkpoints in their shape.

A small one has the real width, heads and positions, two layers, the embedded model's tokenizer and
a vocabulary to fit it: some 0.9 GB of random numbers for the 8B models.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stratakv.benchmarks.gpu.engine import model as engine_model
from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.models.checkpoint.weights import expected_tensors
from stratakv.engine.models.spec.spec_parser import load_model_spec

LLAMA_3_1_8B: dict[str, Any] = engine_model.LLAMA_3_1_8B | {
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 36,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
# What makes one small: layers, and ids that the embedded model's tokenizer has.
SMALL = {"num_hidden_layers": 2, "vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0}
SPREAD = 0.02
PATTERN = 2**20


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    """A model directory with a config.json alone; the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_small(directory: Path, config: dict[str, Any]) -> Path:
    """A checkpoint in bfloat16 that can be served; the directory."""
    write_config(directory, config | SMALL)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, directory)
    # The same numbers over and over: drawing them all takes longer than a test may.
    drawn = torch.randn(PATTERN, generator=torch.Generator().manual_seed(1)) * SPREAD
    pattern = drawn.to(torch.bfloat16)
    tensors = {}
    for name, shape in expected_tensors(load_model_spec(directory)).items():
        count = torch.Size(shape).numel()
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensors[name] = pattern.repeat(-(-count // PATTERN))[:count].view(shape).contiguous()
    save_file(tensors, directory / "model.safetensors")
    return directory
