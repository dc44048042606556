# SPDX-License-Identifier: Apache-2.0
"""`LLM.open_session`: prompts that are given in parts, and what is refused by name."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratakv.engine.client.base import EngineDead
from stratakv.engine.llm import LLM
from stratakv.engine.offline.prompt_session import PromptSession
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.text.prompt_parts import PromptParts

from .core.conftest import prompt_of

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
TEXT = (
    "The quick brown fox jumps over the lazy dog; then it sleeps.\n\n    def answer(self) -> int:\n"
    "        return 42  # as expected, naïvely\n" * 5
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The embedded model, whose tokens join letters across any border."""
    with LLM(dtype="float64", num_blocks=200, max_model_len=1000, num_threads=1) as made:
        yield made


def cut(text: str, count: int, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(1, len(text)), count - 1))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def feed_until_refused(session: PromptSession, pause_seconds: float) -> None:
    while True:
        time.sleep(pause_seconds)
        session.feed([5])


def until_none_is_open(llm: LLM) -> None:
    core = llm.client._core_loop._core  # type: ignore[attr-defined]
    deadline = time.monotonic() + 30.0
    while len(core._continuations.sessions) or not core.scheduler.manager.pool.is_idle:
        assert time.monotonic() < deadline
        llm.stats()


def test_fifty_parts_answer_as_the_whole(llm: LLM, seed: int) -> None:
    [whole] = llm.generate(TEXT, GREEDY)
    llm.reset_prefix_cache()
    *parts, last = cut(TEXT, 50, random.Random(seed))
    with llm.open_session(GREEDY) as session:
        for part in parts:
            session.feed(part)
        found = session.answer(last)
    assert found.prompt_token_ids == whole.prompt_token_ids
    assert found.outputs[0].token_ids == whole.outputs[0].token_ids
    assert found.outputs[0].text == whole.outputs[0].text
    assert found.outputs[0].finish_reason == "length"


