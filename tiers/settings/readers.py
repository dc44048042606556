# SPDX-License-Identifier: Apache-2.0
"""Readers convert option values from text, Python, YAML or TOML to the types of the settings.

A reader takes the option's name as the user gave it (`--port`, `STRATAKV_PORT`, `port of x.yaml`)
and the value. A reader converts the value or raises ConfigError. A converted value can be read
again, and is unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from .format import format_value
from .sizes import MAX_SIZE_BYTES, show_size
from .suggestions import did_you_mean
from .values import ConfigError, check_device

Reader = Callable[[str, Any], Any]

_SWITCH = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_UNITS: Mapping[str, int] = {
    "": 1, "b": 1,
    "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
    "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
}  # fmt: skip
# The shortest secret of an HMAC; a shorter one could be found by trying.
MIN_SECRET_BYTES = 16
# The length of Linux's longest path, far more than names and keys have.
MAX_TEXT_CHARACTERS = 4096
# Line breaks, terminal sequences, and bytes of a command line that are no UTF-8, which in a name or
# a path would corrupt the log, the identity of blocks or an answer.
_UNUSABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")


def integer(called: str, value: Any) -> int:
    """Read a whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return int(str(value))
    except ValueError:
        raise ConfigError(f"{called} takes a whole number, not {format_value(value)}") from None


def integer_within(low: int, high: int) -> Callable[[str, Any], int]:
    """Return a reader of whole numbers in [low, high]."""

    def read(called: str, value: Any) -> int:
        try:
            number = integer(called, value)
        except ConfigError:
            number = low - 1
        if not low <= number <= high:
            raise ConfigError(
                f"{called} takes a whole number from {low} to {high}, not {format_value(value)}"
            )
        return number

    return read


def number(called: str, value: Any) -> float:
    """Read a number. Infinity and NaN are accepted here; the settings classes refuse them."""
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value if isinstance(value, int | float) else str(value))
    except (ValueError, OverflowError):
        raise ConfigError(f"{called} takes a number, not {format_value(value)}") from None


def seconds_up_to(most: float) -> Callable[[str, Any], float]:
    """Return a reader of a time in seconds, above 0 and at most `most`."""

    def read(called: str, value: Any) -> float:
        seconds = number(called, value)
        if not 0 < seconds <= most:
            raise ConfigError(
                f"{called} takes seconds above 0 and at most {most:g}, not {format_value(value)}"
            )
        return seconds

    return read


def size(called: str, value: Any) -> int:
    """Read a number of bytes, with or without a unit: `512MiB`, `20GiB`, `1.5GB`, `4096`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(str(value))
    amount, unit = match.groups() if match else ("", "?")
    if unit.lower() not in _UNITS:
        raise ConfigError(
            f"{called} takes a number of bytes with an optional unit such as 512MiB or 20GiB, "
            f"not {format_value(str(value))}"
        )
    size_bytes = float(amount) * _UNITS[unit.lower()]
    if size_bytes > MAX_SIZE_BYTES:  # also True for infinity
        most = show_size(MAX_SIZE_BYTES)
        raise ConfigError(f"{called} must be at most {most}, not {str(value)[:40]}")
    return int(size_bytes)


def switch(called: str, value: Any) -> bool:
    """Read True or False, also as a word: true, yes, on, 1, false, no, off, 0."""
    if isinstance(value, bool):
        return value
    given = word(value)
    if given not in _SWITCH:
        raise ConfigError(
            f"{called} takes true or false (yes, no, on, off, 1, 0), not {format_value(value)}"
        )
    return _SWITCH[given]


def word(value: Any) -> str:
    """Return a value of any type as one word in lower case, for comparisons."""
    return (value if isinstance(value, str) else format_value(value)).strip().lower()


def text(called: str, value: Any) -> str:
    """Read a text: not empty, one line, no control characters, valid UTF-8."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"{called} takes a text that is not empty, not {format_value(value)}{_quote(value)}"
        )
    _check_length(called, value)
    if found := _UNUSABLE.search(value):
        is_half = found[0] >= "\ud800"
        raise ConfigError(
            f"{called} takes one line of UTF-8 without control characters, not "
            f"{format_value(value)}; "
            f"{'some of its bytes are no UTF-8: write it anew' if is_half else 'leave them out'}"
        )
    return value


def path(called: str, value: Any) -> Path:
    """Read a path; `~` is expanded. Raises ConfigError for a text that is no path."""
    place = text(called, str(value) if isinstance(value, Path) else value)
    try:
        return Path(place).expanduser()
    except RuntimeError as error:  # `~name`, and the machine has no user of this name
        raise ConfigError(f"{called} takes a path, not {format_value(place)} ({error})") from error


def hosts(called: str, value: Any) -> tuple[str, ...]:
    """Read host names, separated by commas. Return them in lower case. `*` is any host."""
    names = texts(called, value)
    for name in names:
        if name != "*" and not _HOST.fullmatch(name):
            raise ConfigError(
                f"{called} takes * or names of hosts such as models.example.org (no port, no "
                f"https://), not {format_value(name)}"
            )
    return tuple(name.lower().rstrip(".") for name in names)


