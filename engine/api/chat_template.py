# SPDX-License-Identifier: Apache-2.0
"""`ChatTemplate`: the chat template of a model, which converts a conversation to one prompt text.

Templates come from model repositories, so templates are treated as untrusted code. Jinja's sandbox,
without access to Python's internals, compiles and renders templates in a separate process with
limits on time and memory. The length of a template's source and output, and the number of
renderings at once, are limited too."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from ...tiers.settings.values import MIB, ConfigError
from .openai.templates.sandbox import TemplateRefused
from .openai.templates.template_probe import TemplateProbe
from .openai.templates.template_process import Asking, Broken, Limits

MAX_TEMPLATE_CHARACTERS = 1 * MIB
MAX_CONFIG_BYTES = 64 * MIB
MAX_CONCURRENT_RENDERINGS = 4
MAX_NAMED_TEMPLATES = 64
COMPILE_SECONDS = 10.0  # limit of the processor time for compiling a template
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
SPECIAL_TOKENS = (
    "bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token",
)  # fmt: skip
# The two names of templates, from transformers, that the server uses.
DEFAULT, TOOL_USE = "default", "tool_use"
# Variables of templates that the server sets, and that a client may not set.
RESERVED_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", *SPECIAL_TOKENS}
)

_NO_VARIABLES: Mapping[str, object] = MappingProxyType({})


class SpecialTokens(Protocol):
    """The attributes of a tokenizer that templates need."""

    @property
    def chat_template(self) -> str | None: ...

    def special_token(self, name: str) -> str | None: ...


class ChatTemplate:
    """A compiled chat template. Raises ConfigError for an invalid template. `tool_use` is the
    source of the model's second template, for conversations that offer tools."""

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
        self._key = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()
        try:
            Asking(self._key, source, None, Limits(COMPILE_SECONDS, 0)).run()
        except (Broken, TemplateRefused) as error:
            raise ConfigError(
                f"the chat template in {origin} cannot be compiled ({error}); correct it or "
                "take the model's own one"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"the chat template in {origin} cannot be tried: {error}; see to it that this user "
                "may start processes"
            ) from error
        self.source = source
        self.probe = TemplateProbe(source)
        self._special_tokens = dict(special_tokens)
        sources = [source] if tool_use is None else [source, tool_use]
        whole = json.dumps([*sources, self._special_tokens], sort_keys=True)
        self.digest = hashlib.sha256(whole.encode()).hexdigest()  # equal digests: equal prompts
        self._running = asyncio.Semaphore(MAX_CONCURRENT_RENDERINGS)
        self._tool_use = None
        if tool_use is not None:
            self._tool_use = ChatTemplate(tool_use, special_tokens, f"{origin} ({TOOL_USE})")

    @classmethod
    def load(cls, model_path: Path, tokenizer: SpecialTokens) -> ChatTemplate | None:
        """Return the template in a Hugging Face directory: from `chat_template.jinja`, else from
        `tokenizer_config.json`; None if neither file has a template. The template named `tool_use`
        is in `additional_chat_templates/`, or in a list in `tokenizer_config.json`."""
        sources, origin = _sources_in(model_path, tokenizer)
        if DEFAULT not in sources:
            return None
        return cls(sources[DEFAULT], _texts_of(tokenizer), origin, sources.get(TOOL_USE))

    @classmethod
    def read(cls, path: Path, tokenizer: SpecialTokens) -> ChatTemplate:
        """Return the template in a file, for use instead of the model's own. Raises ConfigError."""
        return cls.from_source(read_template(path), tokenizer, str(path))

    @classmethod
    def from_source(cls, source: str, tokenizer: SpecialTokens, origin: str) -> ChatTemplate:
        return cls(source, _texts_of(tokenizer), origin)

    def for_tools(self, tools: Sequence[object] | None) -> ChatTemplate:
        return self if self._tool_use is None or not tools else self._tool_use

    @property
    def tools_source(self) -> str:
        """The source of the template for conversations with tools; it shows the form of calls."""
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
        """Return the rendered prompt text. `variables` are plain JSON values for the template,
        without names in RESERVED_VARIABLES; `tools` are in the form of OpenAI's API. Raises
        TemplateRefused if the template refuses the conversation (with the template's message, if
        any), if rendering takes too long, or if the output is too long."""
        context = {
            **variables,
            **self._special_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": None,
        }

        limits = Limits(timeout_seconds, max_characters)
        asking = Asking(self._key, self.source, context, limits)
        async with self._running:
            try:
                return await asyncio.to_thread(asking.run)
            except asyncio.CancelledError:
                asking.cancel()
                raise
            except OSError as error:
                raise TemplateRefused(f"the chat template was not rendered: {error}") from None


def read_template(path: Path) -> str:
    """Return the source in a file. Raises ConfigError if the file is unreadable or too long."""
    return _read_text(path, 4 * MAX_TEMPLATE_CHARACTERS)


def _texts_of(tokenizer: SpecialTokens) -> dict[str, str]:
    found = {name: tokenizer.special_token(name) for name in SPECIAL_TOKENS}
    return {name: text for name, text in found.items() if text}


def _sources_in(model_path: Path, tokenizer: SpecialTokens) -> tuple[dict[str, str], str]:
    """Return the templates of a directory by name, and the path of the default template. As in
    transformers, template files take precedence over `tokenizer_config.json`."""
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
    """Return the named templates in a configuration file, which has a list or map of templates."""
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
