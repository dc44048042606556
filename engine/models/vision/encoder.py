# SPDX-License-Identifier: Apache-2.0
"""VisionEncoder: the contract of a model's encoder of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ...request.pictures import Picture


class VisionEncoder(Protocol):
    """Turns pictures into embeddings on its device."""

    def encode_pictures(self, pictures: Sequence[Picture], /) -> list[Tensor]:
        """Return the embeddings of each picture, `[num_tokens, hidden]`, queued on the device. Rows
        depend on no other picture. Pixels are uint8 `[height, width, 3]`; the encoder scales and
        normalises them."""
