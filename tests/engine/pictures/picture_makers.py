# SPDX-License-Identifier: Apache-2.0
"""Files of pictures: valid ones of every kind, and hostile ones that are built by hand."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

PNG = b"\x89PNG\r\n\x1a\n"
MODES = {
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
}
_MIB = 1024 * 1024


def picture(mode: str = "RGBA", width: int = 23, height: int = 17) -> Image.Image:
    """A picture of random pixels; some of those with alpha are transparent."""
    noise = np.random.default_rng(3).integers(0, 256, (height, width, 4), dtype=np.uint8)
    whole = Image.fromarray(noise, "RGBA")
    if mode == "I;16":
        return Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    return whole if mode == "RGBA" else whole.convert("RGB").convert(mode)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def valid_files() -> dict[str, bytes]:
    """A file of each format, mode and orientation, by a name."""
    files = {
        f"{kind} {mode}": file_of(picture(mode), kind) for kind, of in MODES.items() for mode in of
    }
    second = [picture().transpose(Image.Transpose.ROTATE_180)]
    for kind in ("PNG", "WEBP", "GIF"):
        files[f"{kind} moving"] = file_of(picture(), kind, save_all=True, append_images=second)
    files["JPEG progressive"] = file_of(picture("RGB"), "JPEG", progressive=True)
    files["JPEG progressive CMYK"] = file_of(picture("CMYK"), "JPEG", progressive=True)
    files["JPEG restarts"] = file_of(picture("RGB"), "JPEG", restart_marker_blocks=1)
    files["WEBP lossless"] = file_of(picture(), "WEBP", lossless=True)
    files["PNG interlaced palette with alpha"] = file_of(
        picture("P"), "PNG", transparency=bytes(range(256)), bits=8
    )
    files["PNG with a transparent colour"] = file_of(picture("RGB"), "PNG", transparency=(1, 2, 3))
    files["GIF with a transparent colour"] = file_of(picture("P"), "GIF", transparency=9)
    gif = files["GIF P"]
    at = gif.index(b",\x00\x00\x00\x00", 13 + 768)
    files["GIF with a frame beyond its screen"] = gif[: at + 1] + b"\x09\x00" + gif[at + 3 :]
    for number in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = number
        for kind in ("PNG", "JPEG", "WEBP"):
            files[f"{kind} turned {number}"] = file_of(picture("RGB"), kind, exif=exif)
    turned = files["WEBP turned 8"]
    files["WEBP without the flag of its EXIF"] = turned[:20] + b"\x00" + turned[21:]
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    files["JPEG turned by XMP"] = file_of(picture("RGB"), "JPEG", xmp=xmp)
    files["WEBP turned by XMP"] = file_of(picture("RGB"), "WEBP", xmp=xmp)
    for is_packed in (False, True):
        text = PngImagePlugin.PngInfo()
        text.add_itxt("XML:com.adobe.xmp", xmp.decode(), zip=is_packed)
        files[f"PNG turned by XMP, packed: {is_packed}"] = file_of(
            picture("RGB"), "PNG", pnginfo=text
        )
        exif = Image.Exif()
        exif[0x0112] = 8
        text = PngImagePlugin.PngInfo()
        digits = exif.tobytes().hex()
        text.add_text("Raw profile type exif", f"\nexif\n{len(digits)}\n{digits}\n", zip=is_packed)
        files[f"PNG turned by a raw profile, packed: {is_packed}"] = file_of(
            picture("RGB"), "PNG", pnginfo=text
        )
    return files


def chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file, with the right checksum."""
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)


def header(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))


def png(*chunks: bytes) -> bytes:
    return b"".join((PNG, *chunks, chunk(b"IEND", b"")))


def pixels(width: int, height: int) -> bytes:
    """The chunk of black pixels."""
    return chunk(b"IDAT", zlib.compress((b"\x00" * (1 + 3 * width)) * height, 9))


def segment(mark: int, content: bytes) -> bytes:
    """A segment of a JPEG file."""
    return struct.pack(">BBH", 0xFF, mark, len(content) + 2) + content


