# SPDX-License-Identifier: Apache-2.0
"""Thoughts apart from the rest of an answer: the marks, and texts that are split at them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from stratakv.engine.request.core_messages import TokenOutput
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.request.structured_params import StructuredOutputsParams
from stratakv.engine.text.output_processor import OutputProcessor, TextOutput
from stratakv.engine.text.reasoning import (
    WELL_KNOWN_MARKS,
    ReasoningMarks,
    ReasoningSplitter,
    Thoughts,
    find_marks,
    with_reasoning_marks,
)
from stratakv.engine.text.tokenizer import Tokenizer
from stratakv.tiers.settings.values import ConfigError

from .small_tokenizers import TOKENIZERS, byte_level

START, END = "<think>", "</think>"
BUDGET = SamplingParams(thinking_token_budget=4)


def with_tokens(*, special: bool) -> Tokenizer:
    """A token for each byte, `<end>` (256), and the marks (257 and 258)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    (fast.add_special_tokens if special else fast.add_tokens)([START, END])
    return Tokenizer(fast)


# Finding the marks


def test_marks_that_are_tokens_are_found() -> None:
    marks = find_marks(with_tokens(special=False), "", "")
    assert marks == ReasoningMarks(START, END, (257,), (258,))
    marks = find_marks(with_tokens(special=True), "", "")
    assert marks == ReasoningMarks(START, END, (257,), (258,), frozenset({256}))
    for texts in WELL_KNOWN_MARKS:
        tokenizer = with_tokens(special=False)
        tokenizer._fast.add_tokens(list(texts))
        named = find_marks(tokenizer, *texts)
        assert named is not None
        assert (len(named.start_token_ids), len(named.end_token_ids)) == (1, 1)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_marks_that_are_texts_are_spelt(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    assert find_marks(tokenizer, "", "") is None, "nobody said that the model thinks"
    marks = find_marks(tokenizer, "the café", "naïve")
    assert marks is not None
    for text, ids in (
        (marks.start, marks.start_token_ids), (marks.end, marks.end_token_ids),
    ):  # fmt: skip
        assert tokenizer.decode(ids, skip_special_tokens=False).strip() == text
        inside = tokenizer.encode(f"a\n{text}", add_special_tokens=False)
        assert tuple(inside[-len(ids) :]) == ids, "as it stands in a text"


def test_no_marks() -> None:
    assert find_marks(None, "", "") is None
    assert find_marks(with_tokens(special=False), "none", "") is None
    assert find_marks(None, "none", "none") is None
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        find_marks(None, START, END)
    with pytest.raises(ConfigError, match="--reasoning-start takes a text that the model's tokens"):
        find_marks(TOKENIZERS["metaspace, never"](), "Ж", END)
    with pytest.raises(ConfigError, match="--reasoning-end takes a text of up to 64 tokens"):
        find_marks(with_tokens(special=False), START, "x" * 65)


def test_parameters_get_the_marks() -> None:
    marks = find_marks(with_tokens(special=False), "", "")
    plain = SamplingParams()
    assert with_reasoning_marks(plain, marks) is plain
    assert with_reasoning_marks(plain, None) is plain
    params = with_reasoning_marks(BUDGET, marks)
    assert (params.reasoning_start_token_ids, params.reasoning_end_token_ids) == ((257,), (258,))
    assert with_reasoning_marks(params, None) == params, "its own marks stay"
    grammar = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    assert with_reasoning_marks(grammar, marks) is grammar, "its thoughts are not split off"
    assert with_reasoning_marks(grammar, None, are_split=True) is grammar
    behind = with_reasoning_marks(grammar, marks, are_split=True)
    assert behind.reasoning_end_token_ids == params.reasoning_end_token_ids
    with pytest.raises(ValueError, match="thinking_token_budget needs the marks around a thought"):
        with_reasoning_marks(BUDGET, None)
    banned = SamplingParams(thinking_token_budget=4, bad_words_token_ids=((258,),))
    with pytest.raises(ValueError, match="bad_words must not ban the end mark"):
        with_reasoning_marks(banned, marks)


@pytest.mark.parametrize(
    ("prompt", "goes_on", "is_open"),
    [
        ("<user>hi<assistant><think>\n", False, True),
        ("<user>hi<assistant>", False, False),
        ("<user>hi<assistant><think>\n\n</think>\n\n", False, False),
        ("<user>what is <think>?<assistant>", False, False),  # only somebody's words
        ("<user>hi<assistant><think>well, ", True, True),
        ("<user>hi<assistant><think>well</think>so ", True, False),
        ("<user>hi<assistant>so ", True, False),
    ],
)
def test_a_prompt_that_ends_in_a_thought(prompt: str, goes_on: bool, is_open: bool) -> None:
    marks = ReasoningMarks(START, END, (1,), (2,))
    assert marks.is_open(prompt, goes_on=goes_on) == is_open


def test_marks_with_line_breaks() -> None:
    marks = ReasoningMarks("<a>\n", "\n</a>\n\n", (1,), (2,))
    for prompt in ("x<a>\n", "x<a>", "x<a>\n\n"):
        assert marks.is_open(prompt)
    assert not marks.is_open("<a>\nx\n</a>\n\n")
    splitter = ReasoningSplitter(marks.start, marks.end)
    assert splitter.split_text("<a>\nb\n</a>\n") == ("b", "")
    assert splitter.split_text("\nc") == ("", "c")


# Splitting


def split(pieces: list[str], is_inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(START, END, is_inside=is_inside)
    parts = [*map(splitter.split_text, pieces), splitter.flush_text()]
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)


@pytest.mark.parametrize(
    ("text", "is_inside", "reasoning", "content"),
    [
        ("hello", False, "", "hello"),
        ("<think>a</think>b", False, "a", "b"),
        ("x<think>a</think>b", False, "a", "xb"),
        ("a</think>b", True, "a", "b"),
        ("<think>a</think>b", True, "a", "b"),  # the model writes the mark once more
        ("a</think>\n\nb<think>c</think>d", True, "ac", "\n\nbd"),
        ("a</think>b</think>c", True, "a", "bc"),
        ("never ends", True, "never ends", ""),
        ("cut </thi", True, "cut </thi", ""),
        ("1 < 2 <thin", False, "", "1 < 2 <thin"),
        ("<<think>a</</think>b", False, "a</", "<b"),
        ("<think></think>", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_texts_are_split_at_marks(text: str, is_inside: bool, reasoning: str, content: str) -> None:
    assert split([text], is_inside) == (reasoning, content)
    assert split(list(text), is_inside) == (reasoning, content), "letter by letter"


def test_pieces_give_what_the_whole_gives(rng: random.Random) -> None:
    """And no mark is left on either side, nor given out in part before it is whole."""
    bits = [START, END, "<th", "ink>", "</", "think", ">", "<", "ab", " ", "\n"]
    for _ in range(400):
        text = "".join(rng.choices(bits, k=rng.randint(0, 12)))
        is_inside = rng.random() < 0.5
        whole = split([text], is_inside)
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 8)))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(pieces, is_inside) == whole
        assert whole == slow_split(text, is_inside)


def slow_split(text: str, is_inside: bool) -> tuple[str, str]:
    sides = {True: "", False: ""}
    while text:
        mark = next((m for m in (START, END) if text.startswith(m)), None)
        if mark is None:
            sides[is_inside] += text[0]
        else:
            is_inside = mark == START
        text = text[len(mark or " ") :]
    return sides[True], sides[False]


def test_no_more_is_held_back_than_a_mark_needs() -> None:
    splitter = ReasoningSplitter(START, END)
    assert splitter.split_text("a <").content == "a "
    assert splitter.split_text("b").content == "<b"
    assert splitter.split_text("<think>c</thin").reasoning == "c"
    assert splitter.split_text("g").reasoning == "</thing"


# From tokens


def answer(
    tokenizer: Tokenizer,
    ids: list[int],
    size: int = 1,
    finish_reason: str = "length",
    prompt: str = "q",
    **wishes: Any,
) -> TextOutput:
    """All outputs of a request as one, with `size` tokens in each."""
    options = {name: wishes.pop(name) for name in ("included", "streamed") if name in wishes}
    marks = find_marks(tokenizer, "", "")
    assert marks is not None
    thoughts = Thoughts(marks, is_inside=marks.is_open(prompt), **options)
    context = pack_token_ids(tokenizer.encode(prompt, add_special_tokens=False))
    processor = OutputProcessor(
        tokenizer, SamplingParams(max_tokens=99, **wishes), context, thoughts
    )
    whole = TextOutput()
    for at in range(0, len(ids), size):
        is_last = at + size >= len(ids)
        output = TokenOutput("r", ids[at : at + size], finish_reason if is_last else None)
        part = processor.process(output)
        whole.text += part.text
        whole.reasoning += part.reasoning
        whole.num_reasoning_tokens += part.num_reasoning_tokens
        whole.token_ids += part.token_ids
        whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
        if part.finish_reason is not None:
            break
    return whole


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("special", [False, True])
def test_marks_are_found_whether_or_not_they_are_special(special: bool, size: int) -> None:
    """Special tokens stay out of the text as ever; marks among them are seen all the same."""
    tokenizer = with_tokens(special=special)
    ids = [257, *ids_of(tokenizer, "a é漢"), 258, 256, *ids_of(tokenizer, "b\n")]
    found = answer(tokenizer, ids, size)
    assert (found.reasoning, found.text) == ("a é漢", "b\n")
    assert found.num_reasoning_tokens == len(ids_of(tokenizer, "a é漢"))
    assert found.token_ids == ids
    shown = answer(tokenizer, ids, size, skip_special_tokens=False)
    assert (shown.reasoning, shown.text) == ("a é漢", "<end>b\n")


def test_a_mark_of_another_spelling_is_found_too() -> None:
    tokenizer = with_tokens(special=False)
    letters = [i for letter in "x</think>y" for i in ids_of(tokenizer, letter)]
    found = answer(tokenizer, [257, *letters])
    assert (found.reasoning, found.text) == ("x", "y")


@pytest.mark.parametrize("size", [1, 2, 50])
@pytest.mark.parametrize(
    ("stop", "include", "reasoning", "content"),
    [
        ("think>", False, "ab</", ""),  # it cuts the mark
        ("k>x", False, "ab</thin", ""),
        ("</think>", False, "ab", ""),
        ("</think>", True, "ab", ""),
        ("b", False, "a", ""),  # in the thought
        ("y", False, "ab", "x"),
        ("y", True, "ab", "xy"),
        ("zz", False, "ab", "xyb"),
    ],
)
def test_stop_strings(stop: str, include: bool, reasoning: str, content: str, size: int) -> None:
    """They are looked for in the whole text; no part of a mark that one cuts gets into content."""
    tokenizer = with_tokens(special=False)
    ids = [*ids_of(tokenizer, "ab"), 258, *ids_of(tokenizer, "xyb")]
    found = answer(
        tokenizer, ids, size, prompt="q<think>", stop=stop, include_stop_str_in_output=include
    )
    assert (found.reasoning, found.text) == (reasoning, content)
    assert found.finish_reason == ("length" if stop == "zz" else "stop")


def test_thoughts_that_are_left_out_or_held_until_they_end() -> None:
    tokenizer = with_tokens(special=False)
    ids = [257, *ids_of(tokenizer, "ab"), 258, *ids_of(tokenizer, "c")]
    found = answer(tokenizer, ids, included=False)
    assert (found.reasoning, found.text, found.num_reasoning_tokens) == ("", "c", 2)
    marks = find_marks(tokenizer, "", "")
    assert marks is not None
    thoughts = Thoughts(marks, is_inside=True, streamed=False)
    assert thoughts.split("ab", is_last=False) == ("", "")
    assert thoughts.split("c</think>d", is_last=False) == ("abc", "d")
    assert thoughts.split("e<think>f", is_last=False) == ("", "e")
    assert thoughts.split("g", is_last=True) == ("fg", "")


def test_a_text_without_marks_is_what_it_is_without_thoughts() -> None:
    tokenizer = byte_level()
    tokenizer._fast.add_tokens([START, END])
    ids = ids_of(tokenizer, "Zwölf 🙂 漢字\n\n<b> </b")
    plain = OutputProcessor(tokenizer, SamplingParams(max_tokens=99))
    text = plain.process(TokenOutput("r", ids, "length")).text
    found = answer(tokenizer, ids)
    assert (found.text, found.reasoning, found.num_reasoning_tokens) == (text, "", 0)
