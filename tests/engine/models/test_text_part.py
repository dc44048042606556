# SPDX-License-Identifier: Apache-2.0
"""The text part of a checkpoint that has a vision part too: its tokens are those of transformers in
float64, whichever way its tensors are spelt, and what cannot be ignored is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from stratakv.engine.models.checkpoint.fingerprint import fingerprint
from stratakv.engine.models.checkpoint.tensor_shapes import text_part_name
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.tiers.settings.values import ConfigError

from ...test_exactness import ask, prompt, running_core
from ...test_windowed_models import MODELS, WINDOW
from ...tiny_models import BASE, greedy_reference

VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    text = BASE | MODELS["gemma3_text"]
    config = Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=1, eos_token_id=[2, 3],
        image_token_index=4, boi_token_index=5, eoi_token_index=6,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.5 if "embed" in name else 10.0)
            else:
                parameter.normal_(0.0, 0.1)
    directory = tmp_path_factory.mktemp("gemma3")
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """A directory of one's own, with the same files."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def change(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.unlink()
    path.write_text(json.dumps({name: each for name, each in config.items() if each is not None}))


def test_its_tokens_are_those_of_transformers(checkpoint: Path) -> None:
    texts = [prompt(1, 3 * WINDOW), prompt(2, 9)]
    spec = load_model_spec(checkpoint)
    assert (spec.architecture, spec.eos_token_ids) == ("Gemma3ForCausalLM", (2, 3))
    assert spec.sliding_window == WINDOW
    with running_core(checkpoint) as core:
        answers = ask(core, texts)
    for text, answer in zip(texts, answers, strict=True):
        said = answer.token_ids
        assert said == greedy_reference(checkpoint, text, len(said), guess=said)


def test_both_spellings_of_its_tensors(copied: Path) -> None:
    tensors = load_file(copied / SHARD)
    ours = {text_part_name(name) for name in tensors} - {None}
    assert len(ours) < len(tensors), "the vision part is in neither"
    spelt = {}
    for name, tensor in tensors.items():
        part = text_part_name(name)
        is_old = name.startswith("language_model.")
        new = f"model.language_model.{(part or '').removeprefix('model.')}"
        old = f"language_model.{part}"
        spelt[f"model.{name}" if part is None else new if is_old else old] = tensor
    assert {text_part_name(name) for name in spelt} - {None} == ours
    texts = [prompt(1, 40)]
    with running_core(copied) as core:
        [first] = ask(core, texts)
    (copied / SHARD).unlink()
    save_file(spelt, copied / SHARD, {"format": "pt"})
    with running_core(copied) as core:
        [second] = ask(core, texts)
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"text_config": None}, "text_config must be an object"),
        ({"text_config": [1]}, "text_config must be an object"),
        ({"model_type": "llama"}, "model_type must be gemma3 for this architecture"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be absent"),
        ({"text_config": {"model_type": "gemma2"}}, "text_config: model_type must be gemma3_text"),
    ],
    ids=str,
)
def test_what_is_refused(copied: Path, values: dict[str, Any], sentence: str) -> None:
    change(copied, **values)
    with pytest.raises(ConfigError, match=sentence):
        load_model_spec(copied)


def test_a_name_for_its_numbers(copied: Path) -> None:
    change(copied, architectures=None)
    assert load_model_spec(copied).is_text_part, "the model type says as much"
    before = fingerprint(copied)
    weights = copied / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert fingerprint(copied) != before, "the file's last byte counts, whatever it is part of"
