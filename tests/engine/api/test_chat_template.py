# SPDX-License-Identifier: Apache-2.0
"""Chat templates, good and hostile: what they may do, and what stops them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest

from stratakv.engine.api.chat_template import (
    MAX_TEMPLATE_CHARACTERS,
    ChatTemplate,
    TemplateRefused,
)
from stratakv.tiers.settings.values import ConfigError

MESSAGES = [{"role": "user", "content": "<hi> €"}]


class Tokens:
    """Special tokens, and a template where the tokenizer's configuration holds one."""

    def __init__(self, template: str | None = None) -> None:
        self.chat_template = template

    def special_token(self, name: str) -> str | None:
        return {"bos_token": "<s>"}.get(name)


def render(source: str, *, max_characters: int = 10_000, seconds: float = 5.0) -> str:
    async def work() -> str:
        template = ChatTemplate(source, {"bos_token": "<s>"}, "test")
        return await template.render(
            MESSAGES,
            add_generation_prompt=True,
            max_characters=max_characters,
            timeout_seconds=seconds,
        )

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<s><hi> €"),
        ("{{ messages | tojson }}", json.dumps(MESSAGES, ensure_ascii=False)),
        ("  {% if add_generation_prompt %}\nyes\n  {% endif %}\n", "yes\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("{{ eos_token }}{{ '=' * 3 }}{{ 2 ** 5 }}", "===32"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 5 %}{{ ns.x }}", "5"),
        ("{{ tools is none }}", "True"),
    ],
)
def test_what_templates_of_models_use(source: str, expected: str) -> None:
    assert render(source) == expected


def test_the_date_of_today() -> None:
    assert render("{{ strftime_now('%Y') }}") >= "2024"


def test_a_template_refuses_in_its_own_words() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ self.__init__.__globals__['os'].system('true') }}",
        "{{ ''['__class__'] }}{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** (10 ** 8) }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{% include 'other' %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for i in range(99999) %}{{ 'xxxxxxxxxx' }}{% endfor %}",
    ],
)
def test_hostile_templates_are_refused(source: str) -> None:
    with pytest.raises(TemplateRefused):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_without_end_is_stopped(source: str) -> None:
    began = time.monotonic()
    with pytest.raises(TemplateRefused, match=r"longer than 0\.2 seconds"):
        render(source, seconds=0.2)
    assert time.monotonic() - began < 30
    for thread in threading.enumerate():
        if thread.name == "chat-template":
            thread.join(5)
            assert not thread.is_alive()


def test_long_output_is_stopped() -> None:
    with pytest.raises(TemplateRefused, match="more than 100 characters"):
        render("{{ 'x' * 60 }}{{ 'y' * 60 }}", max_characters=100)


@pytest.mark.parametrize(
    ("source", "words"),
    [("{% for %}", "cannot be compiled"), ("x" * (MAX_TEMPLATE_CHARACTERS + 1), "at most")],
)
def test_templates_that_cannot_be_used_are_refused_at_the_start(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ChatTemplate(source, {}, "test")


def _loaded(directory: Path, tokens: Tokens) -> str | None:
    template = ChatTemplate.load(directory, tokens)
    if template is None:
        return None
    return asyncio.run(
        template.render(
            MESSAGES, add_generation_prompt=False, max_characters=100, timeout_seconds=5
        )
    )


def test_where_templates_come_from(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    assert _loaded(tmp_path, Tokens()) is None
    config.write_text("{}")
    assert _loaded(tmp_path, Tokens()) is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert _loaded(tmp_path, Tokens()) == "named"
    assert _loaded(tmp_path, Tokens("from the tokenizer")) == "from the tokenizer"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}from its own file")
    assert _loaded(tmp_path, Tokens("from the tokenizer")) == "<s>from its own file"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        ChatTemplate.load(tmp_path, Tokens())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatTemplate.load(tmp_path, Tokens())
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (4 * MAX_TEMPLATE_CHARACTERS + 1))
    with pytest.raises(ConfigError, match="bytes and at most"):
        ChatTemplate.load(tmp_path, Tokens())
