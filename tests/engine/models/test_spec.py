# SPDX-License-Identifier: Apache-2.0
"""Reading config.json: what is understood, and what is refused by the name of its key."""

from __future__ import annotations

import dataclasses
import json

import pytest

from stratakv.engine.models.checkpoint import json_fields
from stratakv.engine.models.checkpoint.shards import find_shards
from stratakv.engine.models.model_spec import resolve_max_model_len
from stratakv.engine.models.spec.rope_spec import RopeSpec
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.tiers.settings.values import ConfigError

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 2.0],
    "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 64,
}


def test_a_plain_configuration(spec_with):
    spec = spec_with()
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 4)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((2,), 1)
    assert spec.rope == RopeSpec() and not spec.tied_embeddings
    assert spec.layout(16, "float32").page_bytes == 2 * 2 * 16 * 2 * 4 * 4


def test_absent_keys_have_defaults(spec_with):
    spec = spec_with(
        num_key_value_heads=None,
        tie_word_embeddings=None,
        rms_norm_eps=None,
        eos_token_id=None,
        bos_token_id=None,
        architectures=None,
    )
    assert (spec.num_kv_heads, spec.rms_norm_eps) == (4, 1e-6)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((), None)


def test_a_head_size_of_its_own(spec_with):
    assert spec_with(head_dim=10).head_dim == 10


def test_generation_config_knows_the_ends_best(directory):
    (directory.path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, 4, 3], "bos_token_id": None})
    )
    spec = load_model_spec(directory.path)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((3, 4), 1)


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 500.0}, RopeSpec(theta=500.0)),
        ({"rope_parameters": {"rope_theta": 50.0}}, RopeSpec(theta=50.0)),
        (
            {"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeSpec("linear", 9.0, 2.0),
        ),
        (
            {
                "rope_scaling": {"rope_type": "dynamic", "factor": 3.0},
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            },
            RopeSpec("dynamic", factor=3.0),
        ),
        (
            {"rope_scaling": {}, "rope_parameters": {"rope_type": "yarn", "factor": None}},
            RopeSpec("yarn", factor=1.0, original_max_positions=256),
        ),
        (
            {
                "rope_parameters": {"rope_type": "yarn", "mscale": 0.5, "beta_fast": 16},
                "original_max_position_embeddings": 64,
            },
            RopeSpec("yarn", factor=4.0, original_max_positions=64, mscale=0.5, beta_fast=16.0),
        ),
        (
            {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
            RopeSpec("proportional", partial_rotary_factor=0.5),
        ),
    ],
)
def test_both_spellings_of_rotary_positions(changes, rope, spec_with):
    assert spec_with(**changes).rope == rope


def test_the_context_ends_where_positions_stop_being_stable(spec_with):
    assert resolve_max_model_len(spec_with(), None) == 256
    assert resolve_max_model_len(spec_with(), 100) == 100
    with pytest.raises(ConfigError, match="max_position_embeddings is 256; use at most 256"):
        resolve_max_model_len(spec_with(), 257)
    spec = spec_with(rope_scaling=LONGROPE)
    assert resolve_max_model_len(spec, None) == 64
    with pytest.raises(ConfigError, match=r"longrope positions depend on the length .* most 64"):
        resolve_max_model_len(spec, 65)


