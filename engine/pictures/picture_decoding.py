# SPDX-License-Identifier: Apache-2.0
"""Decodes a picture's file to RGB pixels, the same pixels as from transformers' `load_image`.

PNG, JPEG, WebP and GIF are supported; of an animation, the first frame is decoded. The size in the
file's header is checked before Pillow gets the file. Pillow gets a copy without metadata, reads the
copy in pieces until the deadline, and allocates at most about 26 bytes for each pixel."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable

# Pillow would import the plugins of all formats if the plugin of a requested format were missing.
from PIL import (
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from . import gif_file, jpeg_file, png_file, webp_file
from .picture_errors import PictureError
from .picture_file import PictureFile, PictureLimits

DEFAULT_LIMITS = PictureLimits()
_PLUGINS = (GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
_WHITE = (255, 255, 255, 255)
_SHOWN_BYTES = 8
# EXIF orientation → the transposition that makes the picture upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_Read = Callable[[bytes, PictureLimits], PictureFile]


class _TimedFile(io.BytesIO):
    """A file in memory whose `read` raises PictureError after a deadline."""

    def __init__(self, content: bytes, deadline: float) -> None:
        super().__init__(content)
        self._deadline = deadline

    def read(self, size: int | None = -1, /) -> bytes:
        check_deadline(self._deadline)
        return super().read(size)


def check_deadline(deadline: float) -> None:
    """Raise PictureError after `deadline`, a time of the monotonic clock."""
    if time.monotonic() > deadline:
        raise PictureError(
            "it was not decoded in time; send a smaller picture, or the same one later"
        )


def decode_picture(
    data: bytes,
    limits: PictureLimits = DEFAULT_LIMITS,
    *,
    deadline: float = math.inf,
) -> Image.Image:
    """Return the picture in `data` as an upright RGB image without transparency, as transformers'
    `load_image` does. Raises only PictureError."""
    return decode_file(read_picture_file(data, limits), deadline=deadline)


def decode_file(file: PictureFile, *, deadline: float = math.inf) -> Image.Image:
    """Return the picture in a file as `decode_picture` does. Raises only PictureError."""
    check_deadline(deadline)
    try:
        return _decode_file(file, deadline)
    except PictureError:
        raise
    except MemoryError:
        raise PictureError(
            f"its {file.width} x {file.height} pixels need more memory than there is; scale it down"
        ) from None
    except UnidentifiedImageError as error:
        raise PictureError(
            f"the header of its {file.kind} file is damaged; save it again"
        ) from error
    except Exception as error:  # Pillow's decoders raise errors of many types
        raise PictureError(
            f"its {file.kind} file is damaged ({type(error).__name__}: {str(error)[:120]}); save "
            "it again"
        ) from error


def read_picture_file(data: bytes, limits: PictureLimits = DEFAULT_LIMITS) -> PictureFile:
    """Return the parts of a file that determine the pixels. Raises PictureError."""
    if len(data) > limits.max_bytes:
        raise PictureError(
            f"its file has {len(data)} bytes, and at most {limits.max_bytes} are read; send a "
            "smaller one"
        )
    return _reader_of(data)(data, limits)


def _reader_of(data: bytes) -> _Read:
    if data.startswith(png_file.SIGNATURE):
        return png_file.read_png
    if data.startswith(jpeg_file.SIGNATURE):
        return jpeg_file.read_jpeg
    if data.startswith(gif_file.SIGNATURES):
        return gif_file.read_gif
    if webp_file.is_webp(data):
        return webp_file.read_webp
    start = f"begins with {data[:_SHOWN_BYTES].hex(' ')}" if data else "is empty"
    raise PictureError(f"its file is no PNG, JPEG, WebP or GIF: it {start}; convert it to PNG")


def _decode_file(file: PictureFile, deadline: float) -> Image.Image:
    size = (file.width, file.height)
    with Image.open(_TimedFile(file.content, deadline), formats=(file.kind,)) as opened:
        if opened.size != size:
            raise PictureError(
                f"its file says {file.width} x {file.height} pixels in one place and "
                f"{opened.width} x {opened.height} in another; save it again"
            )
        opened.load()
        if opened.size != size:
            raise PictureError("its file has pixels of another size than it says; save it again")
        image: Image.Image = opened
        if file.orientation in _TURNS:
            image = opened.transpose(_TURNS[file.orientation])
        check_deadline(deadline)
        return _to_rgb(image)


def to_rgb_on_white(image: Image.Image) -> Image.Image:
    """Return an image as RGB, with white under transparent pixels, as transformers' processors do.
    The given image is not changed. Raises PictureError for pixels that cannot be read."""
    try:
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            ground = Image.new("RGBA", image.size, _WHITE)
            image = Image.alpha_composite(ground, image.convert("RGBA"))
        return _to_rgb(image)
    except Exception as error:  # a lazy image of Pillow reads its file in `convert`
        raise PictureError(
            f"its pixels cannot be read ({type(error).__name__}: {str(error)[:120]})"
        ) from error


def _to_rgb(image: Image.Image) -> Image.Image:
    rgb = image.convert("RGB")
    # The converted image still has the file's metadata, which are removed.
    rgb.info = {}
    return rgb
