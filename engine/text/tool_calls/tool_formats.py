# SPDX-License-Identifier: Apache-2.0
"""The choice of the parser for a model's tool calls: a built-in parser by name, a parser of another
package by entry point, or the parser whose format the model's chat template shows.

    [project.entry-points."stratakv.tool_parsers"]
    myform = "mypackage.parser:MyParser"      # a subclass of base.ToolCallParser"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import NamedTuple

from ....tiers.errors import TierConfigError
from ....tiers.registry import find_entry, installed
from ....tiers.settings.suggestions import did_you_mean
from ....tiers.settings.values import ConfigError
from ..reasoning import ReasoningMarks
from ..tokenizer import Tokenizer
from .base import ToolCallParser
from .json_calls import HermesParser, Llama3Parser, MistralParser
from .pythonic import PythonicParser

ENTRY_POINTS = "stratakv.tool_parsers"
FLAG = "--tool-call-parser"
NONE = "none"  # the name with which no calls are searched

# The built-in parsers, by vLLM's names.
PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "llama4_json": Llama3Parser,
    "llama4_pythonic": PythonicParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}

# A parser, texts of which the chat templates of its models have at least one, and texts that occur
# only in templates of another form. The first parser that fits is used.
_SIGNS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("hermes", ("<tool_call>",), ("<function=", "<arg_key>", "<|tool_call>")),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("pythonic", ("func_name1(",), ()),
    ("llama3_json", ("<|python_tag|>", '"parameters": '), ("<tool_call", "<|tool", "<\uff5ctool")),
)


class ToolFormat(NamedTuple):
    """The format of a model's tool calls. `hidden_token_ids` are the special tokens to leave out of
    text that is searched for calls and reasoning; None means all special tokens, as usual."""

    parser: type[ToolCallParser]
    hidden_token_ids: frozenset[int] | None = None


def make_tool_format(
    parser: type[ToolCallParser] | None, tokenizer: Tokenizer | None, marks: ReasoningMarks | None
) -> ToolFormat | None:
    """Return the `ToolFormat` of a parser; None without a parser or a tokenizer."""
    if parser is None or tokenizer is None:
        return None
    special = tokenizer.special_token_ids
    needed = special.intersection(map(tokenizer.token_id, parser.MARKS))
    if not needed:
        return ToolFormat(parser)
    if marks is not None:
        needed |= {*marks.start_token_ids, *marks.end_token_ids}
    return ToolFormat(parser, special - needed)


def find_tool_parser(name: str, template: str | None) -> type[ToolCallParser] | None:
    """Return the parser with this name. If the name is empty, return the parser that fits the
    source of the chat template. Return None if no parser fits, and for the name `none`. Raises
    ConfigError for an unknown name, and for a parser that cannot be loaded."""
    if name == NONE:
        return None
    if not name:
        found = _shown_by(template or "")
        return PARSERS[found] if found else None
    return PARSERS[name] if name in PARSERS else _load(name)


def _shown_by(template: str) -> str:
    if "tools" not in template:
        return ""
    for name, signs, others in _SIGNS:
        if any(sign in template for sign in signs) and not any(sign in template for sign in others):
            return name
    return ""


def _load(name: str) -> type[ToolCallParser]:
    known = sorted({*PARSERS, *installed(ENTRY_POINTS)})
    if name not in known:
        near = did_you_mean(name, known)
        raise ConfigError(
            f"{FLAG} takes {NONE} or {' or '.join(known)}, not {name!r}{near}; a package brings "
            f"others as entry points of the group {ENTRY_POINTS}"
        )
    try:
        point = find_entry(ENTRY_POINTS, "parser of tool calls", name, tuple(PARSERS))
    except TierConfigError as error:
        raise ConfigError(str(error)) from None
    try:
        found = point.load()
    except (Exception, SystemExit) as error:  # foreign code may raise any exception
        raise ConfigError(
            f"{FLAG} {name} ({point.value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, ToolCallParser)):
        raise ConfigError(
            f"{FLAG} {name} ({point.value}) is no subclass of ToolCallParser in "
            "stratakv.engine.text.tool_calls.base"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"{FLAG} {name} ({point.value}) does not define {missing}")
    return found
