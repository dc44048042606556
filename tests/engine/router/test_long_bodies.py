# SPDX-License-Identifier: Apache-2.0
"""A body of millions of parts, which would take seconds to look at while everybody else waits."""

from __future__ import annotations

from typing import Any

import pytest

from stratakv.engine.router import legs

MANY = legs.MAX_PARTS + 2


@pytest.mark.parametrize(
    ("path", "name", "value", "tokens", "is_exact"),
    [
        (legs.COMPLETIONS, "prompt", b"[" + b"7, " * (MANY - 1) + b"12]", MANY, True),
        (legs.COMPLETIONS, "prompt", b"[" + b"[]," * MANY + b"[]]", 3 * MANY // 4 + 1, False),
        (legs.COMPLETIONS, "prompt", b'"' + b"a, " * MANY + b'"', 3 * MANY // 4 + 1, False),
        (legs.CHAT, "messages", b"[" + b"{}," * MANY + b"{}]", 3 * MANY // 4 + 1, False),
    ],
    ids=["ids", "lists", "text", "messages"],
)
def test_many_parts_are_counted_and_not_read(
    path: str,
    name: str,
    value: bytes,
    tokens: int,
    is_exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(*_: Any) -> Any:
        raise AssertionError("part by part")

    fields = legs.read_fields(b'{"%s": %s}' % (name.encode(), value))
    monkeypatch.setattr(legs, "_decode", read)
    facts = legs.read_facts(path, fields)
    assert (facts.prompt_tokens, facts.is_exact) == (tokens, is_exact)


def test_what_has_fewer_parts_is_read() -> None:
    fields = legs.read_fields(b'{"prompt": [' + b"7," * legs.MAX_PARTS + b'"x"]}')
    assert legs.read_facts(legs.COMPLETIONS, fields).prompt_tokens == 0
