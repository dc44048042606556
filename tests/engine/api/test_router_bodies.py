# SPDX-License-Identifier: Apache-2.0
"""What vllm-router 0.1.17 and sglang-router 0.3.2 send to nodes, word for word, over sockets.

tests/engine/router/test_other_routers.py runs the routers themselves, where they are installed.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from stratakv.tiers.tier_settings import RemoteTierSettings

from ...offload_config import offload_config
from ...tiers.cache_server.rig import server_process
from .conftest import MAX_MODEL_LEN, LiveServer

# HTTP/2 with the head of a gRPC health check, by which sglang-router finds out what a node speaks.
GRPC_PROBE = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x18\x04\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00"
    b"\x00\x04\x00\x00\xff\xff\x00\x05\x00\x00@\x00\x00\x06\x00\x00@\x00\x00\x00X\x01\x04\x00\x00"
    b"\x00\x01\x83\x86A\x8a\x08\x9d\\\x0b\x81p\xdct \x0f\x04\xa5a\x13P:\xa6^k+\"\xe8$\xe5\x92\xda"
    b"\x0bb\xfb\xa6\xa0uM\xb8\x93\x96Kh-\x8cc(\xe8L\xf7\xa7):\xff@\x82I\x7f\x86M\x835\x05\xb1\x1f_"
    b"\x8b\x1du\xd0b\r&=LMedz\x89I\xea1\x18\x02\xe1iq\x7f\x00\x00\x05\x00\x00\x00\x00\x00\x01\x00"
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x01"
)  # fmt: skip
OF_COMPLETIONS: dict[str, Any] = {
    "echo": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True,
    "return_hidden_states": False,
}  # fmt: skip
OF_CHATS: dict[str, Any] = {
    "no_stop_trim": False, "ignore_eos": False, "continue_final_message": False,
    "skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True,
    "return_hidden_states": False,
}  # fmt: skip
ASKS_OF_VLLM_ROUTER = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def nodes(model_path: Path) -> Iterator[dict[str, httpx.Client]]:
    """A prefill and a decode node with the same cache server."""
    with server_process("--cpu-bytes", "32MiB") as cache:
        tiers = ("cpu", f"grpc://127.0.0.1:{cache.port}")
        offload = offload_config(
            tiers=tiers, cpu_bytes=8 * 2**20, load="always", require_tiers=True,
            remote=RemoteTierSettings(lookup_seconds=10.0),  # on a machine that is busy
        )  # fmt: skip
        live = {
            "prefill": LiveServer(model_path, offload=offload, role="prefill"),
            "decode": LiveServer(model_path, offload=offload, role="decode"),
        }
        clients = {
            role: httpx.Client(base_url=each.url, timeout=30, verify=False)
            for role, each in live.items()
        }
        yield clients
        for role, each in live.items():
            clients[role].close()
            each.stop()


def post(client: httpx.Client, body: Any, path: str = COMPLETIONS) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(number: int) -> str:
    """A prompt that no other test has."""
    return f"{number} " + "the quick brown fox jumps over the lazy dog " * 6


def vllm_router(
    nodes: dict[str, httpx.Client], body: dict[str, Any], least: dict[str, Any]
) -> tuple[Any, Any]:
    """The answers of both nodes, asked as vllm-router asks them one after the other."""
    headers = {"authorization": "Bearer", "x-request-id": "___prefill_addr_127.0.0.1:1___d_1"}
    first = {
        **body, **OF_COMPLETIONS, "max_tokens": 1, "stream": False, "min_tokens": 1,
        "kv_transfer_params": ASKS_OF_VLLM_ROUTER,
    }  # fmt: skip
    prefilled = nodes["prefill"].post(COMPLETIONS, json=first, headers=headers).json()
    second = {**body, **OF_COMPLETIONS, "stream": False, **least}
    second["kv_transfer_params"] = prefilled["kv_transfer_params"]
    answer = nodes["decode"].post(COMPLETIONS, json=second, headers=headers)
    assert answer.status_code == 200, answer.text
    return prefilled, answer.json()


@pytest.mark.parametrize("sampled", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}])
def test_vllm_routers_own_min_tokens_does_not_spoil_the_ticket(
    nodes: dict[str, httpx.Client], http: httpx.Client, sampled: dict[str, Any]
) -> None:
    number = 1 + len(sampled)
    body = {"model": "tiny", "prompt": text_of(number), "max_tokens": 5, **sampled}
    prefilled, answer = vllm_router(nodes, body, {})
    count = prefilled["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == count, "with the last one"
    assert answer["choices"] == post(http, body)["choices"]


def test_where_the_client_asked_for_min_tokens_the_ticket_is_not_taken(
    nodes: dict[str, httpx.Client], http: httpx.Client
) -> None:
    body = {"model": "tiny", "prompt": text_of(10), "max_tokens": 5, "temperature": 0.0}
    prefilled, answer = vllm_router(nodes, body, {"min_tokens": 2})
    count = prefilled["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == count - 1
    assert answer["choices"] == post(http, {**body, "min_tokens": 2})["choices"]


def room(count: int | None = None) -> dict[str, Any]:
    one = {
        "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998,
        "bootstrap_room": 9192286213092350559,
    }  # fmt: skip
    return one if count is None else {name: [value] * count for name, value in one.items()}


AT_ONCE = [
    (COMPLETIONS, {"prompt": text_of(20), "n": 2, "stream": False}, OF_COMPLETIONS, room()),
    (COMPLETIONS, {"prompt": [text_of(21), "b"], "stream": False}, OF_COMPLETIONS, room(2)),
    (
        CHATS,
        {
            "messages": [{"role": "user", "content": text_of(22)}], "n": 2, "stream": False,
            "min_tokens": 3, "logprobs": True, "top_logprobs": 2, "stop": ["x"],
        },
        OF_CHATS,
        {**room(2), "bootstrap_port": [None, None]},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "added", "where"), AT_ONCE)
def test_sglang_router_asks_both_nodes_the_same_at_once(
    nodes: dict[str, httpx.Client],
    http: httpx.Client,
    path: str,
    body: dict[str, Any],
    added: dict[str, Any],
    where: dict[str, Any],
) -> None:
    most = "max_tokens" if path == COMPLETIONS else "max_completion_tokens"
    body = {"model": "tiny", **body, most: 6, "seed": 4, "temperature": 0.8}
    sent = {**body, **added, **where}
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(post, nodes[role], sent, path) for role in ("prefill", "decode")]
        prefilled, answer = (each.result() for each in asked)
    usage = prefilled["usage"]
    assert usage["completion_tokens"] == len(prefilled["choices"]), "it makes one token of each"
    assert [each["finish_reason"] for each in prefilled["choices"]] == ["length", "length"]
    expected = post(http, body, path)
    assert [said(each) for each in answer["choices"]] == [
        said(each) for each in expected["choices"]
    ]


def said(choice: dict[str, Any]) -> Any:
    tokens = [each["token"] for each in (choice["logprobs"] or {}).get("content", ())]
    return choice.get("text"), choice.get("message"), choice["finish_reason"], tokens


def test_in_a_stream_a_prefill_node_ends_after_one_token(nodes: dict[str, httpx.Client]) -> None:
    body = {"model": "tiny", "prompt": text_of(30), "max_tokens": 6, "stream": True,
            "ignore_eos": True, **room()}  # fmt: skip
    text = nodes["prefill"].post(COMPLETIONS, json=body).text
    *events, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert last == "[DONE]"
    reasons = [json.loads(each)["choices"][0]["finish_reason"] for each in events]
    assert reasons[-1] == "length" and len(reasons) <= 2


def test_a_node_without_a_role_answers_such_a_request_whole(http: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    assert post(http, {**body, **room()})["choices"] == post(http, body)["choices"]


def test_sglang_router_learns_the_models_name(http: httpx.Client, model_path: Path) -> None:
    info = http.get("/server_info").json()
    assert info["served_model_name"] == "tiny"
    assert info["max_model_len"] == MAX_MODEL_LEN


def test_sglang_routers_other_probes_end_with_an_error(server: LiveServer) -> None:
    with socket.create_connection(server.address, timeout=20) as probe:
        probe.sendall(GRPC_PROBE)
        answer = b"".join(iter(lambda: probe.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404") and b"HTTP/1.1 400" in answer
    with httpx.Client(base_url=server.url, verify=False) as client:
        assert client.get("/model_info").status_code == 404
        assert client.get("/health").status_code == 200
