# SPDX-License-Identifier: Apache-2.0
"""The orientation of a picture in its EXIF or XMP data: a number from 1 to 8.

Pillow reads all values of a directory, and a file can name the same megabytes for each of 65,535
values, which versions before 13 copy. This reader looks at entries of twelve bytes alone. Damaged
data means orientation 1.
"""

from __future__ import annotations

import re
from typing import Literal

UPRIGHT = 1
_TAG = 0x0112
_HEADER = b"Exif\x00\x00"
_SIZES = {3: 2, 8: 2, 4: 4, 9: 4}  # type of a whole number → bytes
_ENTRY_BYTES = 12
_INLINE_BYTES = 4  # of a value inside its entry
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def find_orientation(exif: bytes, xmp: bytes = b"") -> int:
    """Return the orientation, from EXIF if it has one, else from XMP, else UPRIGHT."""
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
