# SPDX-License-Identifier: Apache-2.0
"""Random requests, whole and as streams: the pieces joined are the whole answer, field by field."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROUNDS = 12
PARTS = [
    "hello ",
    "grüße ",
    "日本",
    "🙂",
    "👩\u200d🚀 ",
    "\n",
    "fox",
    "e\u0301",
    "the lazy dog ",
    "\t",
]


def _random_request(rng: random.Random, path: str) -> dict[str, Any]:
    text = "".join(rng.choices(PARTS, k=rng.randrange(1, 9)))
    request: dict[str, Any] = {
        "seed": rng.randrange(2**32),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "n": rng.choice([1, 1, 3]),
        "max_tokens": rng.randrange(1, 40),
        "ignore_eos": rng.random() < 0.5,
        "skip_special_tokens": rng.random() < 0.7,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    if path == CHAT:
        request["messages"] = [{"role": "user", "content": text}]
        if rng.random() < 0.7:
            request |= {"logprobs": True, "top_logprobs": rng.randrange(4)}
    else:
        request["prompt"] = rng.choice([text, [text, "fox"], [[5, 9, 33], [0xE2, 270]]])
        request["echo"] = rng.random() < 0.5
        if rng.random() < 0.7:
            request["logprobs"] = rng.randrange(4)
    return request


def _ask(http: httpx.Client, path: str, request: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in request.items() if name != "stream_options"}
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def _ask_in_pieces(http: httpx.Client, path: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    response = http.post(path, json={**request, "stream": True})
    assert response.status_code == 200, response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _join(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices by index: texts, lists and what comes once."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for piece in event["choices"]:
            whole = choices.setdefault(piece["index"], {"text": "", "token_ids": []})
            assert "finish_reason" not in whole, "nothing follows the end"
            delta = piece.get("delta")
            whole["text"] += piece["text"] if delta is None else delta.get("content", "")
            whole["token_ids"] += piece["token_ids"]
            for name, values in (piece["logprobs"] or {}).items():
                if values is not None:
                    whole.setdefault(name, []).extend(values)
            if "prompt_token_ids" in piece:
                assert "prompt_token_ids" not in whole, "said once"
                whole["prompt_token_ids"] = piece["prompt_token_ids"]
            if piece["finish_reason"] is not None:
                whole |= {"finish_reason": piece["finish_reason"], "stop": piece["stop_reason"]}
    return choices


def _choice(whole: dict[str, Any]) -> dict[str, Any]:
    """A choice of a whole answer in the same form."""
    message = whole.get("message")
    form = {
        "text": whole["text"] if message is None else message["content"],
        "token_ids": whole["token_ids"],
        "prompt_token_ids": whole["prompt_token_ids"],
        "finish_reason": whole["finish_reason"],
        "stop": whole["stop_reason"],
    }
    return form | {k: v for k, v in (whole["logprobs"] or {}).items() if v is not None}


def _rounded(value: Any) -> Any:
    """Sums in another batch may differ in the last digits."""
    if isinstance(value, float):
        return round(value, 3) + 0.0
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return value


def _compare(http: httpx.Client, path: str, request: dict[str, Any]) -> dict[str, Any]:
    whole, events = _ask(http, path, request), _ask_in_pieces(http, path, request)
    *pieces, last = events
    assert last["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
    joined = _join(pieces)
    assert sorted(joined) == [choice["index"] for choice in whole["choices"]]
    made = 0
    for choice in whole["choices"]:
        expected = _choice(choice)
        assert _rounded(joined[choice["index"]]) == _rounded(expected), request
        made += len(expected["token_ids"])
        if expected.get("text_offset"):
            assert expected["text_offset"] == sorted(expected["text_offset"])
            assert len(expected["text_offset"]) == len(expected["tokens"])
    assert whole["usage"]["completion_tokens"] == made
    return whole


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_pieces_are_the_whole(http: httpx.Client, path: str, rng: random.Random) -> None:
    for _ in range(ROUNDS):
        _compare(http, path, _random_request(rng, path))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_pieces_end_where_the_whole_does(http: httpx.Client, path: str, rng: random.Random) -> None:
    """Stop strings out of the answer itself, some of them not yet there or half characters."""
    stopped = 0
    for _ in range(ROUNDS):
        request = _random_request(rng, path) | {"n": 1, "max_tokens": 40}
        if path == COMPLETIONS:
            request |= {"prompt": "fox 🙂", "echo": False}
        text = _choice(_ask(http, path, request)["choices"][0])["text"]
        place = rng.randrange(max(1, len(text) - 3))
        request["stop"] = [text[place : place + rng.randrange(1, 4)] or "x", "zzz"]
        request["include_stop_str_in_output"] = kept = rng.random() < 0.5
        (choice,) = _compare(http, path, request)["choices"]
        form = _choice(choice)
        stop = request["stop"][0]
        if form["finish_reason"] == "stop" and form["stop"] == stop:
            stopped += 1
            assert form["text"].endswith(stop) if kept else stop not in form["text"]
    assert stopped > ROUNDS // 2
