# SPDX-License-Identifier: Apache-2.0
"""Picture: a picture, or a tile of one, that stands for a run of tokens in a prompt.

The prompt has one placeholder token for each embedding of the picture. The digest covers the pixels
and all other inputs of the embeddings, so equal digests mean equal embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_PICTURES = 1024  # in one request; a tile counts as a picture


class Picture(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A processed picture."""

    digest: bytes  # 32 bytes
    start: int  # the picture's first token in the prompt
    num_tokens: int
    height: int  # of the processed picture
    width: int
    pixels: bytes = b""  # uint8 `[height, width, 3]`; b"": sent with another message

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def without_pixels(self) -> Picture:
        return msgspec.structs.replace(self, pixels=b"")


class WrongPictures(ValueError):
    """The placeholders of a prompt are not those of its pictures."""


def check_pictures(
    pictures: Sequence[Picture], tokens: npt.NDArray[np.int32], token_id: int | None
) -> None:
    """Raise WrongPictures unless the placeholders of a prompt are exactly those of its pictures,
    one picture after the other. `token_id` is the placeholder's; None: the model reads text
    alone."""
    if token_id is None:
        if pictures:
            raise WrongPictures("this model reads no pictures; send text")
        return
    if len(pictures) > MAX_PICTURES:
        raise WrongPictures(f"a prompt has at most {MAX_PICTURES} pictures, not {len(pictures)}")
    is_placeholder = tokens == token_id
    if not pictures:
        if is_placeholder.any():
            raise WrongPictures(
                f"the prompt holds the token {token_id}, which stands for a picture, and no "
                "picture came with it; send the picture in a chat, or leave the token out"
            )
        return
    end = 0
    for number, each in enumerate(pictures):
        size = each.height * each.width * 3
        is_inside = end <= each.start and each.num_tokens > 0 and each.end <= len(tokens)
        if not is_inside or len(each.digest) != 32 or len(each.pixels) != size:
            raise WrongPictures(
                f"picture {number} stands for tokens {each.start} to {each.end} of "
                f"{len(tokens)} and has {len(each.pixels)} bytes for {each.height} x {each.width} "
                "pixels; pictures come in order, inside the prompt, with all their pixels"
            )
        if not is_placeholder[each.start : each.end].all():
            raise WrongPictures(f"picture {number} stands for tokens that are no placeholders")
        end = each.end
    num_tokens = sum(each.num_tokens for each in pictures)
    if int(is_placeholder.sum()) != num_tokens:
        raise WrongPictures(
            f"the prompt has {int(is_placeholder.sum())} tokens that stand for pictures, and its "
            f"pictures have {num_tokens}; leave the placeholder out of texts"
        )
