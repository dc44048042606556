# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters as a person gives them: other types are refused by name, never misread."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest

from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.tiers.settings.format import format_value


class Choice(IntEnum):
    SOME = 5


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_tokens", "5", "a whole number, got '5'"),
        ("max_tokens", 5.5, "a whole number, got 5.5"),
        ("max_tokens", True, "a whole number, got True"),
        ("max_tokens", None, "a whole number, got None"),
        ("max_tokens", 0, "at least 1, got 0"),
        ("min_tokens", None, "a whole number"),
        ("min_tokens", 17, "between 0 and max_tokens, got 17"),
        ("temperature", "hot", "a number, got 'hot'"),
        ("temperature", None, "a number, got None"),
        ("temperature", float("nan"), "between 0 and 100, got nan"),
        ("temperature", 10**400, "between 0 and 100"),
        ("top_p", None, "a number, got None"),
        ("top_p", 2, "above 0 and at most 1, got 2"),
        ("top_k", 1.5, "a whole number, got 1.5"),
        ("top_k", -5, "-1, 0 or a positive count"),
        ("seed", 1.5, "a whole number or None, got 1.5"),
        ("seed", 2**63, "a 64-bit integer"),
        ("stop", 5, "a list, got 5"),
        ("stop", [5], "a string or a list of them, got 5"),
        ("stop", "", "1 to 1024 characters"),
        ("stop", ["x"] * 17, "at most 16 strings, got 17"),
        ("stop_token_ids", 5, "a list, got 5"),
        ("stop_token_ids", ["a"], "a list of token ids, got 'a' in it"),
        ("ignore_eos", "yes", "True or False, got 'yes'"),
        ("skip_reading_prefix_cache", 1, "True or False, got 1"),
        ("min_p", 1.5, "between 0 and 1, got 1.5"),
        ("min_p", None, "a number, got None"),
        ("repetition_penalty", 0.0, "above 0 and at most 100, got 0.0"),
        ("repetition_penalty", float("nan"), "above 0 and at most 100, got nan"),
        ("presence_penalty", 2.5, "between -2 and 2, got 2.5"),
        ("frequency_penalty", "much", "a number, got 'much'"),
        ("logit_bias", 5, "a map of token ids to numbers, got 5"),
        ("logit_bias", [5], "a map of token ids to numbers, got [5]"),
        ("logit_bias", {5: 101.0}, "between -100 and 100, got 101.0 for 5"),
        ("logit_bias", {5: float("nan")}, "between -100 and 100, got nan for 5"),
        ("logit_bias", {"5": 1.0}, "token ids with numbers between -100 and 100, got 1.0 for '5'"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "at most 1024 token ids, got 1025"),
        ("bad_words", ["x"] * 129, "at most 128 strings, got 129"),
        ("bad_words", [""], "strings of 1 to 128 characters, got one of 0"),
        ("bad_words_token_ids", [5], "lists of token ids, got 5 in it"),
        ("bad_words_token_ids", [[1], []], "lists of 1 to 64 token ids, got one of 0"),
        ("bad_words_token_ids", [["a"]], "lists of token ids, got ['a'] in it"),
        ("bad_words_token_ids", [[1]] * 257, "at most 256 lists, got 257"),
        ("logprobs", -1, "between 0 and 20, got -1"),
        ("logprobs", True, "a whole number or None, got True"),
        ("prompt_logprobs", 21, "between 0 and 20, got 21"),
        ("max_tokens", 2**63, "a 64-bit integer"),
        ("seed", 10**5000, "a 64-bit integer, got a value of type int too long to show"),
        ("top_k", [10**5000], "a whole number, got a value of type list too long to show"),
        ("temperature", 1j, "a number, got 1j"),
        ("stop", "\ud800", r"valid Unicode, got '\ud800'"),
        ("bad_words", ["\ud800"], r"valid Unicode, got '\ud800'"),
        ("stop_token_ids", [2**31], "a list of token ids, got 2147483648 in it"),
        ("stop_token_ids", np.array([1]), "a list, got array([1])"),
        ("bad_words_token_ids", [[2**31]], "lists of token ids, got [2147483648] in it"),
        ("logit_bias", {2**31: 1.0}, "got 1.0 for 2147483648"),
        ("logit_bias", {5: 10**5000}, "got a value of type int too long to show for 5"),
        ("ignore_eos", np.True_, "True or False"),
    ],
    ids=format_value,
)
def test_what_cannot_be(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match="must be") as refusal:
        SamplingParams(**{name: value})
    assert str(refusal.value).startswith(f"{name} must be ")
    assert words in str(refusal.value)


