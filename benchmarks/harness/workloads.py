# SPDX-License-Identifier: Apache-2.0
"""Workloads by name, with different shared parts of prompts, and so different cache hits.

    chat-system-prompt  many users, with one question each, after the same long system prompt
    multi-turn          conversations; each turn repeats all earlier turns
    documents           questions about few documents, of which some are much more frequent
    few-shot-code       beginnings of functions, each after one of a few sets of examples
    unique              prompts without shared parts, for the cost of serving without cache hits

A seed determines all prompts. The text of the prompts is the help of Python's standard library,
which every machine with the benchmark has, so nothing is downloaded. Because the help is real prose
and code, lengths of tokens and likelihoods of outputs are as in real use."""

from __future__ import annotations

import importlib
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MODULES = (
    "argparse", "collections", "configparser", "csv", "datetime", "decimal", "difflib", "doctest",
    "email.message", "fractions", "functools", "heapq", "http.client", "inspect", "ipaddress",
    "json", "logging", "mailbox", "optparse", "pathlib", "pdb", "pickletools", "random", "shutil",
    "smtplib", "socket", "statistics", "string", "subprocess", "tarfile", "textwrap", "threading",
    "unittest.mock", "urllib.request", "uuid", "zipfile",
)  # fmt: skip

QUESTIONS = (
    "\nThis part of the library is used to",
    "\nNote that the default value of",
    "\nFor example, the following code",
    "\nChanged in version 3.8: The",
)

Encoder = Callable[[str], list[int]]


def documents(encode: Encoder, count: int, prefix_tokens: int) -> list[list[int]]:
    """Return `count` documents of exactly `prefix_tokens` token ids each. Each document starts with
    its own number, so no two documents share the first block. Raises ValueError if the standard
    library has too little text."""
    tokens: list[int] = []
    texts = _help_texts()
    made: list[list[int]] = []
    for number in range(count):
        head = encode(f"Document {number + 1}.\n\n")
        while len(tokens) < prefix_tokens:
            try:
                tokens.extend(encode(next(texts)))
            except StopIteration:
                raise ValueError(
                    f"the standard library has text for {len(made)} documents of {prefix_tokens} "
                    f"tokens, not for {count}; ask for fewer or shorter ones"
                ) from None
        body = prefix_tokens - len(head)
        made.append(head + tokens[:body])
        del tokens[:body]
    return made


def question(encode: Encoder, index: int, max_tokens: int) -> list[int]:
    """Return the token ids of one question, at most `max_tokens` ids."""
    return encode(QUESTIONS[index % len(QUESTIONS)])[:max_tokens]


def _help_texts() -> Iterator[str]:
    for name in _MODULES:
        module = importlib.import_module(name)
        parts = [f"{name}\n{inspect.getdoc(module) or ''}"]
        for member_name, member in sorted(vars(module).items()):
            if inspect.isclass(member) and member.__module__ == name:
                parts.extend(_class_texts(member_name, member))
            elif inspect.isfunction(member) and member.__doc__:
                parts.append(f"{member_name}: {inspect.getdoc(member)}")
        yield "\n\n".join(parts) + "\n\n"


def _class_texts(name: str, cls: type) -> Iterator[str]:
    # The __doc__ of some classes is no text.
    if isinstance(cls.__doc__, str):
        yield f"class {name}: {inspect.cleandoc(cls.__doc__)}"
    for method_name, method in sorted(vars(cls).items()):
        if inspect.isfunction(method) and method.__doc__:
            yield f"{name}.{method_name}: {inspect.getdoc(method)}"


Decoder = Callable[[Sequence[int]], str]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# Sizes in tokens.
CHAT_SYSTEM_TOKENS = 2048
INSTRUCTION_TOKENS = 256
MESSAGE_TOKENS = (24, 96)
DOCUMENT_TOKENS = 1536
EXAMPLE_TOKENS = 384
FUNCTION_TOKENS = (192, 384)
UNIQUE_TOKENS = (96, 160)

LONGEST_PROMPT_TOKENS = 2560  # of all workloads, if answers stay within the limit
LONGEST_ANSWER_TOKENS = 256
CONTEXT_TOKENS = LONGEST_PROMPT_TOKENS + LONGEST_ANSWER_TOKENS

TURNS = 4
DOCUMENTS = 8
EXAMPLE_SETS = 4

CORPUS_DOCUMENTS, CORPUS_DOCUMENT_TOKENS = 16, 8192


