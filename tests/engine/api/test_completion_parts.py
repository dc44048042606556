# SPDX-License-Identifier: Apache-2.0
"""/v1/completions/parts over a real socket: prompts whose body is still being sent."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from ...tiers.store_contract import wait_until
from .conftest import LiveServer
from .test_completions import GREEDY, IDS, JSON, post

PATH = "/v1/completions/parts"
LINES = {"Content-Type": "application/x-ndjson"}
TEXT = "One morning, when Gregor woke\nfrom troubled dreams, he found himself " * 2


def send(http: httpx.Client, lines: Sequence[Any]) -> httpx.Response:
    """Send each line in a chunk of its own."""
    return http.post(PATH, headers=LINES, content=bodies(lines))


def bodies(lines: Sequence[Any]) -> Iterator[bytes]:
    for line in lines:
        yield json.dumps(line).encode() + b"\n"


def lines_of(prompts: Sequence[Any], **fields: Any) -> list[Any]:
    first, *others = prompts
    return [{**GREEDY, **fields, "prompt": first}, *[{"prompt": each} for each in others]]


@pytest.mark.parametrize("size", [1, 7, 40])
def test_the_answer_is_that_to_the_whole_text(http: httpx.Client, size: int) -> None:
    parts = [TEXT[place : place + size] for place in range(0, len(TEXT), size)]
    wishes = {"max_tokens": 9, "return_token_ids": True}
    response = send(http, lines_of(parts, **wishes))
    assert response.status_code == 200, response.text
    found, whole = response.json(), post(http, prompt=TEXT, **wishes)
    assert found["choices"] == whole["choices"]
    assert found["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_tokens_in_parts_and_an_answer_in_events(http: httpx.Client) -> None:
    lines = lines_of([IDS[:3], IDS[3:4], IDS[4:]], max_tokens=6, stream=True)
    events = send(http, lines).text.split("\n\n")
    text = "".join(
        json.loads(event.removeprefix("data: "))["choices"][0]["text"]
        for event in events
        if event.startswith("data: {")
    )
    assert text == post(http, prompt=IDS, max_tokens=6)["choices"][0]["text"]


def test_a_prompt_may_be_all_in_the_first_line_or_begin_in_the_second(http: httpx.Client) -> None:
    expected = post(http, prompt=IDS, max_tokens=4)["choices"][0]["text"]
    for lines in ([{**GREEDY, "prompt": IDS, "max_tokens": 4}],
                  [{**GREEDY, "max_tokens": 4}, {"prompt": IDS[:2]}, {"prompt": IDS[2:]}],
                  lines_of([IDS, ""], max_tokens=4)):  # fmt: skip
        response = send(http, lines)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == expected


def test_what_has_come_is_computed_while_the_rest_is_awaited(http: httpx.Client) -> None:
    """A client that leaves in the middle leaves nothing behind."""
    host, port = http.base_url.host, http.base_url.port
    tokens = [7, 8, 9] * 15
    line = json.dumps({**GREEDY, "prompt": tokens}).encode() + b"\n"
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}:{port}\r\nTransfer-Encoding: chunked\r\n"
    head += "Content-Type: application/x-ndjson\r\n\r\n"
    before = computed(http)
    with socket.create_connection((host, port), 30.0) as client:
        client.sendall(head.encode() + b"%x\r\n%s\r\n" % (len(line), line))
        wait_until(lambda: computed(http) >= before + 45)
        assert gauge(http, "vllm:num_requests_running") == 0.0
    # Its blocks are kept for it no longer.
    wait_until(lambda: http.get("/load").json()["server_load"] == 0)


def computed(http: httpx.Client) -> float:
    return gauge(http, "stratakv:scheduled_tokens_total")


def gauge(http: httpx.Client, name: str) -> float:
    text = http.get("/metrics").text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith((f"{name} ", f"{name}{{"))
    )


@pytest.mark.parametrize(("lines", "status", "param"), [
    ([{**GREEDY, "prompt": IDS, "n": 2}], 400, "n"),
    ([{**GREEDY, "prompt": IDS, "echo": True}], 400, "echo"),
    ([{**GREEDY, "prompt": IDS, "prompt_logprobs": 1}], 400, "prompt_logprobs"),
    ([{**GREEDY, "prompt": [IDS, IDS]}], 400, "prompt"),
    ([{**GREEDY, "model": "other", "prompt": IDS}], 404, "model"),
    ([GREEDY], 400, "prompt[0]"),
    ([], 400, None),
    (lines_of([IDS, [10**6]]), 400, "prompt[1]"),
    ([{**GREEDY, "prompt": IDS}, {"prompt": IDS, "more": 1}], 400, "more"),
    ([{**GREEDY, "prompt": IDS}, "text"], 400, None),
    (lines_of([[5] * 200, [5] * 4000]), 400, "prompt[1]"),
])  # fmt: skip
def test_bad_parts_are_refused_by_name(
    http: httpx.Client, lines: list[Any], status: int, param: str | None
) -> None:
    response = send(http, lines)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


def test_an_engine_that_is_full_says_so_as_ever(http: httpx.Client, server: LiveServer) -> None:
    sessions = server.core._continuations.sessions
    before = sessions.most_sessions
    sessions.most_sessions = 0
    try:
        whole = lines_of([IDS, IDS, IDS], max_tokens=3)
        response = send(http, whole)
        assert response.status_code == 503, response.text
        assert "try later" in response.json()["error"]["message"]
    finally:
        sessions.most_sessions = before


def test_another_kind_of_body_is_refused(http: httpx.Client) -> None:
    response = http.post(PATH, json={**GREEDY, "prompt": IDS})
    assert response.status_code == 415
    assert "application/x-ndjson" in response.json()["error"]["message"]


def test_a_line_may_say_that_it_is_the_last(http: httpx.Client) -> None:
    """The answer comes before the body has ended."""
    host, port = http.base_url.host, http.base_url.port
    lines = [
        {**GREEDY, "prompt": IDS[:2], "max_tokens": 4},
        {"prompt": IDS[2:]},
        {"is_last": True},
        {"prompt": "not read"},
    ]
    body = b"".join(bodies(lines))
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}:{port}\r\nTransfer-Encoding: chunked\r\n"
    head += "Content-Type: application/x-ndjson\r\n\r\n"
    with socket.create_connection((host, port), 30.0) as client:
        client.sendall(head.encode() + b"%x\r\n%s\r\n" % (len(body), body))
        answer = b""
        while b'"usage"' not in answer:
            more = client.recv(65536)
            assert more, answer
            answer += more
    assert answer.startswith(b"HTTP/1.1 200")
    found = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert found["choices"] == post(http, prompt=IDS, max_tokens=4)["choices"]


@pytest.mark.parametrize("parts", [
    [TEXT] * 200,  # too many tokens, and none too many for its characters
    ["a " * 9, "b " * 5000], ["x" * 10**6], [[5] * 200, [5] * 4000], [[5] * 5000],
    [""], [IDS, [10**6]],
], ids=range(7))  # fmt: skip
def test_what_cannot_be_a_prompt_has_the_code_of_whole_prompts(
    http: httpx.Client, parts: list[Any]
) -> None:
    whole = [token for part in parts for token in part]
    body = {**GREEDY, "prompt": whole if whole and isinstance(whole[0], int) else "".join(whole)}
    expected = http.post("/v1/completions", content=json.dumps(body), headers=JSON)
    found = send(http, lines_of(parts))
    assert found.status_code == expected.status_code == 400
    error = found.json()["error"]
    assert error["code"] == expected.json()["error"]["code"]
    assert error["param"].partition("[")[0] == "prompt"
