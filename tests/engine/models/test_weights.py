# SPDX-License-Identifier: Apache-2.0
"""Loading weights: whole and sharded, cast, tied, and every way a directory can be wrong."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from stratakv.engine.models.checkpoint.weights import expected_tensors, load_weights
from stratakv.engine.models.dtypes import compute_dtype, dtype_name
from stratakv.engine.models.families import FAMILIES
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.tiers.settings.values import ConfigError

from ...tiny_models import make_model

Q = "model.layers.1.self_attn.q_proj.weight"


def load(directory, dtype=torch.float32):
    return load_weights(directory.path, load_model_spec(directory.path), dtype)


def test_whole_and_sharded_models_load_alike(directory):
    directory.write_sharded()
    sharded = load(directory)
    directory.write_single()
    single = load(directory)
    tensors = directory.tensors
    for weights in (sharded, single):
        stacked = [tensors[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
        assert torch.equal(weights.layers[1].mixer.qkv, torch.cat(stacked))
        assert torch.equal(
            weights.layers[0].mlp.down, tensors["model.layers.0.mlp.down_proj.weight"]
        )
        assert torch.equal(weights.head, tensors["lm_head.weight"])
        assert weights.layers[0].mixer.qkv_bias is None and weights.layers[0].mlp.gate_bias is None


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16", "auto"])
def test_weights_come_in_the_type_asked_for(name, directory):
    directory.tensors = {n: t.bfloat16() for n, t in directory.tensors.items()}
    directory.write_single()
    dtype = compute_dtype(name)
    weights = load(directory, dtype)
    assert {t.dtype for t in (weights.embedding, weights.norm, weights.layers[0].mixer.qkv)} == {
        dtype
    }
    torch.testing.assert_close(weights.embedding.bfloat16(), weights.embedding.to(torch.bfloat16))
    assert dtype_name(dtype) == ("float32" if name == "auto" else name)


def test_an_unknown_type_is_refused():
    with pytest.raises(ConfigError, match=r"--dtype takes auto or .*, not 'int8'"):
        compute_dtype("int8")


def test_tied_embeddings_share_memory(directory):
    directory.write_config(tie_word_embeddings=True)
    directory.tensors["lm_head.weight"] = directory.tensors["model.embed_tokens.weight"].clone()
    directory.write_single()
    weights = load(directory)
    assert weights.head is weights.embedding
    del directory.tensors["lm_head.weight"]
    directory.write_single()
    weights = load(directory)
    assert weights.head is weights.embedding


@pytest.mark.regression
def test_x12_a_head_that_differs_from_tied_embeddings_is_used(directory, caplog):
    """transformers 5 does the same: tests/test_families.py compares answers with it."""
    directory.write_config(tie_word_embeddings=True)
    directory.write_single()
    weights = load(directory)
    assert torch.equal(weights.head, directory.tensors["lm_head.weight"].to(weights.head.dtype))
    assert not torch.equal(weights.head, weights.embedding)
    assert "they differ; both are used" in caplog.text


@pytest.mark.regression
def test_x12_weights_without_a_prefix(directory):
    expected = load_tied(directory)
    tensors = directory.tensors
    directory.tensors = {name.removeprefix("model."): tensors[name] for name in tensors}
    weights = load_tied(directory)
    assert torch.equal(weights.embedding, expected.embedding)
    assert torch.equal(weights.layers[1].mlp.down, expected.layers[1].mlp.down)
    directory.tensors |= {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(ConfigError, match="twice, as"):
        load_tied(directory)


def load_tied(directory):
    directory.write_config(tie_word_embeddings=True)
    directory.tensors.pop("lm_head.weight", None)
    directory.write_single()
    return load(directory)


@pytest.mark.regression
def test_x12_tensors_that_no_text_depends_on(directory):
    """The head of a reward, and rotary frequencies that an index names and no file has."""
    directory.tensors["v_head.summary.weight"] = torch.zeros(1)
    directory.write_sharded()
    index = directory.path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.layers.0.self_attn.rotary_emb.inv_freq"] = "model-00001-of-00002.safetensors"
    weight_map["model.layers.1.self_attn.rotary_emb.inv_freq"] = "gone.safetensors"
    directory.write_index(weight_map)
    load(directory)


@pytest.mark.regression
def test_x11_quantised_weights_are_named(directory):
    del directory.tensors[Q]
    directory.tensors[Q.removesuffix("weight") + "qweight"] = torch.zeros(1)
    directory.write_single()
    with pytest.raises(ConfigError, match=r"holds quantised weights .GPTQ or AWQ.*take the model"):
        load(directory)


def test_biases_are_loaded_where_the_configuration_has_them(directory):
    directory.write_config(attention_bias=True, mlp_bias=True)
    with pytest.raises(ConfigError, match=r"lacks the tensor model.layers.0.self_attn.q_proj.bias"):
        load_with_biases(directory, skip="model.layers.0.self_attn.q_proj.bias")
    weights = load_with_biases(directory)
    parts = [directory.tensors[f"model.layers.0.self_attn.{p}_proj.bias"] for p in "qkv"]
    assert torch.equal(weights.layers[0].mixer.qkv_bias, torch.cat(parts))
    down = directory.tensors["model.layers.0.mlp.down_proj.bias"]
    assert torch.equal(weights.layers[0].mlp.down_bias, down)


def load_with_biases(directory, skip=None):
    for name, tensor in list(directory.tensors.items()):
        if "_proj.weight" in name:
            directory.tensors[name.replace("weight", "bias")] = torch.randn(len(tensor))
    directory.tensors.pop(skip, None)
    directory.write_single()
    return load(directory)


def as_family(directory, name, **changes):
    """The same directory as a model of another family, whose own tensors are still missing."""
    directory.write_config(
        architectures=[name], model_type=FAMILIES[name].model_type, head_dim=4, **changes
    )


def test_norms_of_heads_are_loaded_one_row_for_each_head(directory):
    as_family(directory, "Qwen3ForCausalLM")
    for layer in range(2):
        for part in "qk":
            name = f"model.layers.{layer}.self_attn.{part}_norm.weight"
            directory.tensors[name] = torch.randn(4)
    directory.write_single()
    norms = load(directory).layers[1].mixer.head_norms
    queries, keys = (
        directory.tensors[f"model.layers.1.self_attn.{part}_norm.weight"] for part in "qk"
    )
    assert torch.equal(norms, torch.stack([queries] * 4 + [keys] * 2))
    del directory.tensors["model.layers.1.self_attn.k_norm.weight"]
    directory.write_single()
    with pytest.raises(ConfigError, match=r"lacks the tensor model.layers.1.self_attn.k_norm"):
        load(directory)


def test_qwen2_has_biases_but_for_the_output_matrix(directory):
    as_family(directory, "Qwen2ForCausalLM")
    directory.write_single()
    with pytest.raises(ConfigError, match=r"lacks the tensor model.layers.0.self_attn.q_proj.bias"):
        load(directory)
    for layer in range(2):
        for part in "qkv":
            name = f"model.layers.{layer}.self_attn.{part}_proj"
            directory.tensors[name + ".bias"] = torch.randn(
                len(directory.tensors[name + ".weight"])
            )
    directory.write_single()
    layer = load(directory).layers[0]
    assert (
        layer.mixer.qkv_bias is not None and layer.out_bias is None and layer.mlp.down_bias is None
    )
    directory.tensors["model.layers.0.self_attn.o_proj.bias"] = torch.randn(16)
    directory.write_single()
    with pytest.raises(ConfigError, match=r"holds the tensor model.layers.0.self_attn.o_proj.bias"):
        load(directory)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
def test_norms_of_heads_that_no_family_but_qwen3_has(name, directory):
    as_family(directory, name)
    directory.tensors = {
        name: torch.zeros(shape)
        for name, shape in expected_tensors(load_model_spec(directory.path)).items()
    }
    directory.write_single()
    load(directory)
    directory.tensors["model.layers.1.self_attn.q_norm.weight"] = torch.ones(4)
    directory.write_single()
    with pytest.raises(ConfigError, match=r"holds the tensor model.layers.1.self_attn.q_norm"):
        load(directory)


def test_a_mistral_has_no_biases(directory):
    as_family(directory, "MistralForCausalLM", attention_bias=True)
    directory.tensors["model.layers.0.self_attn.q_proj.bias"] = torch.randn(16)
    directory.write_single()
    with pytest.raises(ConfigError, match=r"holds the tensor model.layers.0.self_attn.q_proj.bias"):
        load(directory)


def test_old_rotary_frequencies_are_ignored(directory):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    directory.tensors[name] = torch.ones(2)
    directory.write_single()
    load(directory)


def damage_missing_tensor(directory):
    del directory.tensors[Q]
    directory.write_single()


def damage_unknown_tensor(directory):
    directory.tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(1)
    directory.write_single()


def damage_shape(directory):
    directory.tensors[Q] = torch.ones(16, 15)
    directory.write_single()


def damage_type(directory):
    directory.tensors[Q] = directory.tensors[Q].to(torch.int8)
    directory.write_single()


def damage_no_files(directory):
    pass


def damage_missing_shard(directory):
    directory.write_sharded()
    (directory.path / "model-00002-of-00002.safetensors").unlink()


def damage_truncated(directory):
    file = directory.write_single() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damage_header(directory):
    (directory.path / "model.safetensors").write_bytes(b"\xff" * 64)


def damage_empty(directory):
    (directory.path / "model.safetensors").write_bytes(b"")


def damage_index_json(directory):
    directory.write_sharded()
    (directory.path / "model.safetensors.index.json").write_text("{]")


def damage_index_without_map(directory):
    directory.write_index({})


def damage_index_path(directory):
    directory.write_index({Q: "../elsewhere.safetensors"})


def damage_index_type(directory):
    directory.write_index({Q: 3})


def damage_index_long_name(directory):
    directory.write_index({Q: "x" * 300})


def damage_index_zero_byte(directory):
    directory.write_index({Q: "a\0"})


def damage_pipe(directory):
    os.mkfifo(directory.path / "model.safetensors")


def damage_dangling_shard(directory):
    file = directory.write_sharded() / "model-00002-of-00002.safetensors"
    file.unlink()
    file.symlink_to("blob")


def damage_tensor_name(directory):
    directory.tensors["a\nb" * 99] = torch.zeros(1)
    directory.write_single()


def damage_index_place(directory):
    directory.write_sharded()
    index = directory.path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    weight_map[Q] = files[1 - files.index(weight_map[Q])]
    directory.write_index(weight_map)


def damage_two_shards_hold_one(directory):
    directory.write_sharded()
    weight_map = json.loads((directory.path / "model.safetensors.index.json").read_text())
    other = {
        "model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors",
        "model-00002-of-00002.safetensors": "model-00001-of-00002.safetensors",
    }[weight_map["weight_map"][Q]]
    save_file({**load_file(directory.path / other), Q: directory.tensors[Q] + 1.0},
              directory.path / other)  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_two_shards_hold_one, rf"holds {Q} twice, as {Q} in model-00001.* in model-00002"),
        (damage_missing_tensor, f"lacks the tensor {Q}"),
        (damage_unknown_tensor, "holds the tensor model.layers.7.mlp.up_proj.weight that"),
        (damage_shape, rf"{Q} must have shape \[16, 16\] by config.json, not \[16, 15\]"),
        (damage_type, f"{Q} must be one of F64, F32, BF16, F16, not I8"),
        (damage_no_files, "has neither model.safetensors nor model.safetensors.index.json"),
        (damage_missing_shard, "lacks 1 of its 2 weight files, first model-00002-of-00002"),
        (damage_truncated, "model.safetensors is not a whole safetensors file"),
        (damage_header, "model.safetensors is not a whole safetensors file"),
        (damage_empty, "model.safetensors is not a whole safetensors file"),
        (damage_index_json, "index.json is not valid JSON"),
        (damage_index_without_map, "weight_map must be an object of tensor names"),
        (damage_index_path, "must be the name of a file beside it, not '../elsewhere"),
        (damage_index_type, "must be the name of a file beside it, not 3"),
        (damage_index_long_name, r"cannot be looked at \(File name too long\)"),
        (damage_index_zero_byte, "can be no path"),
        (damage_pipe, "model.safetensors is no ordinary file"),
        (damage_dangling_shard, "00002.safetensors is a link to a file that is gone"),
        (damage_tensor_name, r"holds the tensor 'a\\nb.*\.\.\. that config.json does not"),
        (damage_index_place, f"lacks {Q}, which model.safetensors.index.json says it holds"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_wrong_directory_is_refused_in_one_sentence(damage, words, directory):
    damage(directory)
    with pytest.raises(ConfigError, match=words) as refusal:
        load(directory)
    assert "\n" not in str(refusal.value)


def test_norms_stored_less_one_are_added_up_in_float32(tmp_path):
    """Near one bfloat16 has steps of 1/128; what such a model stores may be smaller."""
    make_model(tmp_path, "gemma3_text", head_dim=16, query_pre_attn_scalar=24, rope_parameters=None,
               tie_word_embeddings=True, sliding_window=45, pad_token_id=0)  # fmt: skip
    [file] = tmp_path.glob("*.safetensors")
    stored = load_file(file)
    norm = stored["model.norm.weight"] = 0.01 * torch.randn(len(stored["model.norm.weight"]))
    save_file(stored, file, {"format": "pt"})
    weights = load_weights(tmp_path, load_model_spec(tmp_path), torch.bfloat16)
    assert torch.equal(weights.norm, norm.bfloat16().float() + 1.0)
