# SPDX-License-Identifier: Apache-2.0
"""What settings are made of: sizes, bounds, choices, and the error that says what was wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping

from . import sizes
from .format import format_value
from .suggestions import did_you_mean

MIB = 1024**2
GIB = 1024**3

_UNITS: Mapping[str, int] = {
    "": 1, "b": 1,
    "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
    "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
}  # fmt: skip
_DEVICE = re.compile(r"cpu|cuda(?::\d{1,3})?")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")

# Far above what any machine can use, and small enough for every table that is made of them.
MAX_SIZE_BYTES = 2**60
MAX_BLOCKS = 2**24
MAX_SEQS = 2**16
MAX_TOKENS = 2**24
MAX_WAITING = 2**24
MAX_THREADS = 1024


class ConfigError(ValueError):
    """A setting that cannot work. The message is one sentence with cause and cure."""


def parse_size(text: str | int, name: str = "size") -> int:
    """Bytes from `512MiB`, `20GiB`, `1.5GB`, `4096`; raises ConfigError naming `name`."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    number, unit = match.groups() if match else ("", "?")
    if unit.lower() not in _UNITS:
        raise ConfigError(
            f"{name} takes a number of bytes with an optional unit such as 512MiB or 20GiB, "
            f"not {format_value(text)}"
        )
    size = float(number) * _UNITS[unit.lower()]
    if size > MAX_SIZE_BYTES:  # also what is too large for a float
        raise ConfigError(f"{name} must be at most {show_size(MAX_SIZE_BYTES)}, not {text[:40]}")
    return int(size)


def show_size(size_bytes: int) -> str:
    """Bytes as a flag takes them, exactly: `512MiB`, or `65537 bytes (64 KiB)` where no short text
    with a unit means so many."""
    if 0 < size_bytes <= MAX_SIZE_BYTES:
        return sizes.show_size(size_bytes)
    return f"{format_value(size_bytes)} bytes"


def check_device(called: str, value: str) -> str:
    """`cpu`, `cuda` or `cuda:1`; raises ConfigError for anything else, several GPUs among it."""
    if _DEVICE.fullmatch(value):
        return value
    if value.startswith("cuda") and ("," in value or "+" in value):
        raise ConfigError(
            f"{called} {format_value(value)} names several GPUs, and an engine computes on one; "
            f"name one, "
            "as cuda:0, and start an engine for each"
        )
    near = did_you_mean(value, ("cpu", "cuda"))
    raise ConfigError(f"{called} takes cpu or cuda (or cuda:1, …), not {format_value(value)}{near}")


def within(name: str, value: int, low: int, high: int) -> None:
    """Raises ConfigError for a number out of bounds, which are within."""
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, not {format_value(value)}")
    if value > high:
        raise ConfigError(f"{name} must be at most {high}, not {format_value(value)}")


def size_within(name: str, value: int, low: int) -> None:
    """As `within`, in bytes."""
    if value < low:
        raise ConfigError(f"{name} must be at least {show_size(low)}, not {show_size(value)}")
    if value > MAX_SIZE_BYTES:
        raise ConfigError(
            f"{name} must be at most {show_size(MAX_SIZE_BYTES)}, not {show_size(value)}"
        )
