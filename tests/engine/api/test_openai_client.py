# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client library against a real socket: what its users do, field by field."""

from __future__ import annotations

import asyncio
import inspect
import math
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from stratakv.engine.api.api_settings import ApiSettings
from stratakv.engine.api.openai.request.protocol import ChatRequest, CompletionRequest

from .conftest import until

HELLO: Any = [{"role": "user", "content": "hello world"}]
IDS = [5, 9, 33, 270, 4, 11, 12, 13]
GREEDY: Any = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
# What the library's methods take and keep to themselves.
OF_THE_LIBRARY = {"self", "extra_body", "extra_headers", "extra_query", "timeout"}


def extra(**fields: Any) -> Any:
    """Fields that the library does not know."""
    return {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True, **fields}}


@pytest.mark.parametrize(
    ("create", "kind"),
    [
        (openai.resources.chat.Completions.create, ChatRequest),
        (openai.resources.Completions.create, CompletionRequest),
    ],
    ids=["chat", "completions"],
)
def test_every_field_of_the_library_is_known(create: Any, kind: type[msgspec.Struct]) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    assert set(inspect.signature(create).parameters) - OF_THE_LIBRARY <= known


def test_several_answers(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        messages=HELLO, n=3, seed=11, max_tokens=9, model="tiny", logprobs=True, top_logprobs=1,
        extra_body={"prompt_logprobs": 0},
    )  # fmt: skip
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in chat.choices]
    assert len(set(texts)) == 3, "each draws for itself"
    alone = [
        client.chat.completions.create(messages=HELLO, seed=seed, max_tokens=9, model="tiny")
        for seed in (11, 12, 13)
    ]
    assert texts == [each.choices[0].message.content for each in alone]
    assert chat.usage is not None
    assert alone[0].usage is not None
    assert chat.usage.prompt_tokens == alone[0].usage.prompt_tokens, "counted once"
    assert chat.usage.completion_tokens == sum(
        len(choice.logprobs.content) for choice in chat.choices if choice.logprobs
        and choice.logprobs.content
    )  # fmt: skip
    of_prompt = (chat.model_extra or {})["prompt_logprobs"]
    assert len(of_prompt) == chat.usage.prompt_tokens
    assert of_prompt[0] is None


def test_several_answers_to_several_prompts(client: openai.OpenAI) -> None:
    fields: Any = {"max_tokens": 6, "model": "tiny", "seed": 5}
    prompts = [[4, 5, 6], [7, 8]]
    together = client.completions.create(prompt=prompts, n=2, **fields)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    for place, prompt in enumerate(prompts):
        alone = client.completions.create(prompt=prompt, n=2, best_of=2, **fields)
        texts = [choice.text for choice in together.choices[2 * place : 2 * place + 2]]
        assert texts == [choice.text for choice in alone.choices]
    assert together.usage is not None
    assert together.usage.prompt_tokens == 5


def test_the_best_of_several_answers(client: openai.OpenAI) -> None:
    """Those with the highest log-probabilities a token, the best first, of what `n` gives."""
    fields: Any = {"max_tokens": 6, "model": "tiny", "seed": 5, "temperature": 1.5}
    prompts = [[4, 5, 6], [7, 8]]
    every = client.completions.create(prompt=prompts, n=6, logprobs=0, **fields)
    best = client.completions.create(prompt=prompts, n=2, best_of=6, **fields)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    for place in range(2):
        likely = sorted(every.choices[6 * place : 6 * place + 6], key=mean, reverse=True)
        assert len({mean(choice) for choice in likely}) > 2
        texts = [choice.text for choice in best.choices[2 * place : 2 * place + 2]]
        assert texts == [choice.text for choice in likely[:2]]
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens
    assert best.usage.prompt_tokens == 5


