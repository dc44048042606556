# SPDX-License-Identifier: Apache-2.0
"""Reads a JPEG file, and keeps the segments of tables, frame, scans and colour space.

The size and the number of scans are checked before the file is decoded, because a file can have
thousands of empty scans, each of which takes as long to decode as a whole picture."""

from __future__ import annotations

import re

from .orientation import find_orientation
from .picture_errors import PictureError
from .picture_file import ENDS_EARLY, PictureFile, PictureLimits, check_parts

SIGNATURE = b"\xff\xd8\xff"
_START, _END = b"\xff\xd8", b"\xff\xd9"
# In the data of a scan, 0xff is followed by 0, by a restart number, or by the mark of a segment.
_NEXT_SEGMENT = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_NOT_FILLING = re.compile(rb"[^\xff]")
_HUFFMAN, _ARITHMETIC, _END_MARK, _SCAN, _TABLES, _RESTARTS = 0xC4, 0xCC, 0xD9, 0xDA, 0xDB, 0xDD
_JFIF, _EXIF, _ADOBE = 0xE0, 0xE1, 0xEE
_FRAMES = frozenset(range(0xC0, 0xD0)) - {_HUFFMAN, 0xC8, _ARITHMETIC}
_KEPT = _FRAMES | {_HUFFMAN, _ARITHMETIC, _TABLES, _RESTARTS}
_ALONE = frozenset((0x01, *range(0xD0, 0xD8)))  # marks of segments without length and data
_KEPT_BY_NAME = {_JFIF: b"JFIF\x00", _ADOBE: b"Adobe"}
_EXIF_NAME, _XMP_NAME = b"Exif\x00\x00", b"http://ns.adobe.com/xap/1.0/\x00"
_LEAST_FRAME_BYTES = 8


def read_jpeg(data: bytes, limits: PictureLimits) -> PictureFile:
    """Return a JPEG file's pixels, without metadata, and orientation. Raises PictureError."""
    kept, exif, xmp = [_START], b"", b""
    width = height = num_frames = num_scans = num_parts = 0
    at = len(_START)
    while True:
        num_parts += 1
        check_parts(num_parts)
        at = _mark_at(data, at)
        mark = data[at + 1]
        if mark == _END_MARK:
            break
        if mark in _ALONE:
            at += 2
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        end = at + 2 + length
        if end > len(data):
            raise PictureError(ENDS_EARLY)
        if length < 2:
            raise PictureError(f"a segment of its JPEG file has {length} bytes; save it again")
        payload = data[at + 4 : end]
        if mark in _FRAMES:
            num_frames += 1
            if num_frames > 1 or len(payload) < _LEAST_FRAME_BYTES - 2 or num_scans:
                raise PictureError("its JPEG file has two sizes or a broken one; save it again")
            height, width = (int.from_bytes(payload[i : i + 2], "big") for i in (1, 3))
            limits.check_size(width, height)
        if mark == _SCAN:
            num_scans += 1
            end = _end_of_scan(data, end)
            kept.append(data[at:end])
        elif mark in _KEPT or (mark in _KEPT_BY_NAME and payload.startswith(_KEPT_BY_NAME[mark])):
            kept.append(data[at:end])
        elif mark == _EXIF and payload.startswith(_EXIF_NAME) and not exif:
            exif = payload
        elif mark == _EXIF and payload.startswith(_XMP_NAME):
            xmp = payload
        at = end
    if not num_frames or not num_scans:
        raise PictureError("its JPEG file has no size or no pixels; save it again")
    limits.check_scans(num_scans, width, height)
    content = b"".join((*kept, _END))
    return PictureFile("JPEG", width, height, find_orientation(exif, xmp), content)


def _mark_at(data: bytes, at: int) -> int:
    """Return the offset of the 0xff before the next mark, after 0xff bytes that are padding."""
    if at + 2 > len(data):
        raise PictureError(ENDS_EARLY)
    if data[at] != 0xFF:
        raise PictureError("its JPEG file is damaged between two segments; save it again")
    found = _NOT_FILLING.search(data, at)
    if found is None:
        raise PictureError(ENDS_EARLY)
    return found.start() - 1


def _end_of_scan(data: bytes, start: int) -> int:
    found = _NEXT_SEGMENT.search(data, start)
    if found is None:
        raise PictureError(ENDS_EARLY)
    return found.start()