def test_one_stop_string_is_not_its_letters() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]


def test_lists_become_tuples() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[5])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (5,))
    assert hash(params) == hash(SamplingParams(stop=("a", "b"), stop_token_ids=(5,)))


def test_numbers_and_texts_of_other_kinds_become_pythons() -> None:
    """Others cannot travel to the core."""
    given: dict[str, Any] = {
        "temperature": np.float32(0.5), "top_k": np.int64(5), "seed": np.uint64(7),
        "stop": np.str_("ab"), "stop_token_ids": [np.int32(5)],
        "logit_bias": {np.int64(5): np.float64(1.5)}, "bad_words_token_ids": [[np.int64(5)]],
        "logprobs": np.int8(2), "max_tokens": Choice.SOME,
    }  # fmt: skip
    params = SamplingParams(**given)
    plain = SamplingParams(
        temperature=0.5, top_k=5, seed=7, stop=("ab",), stop_token_ids=(5,), max_tokens=5,
        logit_bias=((5, 1.5),), bad_words_token_ids=((5,),), logprobs=2,
    )  # fmt: skip
    assert params == plain
    assert msgspec.msgpack.encode(params) == msgspec.msgpack.encode(plain)


def test_maps_and_lists_of_lists_become_tuples() -> None:
    given: dict[str, Any] = {"logit_bias": {3: 1.5, 4: -2}, "bad_words_token_ids": [[1, 2], [3]]}
    params = SamplingParams(**given)
    assert params.logit_bias == ((3, 1.5), (4, -2))
    assert params.bad_words_token_ids == ((1, 2), (3,))
    assert hash(params) == hash(SamplingParams(**given))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (5, "a map of texts to plain values, got 5"),
        ("a=1", "a map of texts to plain values, got 'a=1'"),
        ({1: 2}, "a map with texts for keys, got the key 1"),
        ({"a": {2: 3}}, "a map with texts for keys, got the key 2"),
        ({"a": b"bytes"}, "plain values of JSON, got b'bytes' in it"),
        ({"a": [object]}, "plain values of JSON, got <class 'object'> in it"),
        ({"a": {1, 2}}, "plain values of JSON, got {1, 2} in it"),
        ({"a": float("nan")}, "finite numbers, integers of 64 bits, got nan in it"),
        ({"a": 2**64}, "finite numbers, integers of 64 bits"),
        ({"a": "\ud800"}, "valid Unicode"),
        ({"a" * 20_000: 1}, "at most 16384 bytes as JSON, got 20006"),
        ({"a": ["x" * 1000] * 17}, "at most 16384 bytes as JSON"),
    ],
)
def test_extra_args_are_plain_and_small(value, words):
    with pytest.raises(ValueError, match=r"^extra_args must be ") as raised:
        SamplingParams(extra_args=value)
    assert words in str(raised.value)


def test_extra_args_that_hold_themselves_are_refused():
    args: dict[str, Any] = {}
    args["again"] = args
    with pytest.raises(ValueError, match="extra_args must be nested at most 8 deep"):
        SamplingParams(extra_args=args)


def test_extra_args_are_copied_and_travel():
    given = {"words": ("a", np.float32(0.5)), "deep": {"list": [1, None, True, -(2**63)]}}
    params = SamplingParams(extra_args=given)
    plain = {"words": ["a", 0.5], "deep": {"list": [1, None, True, -(2**63)]}}
    given["deep"]["list"].append("later")  # type: ignore[index]
    assert params.extra_args == plain
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params
