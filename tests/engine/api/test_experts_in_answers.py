# SPDX-License-Identifier: Apache-2.0
"""The experts that computed each token, in answers over HTTP."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch

from ...tiny_models import load_reference, make_model
from .conftest import MODEL_NAME, VOCAB_SIZE, LiveServer, _write_tokenizer

EXPERTS, CHOSEN, LAYERS = 300, 3, 2
PROMPT = [40, 41, 42, 50, 60, 70, 80, 90]
ASKED = {"model": MODEL_NAME, "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def experts_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    make_model(
        directory, "qwen3_moe", seed=4, vocab_size=VOCAB_SIZE, num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, moe_intermediate_size=8, num_hidden_layers=LAYERS,
    )  # fmt: skip
    _write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def experts_http(experts_path: Path) -> Iterator[httpx.Client]:
    live = LiveServer(experts_path, tells_experts=True)
    with httpx.Client(base_url=live.url, timeout=60, trust_env=False) as client:
        yield client
    live.stop()


def decoded(text: str) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return found


@torch.inference_mode()
def by_transformers(path: Path, tokens: list[int]) -> npt.NDArray[Any]:
    reference = load_reference(path)
    logits = reference(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([each.topk(CHOSEN).indices for each in logits], 1).numpy()


def test_a_completion_has_the_experts_of_each_token(experts_http, experts_path):
    """A number has two bytes where there are more than 256 experts."""
    for start in (0, 6):
        fields = {"prompt": PROMPT, "return_token_ids": True, "routed_experts_prompt_start": start}
        [choice] = experts_http.post("/v1/completions", json=ASKED | fields).json()["choices"]
        found, tokens = decoded(choice["routed_experts"]), PROMPT + choice["token_ids"]
        assert found.dtype == np.uint16 and found.shape == (len(tokens) - 1 - start, LAYERS, CHOSEN)
        assert np.array_equal(found, by_transformers(experts_path, tokens[:-1])[start:])


def test_a_stream_has_them_at_its_end(experts_http):
    whole = experts_http.post("/v1/completions", json=ASKED | {"prompt": PROMPT}).json()
    body = ASKED | {"prompt": PROMPT, "stream": True}
    with experts_http.stream("POST", "/v1/completions", json=body) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert all("routed_experts" not in choice for choice in choices[:-1])
    assert choices[-1]["routed_experts"] == whole["choices"][0]["routed_experts"]


def test_a_chat_and_an_answer_that_a_stop_string_ends(experts_http):
    body = ASKED | {"messages": [{"role": "user", "content": "hello"}], "return_token_ids": True}
    [choice] = experts_http.post("/v1/chat/completions", json=body).json()["choices"]
    num_tokens = len(choice["prompt_token_ids"]) + len(choice["token_ids"])
    assert len(decoded(choice["routed_experts"])) == num_tokens - 1
    body = ASKED | {"prompt": PROMPT, "return_token_ids": True, "max_tokens": 20}
    text = experts_http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    body["stop"] = text[len(text) // 2]
    [choice] = experts_http.post("/v1/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    num_tokens = len(PROMPT) + len(choice["token_ids"])
    assert len(decoded(choice["routed_experts"])) == num_tokens - 1


def test_a_server_that_tells_none_refuses_the_question(http):
    body = ASKED | {"prompt": PROMPT, "routed_experts_prompt_start": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "routed_experts_prompt_start"
    assert "start it with --enable-return-routed-experts" in error["message"]
    plain = http.post("/v1/completions", json=ASKED | {"prompt": PROMPT}).json()
    assert "routed_experts" not in plain["choices"][0]
