# SPDX-License-Identifier: Apache-2.0
"""Every field that reaches the sampler, sent by OpenAI's client library, changes what it should."""

from __future__ import annotations

from typing import Any

import openai
import pytest

HELLO: Any = [{"role": "user", "content": "hello world"}]
IDS = [5, 9, 33, 270, 4, 11, 12, 13]
GREEDY: Any = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def extra(**fields: Any) -> Any:
    """Fields that the library does not know."""
    return {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True, **fields}}


def test_the_greatest_seed_has_a_successor(client: openai.OpenAI) -> None:
    both = client.completions.create(prompt=IDS, n=2, seed=2**63 - 1, max_tokens=8, model="tiny")
    least = client.completions.create(prompt=IDS, seed=-(2**63), max_tokens=8, model="tiny")
    assert both.choices[1].text == least.choices[0].text != both.choices[0].text


def test_a_seed_repeats_and_its_absence_does_not(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> str | None:
        chat = client.chat.completions.create(
            messages=HELLO, max_tokens=16, model="tiny", temperature=1.5, **fields
        )
        return chat.choices[0].message.content

    assert ask(seed=3) == ask(seed=3) != ask(seed=4)
    assert ask() != ask()


def test_logit_bias_forces_and_forbids_a_token(client: openai.OpenAI) -> None:
    free = extra(return_token_ids=True)
    answer = client.completions.create(prompt=IDS, max_tokens=8, **free).choices[0]
    first = (answer.model_extra or {})["token_ids"][0]
    forced = client.completions.create(
        prompt=IDS, max_tokens=8, logit_bias={"77": 100}, **free
    ).choices[0]
    assert (forced.model_extra or {})["token_ids"] == [77] * 8
    banned = client.completions.create(
        prompt=IDS, max_tokens=8, logit_bias={str(first): -100}, **free
    ).choices[0]
    assert first not in (banned.model_extra or {})["token_ids"]


@pytest.mark.parametrize(
    "fields",
    [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0},
     {"extra_body": {"repetition_penalty": 3.0, "ignore_eos": True}}],
    ids=["presence", "frequency", "repetition"],
)  # fmt: skip
def test_penalties_change_an_answer(client: openai.OpenAI, fields: Any) -> None:
    def distinct(**more: Any) -> int:
        whole = {"max_tokens": 60, **GREEDY, "logit_bias": {"77": 5}, **more}
        choice = client.completions.create(prompt=IDS, logprobs=0, **whole).choices[0]
        assert choice.logprobs is not None
        return len(set(choice.logprobs.tokens or []))

    assert distinct(**fields) > distinct()


def test_fields_of_vllm(client: openai.OpenAI) -> None:
    def ids(**fields: Any) -> list[int]:
        body = {"ignore_eos": True, "return_token_ids": True, **fields}
        answer = client.completions.create(
            prompt=IDS, max_tokens=24, temperature=1.0, seed=2, model="tiny", extra_body=body
        )
        return list((answer.choices[0].model_extra or {})["token_ids"])

    greedy = ids(top_k=1)
    assert ids(min_p=1.0) == greedy, "only the likeliest is as likely as itself"
    assert ids(bad_words=["hello", "the quick"], top_k=1) == greedy, "it writes neither"
    assert ids(priority=0, top_k=1, cache_salt="s", spaces_between_special_tokens=True,
               detokenize=True, use_beam_search=False, length_penalty=1.0) == greedy  # fmt: skip
    assert ids() != greedy


def test_a_bad_word_is_not_written(client: openai.OpenAI) -> None:
    fields: Any = {"prompt": IDS, "max_tokens": 12, "logit_bias": {"77": 100}, "logprobs": 0}
    written = client.completions.create(**fields, **GREEDY).choices[0]
    word = written.text[0]
    clean = client.completions.create(**fields, **extra(bad_words=[word])).choices[0]
    assert set(written.text) == {word}
    assert word not in clean.text


def test_fewest_tokens(client: openai.OpenAI) -> None:
    fields: Any = {"prompt": IDS, "max_tokens": 20, "model": "tiny", "temperature": 0}
    ends: Any = {"stop_token_ids": list(range(2, 250)), "min_tokens": 7}
    answer = client.completions.create(**fields, extra_body=ends)
    assert answer.usage is not None
    assert 7 <= answer.usage.completion_tokens < 20
