# SPDX-License-Identifier: Apache-2.0
"""Reads the orientation of a picture, a number from 1 to 8, from EXIF or XMP data.

Pillow reads all values of an EXIF directory, and before version 13 copies the bytes of each; a file
can name the same megabytes for each of 65,535 values. This module reads only entries, of twelve
bytes each. With damaged data, the orientation is 1."""

from __future__ import annotations

import re
from typing import Literal

UPRIGHT = 1
_TAG = 0x0112
_HEADER = b"Exif\x00\x00"
_SIZES = {3: 2, 8: 2, 4: 4, 9: 4}  # EXIF type of an integer → bytes of the integer
_ENTRY_BYTES = 12
_INLINE_BYTES = 4  # the bytes of a value that is stored inside an entry
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def find_orientation(exif: bytes, xmp: bytes = b"") -> int:
    """Return the orientation in `exif`, else the orientation in `xmp`, else UPRIGHT."""
    number = _in_exif(exif)
    if number is None:
        found = _IN_XMP.search(xmp)
        number = int(found[1]) if found else UPRIGHT
    return number if UPRIGHT <= number <= 8 else UPRIGHT


def _in_exif(exif: bytes) -> int | None:
    while exif.startswith(_HEADER):
        exif = exif[len(_HEADER) :]
    order: Literal["little", "big"]
    if exif[:4] == b"II*\x00":
        order = "little"
    elif exif[:4] == b"MM\x00*":
        order = "big"
    else:
        return None

    def number_at(place: int, size: int) -> int:
        return int.from_bytes(exif[place : place + size], order)

    start = number_at(4, 4)
    first = start + 2
    last = min(len(exif), first + _ENTRY_BYTES * number_at(start, 2)) - _ENTRY_BYTES
    for at in range(first, last + 1, _ENTRY_BYTES):
        if number_at(at, 2) == _TAG:
            size = _SIZES.get(number_at(at + 2, 2))
            if size is not None and 1 <= number_at(at + 4, 4) <= _INLINE_BYTES // size:
                return number_at(at + 8, size)
    return None
