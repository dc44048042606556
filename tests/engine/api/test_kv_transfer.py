# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params` over HTTP: two nodes with a cache server between, and strangers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from stratakv.engine.api.api_settings import ApiSettings
from stratakv.engine.api.openai.response.kv_transfer_params import read_params
from stratakv.engine.request.core_messages import NO_EXTRAS
from stratakv.engine.request.handover_ticket import Ticket, is_possible

from ...offload_config import offload_config
from ...tiers.cache_server.rig import server_process
from .conftest import LiveServer

ASKS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
PROMPT = [7 + i % 90 for i in range(75)]
BODY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 5, "return_token_ids": True}
CHAT = {
    "messages": [{"role": "user", "content": "the quick brown fox " * 12}],
    "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 2,
}  # fmt: skip
TICKET = {
    "num_tokens": 75, "prompt": "ab" * 32, "params": "cd" * 16, "first_token": 3,
    "logprobs": [[3, 3], [-0.5, -0.5], 1],
}  # fmt: skip


@pytest.fixture(scope="module")
def nodes(model_path: Path) -> Iterator[list[httpx.Client]]:
    """Two engines with the same cache server."""
    with server_process("--cpu-bytes", "32MiB") as cache:
        tiers = ("cpu", f"grpc://127.0.0.1:{cache.port}")
        offload = offload_config(
            tiers=tiers, cpu_bytes=8 * 2**20, load="always", require_tiers=True
        )
        live = [LiveServer(model_path, offload=offload) for _ in range(2)]
        clients = [httpx.Client(base_url=each.url, timeout=30, verify=False) for each in live]
        yield clients
        for client, each in zip(clients, live, strict=True):
            client.close()
            each.stop()


