# SPDX-License-Identifier: Apache-2.0
"""/v1/completions over a real socket: every form of prompt, whole and streamed, and its figures."""

from __future__ import annotations

import base64
import json
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file, save

from ...tiers.store_contract import wait_until

JSON = {"Content-Type": "application/json"}

GREEDY = {"model": "tiny", "temperature": 0, "ignore_eos": True}
IDS = [5, 9, 33, 270, 4, 11, 12, 13]


def post(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={**GREEDY, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def stream(http: httpx.Client, path: str = "/v1/completions", **fields: Any) -> list[Any]:
    """The decoded events; the last one must be [DONE]."""
    with http.stream("POST", path, json={**GREEDY, "stream": True, **fields}) as response:
        response.read()
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_token_ids_in_and_out(http: httpx.Client) -> None:
    answer = post(http, prompt=IDS, max_tokens=7, return_token_ids=True)
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert choice["prompt_token_ids"] == IDS
    assert len(choice["token_ids"]) == 7
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 7)
    assert usage["total_tokens"] == 15
    by_tier = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert list(by_tier) == ["pool"], "the server has no tiers below it"


def test_ids_are_left_out_unless_asked_for(http: httpx.Client) -> None:
    (choice,) = post(http, prompt=IDS, max_tokens=2)["choices"]
    assert "token_ids" not in choice
    assert "prompt_token_ids" not in choice


def test_default_is_sixteen_tokens(http: httpx.Client) -> None:
    assert post(http, prompt="hello")["usage"]["completion_tokens"] == 16


def test_a_string_and_its_ids_are_the_same_prompt(http: httpx.Client) -> None:
    by_text = post(http, prompt="hello wörld €", max_tokens=8, return_token_ids=True)
    (choice,) = by_text["choices"]
    by_ids = post(http, prompt=choice["prompt_token_ids"], max_tokens=8, return_token_ids=True)
    assert by_ids["choices"] == by_text["choices"]


@pytest.mark.parametrize(
    "prompts", [["the quick", "brown"], [[1 + 4, 7, 8], IDS, [3]]], ids=["texts", "ids"]
)
def test_several_prompts_answer_as_each_alone(http: httpx.Client, prompts: list[Any]) -> None:
    together = post(http, prompt=prompts, max_tokens=6, return_token_ids=True)
    alone = [post(http, prompt=each, max_tokens=6, return_token_ids=True) for each in prompts]
    assert [choice["index"] for choice in together["choices"]] == list(range(len(prompts)))
    for choice, single in zip(together["choices"], alone, strict=True):
        assert choice["token_ids"] == single["choices"][0]["token_ids"]
        assert choice["text"] == single["choices"][0]["text"]
    total = sum(single["usage"]["prompt_tokens"] for single in alone)
    assert together["usage"]["prompt_tokens"] == total


def test_stream_joins_to_the_whole(http: httpx.Client) -> None:
    """Random bytes: characters lie across token borders all the time."""
    whole = post(http, prompt="grüße €", max_tokens=120, return_token_ids=True)["choices"][0]
    events = stream(http, prompt="grüße €", max_tokens=120, return_token_ids=True)
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert len({event["id"] for event in events}) == 1


def test_stream_of_several_prompts(http: httpx.Client) -> None:
    prompts = [[4, 5, 6], [7, 8]]
    whole = post(http, prompt=prompts, max_tokens=9)["choices"]
    texts = ["", ""]
    for event in stream(http, prompt=prompts, max_tokens=9):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]


def test_usage_at_the_end_of_a_stream(http: httpx.Client) -> None:
    events = stream(http, prompt=IDS, max_tokens=5, stream_options={"include_usage": True})
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 13
    assert all("usage" not in event for event in stream(http, prompt=IDS, max_tokens=2))


