# SPDX-License-Identifier: Apache-2.0
"""What config.json says of layers with a state: its spellings, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.models.checkpoint.fingerprint import fingerprint
from stratakv.engine.models.layer_attention import full, no_attention, state
from stratakv.engine.models.model_spec import ModelSpec, Scales
from stratakv.engine.models.spec.multipliers import Multipliers
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.models.states.state_spec import OutputNorm
from stratakv.tiers.settings.values import ConfigError

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
}
LINEAR, FULL = "linear_attention", "full_attention"


def spec_of(directory: Path, model_type: str, **config: Any) -> ModelSpec:
    given = {"model_type": model_type} | SHAPE | config
    text = json.dumps({name: value for name, value in given.items() if value is not None})
    (directory / "config.json").write_text(text)
    return load_model_spec(directory)


def layers_of(directory: Path, model_type: str, **config: Any) -> tuple[int, ...]:
    spec = spec_of(directory, model_type, **config)
    return () if spec.state is None else spec.state.layers


@pytest.mark.parametrize(
    ("model_type", "config", "layers"),
    [
        ("lfm2", {"layer_types": ["conv", FULL]}, (0,)),
        ("lfm2", {"full_attn_idxs": [0]}, (1,)),
        ("lfm2", {}, ()),
        ("qwen3_next", {"num_hidden_layers": 5}, (0, 1, 2, 4)),
        ("qwen3_next", {"full_attention_interval": 2}, (0,)),
        ("qwen3_5_text", {"layer_types": [FULL, LINEAR], "full_attention_interval": 2}, (1,)),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, (0,)),
        ("granitemoehybrid", {"layers_block_type": ["attention", "mamba"]}, (1,)),
        ("granitemoehybrid", {"layer_types": [FULL, LINEAR]}, (1,)),
        ("bamba", {"attn_layer_indices": [1]}, (0,)),
        ("falcon_h1", {}, (0, 1)),
        ("nemotron_h", {"layers_block_type": [FULL, LINEAR]}, (1,)),
        ("nemotron_h", {"layer_types": ["mamba", "attention"]}, (0,)),
        ("nemotron_h", {"hybrid_override_pattern": "*M"}, (1,)),
    ],
)
def test_layers_with_a_state(model_type, config, layers, tmp_path):
    assert layers_of(tmp_path, model_type, **config) == layers


def test_both_spellings_make_one_specification(tmp_path):
    old = spec_of(tmp_path, "granitemoehybrid", layer_types=["mamba", "attention"])
    new = spec_of(tmp_path, "granitemoehybrid", layer_types=[LINEAR, FULL])
    assert old == new


def test_layers_of_nemotron_have_one_part_each(tmp_path):
    """Of both spellings, and also where the number of layers is only that of the list."""
    listed = ["mamba", "mlp", "attention", "mlp", "mlp", "mamba"]
    given = {"num_hidden_layers": None, "layers_block_type": listed}
    spec = spec_of(tmp_path, "nemotron_h", **given)
    assert spec.layer_attention == (
        state(), no_attention(), full(), no_attention(), no_attention(), state()
    )  # fmt: skip
    assert (spec.num_layers, spec.num_kv_layers, spec.mlp_layers) == (6, 1, (1, 3, 4))
    assert [spec.has_mixer(layer) for layer in range(6)] == [True, False, True, False, False, True]
    older = {"num_hidden_layers": 6, "hybrid_override_pattern": "M-*--M"}
    assert spec_of(tmp_path, "nemotron_h", **older) == spec
    both = {"layer_types": listed, "num_hidden_layers": 6, "hybrid_override_pattern": "MMMMM*"}
    assert spec_of(tmp_path, "nemotron_h", **both) == spec, "a list wins, as in transformers"


def test_layers_of_falcon_have_k_and_v_and_a_state(tmp_path):
    spec = spec_of(tmp_path, "falcon_h1", layers_block_type=["hybrid", "hybrid"])
    assert spec.layer_attention == (full(), full()) and spec.num_kv_layers == 2
    assert spec.has_attention(1) and spec.has_state(1) and spec.has_mlp(1)
    assert spec.layout(16, "bfloat16").num_layers == 2


@pytest.mark.parametrize(
    ("config", "size"),
    [({}, 1024), ({"mamba_d_ssm": 96, "mamba_expand": 3}, 96), ({"mamba_expand": 3}, 1024)],
)
def test_the_size_of_falcons_states(config, size, tmp_path):
    state = spec_of(tmp_path, "falcon_h1", **config).state
    assert state is not None and state.inner_size == size
    assert state.output_norm is OutputNorm.NONE


def test_a_null_size_of_falcons_states_is_the_expanded_one(tmp_path):
    text = json.dumps({"model_type": "falcon_h1", "mamba_d_ssm": None, "mamba_expand": 3} | SHAPE)
    (tmp_path / "config.json").write_text(text)
    state = load_model_spec(tmp_path).state
    assert state is not None and state.inner_size == 3 * 64


def test_norms_of_falcons_states(tmp_path):
    for config, norm in (
        ({"mamba_norm_before_gate": False}, OutputNorm.NONE),
        ({"mamba_rms_norm": True}, OutputNorm.BEFORE_GATE),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": False}, OutputNorm.BEHIND_GATE),
    ):
        state = spec_of(tmp_path, "falcon_h1", **config).state
        assert state is not None and state.output_norm is norm


def test_multipliers(tmp_path):
    given = {"key_multiplier": 0.5, "attention_in_multiplier": 2.0, "lm_head_multiplier": 0.25}
    given |= {"mlp_multipliers": [0.5, 4.0], "embedding_multiplier": 3.0}
    scales = spec_of(tmp_path, "falcon_h1", **given).scales
    # The MLP's own factor is that of the stream, 8; scores have that of keys and twice the input's.
    assert scales == Scales(embedding=3.0, attention=0.5 * 4.0 * 8**-0.5, residual=8.0, logits=4.0)
    plain = spec_of(tmp_path, "falcon_h1")
    assert plain.scales == Scales(embedding=1.0, attention=8**-0.5, residual=1.0, logits=1.0)
    assert plain.multipliers == Multipliers()
    assert spec_of(tmp_path, "bamba", attn_layer_indices=[1], key_multiplier=3).multipliers is None


def test_sizes_of_nemotron(tmp_path):
    given = {"hybrid_override_pattern": "M*", "mamba_num_heads": 12, "mamba_head_dim": 10}
    spec = spec_of(tmp_path, "nemotron_h", **given, n_groups=4, ssm_state_size=6, conv_kernel=3)
    assert spec.state is not None
    assert (spec.state.inner_size, spec.state.conv_channels) == (120, 120 + 2 * 4 * 6)
    assert spec.state.recurrent_shape == (12, 10, 6)
    assert spec.state.conv_width == 3 and spec.state.has_conv_bias and not spec.state.has_bias
    older = {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_conv_bias": True, "use_bias": False}
    ignored = {"n_groups": 2, "conv_kernel": 9, "expand": 7}
    config = given | {"ssm_state_size": 6} | older | ignored
    assert spec_of(tmp_path, "nemotron_h", **config) == spec, "older names win, as in transformers"
    assert spec_of(tmp_path, "nemotron_h", **given, n_groups=3, rope_theta=-1.0).rope_of_layers == (
        1,
        1,
    )


def test_the_older_keys_of_lfm2(tmp_path):
    mixed = {"layer_types": ["conv", FULL]}
    spec = spec_of(tmp_path, "lfm2", **mixed, block_ff_dim=12288, tie_embedding=False)
    assert (spec.intermediate_size, spec.tied_embeddings) == (8192, False)
    spec = spec_of(tmp_path, "lfm2", **mixed, block_ffn_dim_multiplier=1.5, block_multiple_of=7)
    assert spec.intermediate_size == 28, "int(1.5 * int(2 / 3 * 24)) is 24, up to a multiple of 7"


def test_layers_of_granite_have_positions_only_where_it_says_so(tmp_path):
    mixed = {"layer_types": ["mamba", "attention"]}
    assert spec_of(tmp_path, "granitemoehybrid", **mixed).still_layers == (0, 1)
    named = spec_of(tmp_path, "granitemoehybrid", **mixed, position_embedding_type="nope")
    assert named.still_layers == (0, 1)
    named = spec_of(tmp_path, "granitemoehybrid", **mixed, position_embedding_type="rope")
    assert named.still_layers is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        ([0.0, {"__float__": "Infinity"}], None),
        ([0, float("inf")], None),
        ([0.001, 0.1], (0.001, 0.1)),
    ],
)
def test_bounds_of_time_steps(given, kept, tmp_path):
    spec = spec_of(tmp_path, "bamba", attn_layer_indices=[1], time_step_limit=given)
    assert spec.state is not None and spec.state.time_steps == kept


def test_the_fingerprint_separates_states(tmp_path):
    mixed = {"layer_types": [LINEAR, FULL]}
    specs = [
        spec_of(tmp_path, name, **mixed | changes)
        for name in ("qwen3_next", "qwen3_5_moe_text")
        for changes in ({}, {"linear_num_value_heads": 16}, {"linear_conv_kernel_dim": 3})
    ]
    specs.append(spec_of(tmp_path, "qwen3_next", layer_types=[FULL, LINEAR]))
    specs += [
        spec_of(tmp_path, "bamba", attn_layer_indices=[1], **changes)
        for changes in ({}, {"time_step_limit": [0.0, 0.1]}, {"mamba_conv_bias": False})
    ]
    assert len({fingerprint(tmp_path, each, random_for="cpu") for each in specs}) == len(specs)


QWEN = {"layer_types": [LINEAR, FULL]}
GRANITE = {"layer_types": ["mamba", "attention"]}
NEMOTRON = {"hybrid_override_pattern": "M*"}
BAMBA = {"attn_layer_indices": [1]}


@pytest.mark.parametrize(
    ("model_type", "config", "words"),
    [
        # Layers.
        ("lfm2", {"layer_types": ["conv", "conv"]}, "layer_types must be full_attention for at l"),
        ("lfm2", {"layer_types": ["conv", "mamba"]}, "2 layers, not 'mamba' for layer 1"),
        ("lfm2", {"layer_types": ["conv"]}, "for each of the 2 layers, not of 1"),
        ("lfm2", {"full_attn_idxs": [2]}, "full_attn_idxs must be a list of layers below 2"),
        ("lfm2", {"full_attn_idxs": []}, "layer_types must be full_attention for at least one"),
        ("qwen3_next", {}, "layer_types must be full_attention for at least one layer"),
        ("qwen3_next", {"layer_types": [FULL, "sliding_attention"]}, "layer_types must be a list"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval must be a whole"),
        ("granitemoehybrid", {}, "layer_types must be attention or full_attention for at least"),
        ("granitemoehybrid", {"layers_block_type": ["mamba", "conv"]}, "layers_block_type must be"),
        ("bamba", {"attn_layer_indices": [True]}, "attn_layer_indices must be a list of layers"),
        ("nemotron_h", {}, "layers_block_type must be a list with one of mamba, linear_attention"),
        ("nemotron_h", {"hybrid_override_pattern": "M|*"}, r"pattern must be a text of M \* - E"),
        ("nemotron_h", {"hybrid_override_pattern": 3}, "hybrid_override_pattern must be a string"),
        ("nemotron_h", {"hybrid_override_pattern": "ME*"}, r"be without moe \(E\): experts of thi"),
        ("nemotron_h", {"layer_types": [LINEAR, "moe", FULL]}, "layer_types must be without moe"),
        ("nemotron_h", {"layer_types": [LINEAR, "conv"]}, "layer_types must be a list with one of"),
        ("nemotron_h", {"layer_types": [LINEAR, "mlp"]}, "with attention at least among the layer"),
        ("nemotron_h", {"layer_types": [FULL, "mlp"]}, "one with a state and one with attention"),
        ("nemotron_h", {"hybrid_override_pattern": "M-*"}, "num_hidden_layers must be 3, as hybri"),
        # Sizes.
        ("falcon_h1", {"mamba_d_ssm": 100}, r"mamba_n_heads must be a divisor of mamba_d_ssm \(10"),
        ("falcon_h1", {"mamba_d_head": 8}, "mamba_d_head must be 128, which is mamba_d_ssm / mamb"),
        ("falcon_h1", {"mamba_d_ssm": 0}, "mamba_d_ssm must be a whole number"),
        ("nemotron_h", NEMOTRON | {"n_groups": 3}, r"n_groups must be a divisor of mamba_num_head"),
        ("nemotron_h", NEMOTRON | {"mamba_n_groups": 9}, "mamba_n_groups must be a divisor of mam"),
        ("nemotron_h", NEMOTRON | {"conv_kernel": 1}, "conv_kernel must be a whole number from 2"),
        ("nemotron_h", NEMOTRON | {"mamba_head_dim": "x"}, "mamba_head_dim must be a whole number"),
        ("nemotron_h", NEMOTRON | {"mamba_dt_limit": 3}, "mamba_dt_limit must be a list of two nu"),
        ("lfm2", {"full_attn_idxs": [1], "conv_L_cache": 1}, "conv_L_cache must be a whole number"),
        ("lfm2", {"full_attn_idxs": [1], "conv_dim": 32}, r"conv_dim must be hidden_size \(64\)"),
        ("lfm2", {"full_attn_idxs": [1], "block_multiple_of": 0}, "block_multiple_of must be a wh"),
        ("qwen3_next", QWEN | {"linear_num_value_heads": 24}, "linear_num_value_heads must be a m"),
        ("qwen3_next", QWEN | {"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim must be a w"),
        ("qwen3_5_text", QWEN | {"linear_key_head_dim": 0}, "linear_key_head_dim must be a whole"),
        ("bamba", BAMBA | {"mamba_n_heads": 24}, r"mamba_n_heads must be a divisor of .*\(128\)"),
        ("bamba", BAMBA | {"mamba_d_head": 8}, "mamba_d_head must be 16, which is mamba_expand"),
        ("granitemoehybrid", GRANITE | {"mamba_n_groups": 3}, "mamba_n_groups must be a divisor"),
        ("granitemoehybrid", GRANITE | {"mamba_d_state": "x"}, "mamba_d_state must be a whole"),
        ("bamba", BAMBA | {"time_step_limit": [0.1]}, "time_step_limit must be a list of two num"),
        ("bamba", BAMBA | {"time_step_limit": [0.2, 0.1]}, "time_step_limit must be two numbers f"),
        ("bamba", BAMBA | {"time_step_limit": ["0", 1]}, "time_step_limit must be a list of two"),
        # Keys that change numbers.
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias must be False, as mamba_proj_bi"),
        ("falcon_h1", {"mamba_proj_bias": True}, "projectors_bias must be True, as mamba_proj_bia"),
        ("falcon_h1", {"mamba_rms_norm": 1}, "mamba_rms_norm must be true or false"),
        ("falcon_h1", {"key_multiplier": 0}, "key_multiplier must be a number from 1e-06 to 1e"),
        ("falcon_h1", {"ssm_out_multiplier": -1.0}, "ssm_out_multiplier must be a number from"),
        ("falcon_h1", {"lm_head_multiplier": "1"}, "lm_head_multiplier must be a number from"),
        ("falcon_h1", {"embedding_multiplier": 1e9}, "embedding_multiplier must be a number from"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers must be a list of 2 numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0, 1e-9]}, "mlp_multipliers must be 2 numbers from"),
        ("falcon_h1", {"ssm_multipliers": [1, 1, 1, 1, 0]}, "ssm_multipliers must be a list of 5"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ("falcon_h1", {"attention_multiplier": 2.0}, "attention_multiplier must be absent"),
        ("nemotron_h", NEMOTRON | {"mlp_hidden_act": "silu"}, "mlp_hidden_act must be 'relu2'"),
        ("nemotron_h", NEMOTRON | {"mamba_hidden_act": "gelu"}, "mamba_hidden_act must be 'silu'"),
        ("nemotron_h", NEMOTRON | {"sliding_window": 8}, "sliding_window must be absent"),
        ("lfm2", {"full_attn_idxs": [1], "block_use_swiglu": False}, "block_use_swiglu must be Tr"),
        ("lfm2", {"full_attn_idxs": [1], "use_pos_enc": False}, "use_pos_enc must be True"),
        ("lfm2", {"full_attn_idxs": [1], "conv_bias": 1}, "conv_bias must be true or false"),
        ("qwen3_5_text", QWEN | {"attn_output_gate": False}, "attn_output_gate must be True"),
        ("llama", {"max_position_embeddings": 64, "attn_output_gate": True}, "attn_output_gate mu"),
        ("qwen3_next", QWEN | {"sliding_window": 8}, "sliding_window must be absent"),
        ("qwen3_next", QWEN | {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ("qwen3_5_text", QWEN | {"num_experts": 4}, "num_experts must be absent or 0"),
        ("granitemoehybrid", GRANITE | {"position_embedding_type": "alibi"}, "position_embedding"),
        ("granitemoehybrid", GRANITE | {"normalization_function": "layernorm"}, "normalization_f"),
        ("granitemoehybrid", GRANITE | {"num_local_experts": -1}, "num_local_experts must be a w"),
        ("bamba", BAMBA | {"partial_rotary_factor": 0.25}, "partial_rotary_factor must be 0.5"),
        ("bamba", BAMBA | {"embedding_multiplier": 2.0}, "embedding_multiplier must be 1"),
        ("qwen3_next", QWEN | {"quantization_config": {"bits": 4}}, "quantization_config must be"),
    ],
)  # fmt: skip
def test_refusals_name_the_key(model_type, config, words, tmp_path):
    with pytest.raises(ConfigError, match=words) as refusal:
        spec_of(tmp_path, model_type, **config)
    assert "config.json" in str(refusal.value) and "\n" not in str(refusal.value)
