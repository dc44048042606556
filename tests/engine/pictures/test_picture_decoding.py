# SPDX-License-Identifier: Apache-2.0
"""Pictures are decoded as transformers decodes them, and hostile files are refused unread."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import re
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from stratakv.engine.pictures import png_file
from stratakv.engine.pictures.picture_decoding import (
    decode_picture,
    read_picture_file,
    to_rgb_on_white,
)
from stratakv.engine.pictures.picture_errors import PictureError, PicturePoolFull
from stratakv.engine.pictures.picture_file import PictureLimits, unpack_text
from stratakv.engine.pictures.picture_pool import PicturePool

from .picture_makers import (
    changed_files,
    chunk,
    crafted_files,
    cut_files,
    file_of,
    header,
    packed_files,
    picture,
    pixels,
    png,
    valid_files,
)

# Of the reference, about metadata that our reader never shows to Pillow.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

VALID = valid_files()
CRAFTED = crafted_files()
PACKED = packed_files()
LIMITS = PictureLimits()
NUM_CHANGED = 4000
# TIFF data with one entry: the orientation 6.
EXIF_TURNED = struct.pack("<2sHIHHHIHHI", b"II", 42, 8, 1, 0x112, 3, 1, 6, 0, 0)
_SPARE_BYTES = 48 * 1024 * 1024  # the peak of all hostile files together, below each bomb's size


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The size of each picture whose pixels Pillow was asked for."""
    sizes = []
    load = ImageFile.ImageFile.load

    def count(image: ImageFile.ImageFile) -> object:
        sizes.append(image.size)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", count)
    return sizes


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns of every picture that it converts."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def _peak_of_memory(*, is_new: bool = False) -> int:
    """The most bytes that this process had in memory; `is_new` forgets those before now."""
    if is_new:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)[0]) * 1024


def loaded_by_transformers(data: bytes) -> Image.Image:
    from transformers.image_utils import load_image

    return load_image(base64.b64encode(data).decode())


def is_equal(left: Image.Image, right: Image.Image) -> bool:
    return (left.mode, left.size, left.tobytes()) == (right.mode, right.size, right.tobytes())


@pytest.mark.parametrize("name", VALID)
def test_valid_pictures_have_the_pixels_that_transformers_loads(name: str) -> None:
    found = decode_picture(VALID[name])
    assert is_equal(found, loaded_by_transformers(VALID[name]))
    assert found.info == {}, "metadata went past the reader"
    assert read_picture_file(VALID[name]).upright_size == found.size
    number = name.partition("turned ")[2]
    if number in ("by XMP", "5", "6", "7", "8"):
        assert found.size == (17, 23)


@pytest.mark.parametrize("name", [name for name in VALID if "turned" not in name])
def test_images_on_white_are_those_of_processors(name: str) -> None:
    from transformers.image_transforms import convert_to_rgb

    opened = Image.open(io.BytesIO(VALID[name]))
    wanted = convert_to_rgb(opened, return_numpy=True)
    assert np.array_equal(np.asarray(to_rgb_on_white(opened)), wanted)


def test_metadata_changes_no_pixel() -> None:
    for name, data in PACKED.items():
        found = decode_picture(data)
        with Image.open(io.BytesIO(read_picture_file(data).content)) as bare:
            assert is_equal(found, bare.convert("RGB")), name
    profile = file_of(picture("RGB"), "PNG", icc_profile=b"profile" * 999)
    assert is_equal(decode_picture(profile), picture("RGB"))
    flags = read_picture_file(VALID["WEBP turned 3"]).content[20]
    assert flags & 0b101100 == 0, "the flags promise a profile, EXIF or XMP"


