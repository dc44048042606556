# SPDX-License-Identifier: Apache-2.0
"""A server without a tokenizer: token ids in, token ids out, and whatever needs a text refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

IDS = [5, 9, 33]


@pytest.fixture(scope="module")
def wordless(server: Any, model_path: Path) -> Iterator[httpx.Client]:
    live = type(server)(model_path, has_tokenizer=False)
    with httpx.Client(base_url=live.url, timeout=30, verify=False) as client:
        yield client
    live.stop()


def test_log_probabilities_name_ids(wordless: httpx.Client) -> None:
    body = {"prompt": IDS, "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    answer = wordless.post("/v1/completions", json={**body, "logprobs": 1, "prompt_logprobs": 0})
    (choice,) = answer.json()["choices"]
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert choice["prompt_logprobs"][1]["9"]["decoded_token"] == "token_id:9"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "hello"}, "prompt"),
        ("/v1/completions", {"prompt": IDS, "stop": "x"}, "stop"),
        ("/v1/completions", {"prompt": IDS, "bad_words": ["x"]}, "bad_words"),
        ("/v1/completions", {"prompt": IDS, "echo": True}, "echo"),
        ("/tokenize", {"prompt": "hello"}, "prompt"),
        ("/detokenize", {"tokens": IDS}, "tokens"),
    ],
)
def test_texts_are_refused(
    wordless: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    response = wordless.post(path, json=fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "no_tokenizer", param)


def test_there_is_no_chat(wordless: httpx.Client) -> None:
    response = wordless.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hello"}]}
    )
    assert response.json()["error"]["code"] == "no_chat_template"
