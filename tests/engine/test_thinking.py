# SPDX-License-Identifier: Apache-2.0
"""The embedded model thinks: it is told what its marks are, and biased so that it does not end a
thought by itself, or begins one again and again. Budgets hold whatever the engine does around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from stratakv.engine import LLM, SamplingParams
from stratakv.engine.offline.outputs import RequestOutput
from stratakv.tiers.settings.values import ConfigError

START, END = "<think>", "</think>"
MARKS = {"reasoning_start": START, "reasoning_end": END}
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_blocks": 60}
STORY = "Once upon a time there was a little "
PROMPTS = [f"{STORY}{name}.\n{START}" for name in ("girl", "dog", "boy")]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**MARKS, **OPTIONS) as made:
        yield made


@pytest.fixture
def endless(llm: LLM) -> SamplingParams:
    """It never ends a thought by itself, nor begins another."""
    assert llm.marks is not None
    begins = {llm.marks.start_token_ids[0], llm.marks.end_token_ids[0]}
    return SamplingParams(
        max_tokens=30, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(begins, -100.0)
    )  # type: ignore[arg-type]


def with_budget(params: SamplingParams, budget: int) -> SamplingParams:
    return msgspec.structs.replace(params, thinking_token_budget=budget)


def test_the_end_mark_comes_after_the_budget(llm: LLM, endless: SamplingParams) -> None:
    """Against a bias of -100, and the text before it is what it is without a budget."""
    assert llm.marks is not None and llm.tokenizer is not None
    end = list(llm.marks.end_token_ids)
    assert len(end) > 1
    [free] = llm.generate(PROMPTS[0], endless)
    assert END not in free.text
    for budget in (0, 1, 7, 29):
        [output] = llm.generate(PROMPTS[0], with_budget(endless, budget))
        assert output.token_ids[:budget] == free.token_ids[:budget]
        assert output.token_ids[budget : budget + len(end)] == end[: 30 - budget]
        if budget < 20:
            assert output.text.count(END) == 1, "and it does not come again"
    [output] = llm.generate(PROMPTS[0], with_budget(endless, 30))
    assert output.token_ids == free.token_ids


def test_text_without_thoughts_is_the_same(llm: LLM) -> None:
    """Greedy, and drawn by a seed."""
    for wishes in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}):
        params = SamplingParams(max_tokens=20, ignore_eos=True, **wishes)  # type: ignore[arg-type]
        plain, bounded = llm.generate([STORY] * 2, [params, with_budget(params, 0)])
        assert START not in plain.text
        assert plain.token_ids == bounded.token_ids


def test_a_thought_that_was_used_up_in_the_prompt(llm: LLM, endless: SamplingParams) -> None:
    assert llm.marks is not None
    end = list(llm.marks.end_token_ids)
    long = f"{PROMPTS[0]} she wanted to play with all of her friends"
    [output] = llm.generate(long, with_budget(endless, 4))
    assert output.token_ids[: len(end)] == end
    [output] = llm.generate(f"{long}{END}", with_budget(endless, 4))
    assert END not in output.text, "that one is over"


def test_each_thought_has_a_budget_of_its_own() -> None:
    """Marks of one token, of which the first is drawn so often that thoughts come in numbers."""
    with LLM(reasoning_start=" the", reasoning_end=" and", **OPTIONS) as llm:
        assert llm.marks is not None
        (start,), (end,) = llm.marks.start_token_ids, llm.marks.end_token_ids
        params = [
            SamplingParams(max_tokens=60, seed=seed, ignore_eos=True, thinking_token_budget=seed,
                           logit_bias={start: 6.0, end: -100.0})  # type: ignore[arg-type]
            for seed in range(6)
        ]  # fmt: skip
        outputs = llm.generate([STORY] * 6, params)
    for budget, output in enumerate(outputs):
        lengths = thoughts_in(output.token_ids, start, end)
        assert len(lengths) > 2, output.text
        assert set(lengths[:-1]) == {budget}, "each is as long as it may be"
        assert lengths[-1] <= budget


def thoughts_in(token_ids: Sequence[int], start: int, end: int) -> list[int]:
    """The lengths of all thoughts; the last one may be open."""
    lengths: list[int] = []
    rest = list(token_ids)
    while start in rest:
        rest = rest[rest.index(start) + 1 :]
        length = rest.index(end) if end in rest else len(rest)
        lengths.append(length)
        rest = rest[length + 1 :]
    return lengths


def test_preemption_and_prefix_hits_change_nothing(llm: LLM, endless: SamplingParams) -> None:
    """In little room requests are sent back and computed again; prompts come from the pool."""
    params = [with_budget(endless, budget) for budget in (3, 11, 25)]
    expected = [tokens_of(llm.generate(*pair)) for pair in zip(PROMPTS, params, strict=True)]
    small = OPTIONS | {"num_blocks": 9, "admit_below": 1.0, "preempt_above": 1.0,
                       "max_model_len": 80}  # fmt: skip
    with LLM(**MARKS, **small) as other:
        for _ in range(2):
            found = other.generate(PROMPTS, params)
            assert [[tokens] for tokens in tokens_of(found)] == expected
        assert other.stats()["scheduler"]["preemptions"] > 0
    again = llm.generate(PROMPTS, params)
    assert all(output.num_cached_tokens for output in again)
    assert [[tokens] for tokens in tokens_of(again)] == expected


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_without_marks_a_budget_is_refused(llm: LLM) -> None:
    with LLM(**OPTIONS) as plain:
        assert plain.marks is None
        with pytest.raises(ValueError, match="prompt 0: thinking_token_budget needs the marks"):
            plain.generate("x", SamplingParams(thinking_token_budget=3))
        own = SamplingParams(
            thinking_token_budget=0, max_tokens=2, temperature=0.0,
            reasoning_start_token_ids=(9,), reasoning_end_token_ids=(8, 7),
        )  # fmt: skip
        assert plain.generate([[5, 9]], own)[0].token_ids == [8, 7], "the request has its own"
    with pytest.raises(ValueError, match="bad_words must not ban the end mark"):
        llm.generate("x", SamplingParams(thinking_token_budget=3, bad_words=(END,)))


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget must be 0 or a positive count"),
        ({"thinking_token_budget": 2**63}, "thinking_token_budget must be 0 or a positive count"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget must be a whole number or None"),
        ({"thinking_token_budget": True}, "thinking_token_budget must be a whole number or None"),
        ({"reasoning_end_token_ids": (5,)}, "reasoning_start_token_ids must be there"),
        ({"reasoning_start_token_ids": (5,)}, "reasoning_end_token_ids must be there"),
        ({"reasoning_start_token_ids": "ab"}, "reasoning_start_token_ids must be a list"),
        (
            {"reasoning_start_token_ids": (5,), "reasoning_end_token_ids": (4, 5)},
            "reasoning_end_token_ids must not contain the start mark",
        ),
        (
            {"reasoning_start_token_ids": (5,), "reasoning_end_token_ids": tuple(range(6, 71))},
            "reasoning_end_token_ids must be at most 64 ids",
        ),
        (
            {"reasoning_start_token_ids": (5,), "reasoning_end_token_ids": (2**40,)},
            "reasoning_end_token_ids must be a list of token ids",
        ),
    ],
)
def test_parameters_that_cannot_be(wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**wishes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reasoning_start": "<a>"}, "--reasoning-start is given and --reasoning-end is not"),
        ({"reasoning_end": "<a>"}, "--reasoning-end is given and --reasoning-start is not"),
        ({"reasoning_start": "a", "reasoning_end": "/a"}, "contain one another"),
        ({"reasoning_start": "a", "reasoning_end": "a"}, "contain one another"),
        ({"reasoning_start": "", "reasoning_end": "a"}, "--reasoning-start takes a text"),
        ({"reasoning_start": "a", "reasoning_end": "b" * 257}, "up to 256 characters, not 257"),
        ({"reasoning_start": "a", "reasoning_end": "b\x00"}, "without control characters"),
        ({"reasoning_parser": "qwen3"}, "--reasoning-start and --reasoning-end name others"),
    ],
)
def test_marks_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(**options)


def test_marks_may_have_line_breaks() -> None:
    from stratakv.engine.config.engine_options import engine_config

    given = {"reasoning_start": "<a>\n", "reasoning_end": "\n</a>\n\n"}
    model = engine_config(None, given).model
    assert (model.reasoning_start, model.reasoning_end) == ("<a>\n", "\n</a>\n\n")


def test_the_flag_of_generate(capsys: pytest.CaptureFixture[str]) -> None:
    from stratakv.engine.cli.main import main

    words = ["generate", "--prompt", PROMPTS[0], "--max-tokens", "12", "--num-blocks", "60"]
    marks = ["--reasoning-start", START, "--reasoning-end", END]
    assert main([*words, *marks, "--thinking-token-budget", "2"]) == 0
    assert END in capsys.readouterr().out
    assert main([*words, "--thinking-token-budget", "2"]) == 2
    assert "--thinking-token-budget needs the marks around a thought" in capsys.readouterr().err
