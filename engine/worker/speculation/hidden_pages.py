# SPDX-License-Identifier: Apache-2.0
"""HiddenPages: the hidden states of a model, stored in the blocks of the pool next to its K and V.

The states have the type of the computation, even if K and V have another type. A state is in the
slot of its token, divided over as many layer places of the page as it needs:

    place    | block_size slots of part 0 |    place    | block_size slots of part 1, zeros |"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...batch.batch_update import IntArray
from ...sampling.copies import to_device
from ..block_table import BlockTable, MultiGroupBlockTable
from ..kv_pool import ModelPages


class HiddenPages:
    """Storage for hidden states of `hidden_size` elements of type `dtype`, divided over the layer
    places `pages.places`. `pages.tensor` has all layer places of a page."""

    def __init__(
        self, pages: ModelPages, tables: MultiGroupBlockTable, hidden_size: int, dtype: torch.dtype
    ) -> None:
        num_blocks, num_places, _, self._block_size = pages.tensor.shape[:4]
        raw = pages.tensor.view(num_blocks, num_places, -1).view(torch.uint8)
        slots = raw.view(num_blocks, num_places, self._block_size, -1).view(dtype)
        width = slots.shape[-1]
        self._hidden_size, self._dtype, self.device = hidden_size, dtype, raw.device
        # For each block table: the parts in its pages, and where each part begins in a state.
        self._parts: list[tuple[BlockTable, list[tuple[Tensor, int]]]] = []
        start = 0
        for group, places in groupby(pages.places, key=attrgetter("group")):
            parts = []
            for place in places:
                parts.append((slots[:, place.in_page], start))
                start += width
            self._parts.append((tables[group], parts))
        self._rest = start - hidden_size  # numbers of padding in the last part

    def write_states(self, rows: IntArray, positions: IntArray, hidden: Tensor) -> None:
        """Store `hidden` `[tokens, hidden]` for the tokens at these rows and positions of the
        batch."""
        # Padding is written too, because pages of another cache group may have left data.
        hidden = F.pad(hidden, (0, self._rest))
        for table, parts in self._parts:
            index = slot_index(table, rows, positions, self.device)
            for part, start in parts:
                part[index] = hidden[:, start : start + part.shape[-1]]

    def read_states(self, rows: IntArray, positions: IntArray) -> Tensor:
        """Return the stored states `[tokens, hidden]` of the tokens at these rows and positions of
        the batch."""
        shape = len(rows), self._hidden_size + self._rest
        found = torch.empty(shape, dtype=self._dtype, device=self.device)
        for table, parts in self._parts:
            index = slot_index(table, rows, positions, self.device)
            for part, start in parts:
                found[:, start : start + part.shape[-1]] = part[index]
        return found[:, : self._hidden_size]


def slot_index(
    table: BlockTable, rows: IntArray, positions: IntArray, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the blocks of these tokens and the slots within them, as indices on `device`."""
    blocks, offsets = np.divmod(table.slot_mapping(rows, positions), table.block_size)
    return to_device(blocks, device), to_device(offsets, device)
