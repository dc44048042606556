# SPDX-License-Identifier: Apache-2.0
"""Stop strings are found across any borders of the pieces, and hold back no more than they must."""

from __future__ import annotations

import random

import pytest

from stratakv.engine.text.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """The text that came out, and what matched."""
    checker = StopStrings(stops, include=include)
    out = [checker.push(piece) for piece in pieces]
    return "".join([*out, checker.finish()]), checker.matched


def test_every_way_to_cut_the_text(rng: random.Random) -> None:
    for _ in range(500):
        text = "".join(rng.choices("ab\n", k=rng.randrange(1, 30)))
        stop = "".join(rng.choices("ab\n", k=rng.randrange(1, 5)))
        expected = (text.partition(stop)[0], stop if stop in text else None)
        cuts = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert run([stop], pieces) == run([stop], list(text)) == expected


def test_of_several_the_first_in_the_text_wins() -> None:
    assert run(["END", "stop"], ["a stop b END"]) == ("a ", "stop")
    assert run(["ab", "abc"], ["xabc"]) == ("x", "ab")


def test_the_stop_string_is_kept_where_asked_for() -> None:
    assert run(["\n\n"], ["one\n", "\ntwo"], include=True) == ("one\n\n", "\n\n")


def test_only_a_possible_beginning_is_held_back() -> None:
    checker = StopStrings(["###"])
    assert [checker.push(piece) for piece in ("a#", "#b", "##", "c")] == ["a", "##b", "", "##c"]
    assert checker.push("#") == ""
    assert checker.finish() == "#"


@pytest.mark.parametrize("piece", ["x", ""])
def test_nothing_comes_after_a_match(piece: str) -> None:
    checker = StopStrings(["!"])
    assert checker.push("a!b") == "a"
    assert checker.push(piece) == ""
    assert checker.finish() == ""
