# SPDX-License-Identifier: Apache-2.0
"""Stop strings are found across any borders of the pieces, and hold back no more than they must."""

from __future__ import annotations

import random
import time

import pytest

from stratakv.engine.text.output_processor import StopStrings


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """The text that came out, and what matched."""
    checker = StopStrings(stops, include=include)
    out = [checker.filter_text(piece) for piece in pieces]
    return "".join([*out, checker.flush_held()]), checker.matched


def test_every_way_to_cut_the_text(rng: random.Random) -> None:
    for _ in range(500):
        text = "".join(rng.choices("ab\n", k=rng.randrange(1, 30)))
        stop = "".join(rng.choices("ab\n", k=rng.randrange(1, 5)))
        expected = (text.partition(stop)[0], stop if stop in text else None)
        cuts = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert run([stop], pieces) == run([stop], list(text)) == expected


def test_several_that_begin_alike(rng: random.Random) -> None:
    """As if the whole text was looked at anew with every piece."""
    for _ in range(500):
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 7))) for _ in range(3)]
        pieces = ["".join(rng.choices("ab", k=rng.randrange(4))) for _ in range(8)]
        text, expected = "", None
        for piece in pieces:
            text += piece
            found = [(text.find(stop), place) for place, stop in enumerate(stops) if stop in text]
            if found:
                start, place = min(found)
                expected = (text[:start], stops[place])
                break
        assert run(stops, pieces) == (expected or (text, None)), (stops, pieces)


def test_what_one_holds_back_is_not_looked_at_again_for_the_others() -> None:
    """At every piece that would be 16 times a thousand comparisons."""
    stops = ["a" * 1023 + "b", *("a" * 500 + f"c{i}" + "a" * 500 for i in range(15))]
    checker = StopStrings(stops)
    began = time.thread_time()
    out = [checker.filter_text("a") for _ in range(5000)]
    assert time.thread_time() - began < 3
    assert "".join([*out, checker.flush_held()]) == "a" * 5000


def test_of_several_the_first_in_the_text_wins() -> None:
    assert run(["END", "stop"], ["a stop b END"]) == ("a ", "stop")
    assert run(["ab", "abc"], ["xabc"]) == ("x", "ab")


def test_the_stop_string_is_kept_where_asked_for() -> None:
    assert run(["\n\n"], ["one\n", "\ntwo"], include=True) == ("one\n\n", "\n\n")


def test_only_a_possible_beginning_is_held_back() -> None:
    checker = StopStrings(["###"])
    assert [checker.filter_text(piece) for piece in ("a#", "#b", "##", "c")] == [
        "a",
        "##b",
        "",
        "##c",
    ]
    assert checker.filter_text("#") == ""
    assert checker.flush_held() == "#"


@pytest.mark.parametrize("piece", ["x", ""])
def test_nothing_comes_after_a_match(piece: str) -> None:
    checker = StopStrings(["!"])
    assert checker.filter_text("a!b") == "a"
    assert checker.filter_text(piece) == ""
    assert checker.flush_held() == ""
