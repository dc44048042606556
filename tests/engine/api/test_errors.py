# SPDX-License-Identifier: Apache-2.0
"""Bad input over HTTP: each is refused with OpenAI's error object, its cause, and a cure."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from stratakv.engine.api.api_errors import ApiError, to_api_error
from stratakv.engine.client.base import EngineDead

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code, error
    assert "Traceback" not in error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({}, "missing_field", "prompt", "prompt"),
        ({"prompt": 5}, "invalid_type", "prompt", "$.prompt"),
        ({"prompt": "a", "temperature": "hot"}, "invalid_type", "temperature", "$.temperature"),
        ({"prompt": "a", "temperature": -1}, "invalid_value", "temperature", "between 0 and"),
        ({"prompt": "a", "top_p": 0}, "invalid_value", "top_p", "top_p"),
        ({"prompt": "a", "top_k": -2}, "invalid_value", "top_k", "top_k"),
        ({"prompt": "a", "max_tokens": 0}, "invalid_value", "max_tokens", "0 is for `echo: true`"),
        ({"prompt": "a", "max_tokens": -1}, "invalid_value", "max_tokens", "at least 1, got -1"),
        ({"prompt": "a", "max_tokens": 2**62}, "context_length_exceeded", "max_tokens", "left"),
        ({"prompt": "a", "max_tokens": 10**30}, "invalid_value", "max_tokens", "64-bit integer"),
        ({"prompt": "a", "min_tokens": 99}, "invalid_value", "min_tokens", "max_tokens"),
        ({"prompt": [4] * 4090, "min_tokens": 7}, "context_length_exceeded", "min_tokens",
         "has 6 left; ask for less"),
        ({"prompt": "a", "seed": 2**64}, "invalid_value", "seed", "64-bit"),
        ({"prompt": "a", "stop": [""]}, "invalid_value", "stop", "stop"),
        ({"prompt": "a", "stop": ["x"] * 17}, "invalid_value", "stop", "16"),
        ({"prompt": "a", "stop_token_ids": [5] * 257}, "invalid_value", "stop_token_ids",
         "257 ids and at most 256 are taken; send fewer"),
        ({"prompt": "a", "stop_token_ids": [2**70]}, "token_id_out_of_range", "stop_token_ids",
         "319"),
        ({"prompt": "a", "temprature": 1}, "unknown_parameter", "temprature", "temperature"),
        ({"prompt": "a", "zzzz": 1}, "unknown_parameter", "zzzz", "leave it out"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}, "stream": True}, "invalid_type",
         "stream_options.include_usage", "$.stream_options"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "invalid_value",
         "stream_options", "stream: true"),
        ({"prompt": "a", "n": 0}, "invalid_value", "n", "between 1 and 64, got 0"),
        ({"prompt": "a", "n": 65}, "invalid_value", "n", "between 1 and 64, got 65"),
        ({"prompt": ["a"] * 5, "n": 64}, "too_many_choices", "n", "320 answers, and at most 256"),
        ({"prompt": "a", "best_of": 65}, "invalid_value", "best_of", "at most 64"),
        ({"prompt": "a", "best_of": 3, "stream": True}, "invalid_value", "best_of", "`stream`"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "invalid_value", "best_of", "at least `n`"),
        ({"prompt": "a", "logprobs": 21}, "invalid_value", "logprobs", "between 0 and 20, got 21"),
        ({"prompt": "a", "logprobs": True}, "invalid_type", "logprobs", "$.logprobs"),
        ({"prompt": "a", "prompt_logprobs": -1}, "invalid_value", "prompt_logprobs", "0 and 20"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs",
         "whole answers only"),
        ({"prompt": [[4] * 4000] * 12, "prompt_logprobs": 20}, "too_many_logprobs",
         "prompt_logprobs", "1008000 log-probabilities of prompt tokens and at most 1000000"),
        ({"prompt": [[4] * 4000] * 6, "echo": True, "logprobs": 20, "n": 2, "stream": True},
         "too_many_logprobs", "prompt_logprobs", "1008000"),
        ({"prompt": "a", "max_tokens": 0, "echo": True, "min_tokens": 1}, "invalid_value",
         "min_tokens", "leave it out"),
        ({"prompt": "a", "min_p": 1.5}, "invalid_value", "min_p", "between 0 and 1"),
        ({"prompt": "a", "repetition_penalty": 0}, "invalid_value", "repetition_penalty",
         "above 0"),
        ({"prompt": "a", "presence_penalty": 3}, "invalid_value", "presence_penalty", "-2 and 2"),
        ({"prompt": "a", "frequency_penalty": -3}, "invalid_value", "frequency_penalty", "-2 and"),
        ({"prompt": "a", "logit_bias": {"320": 1}}, "token_id_out_of_range", "logit_bias", "319"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "token_id_out_of_range", "logit_bias", "'-1'"),
        ({"prompt": "a", "logit_bias": {"the": 1}}, "token_id_out_of_range", "logit_bias", "'the'"),
        ({"prompt": "a", "logit_bias": {"9" * 9999: 1}}, "token_id_out_of_range", "logit_bias",
         "the key '999"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "invalid_value", "logit_bias", "101"),
        ({"prompt": "a", "logit_bias": {"5": "1"}}, "invalid_type", "logit_bias[...]", "$.logit_b"),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "invalid_value",
         "logit_bias", "1025 ids and at most 1024"),
        ({"prompt": "a", "bad_words": ["x"] * 129}, "invalid_value", "bad_words", "128"),
        ({"prompt": "a", "bad_words": [" "]}, "invalid_value", "bad_words", "can spell"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens",
         "-1 or between 1 and 4095"),
        ({"prompt": "a", "truncate_prompt_tokens": 4096}, "invalid_value", "truncate_prompt_tokens",
         "got 4096"),
        ({"prompt": "a", "priority": -3}, "invalid_value", "priority", "--scheduling-policy"),
        ({"prompt": "a", "request_id": "r" * 129}, "invalid_value", "request_id", "128"),
        ({"prompt": "a", "spaces_between_special_tokens": False}, "unsupported_parameter",
         "spaces_between_special_tokens", "send true"),
        ({"prompt": "a", "detokenize": 1}, "unsupported_parameter", "detokenize", "send true"),
        ({"prompt": "a", "use_beam_search": 1}, "invalid_type", "use_beam_search", "bool"),
        ({"prompt": "a", "length_penalty": 2}, "invalid_value", "length_penalty", "beam"),
        ({"prompt": "a", "early_stopping": "never"}, "invalid_value", "early_stopping", "beam"),
        ({"prompt": "a", "use_beam_search": True, "early_stopping": "soon"}, "invalid_type",
         "early_stopping", "never"),
        ({"prompt": "a", "use_beam_search": True, "logprobs": 2}, "invalid_value", "logprobs",
         "beam search"),
        ({"prompt": "a", "use_beam_search": True, "best_of": 3}, "invalid_value", "best_of",
         "its `n` best"),
        ({"prompt": "a", "use_beam_search": True, "frequency_penalty": 1.0}, "invalid_value",
         "frequency_penalty", "beam search"),
        ({"prompt": "a", "early_stopping": True}, "invalid_value", "early_stopping", "beam"),
        ({"prompt": "a", "length_penalty": 0}, "invalid_value", "length_penalty", "beam"),
        ({"prompt": "a", "use_beam_search": True, "length_penalty": 1e3}, "invalid_value", None,
         "length_penalty must be a number from -16 to 16"),
        ({"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix", "suffix"),
        ({"prompt": "a", "cache_salt": "s" * 300}, "invalid_value", "cache_salt", "256"),
        ({"prompt": ""}, "empty_prompt", "prompt", "at least one"),
        ({"prompt": []}, "no_prompt", "prompt", "empty list"),
        ({"prompt": ["a", []]}, "invalid_type", "prompt", "mixes"),
        ({"prompt": [1, "a"]}, "invalid_type", "prompt", "mixes"),
        ({"prompt": [1, 2.5]}, "invalid_type", "prompt[1]", "$.prompt[1]"),
        ({"prompt": [1, True]}, "invalid_type", "prompt[1]", "$.prompt[1]"),
        ({"prompt": [5, 320]}, "token_id_out_of_range", "prompt", "`prompt[1]` is 320"),
        ({"prompt": [5, -1]}, "token_id_out_of_range", "prompt", "from 0 to 319"),
        ({"prompt": [5, 2**80]}, "token_id_out_of_range", "prompt", "319"),
        ({"prompt": [[5], [7, 999]]}, "token_id_out_of_range", "prompt[1]", "`prompt[1][1]`"),
        ({"prompt": [[5], []]}, "empty_prompt", "prompt[1]", "prompt[1]"),
        ({"prompt": [4] * 4096}, "context_length_exceeded", "prompt", "4096 tokens and at most"),
        ({"prompt": "ab " * 9000}, "context_length_exceeded", "prompt", "4095"),
        ({"prompt": "a" * 2_000_000}, "context_length_exceeded", "prompt", "2000000 characters"),
        ({"prompt": [4] * 4000, "max_tokens": 4097}, "context_length_exceeded", "max_tokens",
         "96 are left"),
        ({"prompt": ["a"] * 129}, "too_many_prompts", "prompt", "128"),
    ],
)  # fmt: skip
def test_bad_completions(
    http: httpx.Client, fields: dict[str, Any], code: str, param: str, words: str
) -> None:
    error = refused(http.post(COMPLETIONS, json=fields), 400, code)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"messages": []}, "invalid_value", "not 0"),
        ({"messages": HELLO * 5000}, "invalid_value", "4096"),
        ({"messages": HELLO, "prompt": "a"}, "unknown_parameter", "unknown field `prompt`"),
        ({"messages": "hello"}, "invalid_type", "$.messages"),
        ({"messages": [{"role": "user"}]}, "missing_field", "content"),
        ({"messages": [{"role": "system", "content": None}]}, "missing_field", "no `content`"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "invalid_type", "$.messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]},
         "unsupported_content_part", "`messages[0].content[0]` is a part of the type"),
        ({"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, "invalid_value",
         "newer name"),
        ({"messages": HELLO, "functions": [{"name": "f"}]}, "unsupported_parameter",
         "takes `tools`, `tool_choice` and `tool_calls`, not their older form"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
         "missing_field", "`function`"),
        ({"messages": [{"role": "assistant", "content": "", "audio": {"id": "a"}}]},
         "unsupported_parameter", "`messages[0].audio`"),
        ({"messages": HELLO, "top_logprobs": 2}, "invalid_value", "needs `logprobs: true`"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "invalid_value",
         "`top_logprobs` must be between 0 and 20, got 21"),
        ({"messages": HELLO, "logprobs": 1}, "invalid_type", "$.logprobs"),
        ({"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
         "invalid_value", "send one of them"),
        ({"messages": HELLO, "chat_template_kwargs": {"bos_token": "x"}}, "invalid_value",
         "may not hold bos_token"),
        ({"messages": HELLO, "chat_template_kwargs": {"x": "y" * 70_000}}, "invalid_value",
         "65536"),
        ({"messages": HELLO, "chat_template_kwargs": []}, "invalid_type",
         "$.chat_template_kwargs"),
        ({"messages": HELLO, "store": "yes"}, "invalid_type", "$.store"),
        ({"messages": HELLO, "metadata": "a=b"}, "invalid_type", "$.metadata"),
        ({"messages": HELLO, "verbosity": "low"}, "unsupported_parameter", "verbosity"),
        ({"messages": HELLO, "prediction": {"type": "content", "content": "a"}},
         "unsupported_parameter", "prediction"),
        ({"messages": [{"role": "user", "content": "ab " * 9000}]}, "context_length_exceeded",
         "4095"),
    ],
)  # fmt: skip
def test_bad_chats(http: httpx.Client, fields: dict[str, Any], code: str, words: str) -> None:
    assert words in refused(http.post(CHAT, json=fields), 400, code)["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]" * 3, b"\xff", b'{"prompt": "\xff"}', b'{"prompt": "a"', b"[" * 50_000,
     b'{"prompt":' + b"[" * 50_000, b'{"prompt": "\\ud800"}'],
)  # fmt: skip
def test_bodies_that_are_no_json(http: httpx.Client, body: bytes) -> None:
    response = http.post(COMPLETIONS, content=body, headers=JSON)
    error = response.json()["error"]
    assert error["code"] in ("invalid_json", "invalid_type")
    assert error["param"] or "; send " in error["message"]
    assert response.status_code == 400


def test_an_empty_body(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, content=b" ", headers=JSON)
    assert "the body is empty" in refused(response, 400, "invalid_json")["message"]


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "came with no Content-Type"),
        ({"Content-Type": "text/plain"}, "`Content-Type: text/plain`; send JSON with"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, "send JSON with `Content-Type: ap"),
        ({**JSON, "Content-Encoding": "gzip"}, "`Content-Encoding: gzip`; send JSON uncompressed"),
    ],
)
def test_bodies_of_another_kind(http: httpx.Client, headers: dict[str, str], words: str) -> None:
    body = b'{"prompt": [5], "max_tokens": 1}'
    for route in (COMPLETIONS, CHAT):
        response = http.post(route, content=body, headers=headers)
        assert words in refused(response, 415, "unsupported_media_type")["message"]
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        response = http.post(COMPLETIONS, content=body, headers={"Content-Type": kind})
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "user"}, "messages[0].content", "; add a text, or leave the message out"),
        ({"role": "tool", "content": "a"}, "messages[0].tool_call_id",
         "; add the `id` of the call that it answers"),
        ({"role": "robot", "content": "a"}, "messages[0].role",
         "; send assistant or developer or function or system or tool or user"),
        ({"role": "user", "content": [{"type": "image_url", "text": ""}]},
         "messages[0].content[0].type", "so send parts of the type text"),
    ],
)  # fmt: skip
def test_a_message_is_pointed_at(
    http: httpx.Client, message: dict[str, Any], param: str, words: str
) -> None:
    response = http.post(CHAT, json={"messages": [message]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].endswith(words)


def test_one_bad_prompt_refuses_the_request_before_anything_starts(
    http: httpx.Client, server: Any
) -> None:
    before = server.stats()
    body = {"prompt": [[5, 6], [7, 8], [9, 320]], "max_tokens": 2}
    refused(http.post(COMPLETIONS, json=body), 400, "token_id_out_of_range")
    after = server.stats()
    assert after["steps"] == before["steps"]
    assert after.get("prompt_tokens", 0) == before.get("prompt_tokens", 0)


def test_unknown_model(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json={"model": "gpt-9", "prompt": "a"})
    assert "use `tiny`" in refused(response, 404, "model_not_found")["message"]


def test_what_a_client_sent_is_not_echoed_at_length(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json={"model": "m" * 100_000, "prompt": "a"})
    refused(response, 404, "model_not_found")
    assert len(response.content) < 500
    response = http.post(CHAT, json={"messages": [{"role": "r" * 100_000, "content": "a"}]})
    refused(response, 400, "invalid_type")
    assert len(response.content) < 1500


def test_unknown_route_and_wrong_method(http: httpx.Client) -> None:
    for path, words in (
        ("/zzzzzz", "there is no route /zzzzzz; the API lies under /v1"),
        ("/v1/completions/", "did you mean /v1/completions?"),
        ("/v1/completion", "did you mean /v1/completions?"),
    ):
        assert words in refused(http.post(path, json={}), 404, "not_found")["message"]
    response = http.get(COMPLETIONS)
    error = refused(response, 405, "method_not_allowed")
    assert error["message"] == "/v1/completions does not take GET; use POST"
    assert response.headers["allow"] == "POST"


def test_an_error_keeps_the_connection_and_the_server(http: httpx.Client) -> None:
    for _ in range(3):
        refused(http.post(COMPLETIONS, content=b"{", headers=JSON), 400, "invalid_json")
    body = json.dumps({"prompt": [5, 6], "max_tokens": 1}).encode()
    assert http.post(COMPLETIONS, content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_told_as_such(http: httpx.Client, server: Any, stream: bool) -> None:
    config = server.core.scheduler.config
    usual = config.max_waiting_requests
    object.__setattr__(config, "max_waiting_requests", 0)
    try:
        response = http.post(COMPLETIONS, json={"prompt": [[5], [6, 7]], "stream": stream})
    finally:
        object.__setattr__(config, "max_waiting_requests", usual)
    assert "try later" in refused(response, 503, "overloaded")["message"]
    assert int(response.headers["retry-after"]) >= 1
    assert http.post(COMPLETIONS, json={"prompt": [5]}).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ApiError("no", status=418, code="teapot"), 418, "teapot"),
        (EngineDead("gone"), 503, "engine_dead"),
        (TimeoutError(), 504, "timeout"),
        (KeyError("secret"), 500, "internal_error"),
    ],
)
def test_every_exception_has_an_answer(error: Exception, status: int, code: str) -> None:
    answer = to_api_error(error)
    assert (answer.status, answer.code) == (status, code)
    assert "secret" not in answer.message
