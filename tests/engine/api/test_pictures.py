# SPDX-License-Identifier: Apache-2.0
"""Chats with pictures over HTTP, with the client library that people use: the answers of
transformers in float64, and errors that name the part."""

from __future__ import annotations

import asyncio
import re
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from stratakv.engine.api.api_errors import ApiError
from stratakv.engine.api.api_settings import ApiSettings
from stratakv.engine.api.openai.request.protocol import ChatMessage
from stratakv.engine.api.picture_reader import PictureReader

from ..picture_model import KINDS, Part, PictureModel, draw_picture, make_picture_model, url_of
from .conftest import MODEL_NAME, LiveServer

NUM_TOKENS = 6
WIDE, TALL = draw_picture(40, 90, 1), draw_picture(64, 30, 2)
TEXT = {"type": "text", "text": "hello"}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PictureModel:
    return PictureModel(make_picture_model(tmp_path_factory.mktemp("pictures"), request.param))


@pytest.fixture(scope="module")
def server(model: PictureModel) -> Iterator[LiveServer]:
    live = LiveServer(model.path, ApiSettings(), dtype="float64")
    yield live
    live.stop()


def content_of(parts: Sequence[Part], kind: str = "image_url") -> list[dict[str, Any]]:
    shown = {"image_url": lambda url: {"url": url, "detail": "high"}, "input_image": str}[kind]
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": kind, "image_url": shown(url_of(part))}
        for part in parts
    ]