def test_a_beam_search(client: openai.OpenAI) -> None:
    """Its answers are the choices, the best first; a stream has each of them in one piece."""
    fields: Any = {"max_tokens": 6, "model": "tiny", "n": 3, "temperature": 0}
    beams = {"use_beam_search": True, "length_penalty": 0.5}
    prompts = [[4, 5, 6], [7, 8]]
    whole = client.completions.create(prompt=prompts, logprobs=0, extra_body=beams, **fields)
    greedy = client.completions.create(prompt=prompts, logprobs=0, **{**fields, "n": 1})
    assert [choice.index for choice in whole.choices] == list(range(6))

    def score(choice: Any) -> float:
        logprobs = choice.logprobs.token_logprobs
        return float(sum(logprobs) / len(logprobs) ** 0.5)

    for place in range(2):
        found = whole.choices[3 * place : 3 * place + 3]
        assert len({choice.text for choice in found}) == 3
        scores = [score(choice) for choice in found]
        assert scores == sorted(scores, reverse=True)
        assert scores[0] >= score(greedy.choices[place]) - 1e-6
    texts = [""] * 6
    for chunk in client.completions.create(prompt=prompts, stream=True, extra_body=beams, **fields):
        for choice in chunk.choices:
            assert choice.finish_reason is not None
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    chat = client.chat.completions.create(messages=HELLO, extra_body=beams, **fields)
    assert len({choice.message.content for choice in chat.choices}) == 3
    assert chat.usage is not None and chat.usage.completion_tokens <= 18


def test_several_answers_in_one_stream(client: openai.OpenAI) -> None:
    fields: Any = {"messages": HELLO, "n": 3, "seed": 4, "max_tokens": 12, "model": "tiny"}
    whole = client.chat.completions.create(**fields)
    texts, roles, ends = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for chunk in client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ends == [1, 1, 1]


