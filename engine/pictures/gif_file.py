# SPDX-License-Identifier: Apache-2.0
"""Reads the blocks of a GIF file up to the first frame, without comments and application data."""

from __future__ import annotations

from .orientation import UPRIGHT
from .picture_errors import PictureError
from .picture_file import ENDS_EARLY, PictureFile, PictureLimits, check_parts

SIGNATURES = (b"GIF87a", b"GIF89a")
_SCREEN_END = 13
_EXTENSION, _FRAME, _TRAILER = 0x21, 0x2C, 0x3B
_CONTROL = 0xF9  # the label of the extension that names the transparent colour
_MAX_CONTROL_BYTES = 16
# Limit of data blocks. A block has up to 255 bytes; a file of 20 MiB has 82,240 full blocks.
_MAX_DATA_BLOCKS = 131_072


def read_gif(data: bytes, limits: PictureLimits) -> PictureFile:
    """Return the first frame of a GIF file. Raises PictureError."""
    if len(data) < _SCREEN_END:
        raise PictureError(ENDS_EARLY)
    width, height = (int.from_bytes(data[i : i + 2], "little") for i in (6, 8))
    limits.check_size(width, height)
    at = _SCREEN_END + _palette_bytes(data[10])
    head, control = data[:at], b""
    num_parts = 0
    while True:
        num_parts += 1
        check_parts(num_parts)
        if at + 2 > len(data):
            raise PictureError(ENDS_EARLY)
        if data[at] == _EXTENSION:
            end = _end_of_blocks(data, at + 2)
            if data[at + 1] == _CONTROL and end - at <= _MAX_CONTROL_BYTES:
                control = data[at:end]
            at = end
        elif data[at] == _FRAME:
            break
        else:
            raise PictureError(
                f"its GIF file has the byte {data[at]} where a frame is expected; save it again"
            )
    if at + 10 > len(data):
        raise PictureError(ENDS_EARLY)
    sides = (int.from_bytes(data[i : i + 2], "little") for i in range(at + 1, at + 9, 2))
    left, top, across, down = sides
    limits.check_size(across, down)
    # A frame that extends beyond the file's logical screen makes the picture larger.
    width, height = max(width, left + across), max(height, top + down)
    limits.check_size(width, height)
    end = _end_of_blocks(data, at + 10 + _palette_bytes(data[at + 9]) + 1)
    content = b"".join((head, control, data[at:end], bytes((_TRAILER,))))
    return PictureFile("GIF", width, height, UPRIGHT, content)


def _palette_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _end_of_blocks(data: bytes, at: int) -> int:
    """Return the offset after the empty block that ends the row of data blocks at offset `at`."""
    for _ in range(_MAX_DATA_BLOCKS):
        if at >= len(data):
            raise PictureError(ENDS_EARLY)
        size = data[at]
        at += 1 + size
        if size == 0:
            return at
    raise PictureError("its GIF file has more blocks than encoders write; save it again")
