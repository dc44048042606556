# SPDX-License-Identifier: Apache-2.0
"""What each family takes where its config.json is silent, its windows, and its fingerprint."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stratakv.engine.models.checkpoint.fingerprint import fingerprint
from stratakv.engine.models.checkpoint.weights import expected_tensors
from stratakv.engine.models.families import ARCHITECTURES, FAMILIES
from stratakv.engine.models.spec import load_model_spec, resolve_max_model_len
from stratakv.tiers.settings.values import ConfigError

SHAPE = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 32}  # fmt: skip
NAMES = {family.model_type: name for name, family in FAMILIES.items()}
SPARSE = [name for name in NAMES if name != "llama"]  # a Llama must give its positions


def spec_of(directory, model_type, **config):
    text = json.dumps({"model_type": model_type} | SHAPE | config)
    (directory.path / "config.json").write_text(text)
    return load_model_spec(directory.path)


def theirs(directory):
    return AutoConfig.from_pretrained(directory.path)


@pytest.mark.parametrize("model_type", SPARSE)
def test_silence_means_what_it_means_to_transformers(model_type, directory):
    spec = spec_of(directory, model_type)
    config = theirs(directory)
    assert spec.architecture == NAMES[model_type]
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == (getattr(config, "head_dim", None) or 64 // 32)
    assert spec.max_positions == config.max_position_embeddings
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.tied_embeddings == config.tie_word_embeddings
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    assert spec.sliding_window == config.sliding_window


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("model_type", NAMES)
def test_the_tensors_are_those_of_transformers(model_type, changes, directory):
    """Also where the file has keys that a family does not heed."""
    spec = spec_of(directory, model_type, max_position_embeddings=64, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs(directory))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert expected_tensors(spec) == shapes


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_no_number_of_key_heads_means_as_many_as_heads(model_type, directory):
    assert spec_of(directory, model_type, num_key_value_heads=None).num_kv_heads == 32
    assert theirs(directory).num_key_value_heads == 32


QWEN_WINDOWS = [
    ({"sliding_window": 9, "max_window_layers": 0}, None),
    ({"use_sliding_window": True}, None),  # 28 layers keep full attention, and there are 2
    ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None),
    ({"use_sliding_window": True, "max_window_layers": 1}, 4096),
    ({"use_sliding_window": True, "max_window_layers": 2}, None),
    ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, 9),
    ({"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, 4096),
    (
        {
            "use_sliding_window": True,
            "layer_types": ["full_attention"] * 2,
            "max_window_layers": 0,
        },
        None,
    ),
    ({"layer_types": ["full_attention"] * 2}, None),
]


@pytest.mark.parametrize(("changes", "window"), QWEN_WINDOWS)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_windows_of_some_layers(model_type, changes, window, directory):
    spec = spec_of(directory, model_type, **changes)
    config = theirs(directory)
    slides = "sliding_attention" in config.layer_types
    assert spec.sliding_window == window == (config.sliding_window if slides else None)
    assert resolve_max_model_len(spec, None) == (window or 32768)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, 4096),
        ({"sliding_window": None}, None),
        ({"sliding_window": 2000, "use_sliding_window": False}, 2000),
        ({"sliding_window": 2000, "layer_types": ["sliding_attention"] * 2}, 2000),
    ],
)
def test_windows_of_every_layer(changes, window, directory):
    spec = spec_of(directory, "mistral", **changes)
    assert spec.sliding_window == window == theirs(directory).sliding_window
    assert resolve_max_model_len(spec, None) == (window or 131072)


def test_the_shortest_limit_counts(directory):
    spec = spec_of(directory, "mistral", max_position_embeddings=512)
    assert resolve_max_model_len(spec, None) == 512
    with pytest.raises(ConfigError, match="max_position_embeddings is 512"):
        resolve_max_model_len(spec, 513)
    spec = spec_of(directory, "mistral", sliding_window=100)
    assert resolve_max_model_len(spec, 100) == 100
    with pytest.raises(ConfigError, match=r"only the last 100 positions, .* use at most 100"):
        resolve_max_model_len(spec, 101)


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be a whole number from 2"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window must be a whole number"),
        (
            "mistral",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "layer_types must be full_attention for every layer, as it has no window",
        ),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window must be true or false"),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers must be a whole number from 0",
        ),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types must be full_attention"),
        ("qwen3", {"layer_types": ["full_attention"]}, "for each of the 2 layers"),
        ("qwen3", {"layer_types": "full_attention"}, "for each of the 2 layers"),
        ("qwen2", {"use_mrope": True}, "use_mrope must be False"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 9}}, "dual_chunk_attention_conf"),
        ("qwen3", {"num_experts": 128}, "num_experts must be absent"),
        ("qwen3_moe", {}, "model_type must be .*Qwen3ForCausalLM.*, not 'qwen3_moe'"),
        ("qwen2", {"architectures": ["Qwen2Model"]}, "architectures must be one supported name"),
        ("qwen2", {"architectures": ["Qwen3ForCausalLM"]}, "model_type must be qwen3 for this"),
        ("qwen2", {"num_attention_heads": 16}, r"num_key_value_heads must be a divisor of .*\(16"),
    ],
)
def test_refusals_name_the_key(model_type, changes, words, directory):
    with pytest.raises(ConfigError, match=words) as refusal:
        spec_of(directory, model_type, **changes)
    assert "config.json" in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_fingerprint_separates_families_and_windows(directory):
    directory.write_single()
    shape = {"num_key_value_heads": 32, "head_dim": 2, "max_position_embeddings": 64,
             "sliding_window": None}  # fmt: skip
    specs = [spec_of(directory, name, **shape) for name in NAMES]
    specs.append(spec_of(directory, "mistral", **shape | {"sliding_window": 9}))
    assert len({fingerprint(directory.path, spec) for spec in specs}) == len(ARCHITECTURES) + 1