def test_of_many_compressed_texts_the_last_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 20 MiB has room for thousands of texts, each unpacked to 128 KiB."""
    unpacked = []
    monkeypatch.setattr(
        png_file, "unpack_text", lambda text: unpacked.append(text) or unpack_text(text)
    )
    turned = b"\n\n\n" + (b"Exif\x00\x00" + EXIF_TURNED).hex().encode()
    texts = [bytes(1000), bytes(2000), turned]
    raw = [chunk(b"zTXt", b"Raw profile type exif\x00\x00" + zlib.compress(t)) for t in texts]
    xmp = [chunk(b"iTXt", b"XML:com.adobe.xmp\x00\x01\x00\x00\x00" + zlib.compress(t))
           for t in texts]  # fmt: skip
    file = read_picture_file(png(header(4, 2), *raw, *xmp, pixels(4, 2)))
    assert file.upright_size == (2, 4) and len(unpacked) == 2


def test_hostile_files_are_refused_and_none_is_decoded_past_a_limit(
    loaded: list[tuple[int, int]],
) -> None:
    before = _peak_of_memory(is_new=True)
    hostile = [*CRAFTED.items(), *cut_files(VALID)]
    assert len(hostile) > 600
    for name, data in hostile:
        with pytest.raises(PictureError, match=r"its .*; |it has .*; ") as raised:
            decode_picture(data)
        assert len(str(raised.value)) < 400, name
        if name == "JPEG with two sizes":
            assert "has two sizes" in str(raised.value)
    for data in PACKED.values():
        decode_picture(data)
    assert _peak_of_memory() - before < _SPARE_BYTES, "something was unpacked"
    assert all(width * height < 100_000 for width, height in loaded), loaded


def test_changed_files_are_refused_or_have_the_pixels_of_the_reference(
    loaded: list[tuple[int, int]],
) -> None:
    num_decoded = 0
    for name, data in changed_files(VALID, NUM_CHANGED):
        try:
            found = decode_picture(data)
        except PictureError:
            continue
        try:
            with Image.open(io.BytesIO(data)) as opened:
                wanted = ImageOps.exif_transpose(opened).convert("RGB")
        except Exception:  # metadata that is damaged, or was never read here
            continue
        assert is_equal(found, wanted), name
        num_decoded += 1
    assert num_decoded > NUM_CHANGED / 10, "the changes leave no picture to compare"
    assert all(width * height <= LIMITS.max_pixels for width, height in loaded)


def test_limits_hold_at_their_edges() -> None:
    tight = PictureLimits(max_bytes=len(VALID["PNG RGB"]), max_pixels=23 * 17, max_side=23)
    assert decode_picture(VALID["PNG RGB"], tight).size == (23, 17)
    for name, limits, reason in (
        ("PNG RGB", PictureLimits(max_bytes=len(VALID["PNG RGB"]) - 1), "bytes, and at most"),
        *((kind, PictureLimits(max_pixels=23 * 17 - 1), "scale it down") for kind in VALID),
        *((kind, PictureLimits(max_side=22), "scale it down") for kind in VALID),
    ):
        with pytest.raises(PictureError, match=reason):
            decode_picture(VALID[name], limits)


@pytest.mark.parametrize("name", ["PNG RGB", "JPEG RGB", "WEBP RGB", "GIF P"])
def test_a_header_that_lies_to_our_reader_is_found_by_pillow(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = read_picture_file(VALID[name])
    monkeypatch.setattr(
        "stratakv.engine.pictures.picture_decoding.read_picture_file",
        lambda *_: file._replace(width=file.width + 1),
    )
    with pytest.raises(PictureError, match="in one place and"):
        decode_picture(VALID[name])


def test_decoding_stops_at_its_deadline() -> None:
    class Late(float):
        """A deadline that is over when it is asked for the third time."""

        num_asked = 0

        def __lt__(self, now: float) -> bool:
            Late.num_asked += 1
            return Late.num_asked > 2

    with pytest.raises(PictureError, match="decoded in time"):
        decode_picture(VALID["JPEG RGB"], deadline=Late())
    assert Late.num_asked == 3, "a read of the file asked"


def test_a_pool_decodes_and_refuses_what_it_has_no_room_for() -> None:
    async def run() -> None:
        pool = PicturePool(num_threads=2, max_waiting=1)
        held, begun = threading.Event(), threading.Semaphore(0)

        def wait(_: float) -> str:
            begun.release()
            held.wait()
            return "done"

        assert (await pool.run_task(lambda _: decode_picture(VALID["PNG RGB"]))).size == (23, 17)
        with pytest.raises(PictureError):
            await pool.run_task(lambda _: decode_picture(b""))
        running = [asyncio.ensure_future(pool.run_task(wait)) for _ in range(3)]
        await asyncio.to_thread(lambda: [begun.acquire() for _ in range(2)])
        with pytest.raises(PicturePoolFull, match="later"):
            await pool.run_task(lambda _: decode_picture(VALID["PNG RGB"]))
        running[2].cancel()  # its client is gone before it began
        await asyncio.wait(running[2:])
        last = asyncio.ensure_future(pool.run_task(lambda _: "last"))
        await asyncio.sleep(0)
        held.set()
        assert await asyncio.gather(*running[:2], last) == ["done", "done", "last"]
        pool.close_pool()

    asyncio.run(run())


def test_a_pool_gives_up_at_the_deadline_and_keeps_the_place_of_a_running_thread() -> None:
    async def run() -> None:
        pool = PicturePool(PictureLimits(seconds=0.05), num_threads=1, max_waiting=0)
        held = threading.Event()
        deadlines = []

        def stuck(deadline: float) -> None:
            deadlines.append(deadline)
            held.wait()

        began = time.monotonic()
        while not deadlines:  # a slow machine may give up before the thread begins
            with pytest.raises(PictureError, match="decoded in"):
                await pool.run_task(stuck)
        assert began < deadlines[0] < time.monotonic()
        with pytest.raises(PicturePoolFull):
            await pool.run_task(stuck)
        held.set()
        for _ in range(6000):
            try:
                await pool.run_task(lambda _: None)
                break
            except (PicturePoolFull, PictureError):
                await asyncio.sleep(0.01)
        else:
            pytest.fail("the place was not freed")
        pool.close_pool()

    asyncio.run(run())
