# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions, with the client library that people use."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

MESSAGES: Any = [
    {"role": "system", "content": "hello"},
    {"role": "user", "content": [{"type": "text", "text": "wörld"}, {"type": "text", "text": "€"}]},
]
GREEDY: Any = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
RENDERED = "<s><system>hello\n<user>wörld\n€\n<assistant>"


def test_a_conversation_goes_through_the_template(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    chat = client.chat.completions.create(messages=MESSAGES, max_tokens=12, **GREEDY)
    body = {"prompt": RENDERED, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    plain = http.post("/v1/completions", json=body).json()
    assert chat.object == "chat.completion"
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content == plain["choices"][0]["text"]
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == plain["usage"]["prompt_tokens"]
    assert chat.usage.completion_tokens == 12
    assert chat.usage.prompt_tokens_details is not None


def test_stream_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=60, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES, max_completion_tokens=60, stream=True,
            stream_options={"include_usage": True}, **GREEDY,
        )
    )  # fmt: skip
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert all(part.choices[0].delta.role is None for part in parts[1:])
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 60


def test_second_turn_finds_the_first_in_the_pool(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "the quick brown fox jumps " * 12}]
    first = client.chat.completions.create(messages=long, max_tokens=8, **GREEDY)
    more = [
        *long,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "and then"},
    ]
    second = client.chat.completions.create(messages=more, max_tokens=8, **GREEDY)
    assert first.usage is not None
    assert second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None
    assert details.cached_tokens >= first.usage.prompt_tokens // 16 * 16 - 16 > 0
    extra = details.model_extra or {}
    assert extra["cached_tokens_by_tier"]["pool"] == details.cached_tokens


def test_without_a_limit_the_answer_may_fill_the_context(http: httpx.Client) -> None:
    """It ends by a stop token here, or this would take a while."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "temperature": 1.5, "seed": 3, "min_tokens": 20, "stop_token_ids": list(range(2, 320)),
    }  # fmt: skip
    # 256 stop ids are allowed at most.
    assert http.post("/v1/chat/completions", json=body).status_code == 400
    body["stop_token_ids"] = list(range(2, 250))
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] >= 20
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_completions_by_the_library(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=[4, 5, 6], max_tokens=10, **GREEDY)
    parts = client.completions.create(prompt=[4, 5, 6], max_tokens=10, stream=True, **GREEDY)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert (model.model_extra or {})["max_model_len"] == 4096
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="org/other"):
        client.models.retrieve("org/other")
