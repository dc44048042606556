# SPDX-License-Identifier: Apache-2.0
"""What well-known programs send, word for word, and what they read from the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Read as those programs read: line by line until [DONE]."""
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line:
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return
            yield json.loads(data)
    pytest.fail("the stream ended without [DONE]")


@pytest.mark.parametrize("prompt", ["the quick brown fox", [5, 9, 33, 270, 4]], ids=["text", "ids"])
def test_vllm_bench_serve(http: httpx.Client, prompt: Any) -> None:
    body = {
        "model": "tiny", "prompt": prompt, "temperature": 0.0, "repetition_penalty": 1.0,
        "max_tokens": 20, "logprobs": None, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    answers = list(events(http, "/v1/completions", body))
    text = "".join(c["text"] for answer in answers for c in answer["choices"])
    assert answers[-1]["choices"] == []
    assert answers[-1]["usage"]["completion_tokens"] == 20
    whole = http.post(
        "/v1/completions",
        json={"prompt": prompt, "temperature": 0, "max_tokens": 20, "ignore_eos": True},
    ).json()
    assert text == whole["choices"][0]["text"]


def test_vllm_bench_serve_of_chats(http: httpx.Client) -> None:
    body = {
        "model": "tiny", "temperature": 0.0, "max_completion_tokens": 9, "ignore_eos": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    *parts, last = events(http, "/v1/chat/completions", body)
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert last["usage"]["completion_tokens"] == 9


def test_guidellm(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {
        "model": "tiny", "prompt": "the quick brown fox", "max_tokens": 12, "stop": None,
        "ignore_eos": True, "stream": True, "stream_options": options,
    }  # fmt: skip
    answers = list(events(http, "/v1/completions", body))
    counts = [answer["usage"]["completion_tokens"] for answer in answers]
    assert counts == sorted(counts)
    assert 1 <= counts[0] < counts[-1] == 12
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1
    chat = {
        "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stop": None,
        "max_tokens": 12, "max_completion_tokens": 12, "ignore_eos": True, "stream": True,
        "stream_options": {**options, "include_usage": False},
    }  # fmt: skip
    last = list(events(http, "/v1/chat/completions", chat))[-1]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 12


def test_lm_eval(http: httpx.Client) -> None:
    """How likely an ending is after a beginning, as it works that out."""
    beginning, ending = [5, 9, 33, 270], [4, 11]
    body = {
        "model": "tiny", "prompt": [[*beginning, *ending], [7, *ending]], "temperature": 0,
        "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    first, second = http.post("/v1/completions", json=body).json()["choices"]
    for choice, start in ((first, 4), (second, 1)):
        form = choice["logprobs"]
        values = form["token_logprobs"][start:-1]
        assert len(values) == 2
        greedy = [max(top.values()) for top in form["top_logprobs"][start:-1]]
        assert all(value <= best for value, best in zip(values, greedy, strict=True))
    by_prompt = http.post(
        "/v1/completions",
        json={"prompt": [*beginning, *ending], "max_tokens": 1, "prompt_logprobs": 0},
    ).json()["choices"][0]["prompt_logprobs"]
    known = [entry[str(i)]["logprob"] for entry, i in zip(by_prompt[4:], ending, strict=True)]
    assert first["logprobs"]["token_logprobs"][4:6] == pytest.approx(known, abs=1e-4)


def test_langchain(http: httpx.Client) -> None:
    """Its model of chats, with a conversation in which a call of a tool was considered."""
    body = {
        "model": "tiny", "temperature": 0.7, "stream": False, "n": 1, "max_completion_tokens": 3,
        "messages": [
            {"role": "system", "content": "hello"},
            {"role": "user", "content": "world", "name": "someone"},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user", "content": "again"},
        ],
        "parallel_tool_calls": True, "tool_choice": "auto", "store": False,
        "response_format": {"type": "text"}, "service_tier": "auto", "user": "someone",
    }  # fmt: skip
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] <= 3