def model(called: str, value: Any) -> str:
    """Read a model's path or id, unchanged: `./org/model` is a path, `org/model` may be an id."""
    path(called, value)
    return str(value)


def one_of(*known: str, synonyms: Mapping[str, str] | None = None) -> Callable[[str, Any], str]:
    """Return a reader of one of the `known` words. `synonyms` maps other names to known words."""

    def read(called: str, value: Any) -> str:
        if synonyms and isinstance(value, str):
            value = synonyms.get(value, value)
        if not isinstance(value, str) or value not in known:
            near = did_you_mean(word(value), known)
            raise ConfigError(
                f"{called} takes {' or '.join(known)}, not {format_value(value)}{near}"
            )
        return str(value)

    return read


def one_of_these_or(known: Collection[str], all_known: Callable[[], list[str]]) -> Reader:
    """Return a reader of a word that is in `known` or else in the result of `all_known`."""

    def read(called: str, value: Any) -> str:
        if isinstance(value, str) and value in known:
            return value
        return one_of(*all_known())(called, value)

    return read


def device(called: str, value: Any) -> str:
    return check_device(called, text(called, value))


def tiers(called: str, value: Any) -> tuple[str, ...]:
    """Read tier names, separated by commas or in a list. The caller checks names and order."""
    names = value.split(",") if isinstance(value, str) else value
    is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not is_list or value == "":
        raise ConfigError(f"{called} takes cpu or cpu,ssd, not {format_value(value)}")
    stripped = tuple(name.strip() for name in names)
    return () if stripped == ("none",) else stripped


def tier_options(called: str, value: Any) -> dict[str, dict[str, str]]:
    """Read `tier.option=value,…` into a dict tier → option → value. A dict is accepted too."""
    if isinstance(value, Mapping):
        if not all(isinstance(options, Mapping) for options in value.values()):
            raise ConfigError(f"{called} takes options by tier, not {format_value(value)}")
        return {
            tier: {str(name): text(f"{called}, {tier}.{name}", str(v)) for name, v in of.items()}
            for tier, of in value.items()
        }
    result: dict[str, dict[str, str]] = {}
    for item in text(called, value).split(","):
        name, equals, given = item.partition("=")
        tier, dot, option = name.strip().partition(".")
        if not (tier and dot and option and equals):
            raise ConfigError(f"{called} takes tier.option=value,…, not {format_value(item)}")
        result.setdefault(tier, {})[option] = text(f"{called}, {tier}.{option}", given.strip())
    return result


def texts(called: str, value: Any) -> tuple[str, ...]:
    """Read several texts: a list, a JSON list as vLLM takes, or texts separated by commas."""
    items = value
    if isinstance(value, str):
        try:
            items = json.loads(value) if value.strip().startswith("[") else value.split(",")
        except ValueError as error:
            raise ConfigError(
                f"{called} takes texts with commas between, or a list in JSON, not "
                f"{format_value(value)} "
                f"({error})"
            ) from error
    if not isinstance(items, list | tuple) or not items:
        raise ConfigError(f"{called} takes one text or several, not {format_value(value)}")
    return tuple(text(called, item).strip() for item in items)


def api_key(called: str, value: Any) -> str:
    """Read an API key that fits in an HTTP header. No message contains the key."""
    _check_secret(called, value)
    _check_length(called, value)
    if not (value.isascii() and value.isprintable()) or " " in value:
        raise ConfigError(
            f"{called} holds a space, a line break or a letter beyond ASCII, which clients cannot "
            "send in a header; choose another key"
        )
    return str(value)


def secret_bytes(called: str, value: Any) -> bytes:
    """Read a secret for HMAC and return bytes. No message contains the secret."""
    if not isinstance(value, bytes):
        _check_secret(called, value)
        value = value.encode("utf-8", "surrogateescape")
    _check_length(called, value)
    if len(value) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{called} has {len(value)} bytes and {MIN_SECRET_BYTES} are the least that cannot be "
            "guessed; make one with `openssl rand -hex 32`"
        )
    return bytes(value)


def _check_secret(called: str, value: Any) -> None:
    if not isinstance(value, str):
        kind = type(value).__name__
        raise ConfigError(f"{called} takes a text, not a value of type {kind}; put it in quotes")
    if not value.strip():
        raise ConfigError(f"{called} is empty; give a key, or leave the option out")


def _check_length(called: str, value: str | bytes) -> None:
    if len(value) > MAX_TEXT_CHARACTERS:
        raise ConfigError(
            f"{called} takes up to {MAX_TEXT_CHARACTERS} characters, not {len(value)}; choose a "
            "shorter one"
        )


def _quote(value: Any) -> str:
    """Return the message for a value that YAML or TOML parsed as a number, a date or a boolean."""
    return "" if value is None or isinstance(value, str | list | dict) else "; put it in quotes"
