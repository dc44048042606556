# SPDX-License-Identifier: Apache-2.0
"""Reads a PNG file, and keeps the chunks of pixels, without texts, profiles and frames."""

from __future__ import annotations

from .orientation import find_orientation
from .picture_errors import PictureError
from .picture_file import ENDS_EARLY, PictureFile, PictureLimits, check_parts, unpack_text

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_KEPT = frozenset((b"PLTE", b"tRNS", b"IDAT"))
_MAX_PALETTE_BYTES = 768
_FRAME_BYTES = 12  # bytes of the length, name and checksum of a chunk
_XMP = b"XML:com.adobe.xmp\x00"
_RAW_EXIF = b"Raw profile type exif\x00"  # ImageMagick's chunk of EXIF data in hexadecimal digits


def read_png(data: bytes, limits: PictureLimits) -> PictureFile:
    """Return a PNG file's pixels, without metadata, and orientation. Raises PictureError."""
    kept, exif, raw_exif, xmp = [SIGNATURE], b"", b"", b""  # the last two may be compressed
    width = height = 0
    at, num_parts, num_pixel_chunks = len(SIGNATURE), 0, 0
    while True:
        num_parts += 1
        check_parts(num_parts)
        name = data[at + 4 : at + 8]
        length = int.from_bytes(data[at : at + 4], "big")
        end = at + _FRAME_BYTES + length
        if end > len(data) or len(name) < 4:
            raise PictureError(ENDS_EARLY)
        if (name == b"IHDR") != (num_parts == 1) or (name == b"IHDR" and length != 13):
            raise PictureError("its PNG file does not begin with one header; save it again")
        if name == b"IHDR":
            width = int.from_bytes(data[at + 8 : at + 12], "big")
            height = int.from_bytes(data[at + 12 : at + 16], "big")
            limits.check_size(width, height)
            kept.append(data[at:end])
        elif name == b"IEND":
            kept.append(data[at:end])
            break
        elif name in _KEPT:
            if name != b"IDAT" and length > _MAX_PALETTE_BYTES:
                raise PictureError(f"its palette has {length} bytes, not 768; save it again")
            num_pixel_chunks += name == b"IDAT"
            kept.append(data[at:end])
        elif name == b"eXIf":
            exif = data[at + 8 : end - 4]
        elif name == b"iTXt" and data.startswith(_XMP, at + 8):
            xmp = data[at + 8 + len(_XMP) : end - 4]
        elif name in (b"zTXt", b"tEXt") and data.startswith(_RAW_EXIF, at + 8):
            raw_exif = data[at + 4 : end - 4]
        at = end
    if not num_pixel_chunks:
        raise PictureError("its PNG file has no pixels (no IDAT chunk); save it again")
    # Only the last text of a kind is unpacked: a file may have thousands.
    orientation = find_orientation(exif or _raw_exif(raw_exif), _international_text(xmp))
    return PictureFile("PNG", width, height, orientation, b"".join(kept))


def _international_text(text: bytes) -> bytes:
    """Return the text of an iTXt chunk, after flags, language and translated keyword."""
    is_packed = text[:1] == b"\x01"
    parts = text[2:].split(b"\x00", 2)
    if len(parts) < 3:
        return b""
    return unpack_text(parts[2]) if is_packed else parts[2]


def _raw_exif(chunk: bytes) -> bytes:
    """Return the EXIF data in a chunk, from the chunk's name on; b"" without a chunk."""
    text = chunk[4 + len(_RAW_EXIF) :]
    if chunk.startswith(b"zTXt"):
        text = unpack_text(text[1:])
    try:
        return bytes.fromhex("".join(text.decode("ascii").split("\n")[3:]))
    except ValueError:
        return b""