def test_log_probabilities_of_a_chat(client: openai.OpenAI, http: httpx.Client) -> None:
    fields: Any = {"messages": HELLO, "max_tokens": 40, "logprobs": True, "top_logprobs": 4}
    choice = client.chat.completions.create(**fields, **extra(return_token_ids=True)).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert len(content) == 40
    raw = b"".join(bytes(each.bytes or []) for each in content)
    assert raw.decode(errors="replace") == choice.message.content
    for each in content:
        assert len(each.top_logprobs) == 4
        values = [top.logprob for top in each.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert each.logprob == values[0], "greedy takes the likeliest"
        assert (each.top_logprobs[0].token, each.top_logprobs[0].bytes) == (each.token, each.bytes)
        assert sum(map(math.exp, values)) <= 1.0001
    ids = (choice.model_extra or {})["token_ids"]
    spelt = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert spelt == choice.message.content

    parts: list[Any] = []
    for chunk in client.chat.completions.create(stream=True, **fields, **GREEDY):
        of_chunk = chunk.choices[0].logprobs
        assert of_chunk is not None
        parts += of_chunk.content or []
    assert parts == content


def test_log_probabilities_are_given_only_where_asked_for(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(messages=HELLO, max_tokens=2, **GREEDY)
    assert plain.choices[0].logprobs is None
    bare = client.chat.completions.create(messages=HELLO, max_tokens=2, logprobs=True, **GREEDY)
    assert bare.choices[0].logprobs is not None
    assert [each.top_logprobs for each in bare.choices[0].logprobs.content or []] == [[], []]


def test_log_probabilities_of_a_completion(client: openai.OpenAI) -> None:
    choice = client.completions.create(prompt=IDS, max_tokens=50, logprobs=3, **GREEDY).choices[0]
    form = choice.logprobs
    assert form is not None
    assert form.tokens and form.token_logprobs and form.top_logprobs and form.text_offset
    assert len(form.tokens) == len(form.token_logprobs) == len(form.text_offset) == 50
    for token, offset, logprob, top in zip(
        form.tokens, form.text_offset, form.token_logprobs, form.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())
        assert 1 <= len(top) <= 3
        if "\ufffd" not in token:
            assert choice.text[offset:].startswith(token)
    assert form.text_offset == sorted(form.text_offset)

    offsets: list[int] = []
    for chunk in client.completions.create(
        prompt=IDS, max_tokens=50, logprobs=3, stream=True, **GREEDY
    ):
        of_chunk = chunk.choices[0].logprobs
        assert of_chunk is not None
        offsets += of_chunk.text_offset or []
    assert offsets == form.text_offset, "they go on from chunk to chunk"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_end_with_the_tokens(client: openai.OpenAI, stream: bool) -> None:
    """A stop string is found in the middle of what the engine made."""
    fields: Any = {"prompt": IDS, "max_tokens": 60, "logprobs": 0, **GREEDY}
    whole = client.completions.create(**fields).choices[0]
    stop = next(c for c in whole.text[8:] if c.isascii() and c not in whole.text[:8])
    fields["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(stop=stop, stream=stream, **fields)
    choices = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    tokens = [t for choice in choices if choice.logprobs for t in choice.logprobs.tokens or []]
    ids = [i for choice in choices for i in (choice.model_extra or {}).get("token_ids", [])]
    assert len(tokens) == len(ids) < 60
    assert stop in tokens[-1]
    assert stop not in "".join(choice.text for choice in choices)


def test_tokens_as_ids(client: openai.OpenAI) -> None:
    fields = extra(return_tokens_as_token_ids=True, return_token_ids=True)
    choice = client.completions.create(prompt=IDS, max_tokens=5, logprobs=2, **fields).choices[0]
    assert choice.logprobs is not None
    ids = (choice.model_extra or {})["token_ids"]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in ids]
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs or [])


def test_an_answer_has_the_id_that_was_asked_for(client: openai.OpenAI) -> None:
    two = [
        client.completions.create(prompt=IDS, max_tokens=1, **extra(request_id="mine"))
        for _ in range(2)
    ]
    assert [answer.id for answer in two] == ["cmpl-mine"] * 2


def test_no_tools_are_as_good_as_none(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(messages=HELLO, tools=[], max_tokens=1, **GREEDY)
    assert chat.choices[0].message.tool_calls is None


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    """As the library keeps it, with its empty fields or without."""
    message = client.chat.completions.create(messages=HELLO, max_tokens=4, **GREEDY).choices[0]
    for kept in (message.message, message.message.model_dump(), {"role": "assistant"}):
        turns: Any = [*HELLO, kept, *HELLO]
        client.chat.completions.create(messages=turns, max_tokens=1, **GREEDY)


def test_errors_are_the_classes_of_the_library(client: openai.OpenAI, server: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=HELLO, n=0, **GREEDY)
    assert (caught.value.param, caught.value.type) == ("n", "invalid_request_error")
    config = server.core.scheduler.config
    usual = config.max_waiting_requests
    object.__setattr__(config, "max_waiting_requests", 0)
    try:
        with pytest.raises(openai.InternalServerError, match="try later"):
            client.chat.completions.create(messages=HELLO, stream=True, **GREEDY)
    finally:
        object.__setattr__(config, "max_waiting_requests", usual)


def test_a_wrong_key_is_an_error_of_the_library(server: Any, model_path: Path) -> None:
    live = type(server)(model_path, ApiSettings(api_key="right"))
    with openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="wrong", max_retries=0,
        http_client=openai.DefaultHttpxClient(verify=False),
    ) as stranger:  # fmt: skip
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        assert stranger.with_options(api_key="right").models.list().data[0].id == "tiny"
    live.stop()


def test_many_at_once(server: Any) -> None:
    """32 chats at the same time answer as they do alone, and nothing of them is left."""

    async def ask_all() -> tuple[list[str], list[str]]:
        web = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=web
        ) as client:

            async def ask(index: int) -> str:
                words: Any = [{"role": "user", "content": f"number {index} " * (1 + index % 5)}]
                parts = await client.chat.completions.create(
                    messages=words, max_tokens=10, stream=True, seed=index, model="tiny"
                )
                return "".join([part.choices[0].delta.content or "" async for part in parts])

            together = await asyncio.gather(*map(ask, range(32)))
            return list(together), [await ask(index) for index in range(32)]

    together, alone = asyncio.run(ask_all())
    assert together == alone
    assert server.stats()["num_running"] == 0


def test_leaving_a_stream_ends_all_its_answers(client: openai.OpenAI, server: Any) -> None:
    aborted = server.stats().get("ended_abort", 0)
    stream = client.chat.completions.create(
        messages=HELLO, n=5, max_tokens=4000, stream=True, **GREEDY
    )
    next(iter(stream))
    assert until(lambda: server.stats()["num_running"] == 5)
    assert httpx.get(f"{server.url}/load", verify=False).json() == {"server_load": 1}
    stream.close()
    assert until(lambda: server.stats()["num_running"] == 0)
    assert server.stats()["ended_abort"] == aborted + 5
    assert until(lambda: httpx.get(f"{server.url}/load", verify=False).json()["server_load"] == 0)
