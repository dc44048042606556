# SPDX-License-Identifier: Apache-2.0
"""The model of the whole-engine sections, in the shape of Llama-3.1-8B, or tiny in a rehearsal.

The model directory contains only a config.json, from which the engine makes random weights, so
nothing is downloaded and nothing large is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ....engine.models.checkpoint.tensor_shapes import EMBEDDING, expected_tensors
from ....engine.models.model_spec import ModelSpec
from ....engine.plan.memory_plan import num_elements
from ....engine.worker.runtime.placement import with_index
from ..section import Place

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
TOY = LLAMA_3_1_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@contextmanager
def model_directory(place: Place) -> Iterator[Path]:
    """Yield the directory of the run's model, which is removed on exit."""
    with TemporaryDirectory(prefix="stratakv-bench-") as folder:
        path = Path(folder)
        config = TOY if place.is_rehearsal else LLAMA_3_1_8B
        (path / "config.json").write_text(json.dumps(config))
        yield path


def engine_options(place: Place) -> dict[str, Any]:
    """Return the options of every engine of the run: the GPU with its kernels, or in a rehearsal
    the CPU with the kernels' CPU versions."""
    common: dict[str, Any] = {"load_format": "dummy", "attention_backend": "kernels"}
    if place.is_rehearsal:
        return common | {"device": "cpu", "dtype": "float64"}
    return common | {
        "device": str(with_index(place.device)), "dtype": "bfloat16", "strict_kernels": True
    }  # fmt: skip


def read_weight_bytes(spec: ModelSpec, element_bytes: int) -> int:
    """Return the bytes of the weights that a step reads: all weights but a separate embedding
    matrix, of which a step reads only a few rows."""
    shapes = dict(expected_tensors(spec))
    if not spec.tied_embeddings:
        del shapes[EMBEDDING]
    return num_elements(shapes) * element_bytes
