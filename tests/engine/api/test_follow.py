# SPDX-License-Identifier: Apache-2.0
"""The routes that say which prompt will come: bodies are read as those of the request itself."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

COMPLETION = {"prompt": [5, 6, 7] * 20, "stream": True, "n": 2}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0.5}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
def test_an_engine_without_a_shared_tier_follows_nothing(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = http.post("/follow" + path, json=body)
    assert (answer.status_code, answer.json()) == (200, {"followed": 0, "object": "follow"})


@pytest.mark.parametrize(
    "body", [{}, {"prompt": []}, {"prompt": "a", "no_such_field": 1}, {"prompt": [10**6]}]
)
def test_what_is_no_request_is_refused_as_ever(http: httpx.Client, body: dict[str, Any]) -> None:
    here, there = (
        http.post("/follow/v1/completions", json=body),
        http.post("/v1/completions", json=body),
    )
    assert (here.status_code, here.json()) == (there.status_code, there.json())
    assert here.status_code == 400
