# SPDX-License-Identifier: Apache-2.0
"""The bytes of states: those of published models, and where each part lies in a slot."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from stratakv.engine.models.checkpoint.tensor_shapes import expected_tensors
from stratakv.engine.models.layer_attention import full, no_attention, state
from stratakv.engine.models.model_spec import ModelSpec
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.models.states.running_states import RunningStates
from stratakv.engine.models.states.state_spec import ALIGNMENT, StateKind, StateSpec
from stratakv.engine.plan.memory_plan import num_elements, prefill_of

CPU = torch.device("cpu")
LFM2_1_2B: dict[str, Any] = {
    "model_type": "lfm2",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "num_attention_heads": 32,
    "block_ff_dim": 12288,
}
GRANITE_4_H_MICRO: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 8192,
    "mamba_n_heads": 64,
    "mamba_d_state": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 100352,
    "tie_word_embeddings": True,
}
QWEN3_NEXT_80B: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
}


NEMOTRON_NANO_9B: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 4480,
    "num_hidden_layers": 56,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "mamba_head_dim": 80,
    "num_attention_heads": 40,
    "intermediate_size": 15680,
}


FALCON_H1_0_5B: dict[str, Any] = {
    "model_type": "falcon_h1",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_state": 128,
    "vocab_size": 32784,
}


def spec_of(directory: Path, config: dict[str, Any]) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config))
    return load_model_spec(directory)


@pytest.mark.parametrize(
    ("config", "state_bytes", "token_bytes", "counts"),
    [
        # Ten layers of 2,048 channels, of which two columns are kept.
        (LFM2_1_2B, 10 * 2048 * 2 * 2, 6 * 2 * 8 * 64 * 2, (6, 10, 0)),
        # 36 layers of 64 heads of 64 by 128 numbers, and three columns of 4,096 + 256 channels.
        (
            GRANITE_4_H_MICRO,
            36 * (64 * 64 * 128 * 4 + 4352 * 3 * 2),
            4 * 2 * 8 * 64 * 2,
            (4, 36, 0),
        ),
        # 36 layers of 32 heads of 128 by 128, and three columns of 2 * 2,048 + 4,096.
        (
            QWEN3_NEXT_80B,
            36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2),
            12 * 2 * 2 * 256 * 2,
            (12, 36, 0),
        ),
        # 27 layers of 128 heads of 80 by 128, and three columns of 10,240 + 2,048.
        # 36 layers of 24 heads of 64 by 128, three columns of 1,536 + 256, and K and V in all.
        (FALCON_H1_0_5B, 36 * (24 * 64 * 128 * 4 + 1792 * 3 * 2), 36 * 2 * 2 * 64 * 2, (36, 0, 0)),
        (
            NEMOTRON_NANO_9B,
            27 * (128 * 80 * 128 * 4 + 12288 * 3 * 2),
            4 * 2 * 8 * 128 * 2,
            (4, 27, 25),
        ),
    ],
    ids=lambda each: each["model_type"] if isinstance(each, dict) else "",
)
def test_bytes_of_published_models(config, state_bytes, token_bytes, counts, tmp_path):
    spec = spec_of(tmp_path, config)
    assert spec.state is not None
    assert spec.state.slot_bytes("bfloat16") == state_bytes
    assert spec.layout(16, "bfloat16").token_bytes == token_bytes
    kinds = spec.layer_attention
    assert tuple(map(kinds.count, (full(), state(), no_attention()))) == counts
    alone = [layer for layer in spec.state.layers if not spec.has_attention(layer)]
    assert [layer for layer, kind in enumerate(kinds) if kind.is_state] == alone


@pytest.mark.parametrize(
    ("config", "count"),
    [(FALCON_H1_0_5B, 521_411_104), (NEMOTRON_NANO_9B, 8_888_227_328)],
    ids=lambda each: each["model_type"] if isinstance(each, dict) else "",
)
def test_numbers_of_published_models(config, count, tmp_path):
    assert num_elements(expected_tensors(spec_of(tmp_path, config))) == count


def test_weights_of_a_published_model_are_counted(tmp_path):
    spec = spec_of(tmp_path, LFM2_1_2B)
    shapes = expected_tensors(spec)
    assert num_elements(shapes) == 1_170_340_608
    prefill = prefill_of(shapes, spec, 1.0)
    assert prefill.per_square == 2 * 6 * 32 * 64, "layers with a state have no square"
    norms = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    assert prefill.per_token == 2 * (1_170_340_608 - 65536 * 2048 - norms)


def test_experts_count_by_their_share_and_convolutions_whole(tmp_path):
    spec = spec_of(tmp_path, QWEN3_NEXT_80B)
    shapes = expected_tensors(spec)
    sizes = {name: num_elements({name: shape}) for name, shape in shapes.items()}
    layers = {name: size for name, size in sizes.items() if ".layers." in name}
    experts = sum(size for name, size in layers.items() if ".mlp.experts." in name)
    vectors = sum(size for name, size in layers.items() if len(shapes[name]) == 1)
    others = sum(layers.values()) - experts - vectors
    assert prefill_of(shapes, spec, 1.0).per_token == 2 * (others + experts * 10 / 512)


MAMBA = StateSpec(StateKind.MAMBA2, (0, 3), 5, 4, num_heads=3, head_dim=1, state_size=1)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_parts_are_aligned_and_apart(dtype):
    parts = MAMBA.parts(dtype)
    assert [(part.layer, part.is_recurrent) for part in parts] == [
        (0, False), (0, True), (3, False), (3, True)
    ]  # fmt: skip
    assert {part.dtype for part in parts if not part.is_recurrent} == {dtype}
    wide = "float64" if dtype == "float64" else "float32"
    assert {part.dtype for part in parts if part.is_recurrent} == {wide}
    assert all(part.offset % ALIGNMENT == 0 for part in parts)
    assert all(one.offset + one.num_bytes <= other.offset for one, other in pairwise(parts))
    last = parts[-1]
    assert last.offset + last.num_bytes <= MAMBA.slot_bytes(dtype) < last.offset + 2 * ALIGNMENT


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_slot_is_one_run_of_bytes(dtype):
    running = RunningStates(MAMBA, 4, dtype, CPU)
    assert running.raw.dtype is torch.uint8 and not running.raw.any()
    layer = running.layers[3]
    assert layer.conv.shape == (4, 5, 3) and layer.conv.dtype is dtype
    assert layer.recurrent is not None and layer.recurrent.shape == (4, 3, 1, 1)
    for each in running.layers.values():
        each.conv[2] = 1.5
        assert each.recurrent is not None
        each.recurrent[2] = 2.5
    rows = running.raw.any(1)
    assert rows.tolist() == [False, False, True, False]
    running.raw[1] = running.raw[2]
    assert bool((layer.conv[1] == 1.5).all()) and bool((layer.recurrent[1] == 2.5).all())


def test_a_state_without_a_recurrence_is_a_convolutions():
    spec = StateSpec(StateKind.SHORT_CONV, (1,), 6, 3)
    running = RunningStates(spec, 2, torch.float32, CPU)
    assert running.layers[1].recurrent is None
    assert spec.slot_bytes("float32") == ALIGNMENT
