# SPDX-License-Identifier: Apache-2.0
"""Arguments for logits processors over HTTP, by vLLM's name and ours, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ...processor_package import MODULE, SOURCE, packages_in
from .conftest import LiveServer

IDS = [5, 9, 33, 270, 4]


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("site")
    (folder / f"{MODULE}.py").write_text(SOURCE)
    with packages_in(folder):
        live = LiveServer(model_path, logits_processors=(f"{MODULE}:Only", f"{MODULE}:Counts"))
        yield live
        live.stop()


def create(client: openai.OpenAI, **fields: Any) -> Any:
    extra = {"ignore_eos": True, "return_token_ids": True, **fields}
    return client.completions.create(model="tiny", prompt=IDS, max_tokens=5, extra_body=extra)


def token_ids(answer: Any) -> list[int]:
    return list((answer.choices[0].model_extra or {})["token_ids"])


@pytest.mark.parametrize("name", ["vllm_xargs", "extra_args"])
def test_both_names_reach_the_processors(client: openai.OpenAI, name: str) -> None:
    assert token_ids(create(client, **{name: {"only": 77}})) == [77] * 5
    assert token_ids(create(client, **{name: {"from": 30}})) == [30, 31, 32, 33, 34]


def test_chats_and_several_answers_take_them_too(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=4, n=3,
        extra_body={"vllm_xargs": {"only": 77}, "ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    assert [(one.model_extra or {})["token_ids"] for one in chat.choices] == [[77] * 4] * 3


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"vllm_xargs": {"only": "77"}}, "vllm_xargs",
            f"logits processor {MODULE}:Only: only must be a token id, got '77'",
        ),
        ({"extra_args": {"only": None}}, "extra_args", "only must be a token id, got None"),
        ({"extra_args": {}, "vllm_xargs": {}}, "extra_args", "two names of one field; send one"),
        ({"vllm_xargs": {"a": "x" * 20_000}}, "extra_args", "at most 16384 bytes as JSON"),
        ({"vllm_xargs": [5]}, None, "vllm_xargs"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(
    client: openai.OpenAI, fields: Any, param: str | None, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        create(client, **fields)
    assert words in raised.value.message
    if param is not None:
        assert raised.value.param == param


def test_a_processor_that_raises_fails_its_answer_by_name(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    with pytest.raises(openai.InternalServerError) as raised:
        create(client, vllm_xargs={"only": 77, "boom": "apply"})
    assert raised.value.code == "logits_processor_failed"
    assert f"the logits processor {MODULE}:Only failed" in raised.value.message
    body = {"model": "tiny", "prompt": IDS, "max_tokens": 5, "stream": True, "ignore_eos": True,
            "vllm_xargs": {"only": 77, "boom": "apply"}}  # fmt: skip
    stream = http.post("/v1/completions", json=body).text
    assert "logits_processor_failed" in stream
    assert token_ids(create(client, vllm_xargs={"only": 77})) == [77] * 5


def test_without_processors_vllms_name_is_ignored_and_ours_is_refused(model_path: Path) -> None:
    live = LiveServer(model_path)
    body = {"model": "tiny", "prompt": IDS, "max_tokens": 4, "temperature": 0.0}
    with httpx.Client(base_url=live.url, timeout=30, verify=False) as http:
        plain, ignored, answer = (
            http.post("/v1/completions", json={**body, **fields})
            for fields in ({}, {"vllm_xargs": {"only": 77}}, {"extra_args": {"only": 77}})
        )
    live.stop()
    assert ignored.status_code == 200
    assert ignored.json()["choices"] == plain.json()["choices"]
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "extra_args"
    assert "none is loaded here; start the engine with --logits-processors" in answer.text
