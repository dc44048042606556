# SPDX-License-Identifier: Apache-2.0
"""The sandbox that compiles and renders chat templates, with limits on a template's functions and
output. The sandbox runs in a separate process (`template_worker.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_PRODUCT_ITEMS = 1024**2  # limit of the length of a string or list that `*` repeats
MAX_POWER_BITS = 4096


class TemplateRefused(ValueError):
    """A template refused a conversation, or was stopped because it exceeded a limit."""


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks text for training. Its body renders as plain text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares `tags` as a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses to build huge values by `*` and `**`."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check_power(left, right)
        else:
            _check_product(left, right)
            _check_product(right, left)
        return super().call_binop(context, operator, left, right)


def compile_template(source: str) -> jinja2.Template:
    """Compile a template. Raises Jinja's errors for an invalid source."""
    return _environment().from_string(source)


def render_template(
    template: jinja2.Template, context: Mapping[str, object], max_characters: int
) -> str:
    """Return the rendered text. Raises TemplateRefused, with a message of the template if any."""
    parts: list[str] = []
    size = 0
    try:
        for piece in template.generate(context):
            size += len(piece)
            if size > max_characters:
                raise TemplateRefused(
                    f"the chat template made more than {max_characters} characters of this "
                    "conversation; send a shorter one"
                )
            parts.append(piece)
    except SecurityError as error:
        raise TemplateRefused(f"the chat template was refused by its sandbox: {error}") from error
    except (TemplateRefused, MemoryError):
        raise
    except Exception as error:
        raise TemplateRefused(
            f"the chat template refused this conversation: {str(error) or type(error).__name__}"
        ) from error
    return "".join(parts)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the value as plain JSON. Jinja's own `tojson` would escape characters for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _format_now(form: str) -> str:
    return datetime.now(UTC).strftime(form)


def _check_power(base: object, exponent: object) -> None:
    if isinstance(base, int) and isinstance(exponent, int):
        if base.bit_length() * abs(exponent) > MAX_POWER_BITS:
            raise SecurityError("a power with so many digits")


def _check_product(items: object, count: object) -> None:
    if isinstance(items, str | bytes | list | tuple) and isinstance(count, int):
        if len(items) * count > MAX_PRODUCT_ITEMS:
            raise SecurityError("a repetition with so many items")
