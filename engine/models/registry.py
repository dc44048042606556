# SPDX-License-Identifier: Apache-2.0
"""Which class computes which architecture.

Knows nothing of configurations; `spec.py` has already refused what is not in this table.
"""

from __future__ import annotations

from pathlib import Path

import torch

from .llama import Llama
from .spec import ModelSpec

MODELS: dict[str, type[Llama]] = {"LlamaForCausalLM": Llama}


def load_model(path: Path, spec: ModelSpec, max_model_len: int, dtype: torch.dtype) -> Llama:
    """The model under `path` in `dtype`; raises ConfigError where its weights do not fit."""
    return MODELS[spec.architecture].load(path, spec, max_model_len, dtype)
