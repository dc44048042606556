# SPDX-License-Identifier: Apache-2.0
"""`PictureFile`: a picture's file without metadata, and the picture's size.

The reader of each of the four formats copies the parts of a file that determine the pixels of the
first frame, and reads the orientation. Pillow gets only the copy, so Pillow reads no profile, text,
comment, thumbnail or later frame, which may be decompression bombs."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple

from .picture_errors import PictureError

MAX_PICTURE_BYTES = 20 * 1024 * 1024
_FIRST_TURNED = 5  # the first EXIF orientation that exchanges width and height
MAX_PARTS = 32_768  # limit of the chunks, segments or blocks of a file
MAX_UNPACKED_BYTES = 128 * 1024  # limit of uncompressed metadata, which may have the orientation
ENDS_EARLY = "its file ends early; send the whole file"
# Limit of the largest JPEG's scans, as each scan takes time for all pixels. Encoders write 10
# scans, or 18 with four colours.
MAX_SCANS_OF_LARGEST = 20


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """Limits of a picture, which are checked before the picture is decoded."""

    max_bytes: int = MAX_PICTURE_BYTES
    max_pixels: int = 32_000_000
    max_side: int = 16_384
    seconds: float = 10.0  # time limit of waiting in the queue and decoding

    def check_size(self, width: int, height: int) -> None:
        """Raise PictureError for a picture of a size that may not be decoded."""
        if width < 1 or height < 1:
            raise PictureError(f"it has {width} x {height} pixels; send a picture with pixels")
        if width > self.max_side or height > self.max_side or width * height > self.max_pixels:
            raise PictureError(
                f"it has {width} x {height} pixels, and at most {self.max_pixels} pixels with "
                f"sides of up to {self.max_side} are read; scale it down"
            )

    def check_scans(self, num_scans: int, width: int, height: int) -> None:
        """Raise PictureError if the scans of a JPEG have too many pixels together."""
        if num_scans * width * height > MAX_SCANS_OF_LARGEST * self.max_pixels:
            raise PictureError(
                f"it has {num_scans} scans of {width} x {height} pixels, more than encoders "
                "write; save it again as a baseline JPEG"
            )


class PictureFile(NamedTuple):
    """A picture's file with one frame and without metadata."""

    kind: str  # Pillow's name of the file's format
    width: int  # the width before the orientation is applied
    height: int
    orientation: int  # EXIF orientation, 1 to 8; 1: upright
    content: bytes

    @property
    def upright_size(self) -> tuple[int, int]:
        """The width and height after the orientation is applied."""
        turned = self.orientation >= _FIRST_TURNED
        return (self.height, self.width) if turned else (self.width, self.height)


def check_parts(num_parts: int) -> None:
    """Raise PictureError for a file with more parts than encoders write."""
    if num_parts > MAX_PARTS:
        raise PictureError(f"its file has more than {MAX_PARTS} parts; save it again")


def unpack_text(packed: bytes) -> bytes:
    """Return the uncompressed zlib data, up to MAX_UNPACKED_BYTES; b"" for damaged data."""
    try:
        return zlib.decompressobj().decompress(packed, MAX_UNPACKED_BYTES)
    except zlib.error:
        return b""
