# SPDX-License-Identifier: Apache-2.0
"""The chat template of a model: a conversation becomes one prompt text.

Templates come with the model from elsewhere, so they are treated as hostile: rendered in Jinja's
sandbox without access to Python's internals, limited in source and output size, in the size of
products and powers, in time, and in how many run at once. What is not limited is the memory that a
template's own string concatenations take before the time is up.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ....tiers.settings.values import MIB, ConfigError

T = TypeVar("T")

MAX_WAIT = 10
LEAST_WAIT_SECONDS = 0.01


class Interrupted(BaseException):
    """Raised inside the function. Not an Exception, so that the function's own handlers, and
    those of the libraries it calls, let it through."""


class _Work(Generic[T]):
    """The function in its thread, and the future that waits for it."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[T] = self._loop.create_future()
        # One thread each: an interruption that comes late hits nothing but this thread's end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def processor_seconds(self) -> float:
        """What the function has used until now; 0 once its thread is gone."""
        try:
            text = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
        except OSError:
            return 0.0
        # Behind the name in parentheses, which may hold anything, the 12th and 13th field.
        ticks = sum(map(int, text.rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def interrupt(self) -> None:
        if self._thread.is_alive() and self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(Interrupted)
            )

    def _run(self) -> None:
        try:
            self._finish()
        except (RuntimeError, Interrupted):
            return  # the loop is closed, or the time is up: nobody waits any more

    def _finish(self) -> None:
        try:
            value = self._function()
        except Exception as error:  # noqa: BLE001 - handed to the waiting side, whatever it is
            self._tell(self.result.set_exception, error)
        else:
            self._tell(self.result.set_result, value)

    def _tell(self, setter: Callable[..., None], value: object) -> None:
        def deliver() -> None:
            if not self.result.done():
                setter(value)

        self._loop.call_soon_threadsafe(deliver)


async def run_interruptible(function: Callable[[], T], seconds: float, name: str) -> T:
    """The function's result, or what it raised. TimeoutError once it has used `seconds` of a
    processor, so that a busy machine refuses nobody, or after `MAX_WAIT` times as long by the
    clock. The function, which runs in a thread of its own, is interrupted then, and also when the
    waiting task is cancelled.

    Python cannot kill a thread, but it can raise an exception in one between two bytecodes. That
    ends any loop written in Python, which is what a hostile chat template is made of; a single call
    into C runs to its end first.
    """
    work = _Work(function, name)
    give_up = time.monotonic() + MAX_WAIT * seconds
    try:
        while True:
            left = min(seconds - work.processor_seconds(), give_up - time.monotonic())
            if left <= 0 and not work.result.done():
                raise TimeoutError
            # It cannot use more than passes by the clock.
            done, _ = await asyncio.wait((work.result,), timeout=max(left, LEAST_WAIT_SECONDS))
            if done:
                return work.result.result()
    finally:
        if not work.result.done() or work.result.cancelled():
            work.interrupt()


MAX_TEMPLATE_CHARACTERS = 1 * MIB
MAX_CONFIG_BYTES = 64 * MIB
MAX_CONCURRENT_RENDERINGS = 8
MAX_PRODUCT_ITEMS = 1 * MIB  # of a repeated string or list
MAX_POWER_BITS = 4096
MAX_NAMED_TEMPLATES = 64
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
SPECIAL_TOKENS = (
    "bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token",
)  # fmt: skip
# The names that transformers gives templates; those of others are never asked for.
DEFAULT, TOOL_USE = "default", "tool_use"
# Variables that the server sets, and a client may not.
RESERVED_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", *SPECIAL_TOKENS}
)

_NO_VARIABLES: Mapping[str, object] = MappingProxyType({})


class TemplateRefused(ValueError):
    """The template refused this conversation, or was refused for what it did."""


class SpecialTokens(Protocol):
    """The part of a tokenizer that templates need."""

    @property
    def chat_template(self) -> str | None: ...

    def special_token(self, name: str) -> str | None: ...


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - the form that Jinja declares

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