def crafted_files() -> dict[str, bytes]:
    """Hostile files that a limit, a lie or a missing part should have refused, by a name."""
    files: dict[str, bytes] = {
        "empty": b"",
        "one byte": b"\x89",
        "text": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "BMP": file_of(picture("RGB"), "BMP"),
        "TIFF": file_of(picture("RGB"), "TIFF"),
        "ICO": file_of(picture("RGB"), "ICO"),
        "PPM": file_of(picture("RGB"), "PPM"),
        "EPS": file_of(picture("RGB"), "EPS"),
        "AVIF": b"\x00\x00\x00\x1cftypavif" + b"\x00" * 64,
        "PNG behind text": b"GIF" + file_of(picture("RGB"), "PNG"),
        "PNG without header": png(pixels(4, 4)),
        "PNG without pixels": png(header(4, 4)),
        "PNG with two headers": png(header(4, 4), header(9999, 9999), pixels(4, 4)),
        "PNG with a second header behind": png(header(4, 4), pixels(4, 4), header(4, 4)),
        "PNG of fewer pixels": png(header(64, 64), pixels(4, 4)),
        "PNG of no zlib": png(header(4, 4), chunk(b"IDAT", b"no zlib at all")),
        "PNG of colour 7": png(header(4, 4, 8, 7), pixels(4, 4)),
        "PNG of depth 3": png(header(4, 4, 3), pixels(4, 4)),
        "PNG with a large palette": png(header(4, 4), chunk(b"PLTE", bytes(2001)), pixels(4, 4)),
        "PNG with a wrong checksum": png(header(4, 4)[:-1] + b"\x00", pixels(4, 4)),
        "PNG of tiny chunks": png(header(4, 4), chunk(b"tEXt", b"a\x00") * 40_000, pixels(4, 4)),
        "PNG of empty pixels": png(header(4, 4), chunk(b"IDAT", b"") * 40_000, pixels(4, 4)),
        "PNG of a long chunk": PNG + header(4, 4) + b"\x7f\xff\xff\xffIDAT" + b"\x00" * 64,
    }
    for width, height in (
        (0, 4), (4, 0), (2**31 - 1, 2**31 - 1), (2**32 - 1, 1), (16_385, 1), (1, 16_385),
        (5657, 5657), (32_000, 1001), (16_384, 16_384),
    ):  # fmt: skip
        files[f"PNG of {width} x {height}"] = png(header(width, height), pixels(8, 8))
    jpeg = file_of(picture("RGB"), "JPEG")
    gif = file_of(picture("P"), "GIF")
    frame = jpeg.index(b"\xff\xc0")
    scan = jpeg.index(b"\xff\xda")
    for width, height in ((65_535, 65_535), (65_535, 1), (1, 65_535), (0, 0), (9, 0), (6000, 6000)):
        size = struct.pack(">HH", height, width)
        files[f"JPEG of {width} x {height}"] = jpeg[: frame + 5] + size + jpeg[frame + 9 :]
        size = struct.pack("<HH", width, height)
        files[f"GIF of {width} x {height}"] = gif[:6] + size + gif[10:]
        at = gif.index(b",\x00\x00\x00\x00", 13 + 768)
        files[f"GIF with a frame of {width} x {height}"] = gif[: at + 5] + size + gif[at + 9 :]
        files[f"GIF with a frame at {width} x {height}"] = (
            gif[: at + 1] + struct.pack("<HH", max(width, 20_000), height) + gif[at + 5 :]
        )
        name = b"VP8X" + struct.pack("<I", 10) + b"\x10\x00\x00\x00"
        sides = b"".join((max(1, side) - 1).to_bytes(3, "little") for side in (width, height))
        whole = file_of(picture(), "WEBP", lossless=True)
        body = name + sides + whole[whole.index(b"VP8L") :]
        files[f"WEBP of {width} x {height}"] = (
            b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
        )
    files["JPEG with two sizes"] = jpeg[:scan] + jpeg[frame : frame + 19] + jpeg[scan:]
    files["JPEG with a size behind"] = jpeg[:-2] + jpeg[frame : frame + 19] + jpeg[-2:]
    files["JPEG without a scan"] = jpeg[:scan] + b"\xff\xd9"
    files["JPEG without a size"] = jpeg[:frame] + jpeg[frame + 19 :]
    files["JPEG of a short segment"] = jpeg[:2] + b"\xff\xe1\x00\x01" + jpeg[2:]
    files["JPEG with bytes between"] = jpeg[:2] + b"between" + jpeg[2:]
    files["JPEG of filling bytes"] = jpeg[:2] + b"\xff" * _MIB
    files["JPEG of filling in its scan"] = jpeg[: scan + 14] + b"\xff" * _MIB
    files["JPEG of tiny segments"] = jpeg[:2] + segment(0xFE, b"") * 40_000 + jpeg[2:]
    files["JPEG of restarts outside"] = jpeg[:2] + b"\xff\xd0" * 40_000 + jpeg[2:]
    large = file_of(Image.new("L", (1000, 1000)), "JPEG", progressive=True)
    last = large.rindex(b"\xff\xda")
    files["JPEG of 2,000 scans"] = large[:-2] + large[last:-2] * 2000 + large[-2:]
    files["GIF without a frame"] = gif[:13] + b"\x00" * 768 + b";"
    files["GIF of comments"] = gif[: 13 + 768] + b"!\xfe\x01a\x00" * 40_000 + gif[13 + 768 :]
    files["GIF of one long comment"] = (
        gif[: 13 + 768] + b"!\xfe" + b"\x01a" * 140_000 + b"\x00" + gif[13 + 768 :]
    )
    files["GIF of tiny blocks"] = gif[:-2] + b"\x01a" * 140_000 + b"\x00;"
    webp = file_of(picture("RGB"), "WEBP")
    files["WEBP longer than its file"] = webp[:4] + b"\xff\xff\xff\xff" + webp[8:]
    files["WEBP of a long chunk"] = webp[:16] + b"\xff\xff\xff\x0f" + webp[20:]
    files["WEBP without pixels"] = b"RIFF\x04\x00\x00\x00WEBP"
    files["WEBP that begins with EXIF"] = b"RIFF\x10\x00\x00\x00WEBPEXIF\x04\x00\x00\x00abcd"
    return files


