# SPDX-License-Identifier: Apache-2.0
"""Formats numbers of bytes for messages."""

from __future__ import annotations

from collections.abc import Iterator

from .format import format_value

# Far above the memory of any machine, and small enough to compute with.
MAX_SIZE_BYTES = 2**60
KIB = 1024
MIB = 1024**2
_BINARY = (("TiB", KIB**4), ("GiB", KIB**3), ("MiB", KIB**2), ("KiB", KIB))
_UNITS = (*_BINARY, ("TB", 1000**4), ("GB", 1000**3), ("MB", 1000**2), ("kB", 1000))
_DECIMALS = 3  # decimals in a text with a unit above KiB
_MANY_BYTES = 10_000  # from here on, a rough size is added
_MOST_DIGITS = 4  # most digits in a text with a unit


def exact_size(size_bytes: int) -> str | None:
    """Return the shortest text with a unit that is read back as this number: `512MiB`, `1.5GB`. A
    size that a user typed is shown as typed, or in fewer digits. None if no short text is exact."""
    texts = sorted(_texts(size_bytes), key=lambda text: (_digits(text), len(text)))
    return texts[0] if texts else None


def show_size(size_bytes: int) -> str:
    """Return a size for messages: `512MiB`, or `65537 bytes (64 KiB)` without an exact text."""
    if not 0 < size_bytes <= MAX_SIZE_BYTES:
        return f"{format_value(size_bytes)} bytes"
    text = exact_size(size_bytes)
    if text is not None:
        return text
    rough = f" ({rough_size(size_bytes)})" if size_bytes >= _MANY_BYTES else ""
    return f"{size_bytes} bytes{rough}"


def rough_size(size_bytes: int) -> str:
    """Return the size in three figures: `20 GiB`, `1.43 MiB`, `500 bytes`."""
    for unit, factor in _BINARY:
        if size_bytes >= factor:
            number = size_bytes / factor
            decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0
            return f"{round(number, decimals):.10g} {unit}"
    return f"{size_bytes} bytes"


def _texts(size_bytes: int) -> Iterator[str]:
    for unit, factor in _UNITS:
        if size_bytes < factor:
            continue
        if size_bytes % factor == 0 and factor > KIB and unit.endswith("iB"):
            yield f"{size_bytes // factor}{unit}"
        for decimals in range(_DECIMALS + 1 if factor > KIB else 1):
            number = f"{size_bytes / factor:.{decimals}f}"
            # Fractions of a byte are dropped, as by the reader of sizes.
            if int(float(number) * factor) == size_bytes and _digits(number) <= _MOST_DIGITS:
                yield f"{number}{unit}"
                break


def _digits(text: str) -> int:
    """Return the number of digits in a text that are not leading or trailing zeros."""
    return len("".join(filter(str.isdigit, text)).strip("0"))
