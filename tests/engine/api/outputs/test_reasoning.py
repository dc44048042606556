# SPDX-License-Identifier: Apache-2.0
"""A model that thinks, over HTTP and with OpenAI's client: budgets, and thoughts beside the answer.

The tiny model's template opens a thought, as those of DeepSeek-R1 and Qwen3 do, and both marks are
banned by biases, so that nothing but a budget ends it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer as FastTokenizer

from ..conftest import LiveServer

START, END = "<think>", "</think>"
START_ID, END_ID = 300, 301
BUDGET = 5
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{% endif %}"
)
HELLO: Any = [{"role": "user", "content": "hello world"}]
NEVER: Mapping[str, int] = {str(START_ID): -100, str(END_ID): -100}


@pytest.fixture(scope="module")
def thinking_path(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with the marks among its tokens."""
    directory = tmp_path_factory.mktemp("thinking-llama")
    for name in ("model.safetensors", "config.json"):
        (directory / name).symlink_to(model_path / name)
    fast = FastTokenizer.from_file(str(model_path / "tokenizer.json"))
    fast.add_tokens([START, END])
    assert (fast.token_to_id(START), fast.token_to_id(END)) == (START_ID, END_ID)
    fast.save(str(directory / "tokenizer.json"))
    config = json.loads((model_path / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def server(thinking_path: Path) -> Iterator[LiveServer]:
    live = LiveServer(thinking_path)
    yield live
    live.stop()


def fields(budget: int | None = BUDGET, **more: Any) -> dict[str, Any]:
    """A greedy chat of 20 tokens; `more` are fields that the library does not know."""
    extra = {"ignore_eos": True, "return_token_ids": True, "thinking_token_budget": budget, **more}
    return {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 20,
            "logit_bias": dict(NEVER), "extra_body": extra}  # fmt: skip


def whole(client: openai.OpenAI, asked: dict[str, Any], **own: Any) -> tuple[str, str, Any]:
    """The thought, the content, and the answer."""
    answer = client.chat.completions.create(**asked, **own)
    message = answer.choices[0].message
    assert isinstance(message.content, str)
    extra = message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    assert START not in message.content and END not in message.content
    return extra.get("reasoning_content", ""), message.content, answer


def streamed(client: openai.OpenAI, asked: dict[str, Any], **own: Any) -> dict[int, list[Any]]:
    """(thought, content) of each delta that says something, by choice."""
    found: dict[int, list[Any]] = {}
    for chunk in client.chat.completions.create(stream=True, **asked, **own):
        for choice in chunk.choices:
            extra = choice.delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            piece = (extra.get("reasoning_content", ""), choice.delta.content or "")
            if piece != ("", ""):
                found.setdefault(choice.index, []).append(piece)
    return found


def joined(pieces: list[Any]) -> tuple[str, str]:
    return "".join(p[0] for p in pieces), "".join(p[1] for p in pieces)


def test_a_thought_ends_with_its_budget(client: openai.OpenAI, thinking_path: Path) -> None:
    thought, content, answer = whole(client, fields())
    ids = answer.choices[0].model_extra["token_ids"]
    assert ids.index(END_ID) == BUDGET and ids.count(END_ID) == 1
    tokenizer = FastTokenizer.from_file(str(thinking_path / "tokenizer.json"))
    assert (thought, content) == (tokenizer.decode(ids[:BUDGET]), tokenizer.decode(ids[6:]))
    assert thought and content
    assert answer.usage.completion_tokens_details.reasoning_tokens == BUDGET
    assert answer.usage.completion_tokens == 20
    free, nothing, unbounded = whole(client, fields(None))
    assert free.startswith(thought) and nothing == ""
    assert unbounded.usage.completion_tokens_details.reasoning_tokens == 20


def test_a_stream_gives_what_the_whole_gives(client: openai.OpenAI) -> None:
    for budget in (0, 1, BUDGET, 18, 19, 20):
        thought, content, _ = whole(client, fields(budget))
        pieces = streamed(client, fields(budget)).get(0, [])
        assert joined(pieces) == (thought, content)
        sides = [bool(piece[1]) for piece in pieces]
        assert sides == sorted(sides), "the thought comes first"


def test_usage_of_a_stream(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens_details.reasoning_tokens
        for chunk in client.chat.completions.create(stream=True, stream_options=options, **fields())
        if chunk.usage is not None and chunk.usage.completion_tokens_details is not None
    ]
    assert counts == sorted(counts), "never fewer than before"
    assert counts[-1] == BUDGET


def test_thoughts_may_be_left_out(client: openai.OpenAI) -> None:
    thought, content, _ = whole(client, fields())
    hidden, same, answer = whole(client, fields(include_reasoning=False))
    assert (hidden, same) == ("", content)
    assert answer.usage.completion_tokens_details.reasoning_tokens == BUDGET
    pieces = streamed(client, fields(include_reasoning=False, return_token_ids=False))[0]
    assert joined(pieces) == ("", content)
    assert len(thought) > 0


def test_thoughts_may_stay_in_the_text(client: openai.OpenAI) -> None:
    """As one router of SGLang has it; its other switch gives a thought in one piece."""
    thought, content, _ = whole(client, fields())
    asked = fields(separate_reasoning=False)
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == f"{thought}{END}{content}"
    assert answer.usage is not None and answer.usage.completion_tokens_details is None
    pieces = streamed(client, fields(stream_reasoning=False))[0]
    assert [piece[0] for piece in pieces if piece[0]] == [thought]
    assert joined(pieces) == (thought, content)
    routers = fields(separate_reasoning=True, stream_reasoning=True, include_reasoning=True)
    assert whole(client, routers)[:2] == (thought, content)


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_think_each_for_itself(client: openai.OpenAI, stream: bool) -> None:
    drawn = {**fields(), "temperature": 1.0, "seed": 3}
    alone = [whole(client, {**drawn, "seed": 3 + child})[:2] for child in range(3)]
    assert len(set(alone)) == 3
    if stream:
        pieces = streamed(client, drawn, n=3)
        assert [joined(pieces[child]) for child in range(3)] == alone
        return
    answer = client.chat.completions.create(n=3, **drawn)
    found = [choice.message for choice in answer.choices]
    assert [((m.model_extra or {})["reasoning"], m.content) for m in found] == alone
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3 * BUDGET


@pytest.mark.parametrize("stop", ["think>", END, "</"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_end_mark(client: openai.OpenAI, stop: str, stream: bool) -> None:
    thought, _, _ = whole(client, fields())
    asked = {**fields(), "stop": stop}
    wanted = (thought + END[: END.index(stop)], "")
    found = joined(streamed(client, asked)[0]) if stream else whole(client, asked)[:2]
    assert found == wanted


def test_a_chat_that_does_not_think(client: openai.OpenAI) -> None:
    """Nothing of it is a thought, and a budget changes nothing, bit for bit."""
    off = {"enable_thinking": False}
    thought, content, answer = whole(client, fields(0, chat_template_kwargs=off))
    assert thought == "" and "reasoning" not in (answer.choices[0].message.model_extra or {})
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert whole(client, fields(None, chat_template_kwargs=off))[1] == content
    assert joined(streamed(client, fields(0, chat_template_kwargs=off))[0]) == ("", content)


def test_words_of_a_user_about_marks_are_no_thought(client: openai.OpenAI) -> None:
    asked = fields(None, chat_template_kwargs={"enable_thinking": False})
    asked["messages"] = [{"role": "user", "content": "why do you write <think>?"}]
    thought, content, _ = whole(client, asked)
    assert thought == "" and content


def test_a_message_that_goes_on_in_its_thought(client: openai.OpenAI) -> None:
    for text, thinks in ((f"{START}well", True), (f"{START}well{END}so", False), ("so", False)):
        asked = fields(9, continue_final_message=True)
        asked["messages"] = [*HELLO, {"role": "assistant", "content": text}]
        thought, content, answer = whole(client, asked)
        assert bool(thought) == thinks
        assert content
        in_answer = answer.usage.completion_tokens_details.reasoning_tokens
        assert (0 < in_answer < 9) if thinks else in_answer == 0, "the prompt's part counts too"


def test_an_answer_can_be_sent_back_with_its_thought(client: openai.OpenAI) -> None:
    """The template sees it, by whichever name it comes."""
    message = client.chat.completions.create(**fields()).choices[0].message
    counts = []
    for kept in (
        message.model_dump(),
        {"role": "assistant", "content": message.content, "reasoning": "hello world"},
        {"role": "assistant", "content": message.content, "reasoning_content": "hello world"},
        {"role": "assistant", "content": message.content},
    ):
        asked = {**fields(), "messages": [*HELLO, kept, *HELLO]}
        answer = client.chat.completions.create(**asked)
        assert answer.usage is not None
        counts.append(answer.usage.prompt_tokens)
    assert counts[1] == counts[2] > counts[3]
    assert counts[0] > counts[3]


def test_budgets_of_completions(client: openai.OpenAI) -> None:
    """The text is as it is; so are the switches of routers."""
    extra = {"ignore_eos": True, "thinking_token_budget": 2, "return_token_ids": True,
             "include_reasoning": False, "separate_reasoning": True}  # fmt: skip
    answer = client.completions.create(
        model="tiny", prompt=[[5, START_ID, 9], [5, 9]], temperature=0, max_tokens=6,
        logit_bias=dict(NEVER), extra_body=extra,
    )  # fmt: skip
    first, second = [(choice.model_extra or {})["token_ids"] for choice in answer.choices]
    assert first.index(END_ID) == 1, "one token of the thought stood in the prompt"
    assert END in answer.choices[0].text
    assert END_ID not in second
    assert answer.usage is not None and answer.usage.completion_tokens_details is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-1, "thinking_token_budget must be 0 or a positive count, got -1"),
        (1.5, "thinking_token_budget"),
        ("5", "thinking_token_budget"),
        (True, "thinking_token_budget"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_budgets_that_cannot_be(http: httpx.Client, path: str, value: Any, words: str) -> None:
    own: Any = {"messages": HELLO} if "chat" in path else {"prompt": "x"}
    answer = http.post(path, json={**own, "max_tokens": 2, "thinking_token_budget": value})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_server_without_marks_refuses_budgets(model_path: Path, thinking_path: Path) -> None:
    """And with `none` it splits nothing."""
    for path, marks in ((model_path, ("", "")), (thinking_path, ("none", "none"))):
        live = LiveServer(path, marks=marks)
        with httpx.Client(base_url=live.url, timeout=30, verify=False) as http:
            body = {"messages": HELLO, "max_tokens": 3, "temperature": 0}
            refused = http.post("/v1/chat/completions", json={**body, "thinking_token_budget": 2})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "thinking_token_budget"
            assert "start with --reasoning-start and --reasoning-end" in error["message"]
            answer = http.post("/v1/chat/completions", json={**body, "include_reasoning": False})
            message = answer.json()["choices"][0]["message"]
            assert message.keys() == {"role", "content"}
            assert "completion_tokens_details" not in answer.json()["usage"]
        live.stop()