@pytest.mark.parametrize(
    ("yarn", "context"),
    [
        ({"factor": 4.0}, 1024),  # of what is there, which nobody raised
        ({"factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"factor": 4.5, "original_max_position_embeddings": 100}, 450),
        ({"factor": 2.0, "original_max_position_embeddings": 64}, 256),
        ({"original_max_position_embeddings": 64}, 256),
        ({"factor": 1e6}, 2**24),
    ],
)
def test_a_yarn_reaches_what_it_stretches_to(yarn, context, spec_with):
    spec = spec_with(rope_scaling={"rope_type": "yarn", **yarn})
    assert resolve_max_model_len(spec, None) == spec.max_context == context
    words = (
        r"max_position_embeddings is 256"
        if context == 256
        else (
            rf"is 256, and its yarn stretches original_max_position_embeddings \d+ by a factor of "
            rf"[\d.e+]+; use at most {context}"
        )
    )
    with pytest.raises(ConfigError, match=words):
        resolve_max_model_len(spec, context + 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures must be .*LlamaForCausalLM, Mis"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be one supported name"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be one supported name"),
        (
            {"architectures": None, "model_type": ["llama"]},
            "model_type must be that of a supported",
        ),
        ({"architectures": None, "model_type": "gpt2"}, "model_type must be .*, not 'gpt2'"),
        ({"architectures": None, "model_type": None}, "architectures must be"),
        ({"model_type": "qwen2"}, "model_type must be llama"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu' or 'swish'"),
        ({"pretraining_tp": 2}, "pretraining_tp must be 1 "),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be absent"),
        ({"num_experts": 8}, "num_experts must be absent"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping must be absent"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier must be 1 or 1.0"),
        ({"sliding_window": 4096}, "sliding_window must be absent"),
        ({"use_sliding_window": True}, "use_sliding_window must be absent"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be full"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types must be a list"),
        ({"hidden_size": None}, "the key hidden_size is missing"),
        ({"hidden_size": "16"}, "hidden_size must be a whole number from 1 to .*, not '16'"),
        ({"hidden_size": 18}, "hidden_size must be a multiple of 4 attention heads, not 18"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"vocab_size": 2**40}, "vocab_size must be a whole number"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must be a divisor of .*\(4\), not 3"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0, not 0"),
        ({"attention_bias": 1}, "attention_bias must be true or false, not 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id below 40"),
        ({"eos_token_id": [1, True]}, "eos_token_id must be"),
        ({"bos_token_id": -2}, "bos_token_id must be a whole number from 0 to 39"),
        ({"eos_token_id": list(range(40)) * 2}, "list of at most 64"),
        ({"bos_token_id": 99}, "bos_token_id must be a whole number from 0 to 39"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling: rope_type must be one of default,"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters: full_attention must be absent",
        ),
        ({"rope_scaling": {"mrope_section": [1, 1]}}, "rope_scaling: mrope_section must be absent"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: the key factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a number above 0"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2, "high_freq_factor": 4}},
            "rope_parameters: the key low_freq_factor is missing",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 2,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            r"high_freq_factor must be above low_freq_factor \(4\)",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 1e7}}, "number above 0 and at most 1e.06"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e17}}, "factor must be a number above 0"),
        (
            {"rope_scaling": {"type": "yarn", "beta_fast": -0.5}},
            "beta_fast must be a number from 0",
        ),
        ({"rope_scaling": {"type": "yarn", "beta_slow": 1e308}}, "beta_slow must be a number from"),
        (
            {"rope_scaling": {"type": "yarn", "mscale_all_dim": -0.9}},
            "mscale_all_dim must be a num",
        ),
        (
            {"rope_scaling": {**LONGROPE, "short_factor": [1.0]}},
            "short_factor must be a list of 2 numbers above 0",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_its_key(changes, words, spec_with):
    with pytest.raises(ConfigError, match=words) as refusal:
        spec_with(**changes)
    assert "config.json" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ('{"rms_norm_eps": 1' + "0" * 5000 + "}", "is not valid JSON|architectures must be"),
        ("\x00\xff", "is not valid JSON"),
    ],
)
def test_text_that_is_no_configuration(text, words, directory):
    (directory.path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_model_spec(directory.path)


def test_numbers_no_float_can_hold(spec_with):
    with pytest.raises(ConfigError, match="rms_norm_eps must be a number above 0"):
        spec_with(rms_norm_eps=10**400)


def test_files_of_any_size_are_not_read(directory, monkeypatch):
    monkeypatch.setattr(json_fields.read_json, "__defaults__", (100,))
    with pytest.raises(ConfigError, match="must have at most 100 bytes"):
        load_model_spec(directory.path)


def test_a_directory_without_a_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json is missing"):
        load_model_spec(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        load_model_spec(tmp_path / "missing")


@pytest.mark.regression
@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {"AutoModelForCausalLM": "x.Y"}},
        {"architectures": ["LLaMAForCausalLM"]},
        {"bos_token_id": -1},
        {"num_local_experts": 0, "num_experts": 0, "n_routed_experts": 0},
    ],
    ids=str,
)
def test_x12_what_changes_no_number_is_taken(changes, spec_with):
    expected = spec_with()
    found = spec_with(**changes)
    bos = None if "bos_token_id" in changes else expected.bos_token_id
    assert found == dataclasses.replace(expected, bos_token_id=bos)


@pytest.mark.regression
def test_x12_ends_that_the_model_cannot_choose_end_nothing(spec_with):
    assert spec_with(eos_token_id=40).eos_token_ids == ()
    assert spec_with(eos_token_id=[2, -1, 99, 3]).eos_token_ids == (2, 3)


FOREIGN = {
    "adapter": (
        {"adapter_config.json": '{"base_model_name_or_path": "org/base"}'},
        r"is an adapter of 'org/base'.*merge it into its model",
    ),
    "gguf": ({"m.Q4.gguf": ""}, "holds GGUF files, which are not read; give the directory"),
    "hub": ({"models--org--name/x": ""}, "is a cache of the Hub .*such as 'org/name'"),
    "hub model": (
        {"snapshots/abc/config.json": "{}", "refs/main": "abc"},
        "is a model's folder in the Hub's cache; give .*/snapshots/abc",
    ),
    "trainer": (
        {"checkpoint-90/x": "", "checkpoint-100/x": "", "all_results.json": ""},
        "is the output of a training run; give one of its checkpoints, .*/checkpoint-100",
    ),
    "authors": (
        {"params.json": "{}", "consolidated.00.pth": ""},
        "form of its authors .*; give the one in the form of transformers",
    ),
}


@pytest.mark.regression
@pytest.mark.parametrize(("files", "words"), FOREIGN.values(), ids=FOREIGN)
def test_x11_a_directory_of_another_kind_is_named(files, words, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_model_spec(tmp_path)


@pytest.mark.regression
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("m.gguf", "is a GGUF file, which is not read; give the directory"),
        ("model.safetensors", "is one file of a model; give its directory"),
        ("other", "is not a directory; give a model directory"),
    ],
)
def test_x11_a_file_is_named(name, words, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=words):
        load_model_spec(tmp_path / name)


@pytest.mark.regression
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.gguf", "holds weights in GGUF"),
        ("pytorch_model.bin", "in PyTorch's pickled form .pytorch_model.bin., which is not read"),
        ("adapter_config.json", "is an adapter .* and not a model"),
        ("README.md", "has neither model.safetensors nor"),
    ],
)
def test_x11_weights_of_another_form_are_named(name, words, directory):
    (directory.path / name).touch()
    with pytest.raises(ConfigError, match=words):
        find_shards(directory.path)


@pytest.mark.regression
def test_x11_quantised_models_are_named(spec_with):
    with pytest.raises(ConfigError, match=r"quantised weights are not supported; take the model"):
        spec_with(quantization_config={"quant_method": "gptq", "bits": 4})
