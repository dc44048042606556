# SPDX-License-Identifier: Apache-2.0
"""Memory that calls of the compiled library work in, kept from one to the next."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Memory for partial results and tiles, which grows with what is asked of it and is kept, since
    fresh pages cost more than what is computed in them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def at_least(self, num_bytes: int) -> Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes + num_bytes // 2, dtype=torch.uint8)
        return self._memory