def test_a_repeated_prompt_comes_from_the_pool(http: httpx.Client) -> None:
    prompt = [3 + i % 250 for i in range(200)]
    salt = {"cache_salt": "repeated"}
    first = post(http, prompt=prompt, max_tokens=4, return_token_ids=True, **salt)
    again = post(http, prompt=prompt, max_tokens=4, return_token_ids=True, **salt)
    other = post(http, prompt=prompt, max_tokens=4, cache_salt="another")
    skipping = post(http, prompt=prompt, max_tokens=4, skip_reading_prefix_cache=True, **salt)
    assert again["choices"] == first["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    details = again["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == details["cached_tokens_by_tier"]["pool"] == 192
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert skipping["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_prompt_of_numbers(http: httpx.Client, model_path: Path) -> None:
    (path,) = model_path.glob("*.safetensors")
    table = load_file(path)["model.embed_tokens.weight"]
    files = [base64.b64encode(save({"x": table[IDS[:count]]})).decode() for count in (8, 5)]
    answer = post(http, prompt_embeds=files, max_tokens=6, return_token_ids=True)
    wanted = post(http, prompt=[IDS, IDS[:5]], max_tokens=6, return_token_ids=True)
    for one, other in zip(answer["choices"], wanted["choices"], strict=True):
        assert one["token_ids"] == other["token_ids"]
    assert answer["usage"]["prompt_tokens"] == 13
    for fields, words in (
        ({"prompt_embeds": files, "prompt": "text"}, "`prompt` is about tokens"),
        ({"prompt_embeds": files, "echo": True}, "`echo` is about tokens"),
        ({"prompt_embeds": files, "use_beam_search": True}, "`prompt_embeds` cannot be used in a"),
        ({"prompt_embeds": files, "truncate_prompt_tokens": 0}, "`truncate_prompt_tokens` is"),
        ({"prompt_embeds": "no base64!"}, "`prompt_embeds` cannot be used"),
        ({"prompt_embeds": ""}, "these 0 bytes end inside its header"),
        ({"prompt_embeds": []}, "`prompt_embeds` is an empty list"),
        ({"prompt_embeds": files[0][:-8]}, "and the file has"),
        ({"prompt_embeds": files, "prompt_logprobs": 1}, "have no tokens whose log"),
        ({}, "neither `prompt` nor `prompt_embeds`"),
    ):
        refused = http.post("/v1/completions", json={**GREEDY, **fields})
        assert refused.status_code == 400, refused.text
        assert words in refused.json()["error"]["message"]


def test_pausing(http: httpx.Client) -> None:
    """A request that comes during a pause is answered after it."""
    assert http.get("/is_paused").json() == {"paused": None, "running": 0, "waiting": 0}
    assert http.post("/pause").json()["paused"] == "new"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, http, prompt=[5, 6, 7], max_tokens=2)
        wait_until(lambda: http.get("/is_paused").json()["waiting"] == 1)
        assert not waiting.done()
        assert http.post("/pause?mode=all").json() == {"paused": "all", "running": 0, "waiting": 1}
        assert http.post("/resume").json()["paused"] is None
        assert waiting.result(30.0)["choices"][0]["finish_reason"] == "length"
    refused = http.post("/pause?mode=some")
    assert refused.status_code == 400
    assert "`mode` takes new or all, not 'some'" in refused.json()["error"]["message"]


def test_resetting_the_cache(http: httpx.Client) -> None:
    prompt = [9 + i % 200 for i in range(64)]
    for _ in range(2):
        post(http, prompt=prompt, max_tokens=1)
    assert http.post("/reset_prefix_cache?tiers=pool").json() == {"reset": "pool"}
    answer = post(http, prompt=prompt, max_tokens=1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert http.post("/reset_prefix_cache?tiers=all").status_code == 200
    assert http.post("/reset_prefix_cache?tiers=everything").status_code == 400
    unknown = http.post("/reset_prefix_cache?tier=all").json()["error"]
    assert (unknown["code"], unknown["param"]) == ("unknown_parameter", "tier")


def test_stop_string_ends_the_text_before_it(http: httpx.Client) -> None:
    whole = post(http, prompt=IDS, max_tokens=100)["choices"][0]["text"]
    stop = next(c for c in whole[10:] if c.isascii() and c not in whole[:10])
    fields = {"prompt": IDS, "max_tokens": 100, "stop": [stop, "never to be seen"]}
    choice = post(http, **fields)["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    events = stream(http, **fields)
    assert "".join(e["choices"][0]["text"] for e in events) == choice["text"]


def test_stop_token(http: httpx.Client) -> None:
    ids = post(http, prompt=IDS, max_tokens=20, return_token_ids=True)["choices"][0]["token_ids"]
    answer = post(http, prompt=IDS, max_tokens=20, stop_token_ids=[ids[3]], return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["token_ids"] == ids[: ids.index(ids[3]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[3])


def test_a_seed_repeats_the_draws(http: httpx.Client) -> None:
    fields = {"prompt": IDS, "max_tokens": 12, "temperature": 1.0, "return_token_ids": True}
    one, two, other = (
        post(http, **fields, seed=seed)["choices"][0]["token_ids"] for seed in (7, 7, 8)
    )
    assert one == two != other


def test_neutral_values_of_what_is_not_built_are_taken(http: httpx.Client) -> None:
    post(
        http, prompt=IDS, max_tokens=1, n=1, best_of=1, echo=False, logprobs=None, suffix=None,
        presence_penalty=0, frequency_penalty=0.0, logit_bias={}, user="someone", stop=None,
    )  # fmt: skip


def test_many_at_once(http: httpx.Client) -> None:
    """32 requests of different lengths, half of them streamed, answer as they do alone."""
    prompts = [[3 + (i * 7 + j) % 250 for j in range(5 + i)] for i in range(32)]
    alone = post(http, prompt=prompts[:32], max_tokens=8)["choices"]

    def ask(index: int) -> str:
        if index % 2:
            events = stream(http, prompt=prompts[index], max_tokens=8)
            return "".join(event["choices"][0]["text"] for event in events)
        return str(post(http, prompt=prompts[index], max_tokens=8)["choices"][0]["text"])

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(ask, range(32)))
    assert texts == [choice["text"] for choice in alone]


def test_long_prompts_of_ids_cost_little(http: httpx.Client) -> None:
    """The front's own part of a request with 3,500 ids, measured by one that is refused last."""
    body = json.dumps({"prompt": [100] * 3499 + [100_000], "max_tokens": 1}).encode()
    seconds = []
    for _ in range(15):
        began = time.perf_counter()
        response = http.post("/v1/completions", content=body, headers=JSON)
        seconds.append(time.perf_counter() - began)
        assert response.json()["error"]["code"] == "token_id_out_of_range"
    assert statistics.median(seconds) < 0.05  # about 2 ms with the client's part on an idle core


def _open_request(server: Any, body: dict[str, Any]) -> socket.socket:
    payload = json.dumps({**GREEDY, **body}).encode()
    sock = socket.create_connection(server.address, timeout=20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(payload)}\r\n\r\n"
    sock.sendall(head.encode() + payload)
    return sock


def _wait_until(condition: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_aborts_its_request(server: Any, streamed: bool) -> None:
    aborted = server.stats().get("ended_abort", 0)
    body = {"prompt": IDS, "max_tokens": 4000, "stream": streamed}
    with _open_request(server, body) as sock:
        if streamed:
            assert b"200 OK" in sock.recv(4096)
        assert _wait_until(lambda: server.stats()["num_running"] == 1, 10)
    assert _wait_until(lambda: server.stats()["num_running"] == 0, 2.0)
    assert server.stats()["ended_abort"] == aborted + 1


def test_a_client_that_leaves_aborts_all_its_prompts(server: Any) -> None:
    aborted = server.stats().get("ended_abort", 0)
    body = {"prompt": [[i + 3, 5] for i in range(4)], "max_tokens": 4000, "stream": True}
    with _open_request(server, body) as sock:
        assert b"200 OK" in sock.recv(4096)
    assert _wait_until(lambda: server.stats()["num_running"] == 0, 2.0)
    assert server.stats()["ended_abort"] == aborted + 4


def test_the_first_token_goes_out_while_the_request_runs(http: httpx.Client, server: Any) -> None:
    with _open_request(server, {"prompt": IDS, "max_tokens": 4000, "stream": True}) as sock:
        while b"data: " not in sock.recv(4096):  # the headers come before it
            pass
        assert server.stats()["num_running"] == 1
        refused = http.post("/reset_prefix_cache")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "reset_refused")
    assert _wait_until(lambda: server.stats()["num_running"] == 0, 2.0)
