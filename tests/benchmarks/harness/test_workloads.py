# SPDX-License-Identifier: Apache-2.0
"""Classes of work: the same for the same seed, of the sizes they claim, sharing what they claim."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from stratakv.benchmarks.harness import workloads
from stratakv.benchmarks.harness.workloads import (
    WORKLOADS,
    ChatSession,
    PromptSession,
    make_sessions,
)
from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.text.tokenizer import Tokenizer

BLOCK = 16


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(EMBEDDED_MODEL)


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


@cache
def sessions(name: str, count: int = 24, seed: int = 0) -> Any:
    return make_sessions(name, encode, tokenizer().decode, count, seed)


def prompts(name: str) -> list[list[int]]:
    return [session.token_ids for session in sessions(name)]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_decides_everything(name: str) -> None:
    made = sessions(name)
    assert sum(session.num_turns for session in made) == 24
    assert make_sessions(name, encode, tokenizer().decode, 24, 0) == made
    assert make_sessions(name, encode, tokenizer().decode, 24, 1) != made


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_fit(name: str) -> None:
    longest_answer = tokenizer().decode(encode("x ") * 128)
    for session in sessions(name):
        body = session.body([longest_answer] * (session.num_turns - 1))
        texts = [message["content"] for message in body.get("messages", ())]
        # Four tokens for the role and the end of each message, by the embedded model's template.
        size = sum(len(encode(text)) + 4 for text in texts) or len(body["prompt"])
        assert 0 < size <= workloads.LONGEST_PROMPT_TOKENS


def test_unique_prompts_share_no_first_block() -> None:
    assert len({tuple(prompt[:BLOCK]) for prompt in prompts("unique")}) == 24


def test_documents_are_few_and_the_first_is_asked_about_most() -> None:
    asked = [tuple(prompt[: workloads.DOCUMENT_TOKENS]) for prompt in prompts("documents")]
    counts = sorted((asked.count(document) for document in set(asked)), reverse=True)
    assert 1 < len(counts) <= workloads.DOCUMENTS
    assert counts[0] > 24 / workloads.DOCUMENTS
    assert len(set(map(tuple, prompts("documents")))) == 24, "but each question is another one"


def test_code_comes_after_one_of_a_few_sets_of_examples() -> None:
    heads = {tuple(prompt[: workloads.EXAMPLE_TOKENS]) for prompt in prompts("few-shot-code")}
    assert 1 < len(heads) <= workloads.EXAMPLE_SETS
    assert len(set(map(tuple, prompts("few-shot-code")))) == 24


def test_chats_share_one_long_system_prompt() -> None:
    made = sessions("chat-system-prompt")
    assert all(isinstance(session, ChatSession) for session in made)
    [system] = {session.system for session in made}
    assert len(encode(system)) > 0.95 * workloads.CHAT_SYSTEM_TOKENS
    assert len({session.questions[0] for session in made}) == 24


def test_a_turn_repeats_all_that_was_said() -> None:
    session = ChatSession("be brief", ["one?", "two?", "three?"])
    assert session.num_turns == 3
    first = session.body([])["messages"]
    third = session.body(["1", "2"])["messages"]
    assert [message["role"] for message in first] == ["system", "user"]
    assert [message["content"] for message in third] == [
        "be brief", "one?", "1", "two?", "2", "three?",
    ]  # fmt: skip
    assert len({session.system for session in sessions("multi-turn")}) == 6


def test_a_prompt_of_ids() -> None:
    assert PromptSession([1, 2]).body([]) == {"prompt": [1, 2]}
