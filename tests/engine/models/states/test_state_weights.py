# SPDX-License-Identifier: Apache-2.0
"""The tensors of layers with a state: their names in each family, faults in them, random ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from stratakv.engine.models.checkpoint.state_weights import StateWeights
from stratakv.engine.models.checkpoint.weights import (
    DenseWeights,
    ParallelWeights,
    load_weights,
    random_weights,
)
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.tiers.settings.values import ConfigError
from tests.tiny_models import BASE, draw_weights

from .state_driver import Part, Request, StateDriver
from .state_models import (
    DELTA,
    EXPERTS,
    SMALL,
    exact_logits,
    make_state_model,
    random_tokens,
)

SHARD = "model.safetensors"
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
WHOLE = {
    "qwen3_5": {"model_type": "qwen3_5_text"} | DELTA,
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"} | DELTA | EXPERTS,
}


def make_whole(directory: Path, model_type: str) -> Path:
    """A checkpoint of text and images, with the tensors of a head that drafts."""
    text = BASE | SMALL | WHOLE[model_type]
    text["rope_parameters"] = text["rope_parameters"] | {
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=VISION)
    model = AutoModelForImageTextToText.from_config(config)
    draw_weights(model, "qwen3_5_text")
    model.save_pretrained(directory)
    tensors = load_file(directory / SHARD)
    tensors["mtp.fc.weight"] = torch.zeros(48, 96)
    save_file(tensors, directory / SHARD, {"format": "pt"})
    return directory


@pytest.mark.parametrize("model_type", WHOLE)
def test_the_text_part_is_that_of_transformers(model_type, tmp_path):
    directory = make_whole(tmp_path, model_type)
    tensors = load_file(directory / SHARD)
    assert any(name.startswith("model.visual.") for name in tensors)
    driver = StateDriver(directory)
    assert driver.spec.is_text_part
    tokens = random_tokens(1, 70)
    found = driver.step([Part(Request(0), tokens)])
    expected = exact_logits(directory, tokens)
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_state_model(tmp_path_factory.mktemp("model"), "qwen3_next-experts")


def damaged(stored: Path, directory: Path, change: Any) -> Path:
    """A copy whose tensors `change` has had in its hands."""
    shutil.copy(stored / "config.json", directory)
    tensors = load_file(stored / SHARD)
    change(tensors)
    save_file(tensors, directory / SHARD, {"format": "pt"})
    return directory


QKVZ = "model.layers.0.linear_attn.in_proj_qkvz.weight"
DECAY = "model.layers.2.linear_attn.A_log"
OF_ATTENTION = "model.layers.3.linear_attn.dt_bias"
APART = "model.layers.0.linear_attn.in_proj_z.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(DECAY), "lacks the tensor model.layers.2.mixer.A_log"),
        (lambda t: t.update({QKVZ: t[QKVZ][1:].clone()}), "in_proj_qkvz.weight must have shape"),
        (lambda t: t.update({DECAY: torch.zeros(3)}), r"A_log must have shape \[4\] by config"),
        (lambda t: t.update({DECAY: torch.arange(4)}), "A_log must be one of F64"),
        (
            lambda t: t.update({OF_ATTENTION: torch.zeros(4)}),
            "holds the tensor model.layers.3.mixer.dt_bias that config.json does not describe",
        ),
        (
            lambda t: t.update({APART: torch.zeros(48, 48)}),
            "holds the tensor model.layers.0.mixer.in_proj_z.weight that config.json does not",
        ),
    ],
)
def test_faults_are_named(change, words, stored, tmp_path):
    directory = damaged(stored, tmp_path, change)
    with pytest.raises(ConfigError, match=words):
        load_weights(directory, load_model_spec(directory), torch.float32)


def test_tensors_of_a_head_that_drafts_are_left_alone(stored, tmp_path):
    directory = damaged(stored, tmp_path, lambda t: t.update({"mtp.norm.weight": torch.ones(48)}))
    weights = load_weights(directory, load_model_spec(directory), torch.float32)
    assert len(weights.layers) == 4


def test_vectors_of_a_recurrence_are_wide(stored):
    mixer = load_weights(stored, load_model_spec(stored), torch.bfloat16).layers[0].mixer
    assert isinstance(mixer, StateWeights)
    assert mixer.in_proj.dtype is mixer.conv.dtype is torch.bfloat16
    for vector in (mixer.decay, mixer.dt_bias, mixer.norm):
        assert vector is not None and vector.dtype is torch.float32


LONE_UP = "backbone.layers.1.mixer.up_proj.weight"
LONE_NORM = "backbone.layers.1.norm.weight"


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_state_model(tmp_path_factory.mktemp("model"), "nemotron_h-mlps-last")


def test_a_layer_of_one_part_has_the_tensors_of_that_part(nemotron):
    layers = load_weights(nemotron, load_model_spec(nemotron), torch.bfloat16).layers
    assert [layer.mixer is None for layer in layers] == [False, True, False, False, True, True]
    for layer in layers:
        assert (layer.mlp is None) == (layer.mixer is not None) == (layer.out is not None)
        [norm] = [each for each in (layer.attention_norm, layer.mlp_norm) if each is not None]
        assert norm.dtype is torch.float32, "rounding comes behind its weights"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(LONE_UP), "lacks the tensor model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop(LONE_NORM), "lacks the tensor model.layers.1.norm.weight"),
        (
            lambda t: t.update({LONE_UP.replace("up", "q"): torch.zeros(4, 4)}),
            "holds the tensor model.layers.1.self_attn.q_proj.weight that config.json does not",
        ),
    ],
)
def test_faults_of_lone_parts_are_named(change, words, nemotron, tmp_path):
    directory = damaged(nemotron, tmp_path, change)
    with pytest.raises(ConfigError, match=words):
        load_weights(directory, load_model_spec(directory), torch.float32)


def test_both_prefixes_of_nemotron_are_read(nemotron, tmp_path):
    def change(tensors):
        for name in [name for name in tensors if name.startswith("backbone.")]:
            tensors[name.replace("backbone.", "model.")] = tensors.pop(name)

    directory = damaged(nemotron, tmp_path, change)
    found = [load_weights(each, load_model_spec(each), torch.float32) for each in
             (nemotron, directory)]  # fmt: skip
    assert torch.equal(found[0].embedding, found[1].embedding)
    assert torch.equal(found[0].norm, found[1].norm)


@pytest.fixture(scope="module")
def falcon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_state_model(tmp_path_factory.mktemp("model"), "falcon_h1-without-norm")


def test_a_layer_with_both_has_one_matrix_out_of_both(falcon):
    spec = load_model_spec(falcon)
    assert spec.state is not None and spec.multipliers is not None
    layer = load_weights(falcon, spec, torch.bfloat16).layers[1]
    mixer, queries = layer.mixer, spec.num_heads * spec.head_dim
    assert isinstance(mixer, ParallelWeights) and layer.out is not None
    assert layer.out.shape == (48, queries + 64)
    assert mixer.state.norm is None
    # 0.7 of the attention's output and 0.4 of the state's, over 0.3 / 0.88 of the MLP's.
    assert mixer.attention_factor == pytest.approx(1.3 * 0.7 * 0.88 / 0.3)
    assert mixer.state.output_factor == pytest.approx(0.4 * 0.88 / 0.3)


def test_factors_round_no_matrix(falcon):
    """Nor what else is stored, for that becomes wide."""
    stored, spec = load_file(falcon / SHARD), load_model_spec(falcon)
    layer = load_weights(falcon, spec, torch.bfloat16).layers[0]
    mixer = layer.mixer
    assert isinstance(mixer, ParallelWeights) and isinstance(layer.mlp, DenseWeights)
    assert layer.mlp_norm is not None and layer.out is not None
    names = ("mamba.in_proj", "feed_forward.gate_proj", "feed_forward.down_proj")
    found = (mixer.state.in_proj, layer.mlp.gate, layer.mlp.down)
    for name, matrix in zip(names, found, strict=True):
        assert matrix is not None
        assert torch.equal(matrix, stored[f"model.layers.0.{name}.weight"].bfloat16())
    assert layer.mlp_norm.dtype is mixer.state.conv.dtype is torch.float32
    norm = stored["model.layers.0.pre_ff_layernorm.weight"].bfloat16().float()
    assert torch.equal(layer.mlp_norm, norm * 0.88)


def test_without_factors_weights_are_those_that_are_stored(tmp_path):
    plain = {
        "mlp_multipliers": None,
        "ssm_multipliers": None,
        **{
            f"{part}_multiplier": 1.0
            for part in ("attention_in", "attention_out", "key", "ssm_in", "ssm_out")
        },
    }
    make_state_model(tmp_path, "falcon_h1-without-norm", **plain)
    layer = load_weights(tmp_path, load_model_spec(tmp_path), torch.bfloat16).layers[0]
    stored = load_file(tmp_path / SHARD)
    assert isinstance(layer.mixer, ParallelWeights) and layer.mlp_norm is not None
    assert layer.mixer.attention_factor == layer.mixer.state.output_factor == 1.0
    assert layer.mlp_norm.dtype is torch.bfloat16
    conv = stored["model.layers.0.mamba.conv1d.weight"].bfloat16()
    assert torch.equal(layer.mixer.state.conv.float(), conv.float())


def test_a_norm_behind_the_gate_is_that_of_transformers(tmp_path):
    name = "falcon_h1-norm-biases-groups"
    driver = StateDriver(make_state_model(tmp_path, name, mamba_norm_before_gate=False))
    tokens = random_tokens(3, 70)
    found, expected = driver.step([Part(Request(0), tokens)]), exact_logits(tmp_path, tokens)
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


FALCON_STATE = "model.layers.2.mamba.{}"
FALCON_KEYS = "model.layers.2.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(FALCON_KEYS), "lacks the tensor model.layers.2.self_attn.k_proj.weight"),
        (lambda t: t.pop(FALCON_STATE.format("D")), "lacks the tensor model.layers.2.mixer.D"),
        (
            lambda t: t.update({FALCON_STATE.format("norm.weight"): torch.ones(64)}),
            "holds the tensor model.layers.2.mixer.norm.weight that config.json does not describe",
        ),
    ],
)
def test_faults_of_layers_with_both_are_named(change, words, falcon, tmp_path):
    directory = damaged(falcon, tmp_path, change)
    with pytest.raises(ConfigError, match=words):
        load_weights(directory, load_model_spec(directory), torch.float32)


def test_random_weights_of_layers_with_both(falcon):
    spec = load_model_spec(falcon)
    one, other = (random_weights(spec, torch.float32).layers[3] for _ in range(2))
    assert isinstance(one.mixer, ParallelWeights) and isinstance(other.mixer, ParallelWeights)
    assert torch.equal(one.mixer.attention.qkv, other.mixer.attention.qkv)
    assert torch.equal(one.mixer.state.conv, other.mixer.state.conv)
    logits = StateDriver(falcon, torch.float32, is_random=True).step(
        [Part(Request(0), random_tokens(2, 70))]
    )
    assert logits.isfinite().all() and logits.std() > 0


RANDOM = (
    "nemotron_h-biases-state-last",
    "lfm2-state-last",
    "qwen3_next-experts",
    "granitemoehybrid-dense-still",
)


@pytest.mark.parametrize("name", RANDOM)
def test_random_weights_are_those_of_a_model_before_its_training(name, tmp_path):
    """Heads forget within a few to some thousands of tokens, and a step's numbers are finite."""
    make_state_model(tmp_path, name)
    spec = load_model_spec(tmp_path)
    assert spec.state is not None
    one, other = (random_weights(spec, torch.float32) for _ in range(2))
    for layer in spec.state.layers:
        mixer, again = one.layers[layer].mixer, other.layers[layer].mixer
        assert isinstance(mixer, StateWeights) and isinstance(again, StateWeights)
        assert torch.equal(mixer.in_proj, again.in_proj) and torch.equal(mixer.conv, again.conv)
        assert mixer.conv.abs().max() <= spec.state.conv_width**-0.5
        if mixer.decay is not None and mixer.dt_bias is not None and mixer.norm is not None:
            assert torch.all((mixer.decay <= -1) & (mixer.decay >= -16.001))
            times = torch.nn.functional.softplus(mixer.dt_bias)
            assert torch.all((times > 0.00099) & (times < 0.101)) and times.std() > 0
            assert bool((mixer.norm == 1).all())
        if mixer.skip is not None:
            assert bool((mixer.skip == 1).all())
    driver = StateDriver(tmp_path, torch.float32, is_random=True)
    logits = driver.step([Part(Request(0), random_tokens(2, 70))])
    assert logits.isfinite().all() and logits.std() > 0


def test_a_config_alone_is_a_model(tmp_path):
    """Also one in the published spelling, whose names of layers transformers no longer writes."""
    make_state_model(tmp_path, "granitemoehybrid-dense-still")
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_types"] = ["mamba", "mamba", "attention", "mamba"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / SHARD).unlink()
    spec = load_model_spec(tmp_path)
    assert spec.state is not None and spec.state.layers == (0, 1, 3)
    assert len(random_weights(spec, torch.bfloat16).layers) == 4
