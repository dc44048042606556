# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: the choice, the products in each form, and the forms of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from stratakv.engine.models.checkpoint.weights import (
    DenseWeights,
    ExpertWeights,
    load_weights,
    random_weights,
)
from stratakv.engine.models.experts import ExpertMlp, choose_experts
from stratakv.engine.models.families import Activation
from stratakv.engine.models.layers import Elementwise
from stratakv.engine.models.spec.expert_spec import ExpertSpec
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.tiers.settings.values import ConfigError

from ...tiny_models import make_model

EXPERTS, CHOSEN, HIDDEN, SIZE = 6, 2, 48, 24
OPTIONS = {
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": SIZE, "intermediate_size": SIZE, "num_hidden_layers": 2,
}  # fmt: skip


def spec_with(*, normalises: bool = False, shared_size: int = 0) -> ExpertSpec:
    return ExpertSpec(EXPERTS, CHOSEN, SIZE, normalises, (0,), shared_size)


@pytest.mark.parametrize(
    ("model_type", "router_class", "normalises"),
    [
        ("mixtral", MixtralTopKRouter, True),
        ("qwen3_moe", Qwen3MoeTopKRouter, False),
        ("qwen3_moe", Qwen3MoeTopKRouter, True),
        ("granitemoe", GraniteMoeTopKRouter, True),
    ],
)
def test_the_choice_is_that_of_transformers(model_type, router_class, normalises):
    options = OPTIONS | {"hidden_size": HIDDEN, "norm_topk_prob": normalises}
    router = router_class(AutoConfig.for_model(model_type, **options))
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(1))
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        _, weights, chosen = router(x)
        found, shares = choose_experts(x @ router.weight.T, spec_with(normalises=normalises))
    assert torch.equal(found, chosen)
    torch.testing.assert_close(shares, weights)


def weights_of(dtype: torch.dtype, *, has_shared: bool) -> ExpertWeights:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    made = ExpertWeights(
        8 * draw(EXPERTS, HIDDEN),
        [draw(SIZE, HIDDEN) for _ in range(EXPERTS)],
        [draw(SIZE, HIDDEN) for _ in range(EXPERTS)],
        [draw(HIDDEN, SIZE) for _ in range(EXPERTS)],
    )
    if has_shared:
        made.shared = DenseWeights(draw(SIZE, HIDDEN), draw(SIZE, HIDDEN), draw(HIDDEN, SIZE))
        made.shared_gate = draw(1, HIDDEN)
    return made


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_are_computed_as_one_expert_after_the_other(dtype, has_shared):
    """The grouped product is what a GPU has; it runs here too, but for the gate's kernel."""
    grouped_parts = Elementwise(is_kernels=True)
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(4)).to(dtype)
    spec = spec_with(shared_size=SIZE * has_shared)
    apart = weights_of(dtype, has_shared=has_shared)
    joined = weights_of(dtype, has_shared=has_shared)
    joined.join_gate()
    one = ExpertMlp(spec, apart, Activation.SILU, Elementwise())
    other = ExpertMlp(spec, joined, Activation.SILU, grouped_parts)
    assert not one.can_record and other.can_record == (dtype is torch.bfloat16)
    near = 1e-5 if dtype is torch.float32 else 2e-2
    added = torch.ones_like(x)
    other.add_to(added, x)
    for rows in (x, x[:1], x[:0]):
        torch.testing.assert_close(one(rows), other(rows), rtol=near, atol=near)
    torch.testing.assert_close(added - 1, one(x), rtol=near, atol=2 * near)


def test_a_row_has_its_result_whatever_other_rows_there_are():
    mlp = ExpertMlp(
        spec_with(normalises=True), weights_of(torch.float64, has_shared=False),
        Activation.GELU_TANH, Elementwise(),
    )  # fmt: skip
    x = torch.randn(30, HIDDEN, dtype=torch.float64)
    order = torch.randperm(30)
    torch.testing.assert_close(mlp(x)[order], mlp(x[order]), rtol=1e-12, atol=1e-12)


def fuse(directory: Path) -> None:
    """Write the experts of each layer as published files of some models have them, as one."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}.{e}.{part}_proj.weight") for e in range(EXPERTS)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{at}.gate_up_proj"] = torch.cat((gate, up), 1)
        tensors[f"{at}.down_proj"] = down
    save_file(tensors, file)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return make_model(tmp_path, "qwen3_moe", **OPTIONS)


def test_experts_apart_and_as_one_are_the_same_model(qwen):
    spec = load_model_spec(qwen)
    apart = load_weights(qwen, spec, torch.float32).layers
    fuse(qwen)
    fused = load_weights(qwen, spec, torch.float32).layers
    for one, other in zip(apart, fused, strict=True):
        for name in ("gates", "ups", "downs"):
            pairs = zip(getattr(one.mlp, name), getattr(other.mlp, name), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
    joined = load_weights(qwen, spec, torch.float32, joins_gate=True).layers
    assert torch.equal(joined[1].mlp.gates[3], apart[1].mlp.gates[3])


def test_names_of_other_families(tmp_path):
    """Mixtral has its own for each expert, Granite one tensor for all."""
    for model_type, old in (("mixtral", "experts.1.w3."), ("granitemoe", "input_linear")):
        directory = make_model(tmp_path / model_type, model_type, **OPTIONS)
        stored = load_file(directory / "model.safetensors")
        assert any(old in name for name in stored)
        spec = load_model_spec(directory)
        mlp = load_weights(directory, spec, torch.float32).layers[1].mlp
        if model_type == "mixtral":
            assert torch.equal(
                mlp.ups[1], stored["model.layers.1.block_sparse_moe.experts.1.w3.weight"]
            )
        else:
            both = stored["model.layers.1.block_sparse_moe.input_linear.weight"]
            assert torch.equal(mlp.ups[1], both[1, SIZE:])


def damaged(qwen: Path, change) -> str:
    file = qwen / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ConfigError) as refusal:
        load_weights(qwen, load_model_spec(qwen), torch.float32)
    return str(refusal.value)


def test_an_expert_that_is_missing_is_named(qwen):
    gone = "model.layers.1.mlp.experts.5.up_proj.weight"
    assert f"lacks the tensor {gone}" in damaged(qwen, lambda tensors: tensors.pop(gone))


def test_an_expert_too_many_is_named(qwen):
    name = "model.layers.0.mlp.experts.6.up_proj.weight"
    words = damaged(qwen, lambda tensors: tensors.update({name: torch.ones(SIZE, HIDDEN)}))
    assert f"holds the tensor {name} that config.json does not describe" in words


def test_experts_that_are_there_twice_are_refused(qwen):
    whole = load_file(qwen / "model.safetensors")
    fuse(qwen)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    words = damaged(qwen, lambda tensors: tensors.update({name: whole[name]}))
    assert f"holds the tensor {name} that config.json does not describe" in words


def test_random_experts_are_a_model(qwen):
    (qwen / "model.safetensors").unlink()
    config = json.loads((qwen / "config.json").read_text())
    assert config["num_experts_per_tok"] == CHOSEN
    spec = load_model_spec(qwen)
    mlp = random_weights(spec, torch.float32).layers[0].mlp
    assert len(mlp.gates) == EXPERTS and mlp.downs[5].shape == (HIDDEN, SIZE)
    assert not torch.equal(mlp.gates[0], mlp.gates[1])
