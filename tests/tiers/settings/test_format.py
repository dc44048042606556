# SPDX-License-Identifier: Apache-2.0
"""Whatever came from outside, a message stays one short line."""

from __future__ import annotations

import pytest

from stratakv.tiers.settings.format import format_name, format_value, one_line


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        (1.5, "1.5"),
        ("a\nb\x1b\ud800", r"'a\nb\x1b\ud800'"),
        ("x" * 5000, "'" + "x" * 76 + "..."),
        (
            list(range(5000)),
            "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19",
        ),
        (10**5000, "a value of type int too long to show"),
        ([-(10**5000)], "a value of type list too long to show"),
    ],
    ids=format_value,
)
def test_values(value: object, text: str) -> None:
    assert format_value(value).startswith(text)
    assert len(format_value(value)) <= 80


def test_names() -> None:
    assert format_name("model.norm.weight") == "model.norm.weight"
    assert format_name("a\nb") == r"'a\nb'"
    assert format_name("") == "''"
    assert format_name(" port") == "' port'"
    assert len(format_name("x" * 5000)) == 80


def test_lines() -> None:
    assert one_line("nothing to do, é 漢 👩") == "nothing to do, é 漢 👩"
    assert one_line("/a\nb\x1b[31m\u2028c\x85") == r"/a\nb\x1b[31m\u2028c\x85"
    long = one_line("cause " + "x" * 10_000 + " cure")
    assert (len(long), long[:6], long[-5:]) == (2000, "cause ", " cure")