def ask(http: httpx.Client, content: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    body = {
        "model": MODEL_NAME, "messages": [{"role": "user", "content": content}],
        "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    return http.post("/v1/chat/completions", json=body | fields)


@pytest.mark.parametrize("kind", ["image_url", "input_image"])
def test_answers_are_those_of_transformers(
    model: PictureModel, http: httpx.Client, kind: str
) -> None:
    chats: list[list[Part]] = [[WIDE, "what is it?"], ["is ", WIDE, " like ", TALL, "?"], ["no"]]
    for parts in chats:
        answer = ask(http, content_of(parts, kind))
        assert answer.status_code == 200, answer.text
        tokens, prompt_tokens = model.answer(parts, NUM_TOKENS)
        assert answer.json()["choices"][0]["token_ids"] == tokens
        assert answer.json()["usage"]["prompt_tokens"] == prompt_tokens


def test_the_client_library_sends_and_streams(model: PictureModel, client: openai.OpenAI) -> None:
    parts: list[Part] = ["say: ", TALL]
    messages: Any = [{"role": "user", "content": content_of(parts)}]
    wishes: Any = {
        "model": MODEL_NAME, "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**wishes).choices[0].message.content
    chunks = client.chat.completions.create(**wishes, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole == model.tokenizer.decode(model.answer(parts, NUM_TOKENS)[0])


def test_the_same_picture_is_found_in_the_cache(http: httpx.Client) -> None:
    parts: list[Part] = ["once more: ", WIDE, TALL]
    ask(http, content_of(parts))
    usage = ask(http, content_of(parts)).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] - 16 <= cached + 1 <= usage["prompt_tokens"]
    other = ask(http, content_of(["once more: ", draw_picture(40, 90, 9), TALL])).json()["usage"]
    assert other["prompt_tokens"] == usage["prompt_tokens"]
    assert (other["prompt_tokens_details"] or {}).get("cached_tokens", 0) <= 16


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no picture": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                   "cannot be read"),
    "http": ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
             "this server fetches no pictures"),
    "unlisted host": ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
                      "this server fetches no pictures"),
    "a file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "cannot be read"),
    "no url": ({"type": "image_url"}, "without `image_url`"),
    "an empty url": ({"type": "image_url", "image_url": {}}, "without `image_url.url`"),
    "a forged placeholder": ({"type": "text", "text": "here <image><|image_pad|> is"}, "picture"),
    "video": ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
              "video_url; this model reads text and pictures, no sounds or files"),
    "audio": ({"type": "input_audio", "input_audio": {}}, "input_audio"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_refused_with_its_place(http: httpx.Client, name: str) -> None:
    part, words = BAD[name]
    answer = ask(http, [TEXT, part])
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert ask(http, content_of(["go on"])).status_code == 200


def test_a_forged_placeholder_beside_a_picture_is_refused(
    model: PictureModel, http: httpx.Client
) -> None:
    answer = ask(http, [*content_of([WIDE]), {"type": "text", "text": model.placeholder}])
    assert answer.status_code == 400 and model.placeholder in answer.json()["error"]["message"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("is_text", [True, False])
def test_placeholders_without_a_picture_are_the_clients_error(
    model: PictureModel, http: httpx.Client, route: str, is_text: bool
) -> None:
    token_id = model.tokenizer.token_to_id(model.placeholder)
    field = "prompt" if route == "/v1/completions" else "input"
    given = f"a {model.placeholder}" if is_text else [5, token_id, 6]
    answer = http.post(route, json={"model": MODEL_NAME, field: given})
    assert answer.status_code == 400, answer.text
    assert "stands for a picture" in answer.json()["error"]["message"]


def test_pictures_beyond_the_context_are_refused_before_others_are_read(
    model: PictureModel,
) -> None:
    reader = PictureReader.load(model.path, ApiSettings())
    assert reader is not None
    size = sum(item.num_tokens for item in model.processor.process_picture(TALL).items)
    unread = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [*content_of([TALL, "and", TALL, TALL]), unread]
    messages = msgspec.convert([{"role": "user", "content": content}], list[ChatMessage])
    with pytest.raises(ApiError) as told:
        asyncio.run(reader.read_pictures(messages, 2 * size))
    assert (told.value.status, told.value.code) == (400, "context_length_exceeded")
    assert told.value.param == "messages[0].content[3]"
    with pytest.raises(ApiError) as told:
        asyncio.run(reader.read_pictures(messages, 3 * size))
    assert told.value.param == "messages[0].content[4]" and told.value.code == "invalid_picture"
    reader.pool.close_pool()


def test_tokens_of_pictures_are_no_characters_of_text(model: PictureModel) -> None:
    parts: list[Part] = ["see ", WIDE, TALL]
    held, made = model.placeholder, [model.processor.process_picture(p) for p in (WIDE, TALL)]
    num_items = sum(len(each.items) for each in made)
    others = sum(len(each.text.replace(held, "")) for each in made)
    most = others + num_items * len(held) + 100
    num_tokens = sum(item.num_tokens for each in made for item in each.items)
    assert (num_tokens - num_items) * len(held) > 100
    settings = ApiSettings(max_text_characters=most)
    live = LiveServer(model.path, settings)
    with httpx.Client(base_url=live.url, timeout=60) as http:
        answer = ask(http, content_of(parts))
        long = ask(http, content_of(["x" * most]))
    live.stop()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == model.answer(parts, 1)[1]
    assert long.status_code == 400 and long.json()["error"]["code"] == "text_too_long"


def test_texts_with_pictures_beyond_the_context_are_refused(
    model: PictureModel, http: httpx.Client
) -> None:
    most = http.get("/v1/models").json()["data"][0]["max_model_len"] - 1
    num_tokens = model.answer([WIDE], 1)[1]
    fits, long = (ask(http, content_of([WIDE, "x" * (most - num_tokens + n)])) for n in (0, 1))
    assert fits.status_code == 200 and fits.json()["usage"]["prompt_tokens"] == most
    assert long.status_code == 400, long.text
    assert f"has {most + 1} tokens and at most {most} fit" in long.json()["error"]["message"]


def test_tokenize_counts_the_tokens_of_pictures(model: PictureModel, http: httpx.Client) -> None:
    parts: list[Part] = ["is ", WIDE, " like ", TALL, "?"]
    chat = {"messages": [{"role": "user", "content": content_of(parts)}]}
    answer = http.post("/tokenize", json=chat)
    assert answer.status_code == 200, answer.text
    ids, _ = model.prompt_of(parts)
    assert answer.json()["tokens"] == ids and answer.json()["count"] == len(ids)


@pytest.mark.parametrize("name", BAD)
def test_tokenize_refuses_what_a_chat_refuses(http: httpx.Client, name: str) -> None:
    part, _ = BAD[name]
    chat = {"messages": [{"role": "user", "content": [TEXT, part]}]}
    answer, asked = http.post("/tokenize", json=chat), ask(http, [TEXT, part])
    assert (answer.status_code, answer.json()) == (400, asked.json())


def test_too_many_pictures_are_refused(http: httpx.Client) -> None:
    most = ApiSettings().max_pictures_per_request
    answer = ask(http, content_of([draw_picture(8, 8, 1)] * (most + 1)))
    assert answer.status_code == 400
    assert f"has {most + 1} pictures and at most {most}" in answer.json()["error"]["message"]


def test_a_truncated_prompt_with_pictures_is_refused(http: httpx.Client) -> None:
    answer = ask(http, content_of([WIDE]), truncate_prompt_tokens=20)
    assert answer.status_code == 400 and "truncate_prompt_tokens" in answer.json()["error"]["param"]


def test_several_answers_share_the_pictures(model: PictureModel, http: httpx.Client) -> None:
    parts: list[Part] = [TALL, "twice"]
    answer = ask(http, content_of(parts), n=2)
    assert answer.status_code == 200, answer.text
    wanted = model.answer(parts, NUM_TOKENS)[0]
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == [wanted, wanted]


def test_metrics_count_encoded_pictures(model: PictureModel, http: httpx.Client) -> None:
    def counted() -> list[float]:
        text = http.get("/metrics").text
        names = ("stratakv:pictures_encoded_total", "stratakv:pictures_reused_total")
        found = [re.search(rf"^{name}(?:{{.*}})? ([0-9.]+)$", text, re.MULTILINE) for name in names]
        return [float(each[1]) for each in found if each is not None]

    parts: list[Part] = [draw_picture(33, 47, 7), "once"]
    num_items = len(model.prompt_of(parts)[1])
    before = counted()
    for question in ("once", "again"):
        assert ask(http, content_of([parts[0], question])).status_code == 200
    encoded, reused = (after - first for after, first in zip(counted(), before, strict=True))
    # The blocks of the second prompt's picture are in the pool, but for a block's rest.
    assert encoded == num_items and 0 <= reused <= num_items


def test_the_program_of_the_page_runs(
    client: openai.OpenAI,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "pictures.md").read_text()
    program, _ = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    assert "http://localhost:8000" in program
    WIDE.save(tmp_path / "picture.png")
    (tmp_path / "program.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(openai, "OpenAI", lambda **_: client)
    runpy.run_path("program.py")
    assert capsys.readouterr().out not in ("", "None\n")