def post(client: httpx.Client, body: Any, path: str = "/v1/completions") -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(answer: Any) -> list[Any]:
    """The choices without numbers, which differ in the last digit by how a prompt was computed."""
    for choice in answer["choices"]:
        for token in (choice["logprobs"] or {}).get("content", ()):
            token["logprob"] = None
            token["top_logprobs"] = [each["token"] for each in token["top_logprobs"]]
    choices: list[Any] = answer["choices"]
    return choices


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)]
)
def test_one_node_goes_on_behind_the_other(
    nodes: list[httpx.Client], http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    prefill, decode = nodes
    expected = post(http, body, path)
    first = post(prefill, {**body, "max_tokens": 1, "kv_transfer_params": ASKS}, path)
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    num_prompt = first["usage"]["prompt_tokens"]
    assert params["remote_num_tokens"] == params["stratakv"]["num_tokens"] == num_prompt
    assert params["remote_request_id"] == first["id"]
    params = {**params, "remote_host": "10.0.0.9", "added": [1]}  # as routers do
    answer = post(decode, {**body, "kv_transfer_params": params}, path)
    assert said(answer) == said(expected)
    assert "kv_transfer_params" not in answer
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens_by_tier"]["remote"] == details["cached_tokens"] == num_prompt


def test_in_a_stream_the_last_chunk_hands_over(nodes: list[httpx.Client]) -> None:
    prefill, decode = nodes
    body = {**BODY, "prompt": PROMPT[1:], "max_tokens": 1, "stream": True}
    chunks = events(prefill.post("/v1/completions", json={**body, "kv_transfer_params": ASKS}).text)
    assert [c["choices"][0]["finish_reason"] for c in chunks if "kv_transfer_params" in c] == [
        "length"
    ]
    params = chunks[-1]["kv_transfer_params"]
    body |= {"max_tokens": 5, "kv_transfer_params": params}
    got = events(decode.post("/v1/completions", json=body).text)
    tokens = [token for event in got for token in event["choices"][0]["token_ids"]]
    plain = post(decode, {**BODY, "prompt": PROMPT[1:]})
    assert tokens == plain["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "more",
    [{"n": 2}, {"prompt": [PROMPT[2:], PROMPT[3:]]},
     {"n": 2, "use_beam_search": True}, {"use_beam_search": True}],
)  # fmt: skip
def test_several_answers_have_no_ticket(nodes: list[httpx.Client], more: dict[str, Any]) -> None:
    prefill, decode = nodes
    body = {**BODY, **more}
    first = post(prefill, {**body, "max_tokens": 1, "kv_transfer_params": ASKS})
    assert "kv_transfer_params" not in first
    brought = {"do_remote_prefill": True, "stratakv": TICKET}
    answer = post(decode, {**body, "kv_transfer_params": brought})
    assert answer["choices"] == post(prefill, body)["choices"]


def test_a_ticket_of_another_prompt_changes_nothing(nodes: list[httpx.Client]) -> None:
    brought = {"do_remote_prefill": True, "stratakv": TICKET}
    answer = post(nodes[1], {**BODY, "kv_transfer_params": brought})
    assert answer["choices"] == post(nodes[0], BODY)["choices"]


@pytest.mark.parametrize("params", [None, {}, ASKS, {"do_remote_prefill": True}, {"x": [1]}])
def test_without_a_shared_tier_the_field_is_taken_and_does_nothing(
    http: httpx.Client, params: Any
) -> None:
    answer = post(http, {**BODY, "kv_transfer_params": params})
    assert "kv_transfer_params" not in answer
    assert answer["choices"] == post(http, BODY)["choices"]


BAD: list[Any] = [
    1, "x", [],
    {"do_remote_decode": True, "do_remote_prefill": True},
    {"do_remote_decode": 1}, {"do_remote_prefill": "true"},
    *(
        {"do_remote_prefill": True, "stratakv": ticket}
        for ticket in (
            1, [], {}, {**TICKET, "more": 1}, {**TICKET, "num_tokens": "75"},
            {**TICKET, "num_tokens": 2**70}, {**TICKET, "first_token": 2**70},
            {**TICKET, "first_token": 1.5}, {**TICKET, "prompt": "a" * 65},
            {**TICKET, "params": "a" * 10_000}, {**TICKET, "logprobs": [[], [], 1]},
            {**TICKET, "logprobs": [[1] * 30, [0.0] * 30, 1]},
            {**TICKET, "logprobs": [[1, 2], [0.0], 1]}, {**TICKET, "logprobs": {}},
            {**TICKET, "prompt": None},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("params", BAD, ids=lambda params: json.dumps(params)[:60])
def test_what_is_no_hand_over_is_refused_and_named(http: httpx.Client, params: Any) -> None:
    answer = http.post("/v1/completions", json={**BODY, "kv_transfer_params": params})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("kv_transfer_params")


CONCURRENT: list[tuple[Any, bool]] = [
    ({"do_remote_prefill": True, "transfer_id": "x"}, True),
    ({"remote_prefiller": {"kv_request_id": "r", "remote_host": "h", "remote_port": 1}}, True),
    ({"do_remote_prefill": True, "transfer_id": "x", "stratakv": TICKET}, False),
    ({"do_remote_decode": True, "transfer_id": "x"}, False),
    ({"do_remote_prefill": True}, False),
    ({"do_remote_prefill": True, "remote_request_id": "x", "transfer_mode": "pull"}, False),
    ({"transfer_id": "x"}, False),
    ({"remote_prefiller": None}, False),
    ({"remote_prefiller": {}}, False),
]


@pytest.mark.parametrize(("params", "is_concurrent"), CONCURRENT, ids=str)
def test_which_parameters_say_that_the_prompt_is_being_computed(
    params: Any, is_concurrent: bool
) -> None:
    extras = read_params(params, is_alone=True) or NO_EXTRAS
    assert extras.computed_elsewhere is is_concurrent
    assert not extras.asked_elsewhere


NEUTRAL = {
    "no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True,
    "include_reasoning": True, "return_hidden_states": False, "min_tokens": None,
    "min_completion_tokens": None, "bootstrap_host": None, "bootstrap_port": None,
    "bootstrap_room": None, "data_parallel_rank": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)]
)
def test_what_routers_add_to_every_request_is_taken(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert said(post(http, {**body, **NEUTRAL}, path)) == said(post(http, body, path))


@pytest.mark.parametrize(
    "asked",
    [
        {"return_hidden_states": True},
        {"no_stop_trim": True},
        {"data_parallel_rank": 1},
        {"bootstrap_room": "5"},
        {"bootstrap_port": 2.5},
        {"bootstrap_host": [7]},
    ],
)
def test_what_they_ask_for_that_is_not_built_is_refused(
    http: httpx.Client, asked: dict[str, Any]
) -> None:
    answer = http.post("/v1/completions", json={**BODY, **asked})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split("[")[0] in asked


def test_tenants_that_a_header_names_share_nothing(model_path: Path) -> None:
    live = LiveServer(model_path, ApiSettings(tenant_header="x-tenant"))
    try:
        with httpx.Client(base_url=live.url, timeout=30, verify=False) as client:

            def cached(**headers: str) -> int:
                answer = client.post("/v1/completions", json=BODY, headers=headers)
                assert answer.status_code == 200, answer.text
                return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

            assert cached(**{"x-tenant": "ann"}) == 0
            assert cached(**{"x-tenant": "eve"}) == 0
            assert cached() == 0
            assert cached(**{"X-Tenant": "ann"}) == cached() == 64
            for headers in ([("x-tenant", "a"), ("x-tenant", "b")], [("x-tenant", "a" * 257)]):
                refused = client.post("/v1/completions", json=BODY, headers=headers)
                assert refused.status_code == 400
                assert "one tenant" in refused.json()["error"]["message"]
    finally:
        live.stop()


def test_without_the_setting_a_header_says_nothing(http: httpx.Client) -> None:
    for tenant in ("ann", "eve"):
        post(http, BODY)
        answer = http.post("/v1/completions", json=BODY, headers={"x-tenant": tenant}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


# -1 stands for the ticket's own first token.
FORGED: list[dict[str, Any]] = [
    {"logprobs": [[-1, -1, 2**31 - 1], [-0.5, -0.5, -1.0], 1]},
    {"logprobs": [[3, 3, 7], [-0.5, -0.5, -1.0], 1]},
    {"logprobs": [[-1] * 21, [1e308] * 21, 2**31 - 1]},
    {"first_token": 2**31 - 1},
]


@pytest.mark.parametrize("asked", [{}, {"logprobs": 2}, {"logprobs": 0, "stream": True}])
@pytest.mark.parametrize("forged", FORGED, ids=lambda forged: json.dumps(forged)[:40])
def test_a_ticket_that_was_tampered_with_is_not_used_or_spoils_its_own_answer_alone(
    nodes: list[httpx.Client], forged: dict[str, Any], asked: dict[str, Any]
) -> None:
    """Whoever carries a ticket may change its parts; the prompt and the parameters still fit."""
    prefill, decode = nodes
    body = {**BODY, "prompt": PROMPT[4:], **asked}
    first = {**body, "max_tokens": 1, "logprobs": 2, "stream": False, "kv_transfer_params": ASKS}
    params = post(prefill, first)["kv_transfer_params"]
    ticket = params["stratakv"]
    ticket |= forged
    if "logprobs" in forged:
        ids, *rest = forged["logprobs"]
        ticket["logprobs"] = [[ticket["first_token"] if i == -1 else i for i in ids], *rest]
    expected = post(prefill, {**body, "stream": False})["choices"][0]
    answer = decode.post("/v1/completions", json={**body, "kv_transfer_params": params})
    assert answer.status_code == 200, answer.text
    if asked.get("stream"):
        choices = [event["choices"][0] for event in events(answer.text)]
    else:
        choices = answer.json()["choices"]
    assert [i for each in choices for i in each["token_ids"]] == expected["token_ids"]
    if "logprobs" in asked:
        told = [token for each in choices for token in each["logprobs"]["tokens"]]
        tops = [top for each in choices for top in each["logprobs"]["top_logprobs"]]
        assert told == expected["logprobs"]["tokens"]
        assert all(len(top) <= asked["logprobs"] + 1 for top in tops)
    else:
        assert [each["logprobs"] for each in choices] == [None] * len(choices)


@pytest.mark.parametrize(
    ("changed", "is_good"),
    [
        ({}, True),
        ({"logprobs": None}, True),
        ({"first_token": 4}, False),  # the log-probabilities are of 3
        ({"first_token": 100, "logprobs": None}, False),
        ({"first_token": -1, "logprobs": None}, False),
        ({"logprobs": [[3, 100], [-0.5, -0.5], 1]}, False),
        ({"logprobs": [[3, -1], [-0.5, -0.5], 1]}, False),
        ({"logprobs": [[], [], 1]}, False),
    ],
)
def test_tokens_of_a_ticket_are_of_the_vocabulary(changed: dict[str, Any], is_good: bool) -> None:
    ticket = msgspec.convert({**TICKET, **changed}, Ticket)
    assert is_possible(ticket, 100) is is_good
