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
# A name's first word is the model type.
STATE_MODELS: dict[str, dict[str, Any]] = {
    "lfm2-state-last": {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_auto_adjust_ff_dim": False,
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


@torch.inference_mode()
def exact_logits(directory: Path, token_ids: list[int]) -> Tensor:
    """transformers' logits `[tokens, vocab]` of one pass over a whole sequence."""
    model = load_reference(directory)
    module = sys.modules[type(model).__module__]
    rotary = getattr(model.model, "rotary_emb", None)
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