@dataclass(frozen=True, slots=True)
class PromptSession:
    """A prompt of token ids, and the HTTP route for the prompt."""

    token_ids: list[int]
    path: str = COMPLETIONS
    num_turns: int = 1

    def body(self, answers: Sequence[str]) -> dict[str, Any]:
        """Return the JSON fields with the prompt that follows `answers`."""
        return {"prompt": self.token_ids}


@dataclass(frozen=True, slots=True)
class ChatSession:
    """A conversation under a system prompt."""

    system: str
    questions: list[str]
    path: str = CHAT

    @property
    def num_turns(self) -> int:
        return len(self.questions)

    def body(self, answers: Sequence[str]) -> dict[str, Any]:
        messages = [{"role": "system", "content": self.system}]
        for question, answer in zip(self.questions, answers, strict=False):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": self.questions[len(answers)]})
        return {"messages": messages}


Session = PromptSession | ChatSession  # the requests of one user, one after the other


class Text:
    """Random passages of real text."""

    def __init__(self, encode: Encoder, decode: Decoder, rng: random.Random) -> None:
        """Raise ValueError if the standard library has too little text."""
        self.encode, self._decode, self.rng = encode, decode, rng
        made = documents(encode, CORPUS_DOCUMENTS, CORPUS_DOCUMENT_TOKENS)
        self._ids = list(itertools.chain.from_iterable(made))

    def ids(self, least: int, most: int | None = None) -> list[int]:
        """Return the token ids of a random passage: exactly `least` ids, or `least` to `most`."""
        count = self.rng.randint(least, most or least)
        start = self.rng.randrange(len(self._ids) - count)
        return self._ids[start : start + count]

    def message(self, least: int, most: int | None = None) -> str:
        """Return the text of a random passage of exactly `least` tokens, or `least` to `most`.
        Encoded again, the text may have a few tokens more or less."""
        return self._decode(self.ids(least, most))


def _chat_system_prompt(text: Text, count: int) -> list[Session]:
    system = text.message(CHAT_SYSTEM_TOKENS)
    return [ChatSession(system, [text.message(*MESSAGE_TOKENS)]) for _ in range(count)]


def _multi_turn(text: Text, count: int) -> list[Session]:
    # Each conversation has its own instructions, so all hits of a turn come from earlier turns of
    # the same conversation.
    return [
        ChatSession(
            text.message(INSTRUCTION_TOKENS), [text.message(*MESSAGE_TOKENS) for _ in range(TURNS)]
        )
        for _ in range(max(1, count // TURNS))
    ]


def _documents(text: Text, count: int) -> list[Session]:
    library = [text.ids(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    # The n-th most popular document has 1/n as many questions as the first.
    weights = [1 / (rank + 1) for rank in range(DOCUMENTS)]
    return [
        PromptSession(chosen + text.ids(*MESSAGE_TOKENS) + text.encode(text.rng.choice(QUESTIONS)))
        for chosen in text.rng.choices(library, weights, k=count)
    ]


def _few_shot_code(text: Text, count: int) -> list[Session]:
    sets = [text.ids(EXAMPLE_TOKENS) for _ in range(EXAMPLE_SETS)]
    return [PromptSession(text.rng.choice(sets) + text.ids(*FUNCTION_TOKENS)) for _ in range(count)]


def _unique(text: Text, count: int) -> list[Session]:
    return [PromptSession(text.ids(*UNIQUE_TOKENS)) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload. `usual_hit_rate` is the commonly stated share of cached prompt tokens for such
    work, which is shown next to the measured share."""

    usual_hit_rate: float
    sessions: Callable[[Text, int], list[Session]]


WORKLOADS: Mapping[str, Workload] = {
    "chat-system-prompt": Workload(0.92, _chat_system_prompt),
    "multi-turn": Workload(0.78, _multi_turn),
    "documents": Workload(0.65, _documents),
    "few-shot-code": Workload(0.55, _few_shot_code),
    "unique": Workload(0.05, _unique),
}


def make_sessions(
    name: str, encode: Encoder, decode: Decoder, count: int, seed: int
) -> list[Session]:
    """Return sessions with about `count` requests in total, equal for equal arguments. Raises
    ValueError if there is too little text."""
    text = Text(encode, decode, random.Random(f"{name} {seed}"))
    return WORKLOADS[name].sessions(text, count)