def test_texts_and_tokens_in_turn(llm: LLM) -> None:
    ids = prompt_of(40)
    with llm.open_session(GREEDY) as session:
        session.feed("One two three ")
        session.feed(ids)
        found = session.answer("four")
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    behind = tokenizer.encode("four", add_special_tokens=False)
    expected = [*tokenizer.encode("One two three "), *ids, *behind]
    assert found.prompt_token_ids == expected
    assert found.outputs[0].token_ids == llm.generate([expected], GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize("last", ["and read the lines of", " ", [7, 8, 9], [7]], ids=repr)
def test_the_last_part_counts(llm: LLM, last: str | list[int]) -> None:
    text = "To open a file in Python and to close it again when all has been said and done,\n"
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    whole = (
        tokenizer.encode(text + last) if isinstance(last, str) else [*tokenizer.encode(text), *last]
    )
    [expected] = llm.generate([whole], GREEDY)
    with llm.open_session(GREEDY) as session:
        session.feed(text)
        found = session.answer(last)
    assert found.prompt_token_ids == whole
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_part_that_is_refused_has_not_come(llm: LLM) -> None:
    with llm.open_session(GREEDY) as session:
        session.feed("One two three ")
        for part, words in (("four \ud83d five ", "half of a surrogate pair"),
                            ("word " * 2_000, "at most 999 fit"), ("a" * 10**6, "cannot fit into"),
                            ([5] * 1_000, "at most 999 fit")):  # fmt: skip
            with pytest.raises(ValueError, match=words):
                session.feed(part)
        found = session.answer("four")
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    assert found.prompt_token_ids == tokenizer.encode("One two three four")
    parts = PromptParts(None, 100)
    with pytest.raises(ValueError, match="no tokenizer"):
        parts.add_part("text")
    assert parts.add_part([4]) == [4]
    assert parts.end_prompt() == (1, [])


@pytest.mark.parametrize("part", ["a ", " ", "ab", "word\n"], ids=repr)
def test_many_small_parts_take_some_times_their_length(
    llm: LLM, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    parts, sizes = PromptParts(tokenizer, 10_000), []
    encode = parts._encode
    monkeypatch.setattr(parts, "_encode", lambda text: sizes.append(len(text)) or encode(text))
    told = []
    for _ in range(3_000):
        told += parts.add_part(part)
    num_kept, behind = parts.end_prompt()
    assert told[:num_kept] + behind == tokenizer.encode(part * 3_000)
    assert sum(sizes) < 20 * 3_000 * len(part)


def test_an_answer_without_parts_before(llm: LLM) -> None:
    with llm.open_session(GREEDY) as session:
        said = session.answer(TEXT).outputs[0].token_ids
    assert said == llm.generate(TEXT, GREEDY)[0].outputs[0].token_ids
    with llm.open_session(GREEDY) as session, pytest.raises(ValueError, match="at least one token"):
        session.answer([])


@pytest.mark.parametrize("seed_of_parts", range(5))
def test_tokens_are_told_as_they_are_in_the_whole(seed_of_parts: int, llm: LLM) -> None:
    tokenizer, rng = llm.tokenizer, random.Random(seed_of_parts)
    assert tokenizer is not None
    parts, told = PromptParts(tokenizer, 10_000), []
    for part in cut(TEXT, 30, rng):
        told += parts.add_part(part)
    num_kept, behind = parts.end_prompt()
    assert told[:num_kept] + behind == tokenizer.encode(TEXT) == parts.token_ids
    assert num_kept > 0.8 * len(parts.token_ids)


def test_what_was_told_and_is_not_so_is_taken_back(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may join what no space parts; then what has come counts up to there."""
    [whole] = llm.generate(TEXT, GREEDY)
    add = PromptParts.add_part

    def hasty(parts: PromptParts, part: str) -> list[int]:
        add(parts, part)
        new = parts._encode(parts._text)[len(parts._told) :]
        parts._told += new
        return new

    monkeypatch.setattr(PromptParts, "add_part", hasty)
    with llm.open_session(GREEDY) as session:
        for place in range(0, len(TEXT) - 3, 7):
            session.feed(TEXT[place : place + 7])
        found = session.answer(TEXT[place + 7 :])
    assert found.prompt_token_ids == whole.prompt_token_ids
    assert found.outputs[0].token_ids == whole.outputs[0].token_ids


def test_bad_use_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(ValueError, match="n must be 1 in a session, got 2"):
        llm.open_session(SamplingParams(n=2))
    with pytest.raises(ValueError, match="SamplingParams, not dict"):
        llm.open_session({"n": 1})  # type: ignore[arg-type]
    with llm.open_session(SamplingParams(prompt_logprobs=1)) as session:
        session.feed([5] * 20)
        with pytest.raises(ValueError, match="without prompt_logprobs"):
            feed_until_refused(session, 0.0)
    with llm.open_session(GREEDY) as session:
        with pytest.raises(ValueError, match="a text or a list of token ids, not bytes"):
            session.feed(b"x")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="token ids must be from 0 to 4095"):
            session.feed([4096])
        session.feed([7] * 20)
        with session._exclusively():
            refused: list[str] = []

            def feed() -> None:
                try:
                    session.feed("x")
                except ValueError as error:
                    refused.append(str(error))

            other = threading.Thread(target=feed)
            other.start()
            other.join(30.0)
            assert refused == ["another thread feeds this session; feed one part at a time"]
        session.answer([5])
        for again in (session.feed, session.answer):
            with pytest.raises(ValueError, match="has had its last part; open another one"):
                again("x")
    until_none_is_open(llm)


def test_a_session_that_is_too_slow_or_dropped(tiny_model: Path) -> None:
    llm = LLM(tiny_model, num_blocks=40, num_threads=1, session_idle_seconds=0.2)
    with llm:
        session = llm.open_session(GREEDY)
        session.feed([5] * 20)
        with pytest.raises(ValueError, match=r"no part of the prompt came for 0.2 s"):
            feed_until_refused(session, 0.3)
        session.close()
        dropped = llm.open_session(GREEDY)
        dropped.feed([5] * 20)
        dropped.close()
        dropped.close()
        until_none_is_open(llm)
        open_still = llm.open_session(GREEDY)
        open_still.feed([5] * 20)
    with pytest.raises(EngineDead):
        open_still.feed([5])
