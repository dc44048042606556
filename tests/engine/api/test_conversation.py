# SPDX-License-Identifier: Apache-2.0
"""Messages and the model's template: its variables, and messages that go on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

# As templates of real models do it: messages are trimmed, some are left out, and thinking is a
# variable.
TEMPLATE = (
    "{% for message in messages if message.role != 'system' %}"
    "<{{ message.role }}>{{ message.content | trim }}</end>"
    "{% if twice %}<again>{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{{ reasoning_effort or '' }}{% endif %}"
)
USER = {"role": "user", "content": " hello "}
PATH = "/tokenize"


@pytest.fixture(scope="module")
def thinking(
    server: Any, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    directory = tmp_path_factory.mktemp("templates") / "model"
    shutil.copytree(model_path, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    live = type(server)(directory)
    with httpx.Client(base_url=live.url, timeout=30, verify=False) as client:
        yield client
    live.stop()


def prompt(http: httpx.Client, **fields: Any) -> str:
    """What the template makes of a request."""
    response = http.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    spelt = http.post("/detokenize", json={"tokens": response.json()["tokens"]})
    return str(spelt.json()["prompt"])


def test_variables_reach_the_template(thinking: httpx.Client) -> None:
    plain = prompt(thinking, messages=[USER])
    assert plain == "<user>hello</end><assistant>"
    off = {"enable_thinking": False, "unheard_of": {"a": [1, None]}, "self": 1}
    assert prompt(thinking, messages=[USER], chat_template_kwargs=off) == f"{plain}<think></think>"
    assert (
        prompt(thinking, messages=[USER], chat_template_kwargs={"enable_thinking": True}) == plain
    )
    body = {"messages": [USER], "max_tokens": 1, "chat_template_kwargs": off}
    usage = thinking.post("/v1/chat/completions", json=body).json()["usage"]
    count = thinking.post(PATH, json={"messages": [USER], "chat_template_kwargs": off}).json()
    assert usage["prompt_tokens"] == count["count"]


def test_an_effort_is_a_variable_of_the_template(thinking: httpx.Client) -> None:
    plain = prompt(thinking, messages=[USER])
    asked = {"messages": [USER], "reasoning_effort": "low"}
    assert prompt(thinking, **asked) == f"{plain}low"
    assert prompt(thinking, **asked, chat_template_kwargs={"reasoning_effort": "a"}) == f"{plain}a"
    usage = thinking.post("/v1/chat/completions", json={**asked, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == thinking.post(PATH, json=asked).json()["count"]


@pytest.mark.parametrize("twice", [False, True])
def test_the_last_message_goes_on_where_it_ended(thinking: httpx.Client, twice: bool) -> None:
    begun = {"role": "assistant", "content": "the quick"}
    seen = prompt(
        thinking, messages=[USER, begun], continue_final_message=True,
        chat_template_kwargs={"twice": twice},
    )  # fmt: skip
    if twice:
        assert seen.endswith("<assistant>the quick</end><again>the quick")
    else:
        assert seen == "<user>hello</end><assistant>the quick"


def test_an_empty_message_can_go_on(thinking: httpx.Client) -> None:
    for content in (None, "", []):
        turns = [USER, {"role": "assistant", "content": content}]
        assert prompt(thinking, messages=turns, continue_final_message=True) == (
            "<user>hello</end><assistant>"
        )


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": [USER, {"role": "system", "content": "x"}], "continue_final_message": True},
         "continue_final_message", "leaves out the last message"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs",
         "may not hold messages"),
        ({"messages": [USER], "chat_template_kwargs": {"range": 5, "twice": [1] * 40_000}},
         "chat_template_kwargs", "at most 65536"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered(
    thinking: httpx.Client, fields: dict[str, Any], param: str, words: str
) -> None:
    error = thinking.post(PATH, json=fields).json()["error"]
    assert error["param"] == param
    assert words in error["message"]
