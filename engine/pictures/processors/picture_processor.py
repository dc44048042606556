# SPDX-License-Identifier: Apache-2.0
"""`PictureProcessor`: the interface of a class that makes a model's input from a picture.

    picture ─► items: arrays of pixels, each encoded to the embeddings of a run of tokens
            ─► text: replaces the picture's placeholder in the prompt; has a placeholder per item

An item's digest covers only the pixels and the settings that determine the embeddings, and not the
file's name, address or metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from ...request.pictures import Picture


class PictureItem(NamedTuple):
    """A part of a picture that the model's encoder encodes without the other parts."""

    pixels: bytes  # RGB, row by row
    height: int
    width: int
    digest: bytes
    num_tokens: int


class ProcessedSize(NamedTuple):
    """The size of a picture in the form of a model's input."""

    num_tokens: int
    num_bytes: int  # of the pixels of all items


class ProcessedPicture(NamedTuple):
    """A picture in the form of a model's input."""

    items: list[PictureItem]  # the items in the order of their tokens
    # Replaces the placeholder in the prompt. A placeholder in it stands for all tokens of an item,
    # so that texts are short to tokenize.
    text: str


class PictureProcessor(Protocol):
    """Makes the input of one model from pictures. Any thread may call the methods."""

    @property
    def placeholder(self) -> str:
        """The text that the chat template writes for each picture. The text is one token, which
        also fills the runs of a picture's tokens."""

    def measure_picture(self, width: int, height: int, /) -> ProcessedSize:
        """Return the size of a picture's input, from the picture's size in pixels. Raises
        ValueError for extreme proportions."""

    def process_picture(self, image: Image.Image, /) -> ProcessedPicture:
        """Return a model's input for an RGB picture. Raises ValueError for extreme proportions."""


def make_item(image: Image.Image, settings: bytes, num_tokens: int) -> PictureItem:
    """Return the item of an image. `settings`: the settings of the encoder and the processor."""
    pixels = image.tobytes()
    digest = hashlib.sha256(b"stratakv.picture.1")
    digest.update(len(settings).to_bytes(8, "little") + settings)
    digest.update(repr((image.height, image.width, 3)).encode())
    digest.update(pixels)
    return PictureItem(pixels, image.height, image.width, digest.digest(), num_tokens)


def expand_placeholders(text: str, pictures: Sequence[ProcessedPicture], placeholder: str) -> str:
    """Return the prompt with the text of a picture in place of each placeholder. Raises ValueError
    if the prompt does not have one placeholder for each picture."""
    parts = text.split(placeholder)
    if len(parts) - 1 != len(pictures):
        raise ValueError(
            f"the prompt has {len(parts) - 1} times {placeholder!r}, which stands for a picture, "
            f"and {len(pictures)} pictures came; leave it out of texts, and take a chat template "
            "that shows pictures"
        )
    expanded = [parts[0]]
    for picture, rest in zip(pictures, parts[1:], strict=True):
        expanded += [picture.text, rest]
    return "".join(expanded)


def place_items(
    token_ids: npt.NDArray[np.int32], pictures: Sequence[ProcessedPicture], token_id: int
) -> tuple[npt.NDArray[np.int32], list[Picture]]:
    """Return a prompt in which each placeholder is repeated for all tokens of its item, and the
    items with the positions of their tokens. `token_id`: the placeholder's token. Raises ValueError
    if the prompt does not have one placeholder for each item."""
    items = [item for picture in pictures for item in picture.items]
    places = np.flatnonzero(token_ids == token_id)
    if len(places) != len(items):
        raise ValueError(
            f"the prompt has {len(places)} tokens that stand for pictures, and its pictures need "
            f"{len(items)}; leave the placeholder out of texts"
        )
    counts = np.ones(len(token_ids), np.int64)
    counts[places] = [item.num_tokens for item in items]
    starts = (np.cumsum(counts) - counts)[places]
    placed = [
        Picture(item.digest, start, item.num_tokens, item.height, item.width, item.pixels)
        for item, start in zip(items, starts.tolist(), strict=True)
    ]
    return np.repeat(token_ids, counts), placed