class ChatTemplate:
    """One compiled template. Raises ConfigError where it cannot be compiled. `tool_use` is the
    source of the model's other template, for conversations that offer tools."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str,
        tool_use: str | None = None,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ConfigError(
                f"the chat template in {origin} has {len(source)} characters and at most "
                f"{MAX_TEMPLATE_CHARACTERS} are read; take the model's own one"
            )
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(
                f"the chat template in {origin} cannot be compiled ({error}); correct it or "
                "take the model's own one"
            ) from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        sources = [source] if tool_use is None else [source, tool_use]
        whole = json.dumps([*sources, self._special_tokens], sort_keys=True)
        self.digest = hashlib.sha256(whole.encode()).hexdigest()  # equal where all prompts are
        self._running = asyncio.Semaphore(MAX_CONCURRENT_RENDERINGS)
        self._tool_use = None
        if tool_use is not None:
            self._tool_use = ChatTemplate(tool_use, special_tokens, f"{origin} ({TOOL_USE})")

    @classmethod
    def load(cls, model_path: Path, tokenizer: SpecialTokens) -> ChatTemplate | None:
        """The template of a Hugging Face directory: of `chat_template.jinja`, or else of
        `tokenizer_config.json`; None where it has none. The one named `tool_use` stands in
        `additional_chat_templates/`, or in the list of the configuration."""
        sources, origin = _sources_in(model_path, tokenizer)
        if DEFAULT not in sources:
            return None
        return cls(sources[DEFAULT], _texts_of(tokenizer), origin, sources.get(TOOL_USE))

    @classmethod
    def read(cls, path: Path, tokenizer: SpecialTokens) -> ChatTemplate:
        """The template of a file, in place of the model's own. Raises ConfigError."""
        return cls.of(read_template(path), tokenizer, str(path))

    @classmethod
    def of(cls, source: str, tokenizer: SpecialTokens, origin: str) -> ChatTemplate:
        """The template of this source, with the special tokens of the model."""
        return cls(source, _texts_of(tokenizer), origin)

    def for_tools(self, tools: Sequence[object] | None) -> ChatTemplate:
        """The one that is for a conversation with these tools."""
        return self if self._tool_use is None or not tools else self._tool_use

    @property
    def tools_source(self) -> str:
        """The source of the template that shows how the model calls tools."""
        return self.source if self._tool_use is None else self._tool_use.source

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        max_characters: int,
        timeout_seconds: float,
        variables: Mapping[str, object] = _NO_VARIABLES,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """The prompt text. `variables` are plain JSON values that the template may ask for, none
        of RESERVED_VARIABLES; `tools` are in the form of OpenAI's API. Raises TemplateRefused, with
        the template's own words where it has some, also when the output grows too long or the time
        is up."""
        context = {
            **variables,
            **self._special_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": None,
        }

        def work() -> str:
            return self._render(context, max_characters)

        try:
            async with self._running:
                return await run_interruptible(work, timeout_seconds, "chat-template")
        except TimeoutError:
            raise TemplateRefused(
                f"the chat template took longer than {timeout_seconds:g} seconds and was stopped; "
                "send a shorter conversation"
            ) from None

    def _render(self, context: Mapping[str, object], max_characters: int) -> str:
        parts: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(context):
                size += len(piece)
                if size > max_characters:
                    raise TemplateRefused(
                        f"the chat template made more than {max_characters} characters of this "
                        "conversation; send a shorter one"
                    )
                parts.append(piece)
        except SecurityError as error:
            raise TemplateRefused(
                f"the chat template was refused by its sandbox: {error}"
            ) from error
        except TemplateRefused:
            raise
        except (MemoryError, Exception) as error:
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
    """Plain JSON: Jinja's own filter escapes for HTML, which no model has been trained on."""
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


def read_template(path: Path) -> str:
    """The source in a file. Raises ConfigError where it cannot be one."""
    return _read_text(path, 4 * MAX_TEMPLATE_CHARACTERS)


def _texts_of(tokenizer: SpecialTokens) -> dict[str, str]:
    found = {name: tokenizer.special_token(name) for name in SPECIAL_TOKENS}
    return {name: text for name, text in found.items() if text}


def _sources_in(model_path: Path, tokenizer: SpecialTokens) -> tuple[dict[str, str], str]:
    """The templates of a directory by name, and where they are from. Files go before the
    configuration, as in transformers."""
    path, folder = model_path / TEMPLATE_FILE, model_path / TEMPLATE_FOLDER
    config = model_path / "tokenizer_config.json"
    sources: dict[str, str] = {}
    origin = str(path)
    if path.is_file():
        sources[DEFAULT] = read_template(path)
    elif tokenizer.chat_template is not None:
        sources[DEFAULT], origin = tokenizer.chat_template, str(config)
    else:
        sources, origin = _named(config), str(config)
    more = folder / f"{TOOL_USE}.jinja"
    if more.is_file():
        sources[TOOL_USE] = read_template(more)
    return sources, origin


def _read_text(path: Path, max_bytes: int) -> str:
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ConfigError(
                f"{path} has {size} bytes and at most {max_bytes} are read; take the model's own"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read ({error}); copy it from the model") from error


def _named(path: Path) -> dict[str, str]:
    """The templates where the configuration holds several: a list of them with names, or an
    object."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read_text(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no JSON file ({error}); copy it from the model") from error
    entries = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(entries, list):
        dicts = [each for each in entries[:MAX_NAMED_TEMPLATES] if isinstance(each, dict)]
        entries = {str(each.get("name")): each.get("template") for each in dicts}
    if not isinstance(entries, dict):
        return {}
    return {name: text for name, text in entries.items() if isinstance(text, str)}
