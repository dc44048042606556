# SPDX-License-Identifier: Apache-2.0
"""Reads a WebP file, and keeps the chunks of the first frame."""

from __future__ import annotations

from .orientation import find_orientation
from .picture_errors import PictureError
from .picture_file import ENDS_EARLY, PictureFile, PictureLimits, check_parts

_HEAD_BYTES = 12
_EXTENDED, _LOSSY, _LOSSLESS, _FRAME = b"VP8X", b"VP8 ", b"VP8L", b"ANMF"
_PIXELS = frozenset((_LOSSY, _LOSSLESS, _FRAME))
_KEPT = _PIXELS | {b"ANIM", b"ALPH"}
_HAS_PROFILE, _HAS_EXIF, _HAS_XMP = 0x20, 0x08, 0x04  # flags of an extended WebP file
_EXTENDED_BYTES = 10
_LOSSLESS_START = 0x2F
_LOSSY_START = b"\x9d\x01\x2a"


def is_webp(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def read_webp(data: bytes, limits: PictureLimits) -> PictureFile:
    """Return the first frame of a WebP file. Raises PictureError."""
    file_end = 8 + int.from_bytes(data[4:8], "little")
    if file_end > len(data):
        raise PictureError(ENDS_EARLY)
    kept: dict[bytes, bytes] = {}
    exif = xmp = b""
    width = height = num_parts = flags = 0
    at = _HEAD_BYTES
    while at + 8 <= file_end:
        num_parts += 1
        check_parts(num_parts)
        name, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        end = at + 8 + length
        if end > file_end:
            raise PictureError(ENDS_EARLY)
        if num_parts == 1:
            width, height = _size_in(name, data[at + 8 : min(end, at + 24)])
            limits.check_size(width, height)
            if name == _EXTENDED:
                flags = data[at + 8]
                bare = flags & ~(_HAS_PROFILE | _HAS_EXIF | _HAS_XMP)
                kept[name] = data[at : at + 8] + bytes((bare,)) + data[at + 9 : end]
        if name in _KEPT and name not in kept and not (_PIXELS & kept.keys()):
            kept[name] = data[at:end] + b"\x00" * (length % 2)
        elif name == b"EXIF" and flags & _HAS_EXIF:
            exif = exif or data[at + 8 : end]
        elif name == b"XMP " and flags & _HAS_XMP:
            xmp = xmp or data[at + 8 : end]
        at = end + length % 2
    if not _PIXELS & kept.keys():
        raise PictureError("its WebP file has no pixels; save it again")
    chunks = b"".join(kept.values())
    content = b"RIFF" + (len(chunks) + 4).to_bytes(4, "little") + b"WEBP" + chunks
    orientation = find_orientation(exif, xmp)
    return PictureFile("WEBP", width, height, orientation, content)


def _size_in(name: bytes, start: bytes) -> tuple[int, int]:
    """Return width and height in pixels from the first bytes (`start`) of the first chunk."""
    if name == _EXTENDED and len(start) == _EXTENDED_BYTES:
        return (
            int.from_bytes(start[4:7], "little") + 1,
            int.from_bytes(start[7:10], "little") + 1,
        )
    if name == _LOSSLESS and len(start) >= 5 and start[0] == _LOSSLESS_START:
        bits = int.from_bytes(start[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if name == _LOSSY and len(start) >= 10 and start[3:6] == _LOSSY_START:
        width, height = (int.from_bytes(start[i : i + 2], "little") & 0x3FFF for i in (6, 8))
        return width, height
    raise PictureError("its WebP file does not begin with a size; save it again")
