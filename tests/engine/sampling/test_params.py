# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters as a person gives them: other types are refused by name, never misread."""

from __future__ import annotations

from typing import Any

import pytest

from stratakv.engine.sampling_params import SamplingParams


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
    ],
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
