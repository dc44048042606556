# SPDX-License-Identifier: Apache-2.0
"""What each family takes where its config.json is silent, its windows, and its fingerprint."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

from stratakv.engine.models.checkpoint.fingerprint import fingerprint
from stratakv.engine.models.checkpoint.tensor_shapes import expected_tensors, name_of
from stratakv.engine.models.families import FAMILIES
from stratakv.engine.models.model_spec import resolve_max_model_len
from stratakv.engine.models.spec.expert_spec import COUNT_KEYS
from stratakv.engine.models.spec.rope_spec import STILL
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.tiers.settings.values import ConfigError

SHAPE = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 32}  # fmt: skip
# A layer that carries a state beside one with attention, in families that have both.
MIXED = ["linear_attention", "full_attention"]
HYBRID = {
    "qwen3_next": {"layer_types": MIXED},
    "qwen3_5_text": {"layer_types": MIXED},
    "qwen3_5_moe_text": {"layer_types": MIXED},
    "granitemoehybrid": {"layer_types": MIXED},
    "bamba": {"attn_layer_indices": [1], "head_dim": 8},
    "nemotron_h": {"layers_block_type": MIXED},
    "falcon_h1": {},  # both in every layer
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
NAMES = {family.model_type: name for name, family in FAMILIES.items()}
# Configurations of whole models, for text parts of which transformers makes no model alone.
WHOLE = {"qwen2_5_vl_text": Qwen2_5_VLConfig, "qwen3_vl_text": Qwen3VLConfig}
SLIDING = "sliding_attention"
# A Llama must give its positions, and a Ministral how it stretches them.
SPARSE = [name for name in NAMES if name not in ("llama", "ministral3")]
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
        "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}  # fmt: skip


def spec_of(directory, model_type, **config):
    text = json.dumps({"model_type": model_type} | SHAPE | HYBRID.get(model_type, {}) | config)
    (directory.path / "config.json").write_text(text)
    return load_model_spec(directory.path)


def theirs(directory):
    """The decoder's configuration."""
    return AutoConfig.from_pretrained(directory.path)