def packed_files() -> dict[str, bytes]:
    """Valid pictures with bombs, lies and second files in parts that are not needed, by a name."""
    zeros = zlib.compress(bytes(64 * _MIB), 9)
    small = (header(4, 4), pixels(4, 4))
    exif = b"II*\x00\x08\x00\x00\x00\xff\xff" + b"".join(
        struct.pack("<HHII", tag, 7, 60_000, 8) for tag in range(1, 5000)
    )
    orientation_twice = b"II*\x00\x08\x00\x00\x00\xff\xff" + bytes(300)
    jpeg = file_of(picture("RGB"), "JPEG")
    return {
        "zTXt": png(small[0], chunk(b"zTXt", b"a\x00\x00" + zeros), small[1]),
        "raw profile": png(
            small[0], chunk(b"zTXt", b"Raw profile type exif\x00\x00" + zeros), small[1]
        ),
        "iTXt": png(small[0], chunk(b"iTXt", b"a\x00\x01\x00\x00\x00" + zeros), small[1]),
        "XMP": png(
            small[0], chunk(b"iTXt", b"XML:com.adobe.xmp\x00\x01\x00\x00\x00" + zeros), small[1]
        ),
        "iCCP": png(small[0], chunk(b"iCCP", b"a\x00\x00" + zeros), small[1]),
        "EXIF of one place": png(small[0], chunk(b"eXIf", exif), small[1]),
        "EXIF behind": png(*small, chunk(b"eXIf", exif)),
        "EXIF that ends early": png(small[0], chunk(b"eXIf", orientation_twice[:11]), small[1]),
        "EXIF of no order": png(small[0], chunk(b"eXIf", b"no order"), small[1]),
        "raw profile of no digits": png(
            small[0], chunk(b"tEXt", b"Raw profile type exif\x00\n\n\nxyz"), small[1]
        ),
        "XMP of no parts": png(small[0], chunk(b"iTXt", b"XML:com.adobe.xmp\x00"), small[1]),
        "frames of APNG": png(
            small[0], chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)), small[1],
            chunk(b"fcTL", bytes(26)), chunk(b"fdAT", bytes(64)),
        ),
        "EXIF in JPEG": jpeg[:2] + segment(0xE1, b"Exif\x00\x00" + exif[:60_000]) * 9 + jpeg[2:],
        "thumbnail in JPEG": jpeg[:2] + segment(0xE1, b"Exif\x00\x00" + jpeg) + jpeg[2:],
        "MPF in JPEG": jpeg[:2] + segment(0xE2, b"MPF\x00II*\x00\xff\xff\xff\xff") + jpeg[2:],
        "ZIP behind PNG": png(*small) + b"PK\x05\x06" + bytes(18),
        "page behind JPEG": jpeg + b"<script>alert(1)</script>" + png(header(9999, 9999)),
        "page in JPEG": jpeg[:2] + segment(0xFE, b"<script>alert(1)</script>") + jpeg[2:],
        "PNG behind GIF": file_of(picture("P"), "GIF") + png(header(9999, 9999)),
    }  # fmt: skip


def cut_files(files: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Files cut at twelve places, none of which leaves the whole first frame."""
    for name, data in files.items():
        if "moving" not in name:
            for share in range(12):
                yield f"{name} cut at {share}/12", data[: len(data) * share // 12]


def changed_files(files: dict[str, bytes], count: int) -> Iterator[tuple[str, bytes]]:
    """`count` files with up to four changed bytes each, half of them near the start."""
    chance = random.Random(5)
    names = list(files)
    for number in range(count):
        name = chance.choice(names)
        data = bytearray(files[name])
        end = len(data) if chance.random() < 0.5 else min(len(data), 80)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(end)] = chance.randrange(256)
        yield f"{name}, change {number}", bytes(data)
