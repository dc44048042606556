# SPDX-License-Identifier: Apache-2.0
"""Recommended sampling: what is read, what is ignored, and what is refused by its key."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.models.checkpoint import generation_config
from stratakv.engine.models.checkpoint.generation_config import load_default_sampling
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.tiers.settings.values import ConfigError

# The form that Qwen3's has.
FILE = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [2, 3],
    "pad_token_id": 1,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def load(path, values):
    (path / "generation_config.json").write_text(json.dumps(values))
    return load_default_sampling(path)


def test_what_the_file_recommends(tmp_path):
    assert load(tmp_path, FILE) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    every = {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0.05, "repetition_penalty": 1.1,
             "max_new_tokens": 2048}  # fmt: skip
    assert load(tmp_path, every) == every
    assert load(tmp_path, {**FILE, "temperature": None, "top_p": None}) == {"top_k": 20}


def test_no_file_and_no_recommendation(tmp_path):
    assert load_default_sampling(tmp_path) == {}
    assert load(tmp_path, {"do_sample": False}) == {}
    assert load_default_sampling(EMBEDDED_MODEL) == {}


def test_the_answer_of_deterministic_exporters_keeps_what_they_wrote(tmp_path):
    assert load(tmp_path, FILE | {"do_sample": False})["temperature"] == 0.6


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", -0.1, "a number from 0 to 100, not -0.1"),
        ("temperature", "0.7", "a number from 0 to 100, not '0.7'"),
        ("temperature", float("nan"), "a number from 0 to 100, not nan"),
        ("temperature", True, "a number from 0 to 100, not True"),
        ("top_k", 0.5, "a whole number from -1 to 2147483647, not 0.5"),
        ("top_k", -2, "a whole number from -1"),
        ("top_p", 0, "a number above 0 and at most 1, not 0"),
        ("top_p", 1.5, "a number above 0 and at most 1, not 1.5"),
        ("min_p", 1.01, "a number from 0 to 1, not 1.01"),
        ("repetition_penalty", 0, "a number above 0 and at most 100, not 0"),
        ("max_new_tokens", 0, "a whole number from 1"),
    ],
)
def test_values_that_no_request_may_have(name, value, words, tmp_path):
    with pytest.raises(ConfigError, match=rf"generation_config.json: {name} must be {words}"):
        load(tmp_path, FILE | {name: value})


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0, "top_k": -1, "top_p": 1e-9, "min_p": 0, "repetition_penalty": 1e-9},
        {"temperature": 100, "top_k": 2**31 - 1, "top_p": 1, "min_p": 1, "repetition_penalty": 100},
    ],
)
def test_every_bound_is_one_that_requests_have_too(values, tmp_path):
    assert set(values) | {"max_new_tokens"} == set(generation_config._READERS)
    assert SamplingParams(**load(tmp_path, values)).top_p == values["top_p"]
    assert SamplingParams(max_tokens=load(tmp_path, {"max_new_tokens": 9})["max_new_tokens"])


def test_a_file_that_is_no_json(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config.json is not valid JSON"):
        load_default_sampling(tmp_path)


def test_it_is_read_without_torch():
    name = "stratakv.engine.models.checkpoint.generation_config"
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
