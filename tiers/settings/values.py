# SPDX-License-Identifier: Apache-2.0
"""What settings are made of: sizes, bounds, choices, and the error that says what was wrong."""

from __future__ import annotations

import re

from .format import format_value
from .sizes import MAX_SIZE_BYTES, show_size
from .suggestions import did_you_mean

MIB = 1024**2
GIB = 1024**3

_DEVICE = re.compile(r"cpu|cuda(?::\d{1,3})?")

# Far above what any machine can use, and small enough for every table that is made of them.
MAX_BLOCKS = 2**24
MAX_SEQS = 2**16
MAX_TOKENS = 2**24
MAX_WAITING = 2**24
MAX_THREADS = 1024


class ConfigError(ValueError):
    """A setting that cannot work. The message is one sentence with cause and cure."""


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
