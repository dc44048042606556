# SPDX-License-Identifier: Apache-2.0
"""Checks of setting values (sizes, bounds, devices), and `ConfigError`."""

from __future__ import annotations

import re

from .format import format_value
from .sizes import MAX_SIZE_BYTES, show_size
from .suggestions import did_you_mean

MIB = 1024**2
GIB = 1024**3

_DEVICE = re.compile(r"cpu|cuda(?::\d{1,3})?")

# Far above the needs of any machine, and small enough for a table with this many entries.
MAX_BLOCKS = 2**24
MAX_SEQS = 2**16
MAX_TOKENS = 2**24
MAX_WAITING = 2**24
MAX_THREADS = 1024


class ConfigError(ValueError):
    """A setting that cannot work. The message is one sentence with cause and remedy."""


def check_device(called: str, value: str) -> str:
    """Return a device like `cpu`, `cuda:1`. Raises ConfigError for other values."""
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
    """Raise ConfigError for a number outside [low, high]."""
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, not {format_value(value)}")
    if value > high:
        raise ConfigError(f"{name} must be at most {high}, not {format_value(value)}")


def size_within(name: str, value: int, low: int) -> None:
    """Raise ConfigError for a number of bytes below `low` or above `MAX_SIZE_BYTES`."""
    if value < low:
        raise ConfigError(f"{name} must be at least {show_size(low)}, not {show_size(value)}")
    if value > MAX_SIZE_BYTES:
        raise ConfigError(
            f"{name} must be at most {show_size(MAX_SIZE_BYTES)}, not {show_size(value)}"
        )