def their_shapes(config):
    """The shapes of the decoder's tensors, by name."""
    with torch.device("meta"):
        if config.model_type not in WHOLE:
            model = AutoModelForCausalLM.from_config(config)
            return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1}
        make = WHOLE[config.model_type]
        whole = AutoModelForImageTextToText.from_config(
            make(text_config=config.to_dict(), vision_config=vision)
        )
    tensors = {name: tensor for name, tensor in whole.state_dict().items() if "visual" not in name}
    part = "language_model."
    return {name.replace(part, ""): tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("model_type", SPARSE)
def test_silence_means_what_it_means_to_transformers(model_type, directory):
    spec = spec_of(directory, model_type)
    config = theirs(directory)
    assert spec.architecture == NAMES[model_type]
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == (getattr(config, "head_dim", None) or 64 // 32)
    assert spec.max_positions == config.max_position_embeddings
    assert spec.rms_norm_eps == getattr(config, spec.family.eps_key)
    if model_type in WHOLE:
        config.tie_word_embeddings = WHOLE[model_type]().tie_word_embeddings
    assert spec.tied_embeddings == config.tie_word_embeddings
    if spec.family.never_turns:
        assert not hasattr(config, "rope_parameters") and set(spec.rope_of_layers) == {1}
    else:
        thetas = [rope.theta for rope in spec.ropes if rope is not STILL]
        ropes = config.rope_parameters
        kinds = [ropes] if "rope_theta" in ropes else [ropes["full_attention"], ropes[SLIDING]]
        # Both of its layers have a window: one rotation is all that they need; the other is read.
        assert thetas == [kind["rope_theta"] for kind in kinds]
    assert spec.sliding_window == (getattr(config, "sliding_window", None) or None)
    assert spec.attention_bias == getattr(config, spec.family.bias_key, spec.attention_bias)
    if spec.experts is not None:
        counts = [getattr(config, key, None) for key in COUNT_KEYS]
        assert spec.experts.num_experts in counts
        assert spec.experts.num_per_token == config.num_experts_per_tok
        assert spec.experts.size == getattr(config, spec.family.experts.size_key)
        shared = getattr(config, spec.family.experts.shared_size_key, 0)
        assert spec.experts.shared_size == shared


def test_a_gemma_is_read_as_transformers_reads_it(directory):
    silent = {k: v for k, v in SHAPE.items() if k not in ("vocab_size", "num_attention_heads")}
    (directory.path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"} | silent))
    spec = load_model_spec(directory.path)
    config = theirs(directory)
    assert (spec.vocab_size, spec.num_heads) == (config.vocab_size, config.num_attention_heads)
    assert spec.attention_scale == config.query_pre_attn_scalar**-0.5 == 1 / 16
    assert spec.logits_softcap is None and spec.embedding_scale == 8.0
    spec = spec_of(
        directory, "gemma3_text", num_hidden_layers=8, sliding_window_pattern=3,
        query_pre_attn_scalar=168, final_logit_softcapping=30.0,
    )  # fmt: skip
    config = theirs(directory)
    slides = [kind == SLIDING for kind in config.layer_types]
    assert [layer in spec.sliding_layers for layer in range(8)] == slides
    assert [rope == 1 for rope in spec.rope_of_layers] == slides
    assert [kind.window for kind in spec.layer_attention] == [4096 if s else None for s in slides]
    assert spec.attention_scale == config.query_pre_attn_scalar**-0.5
    assert spec.logits_softcap == config.final_logit_softcapping


GEMMA_ROPES = [
    {},
    {"rope_theta": 500.0, "rope_local_base_freq": 50.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
    {"rope_parameters": {SLIDING: {"rope_theta": 70.0}, "full_attention": {"rope_theta": 9.0}}},
    {
        "rope_parameters": {"full_attention": {"rope_theta": 9.0}},
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
]


@pytest.mark.parametrize("changes", GEMMA_ROPES)
def test_a_gemma_has_rotary_positions_of_two_kinds(changes, directory):
    spec = spec_of(directory, "gemma3_text", num_hidden_layers=6, **changes)
    ropes = theirs(directory).rope_parameters
    for rope, name in zip(spec.ropes, ("full_attention", SLIDING), strict=True):
        assert rope.kind == ropes[name]["rope_type"]
        assert rope.theta == ropes[name]["rope_theta"]
        assert rope.factor == ropes[name].get("factor", 1.0)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("model_type", NAMES)
def test_the_tensors_are_those_of_transformers(model_type, changes, directory):
    """Also where the file has keys that a family does not heed."""
    if model_type == "ministral3":
        changes = changes | {"rope_parameters": YARN}
    spec = spec_of(directory, model_type, max_position_embeddings=64, pad_token_id=0, **changes)
    ours = name_of(spec)
    shapes = {ours(name): shape for name, shape in their_shapes(theirs(directory)).items()}
    if spec.tied_embeddings:
        assert shapes.pop("lm_head.weight") == shapes["model.embed_tokens.weight"]
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
    sliding = [i for i, kind in enumerate(config.layer_types) if kind == SLIDING]
    assert list(spec.sliding_layers or ()) == sliding
    assert [kind.window for kind in spec.layer_attention] == [
        window if layer in sliding else None for layer in range(2)
    ]
    assert resolve_max_model_len(spec, None) == 32768


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
    assert {kind.window for kind in spec.layer_attention} == {window}
    assert resolve_max_model_len(spec, None) == 131072


def test_a_window_that_no_sequence_outgrows_is_none(directory):
    spec = spec_of(directory, "mistral", max_position_embeddings=512, sliding_window=512)
    assert spec.sliding_window == 512
    assert all(kind.is_full for kind in spec.layer_attention)
    spec = spec_of(directory, "mistral", max_position_embeddings=512, sliding_window=511)
    assert all(kind.window == 511 for kind in spec.layer_attention)
    assert resolve_max_model_len(spec, None) == 512
    with pytest.raises(ConfigError, match="max_position_embeddings is 512"):
        resolve_max_model_len(spec, 513)


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
        (
            "gemma3_text",
            {"sliding_window": None},
            "sliding_window must be a whole number, or layer",
        ),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole"),
        (
            "gemma3_text",
            {"hidden_activation": "gelu"},
            "hidden_activation must be 'gelu_pytorch_tanh'",
        ),
        (
            "gemma3_text",
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping must be absent",
        ),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention must be False",
        ),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number ab"),
        ("gemma3_text", {"final_logit_softcapping": -1}, "final_logit_softcapping must be a num"),
        ("gemma3_text", {"rope_local_base_freq": 1}, "rope_local_base_freq must be a number ab"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 10.0}},
            "rope_parameters: rope_theta must be absent, for this family has an object for each",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "mrope"}}},
            "rope_parameters: full_attention: rope_type must be one of default",
        ),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 9}}, "dual_chunk_attention_conf"),
        ("qwen3", {"num_experts": 128}, "num_experts must be absent"),
        ("glm4_moe", {}, "model_type must be .*Qwen3ForCausalLM.*, not 'glm4_moe'"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts must be a whole number from 1"),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 8}, "num_local_experts must be 4, a"),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 5}, "to 4, not 5"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers must be a list of layers below 2"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ("qwen3_moe", {"n_routed_experts": 8}, "n_routed_experts must be absent or 0"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv must be absent"),
        ("qwen2_moe", {"use_sliding_window": True}, "layer_types must be given"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier must be a number above 0"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be a list of 0 or 1 for each"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be a number above 0"),
        ("phi3", {"head_dim": 6, "partial_rotary_factor": 0.5}, "an even part of 6"),
        ("ministral3", {}, "rope_parameters must be an object"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta must be 0 .* beside default positions",
        ),
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
    shape = {"num_key_value_heads": 32, "head_dim": 8, "max_position_embeddings": 64,
             "sliding_window": None}  # fmt: skip
    specs = [spec_of(directory, name, **shape) for name in SPARSE if "gemma" not in name]
    windows = {"sliding_window": 9, "use_sliding_window": True}
    specs.append(spec_of(directory, "mistral", **shape | windows))
    specs += [spec_of(directory, "qwen2", **shape | windows, max_window_layers=n) for n in (0, 1)]
    gemma = shape | {"sliding_window": 9}
    specs += [
        spec_of(directory, "gemma3_text", **gemma | changes)
        for changes in (
            {},
            {"sliding_window_pattern": 2},
            {"rope_local_base_freq": 50.0},
            {"query_pre_attn_scalar": 2},
            {"final_logit_softcapping": 30.0},
        )
    ]
    assert len({fingerprint(directory.path, spec) for spec in specs}) == len(specs)
