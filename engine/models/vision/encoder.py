# SPDX-License-Identifier: Apache-2.0
"""VisionEncoder: the contract of a model's encoder of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]


class VisionEncoder(Protocol):
    """An encoder, which turns pictures into embeddings on the model's device."""

    def encode_pictures(self, pictures: Sequence[Pixels], /) -> list[Tensor]:
        """Queue the computation of each picture's embeddings, `[tokens, hidden]`, which depend on
        no other picture. The encoder scales and normalises the pixels."""
