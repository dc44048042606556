# SPDX-License-Identifier: Apache-2.0
"""Turns of agents' jobs and priorities, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from stratakv.engine.api.api_settings import ApiSettings
from stratakv.engine.api.openai.chat import _answered_tool
from stratakv.engine.api.openai.request.protocol import ChatMessage, ChatRequest

from .conftest import MODEL_NAME, LiveServer

PROMPT = list(range(5, 85))
BODY = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def live(model_path: Path) -> Iterator[LiveServer]:
    server = LiveServer(model_path, ApiSettings(), policy="continuum")
    yield server
    server.stop()


@pytest.fixture
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=30, verify=False) as client:
        yield client


def post(http: httpx.Client, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("by_header", [False, True])
def test_a_turn_is_kept_until_the_last_one(
    live: LiveServer, http: httpx.Client, by_header: bool
) -> None:
    def turn(last: bool) -> None:
        if by_header:
            post(http, BODY, **{"X-Job-Id": "h", "X-Job-Last-Step": "true" if last else "0"})
        else:
            post(http, {**BODY, "job_id": "f", "is_last_step": last})

    before = live.stats()["num_pinned"]
    turn(last=False)
    assert live.stats()["num_pinned"] == before + 1
    assert live.stats()["pinned_blocks"] > 0
    turn(last=False)
    assert live.stats()["num_pinned"] == before + 1
    turn(last=True)
    assert live.stats()["num_pinned"] == before


def test_jobs_of_two_tenants_are_two(live: LiveServer, http: httpx.Client) -> None:
    before = live.stats()["num_pinned"]
    for salt in "ab":
        post(http, {**BODY, "job_id": "same", "cache_salt": salt})
    assert live.stats()["num_pinned"] == before + 2
    for salt in "ab":
        post(http, {**BODY, "job_id": "same", "cache_salt": salt, "is_last_step": True})
    assert live.stats()["num_pinned"] == before


def test_a_tool_that_was_called_is_told_to_the_engine(live: LiveServer, http: httpx.Client) -> None:
    post(http, {**BODY, "job_id": "t"})
    told = json.dumps({"job_id": "t", "tool": "never-seen"})
    assert live.run(live.client.call("tool_called", told)) is True
    with pytest.raises(Exception, match="names no tool"):
        live.run(live.client.call("tool_called", '{"job": 1}'))
    post(http, {**BODY, "job_id": "t", "is_last_step": True})


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"job_id": "x" * 257}, {}, "job_id"),
        ({"job_id": "a\nb"}, {}, "job_id"),
        ({"is_last_step": True}, {}, "is_last_step"),
        ({"job_id": "a"}, {"X-Job-Last-Step": "perhaps"}, None),
        ({"job_id": 5}, {}, "job_id"),
        ({"priority": 1}, {}, "priority"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    http: httpx.Client, body: dict[str, Any], headers: dict[str, str], param: str | None
) -> None:
    answer = http.post("/v1/completions", json={**BODY, **body}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_priorities_are_taken_where_they_have_an_effect(model_path: Path) -> None:
    server = LiveServer(model_path, ApiSettings(), policy="priority")
    try:
        with httpx.Client(base_url=server.url, timeout=30, verify=False) as client:
            assert post(client, {**BODY, "priority": -7})["choices"]
            refused = client.post("/v1/completions", json={**BODY, "priority": 2**40})
            assert refused.status_code == 400
            assert "from -2147483648" in refused.json()["error"]["message"]
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "x"}], ""),
        (
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [
                    {"id": "1", "function": {"name": "find", "arguments": "{}"}},
                    {"id": "2", "function": {"name": "read", "arguments": "{}"}},
                ]},
                {"role": "tool", "tool_call_id": "1", "content": "a"},
                {"role": "tool", "tool_call_id": "2", "content": "b"},
            ],
            "read",
        ),
        ([{"role": "tool", "name": "own", "content": "a"}], "own"),
        ([{"role": "tool", "content": "a"}], ""),
    ],
)  # fmt: skip
def test_the_tool_of_a_turn_is_read_from_its_messages(
    messages: list[dict[str, Any]], expected: str
) -> None:
    request = ChatRequest(messages=msgspec.convert(messages, list[ChatMessage]))
    assert _answered_tool(request) == expected
