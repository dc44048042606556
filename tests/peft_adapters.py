# SPDX-License-Identifier: Apache-2.0
"""Small adapters made by PEFT on small random models, and the logits of both computed by PEFT live.

PEFT begins with B of zeros, which change nothing, so all matrices are drawn here.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from .engine.models.states.state_models import STATE_MODELS, exact_logits_of, make_state_model
from .tiny_models import make_model

EVERY_TARGET = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FILE = "adapter_model.safetensors"


class Made(NamedTuple):
    """An adapter to make."""

    base: str
    options: dict[str, Any]
    dtype: torch.dtype = torch.float32  # of its file
    spread: float = 0.2  # of the numbers of its matrices


_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "norm_topk_prob": True,
}
_PHI3 = {"pad_token_id": 0, "sliding_window": None, "hidden_size": 96, "num_hidden_layers": 2}
# By name; a name of STATE_MODELS is a model with states.
BASES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 40},
    "phi3": _PHI3,
}
ADAPTERS: dict[str, Made] = {
    "plain": Made("qwen3", {"r": 8, "lora_alpha": 16, "target_modules": EVERY_TARGET}),
    "rslora": Made(
        "qwen3",
        {
            "r": 4,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ["q_proj", "down_proj"],
        },
    ),
    "patterns": Made(
        "qwen3",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "up_proj"],
            "layers_to_transform": [1, 2],
            "rank_pattern": {"layers.1.self_attn.q_proj": 6},
            "alpha_pattern": {"up_proj": 20},
        },
    ),
    "all_linear": Made("qwen3", {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}),
    "bfloat16": Made(
        "qwen3",
        {"r": 8, "lora_alpha": 8, "target_modules": ["v_proj", "o_proj", "gate_proj"]},
        torch.bfloat16,
    ),
    "experts_attention": Made(
        "qwen3_moe", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    ),
    "experts_joined": Made(
        "qwen3_moe",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "experts_by_layer": Made(
        "qwen3_moe",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": [],
            "target_parameters": [
                "layers.0.mlp.experts.gate_up_proj",
                "layers.1.mlp.experts.down_proj",
            ],
        },
    ),
    "experts_converted": Made(
        "qwen3_moe",
        {"r": 3, "lora_alpha": 6, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    ),
    "phi3_joined": Made(
        "phi3", {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "gate_up_proj"]}
    ),
    "delta_states": Made(
        "qwen3_next-experts",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"],
        },
    ),
    "shared_experts": Made(
        "qwen2_moe",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": [f"shared_expert.{part}_proj" for part in ("gate", "up", "down")],
        },
    ),
    "mamba_states": Made(
        "granitemoehybrid-experts-rope-groups",
        {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "out_proj", "k_proj"]},
    ),
    "parallel_states": Made(
        "falcon_h1-norm-biases-groups",
        {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "out_proj", "o_proj"]},
    ),
    "conv_states": Made(
        "lfm2-state-last",
        {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "out_proj", "q_proj", "w2"]},
    ),
}


def adapters_of(base: str) -> list[str]:
    """The names of the adapters that are made on a base."""
    return [name for name, made in ADAPTERS.items() if made.base == base]


class AdapterFolders:
    """The folders of bases and adapters below one, made when they are asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def base(self, name: str) -> Path:
        folder = self._root / name
        if not folder.exists():
            if name in STATE_MODELS:
                make_state_model(folder, name)
            else:
                make_model(folder, name, 3, **({"pad_token_id": 0} | BASES[name]))
        return folder

    def adapter(self, name: str) -> Path:
        folder = self._root / f"adapter-{name}"
        if not folder.exists():
            _make_adapter(folder, self.base(ADAPTERS[name].base), ADAPTERS[name], name)
        return folder

    def of_base(self, base: str) -> dict[str, Path]:
        """The folders of all adapters of a base, by name."""
        return {name: self.adapter(name) for name in adapters_of(base)}


@contextmanager
def _unknown_to_peft(model: Any) -> Iterator[None]:
    """PEFT refuses `out_proj` of Falcon H1, for kernels that go past the module; the CPU has none.
    Of other families it has to know the experts."""
    known = model.config.model_type
    model.config.model_type = "unknown" if known == "falcon_h1" else known
    try:
        yield
    finally:
        model.config.model_type = known


def _make_adapter(folder: Path, base: Path, made: Made, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with _unknown_to_peft(model):
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **made.options))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for each, parameter in adapted.named_parameters():
            if "lora_" in each:
                parameter.normal_(0.0, made.spread, generator=generator)
    adapted.save_pretrained(folder)
    tensors = load_file(folder / FILE)
    assert all(tensor.any() for tensor in tensors.values()), "an adapter of zeros proves nothing"
    if made.dtype is not torch.float32:
        save_file({each: tensor.to(made.dtype) for each, tensor in tensors.items()}, folder / FILE)


def with_one_bit_changed(adapter: Path, folder: Path) -> Path:
    """Copy an adapter, but for the lowest bit of the last number of its last tensor; the copy."""
    shutil.copytree(adapter, folder)
    content = bytearray((folder / FILE).read_bytes())
    content[-4] ^= 1  # of a little-endian float32
    (folder / FILE).write_bytes(content)
    return folder


@lru_cache(maxsize=16)
def load_adapted(base: Path, adapter: Path | None, dtype: torch.dtype) -> Any:
    """The model in transformers, with the modules that PEFT puts around those of it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.set_experts_implementation("eager")  # the others know no float64
    if adapter is not None:
        with _unknown_to_peft(model):
            model = PeftModel.from_pretrained(model, adapter).base_model.model
    return model.eval().to(dtype)


@cache
def _peft_logits(
    base: Path, adapter: Path | None, token_ids: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    model = load_adapted(base, adapter, dtype)
    if dtype is torch.float64:
        return exact_logits_of(model, list(token_ids))
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def peft_logits(
    base: Path,
    adapter: Path | None,
    token_ids: Sequence[int],
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """PEFT's logits `[tokens, vocab]` of one pass over a whole sequence; transformers' without an
    adapter."""
    return _peft_logits(base, adapter, tuple(token_ids), dtype)


def check_greedy(
    base: Path, adapter: Path | None, prompt: Sequence[int], answer: Sequence[int]
) -> None:
    """Check that each token of an answer is the best behind the tokens before it."""
    logits = peft_logits(base, adapter, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
    assert list(answer) == logits.argmax(-1).tolist()
