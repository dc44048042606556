# SPDX-License-Identifier: Apache-2.0
"""PictureProcessor: the contract of what makes a model's input from a picture.

    picture ─► items: pixels of a fixed form, each encoded by itself, for a run of tokens
            ─► text: what the picture's placeholder becomes in the prompt, with those tokens in it

Digests cover the pixels and every setting that decides the embeddings, and nothing else: not the
file's name, its address or its metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from ...request.pictures import Picture

Pixels = npt.NDArray[np.uint8]


class PictureItem(NamedTuple):
    """A part of a picture that is encoded by itself."""

    pixels: Pixels  # [height, width, 3]
    digest: bytes
    num_tokens: int


class ProcessedPicture(NamedTuple):
    """A picture in the form that a model reads."""

    items: list[PictureItem]  # in the order of their tokens
    text: str  # takes the place of the placeholder


class PictureProcessor(Protocol):
    """Makes the input of one model. Any thread may call it."""

    @property
    def placeholder(self) -> str:
        """The text that the chat template writes for each picture. Its token fills the runs of a
        picture's tokens."""

    def process_picture(self, image: Image.Image, /) -> ProcessedPicture:
        """Process an RGB picture. Raises ValueError for one of impossible proportions."""


def digest_of(pixels: Pixels, settings: bytes) -> bytes:
    """Return the digest of an item; `settings` are those of the encoder and the processor."""
    digest = hashlib.sha256(b"stratakv.picture.1")
    digest.update(len(settings).to_bytes(8, "little") + settings)
    digest.update(repr(pixels.shape).encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def expand_placeholders(text: str, pictures: Sequence[ProcessedPicture], placeholder: str) -> str:
    """Replace the placeholders of a prompt by the texts of its pictures. Raises ValueError
    unless there are as many as pictures."""
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
) -> list[Picture]:
    """Return the items of a prompt's pictures with their tokens. `token_id` is the placeholder's.
    Raises ValueError if the prompt has other runs of it than the pictures need."""
    items = [item for picture in pictures for item in picture.items]
    places = np.flatnonzero(token_ids == token_id)
    wanted = sum(item.num_tokens for item in items)
    if len(places) != wanted:
        raise ValueError(
            f"the prompt has {len(places)} tokens that stand for pictures, and its pictures need "
            f"{wanted}; leave the placeholder out of texts"
        )
    placed, first = [], 0
    for item in items:
        run = places[first : first + item.num_tokens]
        if run[-1] - run[0] != item.num_tokens - 1:
            raise ValueError("the tokens of a picture are not side by side in the prompt")
        height, width, _ = item.pixels.shape
        placed.append(
            Picture(item.digest, int(run[0]), item.num_tokens, height, width, item.pixels.tobytes())
        )
        first += item.num_tokens
    return placed
