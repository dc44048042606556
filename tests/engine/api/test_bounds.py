# SPDX-License-Identifier: Apache-2.0
"""What one client can take of the server: memory and time are bounded, and others go on."""

from __future__ import annotations

import gc
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer as FastTokenizer

from stratakv.engine.api.api_errors import ApiError
from stratakv.engine.api.api_settings import ApiSettings
from stratakv.engine.api.http import http_protocol
from stratakv.engine.api.openai.request.body import decode_body
from stratakv.engine.api.openai.request.protocol import CompletionRequest
from stratakv.engine.request.sampling_params import SamplingParams, child_params

from .conftest import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def live(server: Any, model_path: Path) -> Iterator[Any]:
    """A server with narrow limits, whose kernel keeps little for clients that do not read."""
    settings = ApiSettings(max_text_characters=9000, max_logprobs_per_request=100)
    live = type(server)(model_path, settings)
    live._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    yield live
    live.stop()


@pytest.fixture(scope="module")
def narrow(live: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=30, verify=False) as client:
        yield client


def refused(response: httpx.Response, code: str) -> dict[str, Any]:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code), error
    return dict(error)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {"prompt": "ab " * 3001}, "prompt"),
        (COMPLETIONS, {"prompt": ["ab " * 2000] * 2}, "prompt"),
        (COMPLETIONS, {"prompt": "ab " * 3001, "truncate_prompt_tokens": 5}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "ab " * 3001}]}, "messages"),
    ],
)
def test_more_text_than_is_cut_into_tokens(
    narrow: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = refused(narrow.post(path, json=fields), "text_too_long")
    assert error["param"] == param
    assert "at most 9000 are cut into tokens" in error["message"]
    assert narrow.post("/tokenize", json={"prompt": "ab " * 3000}).status_code == 200


def test_long_texts_and_lists_of_tokens(http: httpx.Client) -> None:
    """Beyond what is done in the event loop, and beyond what is done many at once."""
    for words in (3000, 90_000):
        text = "hello fox " * words
        answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
        assert back["prompt"] == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 4}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 4}),
    ],
)
def test_more_log_probabilities_than_are_given(
    narrow: httpx.Client, path: str, fields: dict[str, Any], stream: bool
) -> None:
    asked = {**fields, "n": 3, "max_tokens": 7, "stream": stream}
    error = refused(narrow.post(path, json=asked), "too_many_logprobs")
    assert error["param"] == "max_tokens"
    assert "3 answers of 7 tokens could hold 105 log-probabilities" in error["message"]
    assert narrow.post(path, json={**asked, "max_tokens": 6}).status_code == 200


def test_without_a_limit_of_its_own_an_answer_ends_where_they_do(narrow: httpx.Client) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 4, "n": 2, "ignore_eos": True}
    for choice in narrow.post(CHAT, json=body).json()["choices"]:
        assert len(choice["logprobs"]["content"]) == 10
        assert choice["finish_reason"] == "length"
    refused(narrow.post(CHAT, json={**body, "min_tokens": 11}), "too_many_logprobs")


def test_children_share_what_they_have_in_common() -> None:
    """Hundreds of answers with a thousand biases each are checked once."""
    params = SamplingParams(seed=2**63 - 1, prompt_logprobs=2, logit_bias=((5, 1.0),))
    child = child_params(params, 2, with_prompt=False)
    assert child.logit_bias is params.logit_bias
    assert (child.seed, child.prompt_logprobs) == (-(2**63) + 1, None)
    assert (params.seed, params.prompt_logprobs) == (2**63 - 1, 2)
    assert child == msgspec.structs.replace(params, seed=child.seed, prompt_logprobs=None)


def test_lists_of_nothing_keep_the_collector_from_work() -> None:
    decoder = msgspec.json.Decoder(CompletionRequest)
    runs: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        runs.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        request = decode_body(b'{"prompt":[' + b"[]," * 300_000 + b"[]]}", decoder)
        assert len(runs) <= 2, "none in the middle"
    finally:
        gc.callbacks.remove(note)
    assert len(request.prompt) == 300_001
    with pytest.raises(ApiError):
        decode_body(b'{"prompt": 5}', decoder)
    assert gc.isenabled()


def _ask_and_do_not_read(live: Any, path: str, body: dict[str, Any]) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(live.address)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def _connections(live: Any) -> int:
    return len(live.server.server_state.connections)


def test_a_stream_that_nobody_reads_is_cut_off(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "STALL_SECONDS", 0.3)
    aborted = live.stats().get("ended_abort", 0)
    body = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 8}
    with _ask_and_do_not_read(live, COMPLETIONS, body):
        assert until(lambda: live.stats()["num_running"] == 8)
        assert until(lambda: live.stats()["num_running"] == 0)
    assert live.stats()["ended_abort"] == aborted + 8


def test_an_answer_that_nobody_reads_is_dropped(
    live: Any, narrow: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "STALL_SECONDS", 0.3)
    narrow.get("/health")
    usual = _connections(live)
    with _ask_and_do_not_read(live, "/detokenize", {"tokens": [40] * 2_000_000}):
        assert until(lambda: _connections(live) == usual + 1)
        assert until(lambda: _connections(live) == usual)


def test_a_slow_reader_gets_everything(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "STALL_SECONDS", 0.3)
    with _ask_and_do_not_read(live, "/detokenize", {"tokens": [40] * 300_000}) as sock:
        sock.settimeout(10)
        received, began = b"", time.monotonic()
        while not received.endswith(b'"}'):
            part = sock.recv(4096)
            assert part, "cut off"
            received += part
            time.sleep(0.01)
    assert len(received) > 300_000
    assert time.monotonic() - began > 0.6, "longer than nobody may stand still"


def test_bad_words_that_the_tokenizer_has_and_the_model_lacks(
    server: Any, model_path: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "more-tokens"
    shutil.copytree(model_path, directory)
    fast = FastTokenizer.from_file(str(directory / "tokenizer.json"))
    fast.add_tokens([f"<x{i}>" for i in range(40)])
    fast.save(str(directory / "tokenizer.json"))
    live = type(server)(directory)
    try:
        for fields in ({"prompt": "a", "bad_words": ["<x39>"]}, {"prompt": "<x39>"}):
            response = httpx.post(live.url + COMPLETIONS, json=fields, verify=False)
            assert "from 0 to 319" in refused(response, "token_id_out_of_range")["message"]
    finally:
        live.stop()
