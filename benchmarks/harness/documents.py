# SPDX-License-Identifier: Apache-2.0
"""Long documents to ask questions about: the help texts of Python's standard library.

Every machine that runs the benchmark has them, they are real prose and code, and nothing has to be
downloaded.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator

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
    """`count` different documents of exactly `prefix_tokens` token ids each.

    Each starts with its own number, so no two share a first block. Raises ValueError where the
    standard library has too little text.
    """
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
    """The token ids of one question, at most `max_tokens` of them."""
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
    # A class may keep something else than text under __doc__.
    if isinstance(cls.__doc__, str):
        yield f"class {name}: {inspect.cleandoc(cls.__doc__)}"
    for method_name, method in sorted(vars(cls).items()):
        if inspect.isfunction(method) and method.__doc__:
            yield f"{name}.{method_name}: {inspect.getdoc(method)}"
