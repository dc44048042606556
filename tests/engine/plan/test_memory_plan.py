# SPDX-License-Identifier: Apache-2.0
"""The planner's arithmetic: a worked example of a 70B model, and the rules at their edges."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from stratakv.engine.cache.group_spec import StateBytes, plan_groups
from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.models.checkpoint.weights import EMBEDDING, HEAD, expected_tensors
from stratakv.engine.models.layer_attention import full, state
from stratakv.engine.models.model_spec import ModelSpec
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.models.states.state_spec import StateKind, StateSpec
from stratakv.engine.plan import memory_plan as plan
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.settings.values import ConfigError

# 80 layers, 8 key heads of 128, bfloat16: the shape of Llama 70B.
LARGE = BlockLayout(80, 16, 8, 128, "bfloat16")
SMALL = BlockLayout(2, 16, 1, 4, "float32")  # 1,024 bytes a block, padded to 4,096


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return load_model_spec(EMBEDDED_MODEL)


def test_a_block_is_one_chunk_of_five_megabytes() -> None:
    assert LARGE.page_bytes == LARGE.slot_bytes == 5_242_880
    assert LARGE.token_bytes == 327_680


def test_256_blocks_over_a_link_of_28_gigabytes() -> None:
    """4,096 tokens in 46.8 ms where a gigabyte is 1,024 MB, 47.9 ms where it is 10^9 bytes."""
    for rate, milliseconds in ((28 * 1024e6, 46.8), (28e9, 47.9)):
        seconds = 256 * plan.block_seconds(LARGE, {"cpu": rate})["cpu"]
        assert round(1e3 * seconds, 1) == milliseconds


def test_one_block_is_the_null_block() -> None:
    held = plan.capacity(
        1000, 11, 16, max_model_len=64, typical_tokens=33, null_blocks=plan.NULL_BLOCKS
    )
    assert held == plan.Capacity(1000, 11, 160, 2, 3)
    assert plan.capacity(1000, 11, 16, max_model_len=177, typical_tokens=1) == plan.Capacity(
        1000, 11, 176, 0, 11
    )


def test_weights_of_the_embedded_model(spec: ModelSpec) -> None:
    shapes = expected_tensors(spec)
    assert plan.num_elements(shapes) == 5_475_584
    assert plan.weight_bytes(shapes, "float16") == 2 * 5_475_584
    vectors = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    on_each = (5_475_584 - vectors) // 2 + vectors
    assert plan.weight_bytes(shapes, "float16", num_devices=2) == 2 * on_each


def test_prefill_counts_each_weight_of_the_layers_twice(spec: ModelSpec) -> None:
    shapes = expected_tensors(spec)
    ends = sum(math.prod(shapes[name]) for name in (EMBEDDING, HEAD) if name in shapes)
    vectors = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    prefill = plan.prefill_of(shapes, spec, 1.0)
    assert prefill.per_token == 2 * (5_475_584 - ends - vectors)
    assert prefill.per_square == 2 * spec.num_layers * spec.num_heads * spec.head_dim
    assert (
        plan.prefill_of(shapes, spec, 4.0).estimate_seconds(100)
        == prefill.estimate_seconds(100) / 4
    )


def test_prefill_counts_the_experts_of_a_token(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 100,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_model_spec(tmp_path)
    attention, router, expert = 64 * (64 + 2 * 32 + 64), 8 * 64, 3 * 32 * 64
    of_a_token = 3 * (attention + router + 2 * expert)
    prefill = plan.prefill_of(expected_tensors(spec), spec, 1e9)
    assert prefill.estimate_seconds(1) == pytest.approx(2e-9 * of_a_token, rel=1e-2)


def test_what_lies_deeper_passes_through_the_cpu_tier() -> None:
    rates = {"cpu": 1024.0, "ssd": 4096.0, "network": 512.0}
    assert plan.block_seconds(SMALL, rates) == {"cpu": 1.0, "ssd": 2.0, "network": 3.0}
    assert plan.block_seconds(SMALL, rates, num_devices=3) == {
        "cpu": 1.0, "ssd": 4.0, "network": 7.0,
    }  # fmt: skip
    assert plan.block_seconds(SMALL, {"cpu": 512.0}) == {"cpu": 2.0}


def test_loads_are_in_whole_blocks() -> None:
    rows = plan.loads([15, 16, 40], SMALL, {"cpu": 3.0}, plan.Prefill(1.0, 0.5))
    assert [(row.tokens, row.blocks, row.size_bytes) for row in rows] == [
        (16, 1, 1024), (32, 2, 2048),
    ]  # fmt: skip
    assert [row.load_seconds["cpu"] for row in rows] == [3.0, 6.0]
    assert [row.prefill_seconds for row in rows] == [16 + 128, 32 + 512]


@pytest.mark.parametrize(
    ("seconds_per_block", "per_token", "per_square"),
    [(8, 1, 0), (16, 1, 0), (16, 1, 1), (17, 1, 1), (160, 1, "1/8"), (512, 0, 1), (513, 0, 1)],
)
def test_break_even_is_the_first_block_that_loading_wins(
    seconds_per_block: int, per_token: int, per_square: str | int
) -> None:
    """Against a search in exact numbers."""
    square = Fraction(per_square)
    wins = (
        tokens
        for tokens in range(16, 16_000, 16)
        if Fraction(seconds_per_block * tokens, 16) < per_token * tokens + square * tokens**2
    )
    prefill = plan.Prefill(per_token, float(square))
    assert plan.break_even_tokens(seconds_per_block, 16, prefill) == next(wins, None)


def test_waste_is_the_mean_over_all_lengths() -> None:
    lengths = range(1, 16 * 50 + 1)
    held = sum(-(-length // 16) * 16 - length for length in lengths) / len(lengths)
    waste = plan.waste(LARGE, 2048)
    assert waste.tokens_per_request == held == 7.5
    assert waste.bytes_per_request == 7.5 * 327_680
    assert waste.share_of_typical == 7.5 / 2055.5


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [
        (100, [100]),
        (1024, [1024]),
        (9000, [1024, 8192, 9000]),
        (131072, [1024, 8192, 32768, 131072]),
    ],
)
def test_prefixes_to_compare(longest: int, lengths: list[int]) -> None:
    assert plan.prefix_lengths(longest) == lengths


def test_heads_are_divided_or_it_is_refused(spec: ModelSpec) -> None:
    whole = plan.device_layout(spec, 16, "float32")
    half = plan.device_layout(spec, 16, "float32", num_devices=2)
    assert half.page_bytes * 2 == whole.page_bytes
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 does not divide"):
        plan.device_layout(spec, 16, "float32", num_devices=3)


def test_memory_must_hold_weights_reserve_and_two_blocks() -> None:
    plan.check_memory(plan.Memory(5000 + 2048, 4000, 1000), SMALL)
    with pytest.raises(ConfigError, match=r"6.88 KiB of memory cannot .* --memory 1MiB or more"):
        plan.check_memory(plan.Memory(5000 + 2047, 4000, 1000), SMALL)


def test_the_reserve_grows_with_the_model(spec: ModelSpec) -> None:
    step, requests = 2048, 256
    row = 2 * 256 + (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    row += 2 * spec.intermediate_size
    expected = step * row * 2 + requests * 2 * spec.vocab_size * 4
    assert plan.activation_bytes(spec, "bfloat16") == expected


def test_the_reserve_counts_a_layer_with_a_state_where_that_has_more_numbers(
    spec: ModelSpec,
) -> None:
    """Gated delta: 96 channels and 2 heads of 64 numbers are 96 + 128 + 4 numbers behind the matrix
    into the layer, 96 behind the convolution, 128 from the recurrence and 128 behind its gate."""
    wide = StateSpec(
        StateKind.GATED_DELTA, (0,), conv_channels=96, conv_width=4, num_heads=2, head_dim=64,
        num_groups=1, state_size=16,
    )  # fmt: skip
    small = replace(spec, num_heads=2, num_kv_heads=1, head_dim=16, state=wide)
    dense = plan.activation_bytes(replace(small, state=None), "bfloat16")
    own = 96 + 128 + 4 + 96 + 128 + 128
    assert plan.activation_bytes(small, "bfloat16") == dense + 2048 * 2 * (own - 6 * 16)
    narrow = replace(wide, num_heads=1, head_dim=8, conv_channels=8)
    assert plan.activation_bytes(replace(small, state=narrow), "bfloat16") == dense


def test_states_take_memory_and_a_part_of_every_load() -> None:
    """States of 5,000 bytes take three blocks of 2,048. A load of n blocks brings n + 3: computed
    at a second a token, of which loading a block takes four, a prefix of 16 tokens is no gain where
    three blocks more have to come, and one of 32 is."""
    layout = BlockLayout(2, 16, 2, 4, "float32")
    states = StateBytes(5000, "conv")
    groups = plan_groups(layout, 1, [full(), state(), full()], states=states)
    table = plan.group_table(groups, 64, (1,))
    assert [(row.attention, row.layers, row.pages) for row in table] == [
        ("full attention", (0, 2), 4), ("states", (1,), 3)
    ]  # fmt: skip
    assert plan.running_state_bytes(states, 256) == (256 + 4) * 5000
    # With drafts each request has the states before them, behind each, and those of the last step.
    assert plan.running_state_bytes(states, 256, 2, num_drafts=4) == (256 * 6 + 4) * 2500
    prefill = plan.Prefill(1.0)
    [load] = plan.loads([40], layout, {"cpu": 4.0}, prefill, num_state_blocks=3)
    assert (load.tokens, load.blocks, load.load_seconds["cpu"]) == (32, 5, 20.0)
    assert plan.break_even_tokens(4.0, 16, prefill) == 16
    assert plan.break_even_tokens(4.0, 16, prefill, 3) == 32
    assert plan.break_even_tokens(16.0, 16, prefill, 3) is None
    assert plan.break_even_tokens(16.0, 16, plan.Prefill(1.0, 0.5), 3) == 16
    memory = plan.Memory(10_000, 3_000, 2_000, 1_500)
    assert memory.kv_bytes == 3_500
    with pytest.raises(
        ConfigError,
        match=r"the states of running requests \(1.46 KiB; lower --max-num-seqs\) and 2 blocks",
    ):
        plan.check_memory(memory, layout)
