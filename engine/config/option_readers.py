# SPDX-License-Identifier: Apache-2.0
"""Functions that read values of options, in addition to the module `tiers/settings/readers.py`."""

from __future__ import annotations

import re
import sys
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.values import ConfigError

MAX_PORT = 65535
ANY = "*"  # stands for any origin, method or header
_MAX_MARK_CHARACTERS = 256
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # names of HTTP methods and headers
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
_MOST_SECONDS = 3600
_MEDIA_HOST = re.compile(
    r"(?P<host>[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9])?)\.?(?::(?P<port>[0-9]{1,5}))?"
)


def model_mark(called: str, value: Any) -> str:
    """Read the start or end mark of a model's thoughts, a text that may have line breaks."""
    text = value if isinstance(value, str) else ""
    lines = readers.text(called, text.replace("\n", " ").replace("\r", " "))
    if len(lines) > _MAX_MARK_CHARACTERS:
        raise ConfigError(
            f"{called} takes a text of up to {_MAX_MARK_CHARACTERS} characters, not {len(lines)}"
        )
    return text


def processor_names(called: str, value: Any) -> tuple[str, ...]:
    """Read logits processors: `module:Class` with commas between, or a list of names or classes."""
    items = value if isinstance(value, list | tuple) else [] if value is None else [value]
    names: list[str] = []
    for item in items:
        if isinstance(item, type):
            names.append(_importable(called, item))
        elif not isinstance(item, str):
            raise ConfigError(f"{called} takes module:Class or classes, not {format_value(item)}")
        elif item.strip():
            names.extend(readers.texts(called, item))
    for name in names:
        module, _, path = name.partition(":")
        parts = [*module.split("."), *path.split(".")]
        if not all(part.isidentifier() for part in parts):
            raise ConfigError(
                f"{called} takes module:Class, such as mypackage.processors:NoRepeat, not "
                f"{format_value(name)}"
            )
    return tuple(names)


def _importable(called: str, kind: type) -> str:
    """Return the name by which another process can import the class. Raises ConfigError."""
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        raise ConfigError(
            f"{called} holds {kind.__module__}.{kind.__qualname__}, which cannot be found by that "
            "name; define the class at the top of a module"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def generation_config(called: str, value: Any) -> str:
    """Read `auto` or `none`. vLLM's value `vllm` is read as `none`."""
    return readers.one_of("auto", "none")(called, "none" if value == "vllm" else value)


def origins(called: str, value: Any) -> tuple[str, ...]:
    """Read web origins in the form of browsers' Origin header, which has no path."""
    names = readers.texts(called, value)
    for origin in names:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{called} takes * or origins such as https://example.org or http://localhost:3000 "
                f"(no path, no slash at the end), not {format_value(origin)}"
            )
    return names


def media_domains(called: str, value: Any) -> tuple[str, ...]:
    """Read hosts, each with or without `:port`, and return the hosts' names as DNS spells them."""
    return tuple(_media_domain(called, name) for name in readers.texts(called, value))


def _media_domain(called: str, name: str) -> str:
    try:
        ascii_name = name if name.isascii() else name.encode("idna").decode("ascii")
    except UnicodeError:
        ascii_name = ""
    found = _MEDIA_HOST.fullmatch(ascii_name.lower())
    port = int(found["port"] or 0) if found else 0
    is_port = found is not None and (found["port"] is None or 0 < port <= MAX_PORT)
    if found is None or not is_port or ".." in found["host"]:
        raise ConfigError(
            f"{called} takes hosts such as pictures.example.org or pictures.example.org:8443 (no "
            f"https://, no path, no *), not {format_value(name)}"
        )
    return found["host"] if port in (0, 443) else f"{found['host']}:{port}"


def http_tokens(called: str, value: Any) -> tuple[str, ...]:
    """Read names of methods or headers, separated by commas or as a list."""
    tokens = readers.texts(called, value)
    for token in tokens:
        if not _TOKEN.fullmatch(token):
            raise ConfigError(
                f"{called} takes * or names with commas between, not {format_value(token)}"
            )
    return tokens


def http_header(called: str, value: Any) -> str:
    """Read the name of a header, and return it in lower case."""
    name = readers.text(called, value).lower()
    if not _TOKEN.fullmatch(name):
        raise ConfigError(
            f"{called} takes the name of a header such as X-Tenant, not {format_value(value)}"
        )
    return name


def http_methods(called: str, value: Any) -> tuple[str, ...]:
    """Read HTTP methods, separated by commas or as a list, and return them in upper case."""
    return tuple(method.upper() for method in http_tokens(called, value))


def seconds_from_zero(called: str, value: Any) -> float:
    """Read a number of seconds from 0 to an hour."""
    seconds: float = readers.number(called, value)
    if not 0 <= seconds <= _MOST_SECONDS:
        raise ConfigError(f"{called} takes seconds from 0 to {_MOST_SECONDS}, not {seconds}")
    return seconds
