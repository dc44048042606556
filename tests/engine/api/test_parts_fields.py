# SPDX-License-Identifier: Apache-2.0
"""A field of a completion acts for prompts in parts as for whole ones, or is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from stratakv.engine.api.api_settings import ApiSettings
from stratakv.engine.api.openai.completion_parts import FirstPart
from stratakv.engine.api.openai.request.protocol import CompletionRequest
from stratakv.engine.text.tokenizer import TOKENIZER

from .conftest import MAX_MODEL_LEN, LiveServer
from .test_completion_parts import gauge, send
from .test_completions import GREEDY

PARTS = ["the quick brown fox ", "jumps over the lazy dog, " * 6, "again ", "and again"]
WHOLE = "".join(PARTS)
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}
BY_PROMPT = "goes with whole prompts"

# Values of each field, alone or with the fields that go with it. One of them at least changes the
# answer to a whole prompt, so that a field that is left aside in parts would be seen.
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["bcd"]}}}
VALUES: dict[str, Sequence[Any]] = {
    "model": ["other", "tiny", "", None],
    "n": [2, 1, 0, 10**6, None],
    "max_tokens": [2, 0, -1, MAX_MODEL_LEN + 1, None],
    "min_tokens": [{"min_tokens": 3, "ignore_eos": False, "logit_bias": {"1": 100}}, 50, -1],
    "temperature": [{"temperature": 1.5, "seed": 3}, -1, {"temperature": 9, "seed": 3}],
    "top_p": [{"top_p": 0.2, "temperature": 1.0, "seed": 3}, 0.0, 2.0],
    "top_k": [{"top_k": 1, "temperature": 1.0, "seed": 3}, -3],
    "min_p": [{"min_p": 0.9, "temperature": 1.0, "seed": 3}, 2.0],
    "seed": [{"seed": 7, "temperature": 1.0}, 2**70],
    "repetition_penalty": [1.9, 0.0],
    "presence_penalty": [1.5, 9.0],
    "frequency_penalty": [1.5, 9.0],
    "logit_bias": [{"logit_bias": {"70": 100}}, {"logit_bias": {"9999": 1}}],
    "bad_words": [["s", "i", "st"], "a", [""]],
    "repetition_detection": [
        {
            "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
            "logit_bias": {"70": 100},
        }
    ],
    "thinking_token_budget": [1, -1],
    "vllm_xargs": [{"vllm_xargs": {"a": 1}}],
    "extra_args": [{"extra_args": {"a": 1}}],
    "stop": [["a", "e", "i", "s"], "x", [""]],
    "stop_token_ids": [list(range(2, 300)), [9999]],
    "include_stop_str_in_output": [{"include_stop_str_in_output": True, "stop": ["m", "p"]}],
    "ignore_eos": [{"ignore_eos": False, "logit_bias": {"1": 100}}],
    "skip_special_tokens": [{"skip_special_tokens": False, "logit_bias": {"0": 100}}],
    "add_special_tokens": [False, True],
    "truncate_prompt_tokens": [3, 0, -2, 10**6],
    "use_beam_search": [{"use_beam_search": True, "n": 2}, False],
    "length_penalty": [2.0, 1.0],
    "early_stopping": [True, "never", False],
    "stream": [True, False],
    "stream_options": [
        {"stream_options": {"include_usage": True}, "stream": True},
        {"stream_options": {"include_usage": True}},
    ],
    "prompt_logprobs": [1, 0, 99],
    "routed_experts_prompt_start": [0, -1],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [{"return_tokens_as_token_ids": True, "logprobs": 1}],
    "cache_salt": ["x" * 300, "salt"],
    "skip_reading_prefix_cache": [True],
    "priority": [3, 0],
    "job_id": ["x" * 300, "job"],
    "is_last_step": [True, {"is_last_step": True, "job_id": "job"}],
    "request_id": ["x" * 200, "mine"],
    "kv_transfer_params": [
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"kv_transfer_params": {"do_remote_prefill": 3}},
    ],
    "bootstrap_host": ["10.0.0.1"],
    "bootstrap_port": [8998],
    "bootstrap_room": [{"bootstrap_room": 5, "bootstrap_host": "10.0.0.1"}],
    "response_format": [SCHEMA, {"type": "other"}],
    "structured_outputs": [{"structured_outputs": {"regex": "[a-f]{5,9}"}}],
    "guided_json": [{"guided_json": {"enum": ["bcd"]}}],
    "guided_regex": ["[a-f]{5,9}", "["],
    "guided_choice": [["bcd", "efg"], []],
    "guided_grammar": ['root ::= "bcd"', "root ::="],
    "guided_json_object": [True],
    "guided_whitespace_pattern": [{"guided_whitespace_pattern": " ", "guided_json_object": True}],
    "logprobs": [2, 99],
    "echo": [True, False],
    "best_of": [2, 1, 0, 10**6, {"best_of": 2, "n": 2}],
    "prompt_embeds": ["", "abc", [], ["abc"]],
    "prompt": [],  # the tests of this file are of the others
}
# Those that change nothing, or whose every value is refused alike; a text does for all of them.
ALIKE = (
    "user", "safety_identifier", "metadata", "store", "service_tier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "include_reasoning", "separate_reasoning",
    "stream_reasoning", "spaces_between_special_tokens", "detokenize", "allowed_token_ids",
    "no_stop_trim", "return_hidden_states", "min_completion_tokens", "data_parallel_rank", "suffix",
)  # fmt: skip
VALUES |= {name: ["a", True, {name: {}}, 1] for name in ALIKE}
# Those whose effect no answer of this server shows.
IDLE = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params", "vllm_xargs",
        "skip_reading_prefix_cache", "return_token_ids")  # fmt: skip


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose tokenizer puts a token before each text."""
    path = tmp_path_factory.mktemp("begins") / "model"
    shutil.copytree(model_path, path)
    words = json.loads((path / TOKENIZER).read_text())
    first, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"id": "A", "type_id": 0}
    words["post_processor"] = {
        "type": "TemplateProcessing", "single": [first, {"Sequence": text}],
        "pair": [{"Sequence": text}, {"Sequence": text | {"id": "B"}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }  # fmt: skip
    (path / TOKENIZER).write_text(json.dumps(words))
    live = LiveServer(path, ApiSettings(enable_dev_routes=True))
    yield live
    live.stop()


def test_every_field_has_values_here() -> None:
    fields = {each.encode_name for each in msgspec.structs.fields(CompletionRequest)}
    assert set(VALUES) == fields
    first = {each.encode_name for each in msgspec.structs.fields(FirstPart)}
    assert first == fields | {"is_last"}


@pytest.mark.parametrize("name", [name for name in VALUES if name != "prompt"])
def test_a_field_acts_as_for_a_whole_prompt_or_is_refused(http: httpx.Client, name: str) -> None:
    shows = False
    plain = told(http.post("/v1/completions", json=body_of({})))
    for value in VALUES[name]:
        is_several = isinstance(value, dict) and name in value
        fields = value if is_several else {name: value}
        body = body_of(fields)
        first, *others = PARTS
        found = told(send(http, [{**body, "prompt": first}, *({"prompt": p} for p in others)]))
        whole = told(http.post("/v1/completions", json=body))
        shows |= whole != plain
        if isinstance(found, dict) and BY_PROMPT in found["message"]:
            assert found["param"] in fields and found["code"] == "invalid_value"
            assert whole != plain, f"{fields} asks for nothing, and is refused"
        else:
            assert found == whole, fields
    assert shows or name in (*ALIKE, *IDLE), f"no value of {name} does anything, as far as is seen"


@pytest.mark.parametrize("params", [
    {"do_remote_decode": True, "do_remote_prefill": False},
    {"do_remote_prefill": True, "stratakv": {
        "prompt": "a", "params": "b", "num_tokens": 3, "first_token": 5}},
])  # fmt: skip
@pytest.mark.parametrize("prompt", ["a", WHOLE], ids=["short", "long"])
def test_what_routers_hand_over_is_of_whole_prompts(
    http: httpx.Client, params: dict[str, Any], prompt: str
) -> None:
    """However long the first part is."""
    body = body_of({"kv_transfer_params": params})
    assert told(http.post("/v1/completions", json=body))[0] == 200
    found = told(send(http, [{**body, "prompt": prompt}, {"prompt": " and so on"}]))
    assert (found["status"], found["param"]) == (400, "kv_transfer_params")
    assert BY_PROMPT in found["message"]


def test_what_nothing_reads_in_stream_options_is_counted(http: httpx.Client) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "other": 1}}
    counts = []
    for ask in (lambda: http.post("/v1/completions", json=body_of(options)),
                lambda: send(http, [body_of(options)])):  # fmt: skip
        before = gauge(http, "stratakv:request_fields_dropped_total")
        assert ask().status_code == 200
        counts.append(gauge(http, "stratakv:request_fields_dropped_total") - before)
    assert counts == [1.0, 1.0]


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {**GREEDY, "max_tokens": 6, "return_token_ids": True, "prompt": WHOLE, **fields}


def told(response: httpx.Response) -> Any:
    """The answer to a client, without its id and its times."""
    if response.status_code != 200:
        error = response.json()["error"]
        # Of a prompt that has come in part, another number of tokens is left.
        message = re.sub(r"of which \d+ are left", "of which some are left", error["message"])
        return {**error, "status": response.status_code, "message": message}
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.status_code, essence(response.json())]
    events = [each.removeprefix("data: ") for each in response.text.split("\n\n")]
    return joined([json.loads(each) for each in events if each.startswith("{")])


def joined(chunks: list[Any]) -> list[Any]:
    """A stream, whose text is cut into chunks as they are made."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    usages = [essence(chunk) for chunk in chunks if chunk.get("usage")]
    ends = [choice["finish_reason"] for choice in choices]
    return ["".join(choice["text"] for choice in choices), ends[-1], usages]


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    usage = answer["usage"]
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    named = answer["id"] if "mine" in answer["id"] else ""
    handed = "kv_transfer_params" in answer
    return {"choices": rounded(answer["choices"]), "counts": counts, "id": named, "handed": handed}


def rounded(value: Any) -> Any:
    """Log-probabilities depend a little on how many tokens were computed at once."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value
