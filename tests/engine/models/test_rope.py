# SPDX-License-Identifier: Apache-2.0
"""Rotary tables and the rotation equal those of transformers, for every kind."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from stratakv.engine.models.checkpoint.json_fields import JsonFields
from stratakv.engine.models.rope import rope_tables, rotate
from stratakv.engine.models.spec.rope_spec import ROPE_KINDS, RopeSpec, parse_rope, stable_length
from stratakv.tiers.settings.values import ConfigError

HEAD_DIM, MAX_POSITIONS = 16, 4096
FACTORS = [1.0 + i / 4 for i in range(HEAD_DIM // 2)]

KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 1.1},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 100,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn, longer than the model says": {"rope_type": "yarn", "factor": 2.0},
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 2048,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": FACTORS[::-1],
        "original_max_position_embeddings": 1024,
    },
    "longrope, factors": {
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": FACTORS[::-1],
        "factor": 0.5,
        "original_max_position_embeddings": 1024,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}


def test_every_kind_is_tested():
    assert {one["rope_type"] for one in KINDS.values()} == set(ROPE_KINDS)


def yarn_reach(rope: RopeSpec) -> int:
    return max(MAX_POSITIONS, int(rope.factor * rope.original_max_positions))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_tables_equal_those_of_transformers(name, dtype):
    parameters = {"rope_theta": 1000.0, **KINDS[name]}
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(parameters),
    )
    fields = JsonFields({"rope_parameters": parameters}, "config.json")
    rope = parse_rope(fields, HEAD_DIM, MAX_POSITIONS)
    length = stable_length(rope, MAX_POSITIONS)
    assert length == {"longrope": 1024, "yarn": yarn_reach(rope)}.get(rope.kind, MAX_POSITIONS)

    positions = torch.arange(length)[None]
    theirs = LlamaRotaryEmbedding(config)(torch.empty(0, dtype=dtype), positions)
    ours = rope_tables(rope, HEAD_DIM, length, MAX_POSITIONS, dtype)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        # They differ by the last bit of a cosine at most, and on most machines not at all.
        last_bit = 8e-3 if dtype == torch.bfloat16 else 2e-7
        half = other[0, :, : HEAD_DIM // 2]
        torch.testing.assert_close(mine, half, rtol=0, atol=last_bit)


def test_the_rotation_equals_that_of_transformers():
    q, k = torch.randn(7, 4, HEAD_DIM), torch.randn(7, 4, HEAD_DIM)
    angles = torch.rand(7, HEAD_DIM // 2)
    both = torch.cat([angles, angles], dim=-1)[None]
    theirs, _ = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], both.cos(), both.sin()
    )
    ours = rotate(q, angles.cos()[:, None], angles.sin()[:, None])
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1))


def test_short_sequences_use_short_factors_and_transformers_agrees():
    """Up to the original length transformers uses the short factors too, wherever a chunk ends."""
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": 1000.0, **KINDS["longrope"]},
    )
    theirs = LlamaRotaryEmbedding(config)
    short = theirs(torch.empty(0), torch.tensor([[3, 1023]]))[0]
    long = theirs(torch.empty(0), torch.tensor([[3, 1024]]))[0]
    assert not torch.equal(short[0, 0], long[0, 0]), "else there would be no limit to keep"
    rope = parse_rope(
        JsonFields({"rope_parameters": {"rope_theta": 1000.0, **KINDS["longrope"]}}, ""),
        HEAD_DIM,
        MAX_POSITIONS,
    )
    ours = rope_tables(rope, HEAD_DIM, 1024, MAX_POSITIONS, torch.float32)[0]
    torch.testing.assert_close(ours[[3, 1023]], short[0, :, : HEAD_DIM // 2], rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (RopeSpec("linear", factor=1e-320), torch.float32),
        (RopeSpec("longrope", original_max_positions=64, short_factor=(1e-45,) * 8), torch.float32),
        (RopeSpec("yarn", original_max_positions=64, attention_factor=1e5), torch.float16),
    ],
)
def test_numbers_that_are_none_are_refused(spec, dtype):
    """Rather than answered with tokens of no model."""
    with pytest.raises(ConfigError, match=f"the {spec.kind} rotary positions .* cannot hold"):
        rope_tables(spec, HEAD_DIM, 64, MAX_POSITIONS, dtype)
