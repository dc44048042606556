# SPDX-License-Identifier: Apache-2.0
"""What a model's authors recommend counts where a client is silent, and never where it speaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

RECOMMENDED = {
    "temperature": 0.8, "top_k": 1, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3,
    "max_new_tokens": 6,
}  # fmt: skip
IDS = [5, 9, 33, 270, 4, 11, 12, 13]


@pytest.fixture(scope="module")
def advised(server: Any, model_path: Path) -> Iterator[httpx.Client]:
    """A server of the same model with recommendations."""
    live = type(server)(model_path, default_sampling=RECOMMENDED)
    with httpx.Client(base_url=live.url, timeout=30, verify=False) as client:
        yield client
    live.stop()


def ids_of(http: httpx.Client, **fields: Any) -> list[int]:
    body = {"prompt": IDS, "ignore_eos": True, "return_token_ids": True, "seed": 7, **fields}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


def test_silence_takes_what_is_recommended(http: httpx.Client, advised: httpx.Client) -> None:
    explicit = {name: value for name, value in RECOMMENDED.items() if name != "max_new_tokens"}
    assert ids_of(advised) == ids_of(http, max_tokens=6, **explicit)
    assert len(ids_of(http)) == 16


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 0}, {"repetition_penalty": 1.0}, {"top_k": 0, "min_p": 0.0, "top_p": 1.0},
     {"top_k": 0, "temperature": 2.0}],
)  # fmt: skip
def test_a_word_of_the_client_wins(
    http: httpx.Client, advised: httpx.Client, changes: dict[str, Any]
) -> None:
    explicit = {name: value for name, value in RECOMMENDED.items() if name != "max_new_tokens"}
    asked = ids_of(advised, max_tokens=40, **changes)
    assert len(asked) == 40, "the recommended length is no limit"
    assert asked == ids_of(http, max_tokens=40, **explicit | changes)
    assert asked != ids_of(advised, max_tokens=40)


def test_a_beam_search_leaves_it_aside(http: httpx.Client, advised: httpx.Client) -> None:
    beams = {"use_beam_search": True, "n": 3, "max_tokens": 6}
    assert ids_of(advised, **beams) == ids_of(http, **beams)
    body = {"prompt": IDS, **beams, "repetition_penalty": 1.3}
    error = advised.post("/v1/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "repetition_penalty")


def test_an_answer_to_a_chat_ends_there_too(advised: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
    answer = advised.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 6
