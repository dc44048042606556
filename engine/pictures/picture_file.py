# SPDX-License-Identifier: Apache-2.0
"""PictureFile: the pixels of a picture's file without its metadata, and its size.

The readers of the four formats walk over the parts of a file, copy those that decide the pixels of
the first frame and read the orientation. Pillow gets the copy alone, so it meets no profile, text,
comment, thumbnail or later frame, which may be packed bombs, and no bytes behind the picture.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple

from .picture_errors import PictureError

MAX_PICTURE_BYTES = 20 * 1024 * 1024
MAX_PARTS = 32_768  # chunks, segments or blocks of a file
MAX_UNPACKED_BYTES = 128 * 1024  # of compressed metadata that may hold the orientation
ENDS_EARLY = "its file ends early; send the whole file"
# Decoding a scan of a JPEG touches all pixels. Encoders write 10 scans, or 18 with four colours.
MAX_SCANS_OF_LARGEST = 20


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """Limits that hold before a picture is decoded."""

    max_bytes: int = MAX_PICTURE_BYTES
    max_pixels: int = 32_000_000
    max_side: int = 16_384
    seconds: float = 10.0  # in the queue and in decoding

    def check_size(self, width: int, height: int) -> None:
        """Raise PictureError unless a picture of this size may be decoded."""
        if width < 1 or height < 1:
            raise PictureError(
                f"its file says {width} x {height} pixels; send a picture with pixels"
            )
        if width > self.max_side or height > self.max_side or width * height > self.max_pixels:
            raise PictureError(
                f"it has {width} x {height} pixels, and at most {self.max_pixels} pixels with "
                f"sides of up to {self.max_side} are read; scale it down"
            )

    def check_scans(self, num_scans: int, width: int, height: int) -> None:
        """Raise PictureError if a JPEG's scans take longer than those of the largest picture."""
        if num_scans * width * height > MAX_SCANS_OF_LARGEST * self.max_pixels:
            raise PictureError(
                f"it has {num_scans} scans of {width} x {height} pixels, more than encoders "
                "write; save it again as a baseline JPEG"
            )


class PictureFile(NamedTuple):
    """A file of one frame without metadata."""

    kind: str  # Pillow's name of the format
    width: int  # before the orientation is applied
    height: int
    orientation: int  # EXIF's number; 1: as it is
    content: bytes


def check_parts(num_parts: int) -> None:
    """Raise PictureError for a file that is cut into more parts than any encoder makes."""
    if num_parts > MAX_PARTS:
        raise PictureError(f"its file has more than {MAX_PARTS} parts; save it again")


def unpack_text(packed: bytes) -> bytes:
    """Decompress up to MAX_UNPACKED_BYTES of zlib data; b"" for data that is damaged."""
    try:
        return zlib.decompressobj().decompress(packed, MAX_UNPACKED_BYTES)
    except zlib.error:
        return b""
