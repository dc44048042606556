# SPDX-License-Identifier: Apache-2.0
"""Hidden states come back from the pages as they were written, whatever type K and V have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stratakv.engine.cache.group_spec import LayerPlace
from stratakv.engine.models.dtypes import pool_dtype
from stratakv.engine.worker.block_table import BlockTable, MultiGroupBlockTable
from stratakv.engine.worker.kv_pool import ModelPages, block_shape
from stratakv.engine.worker.speculation.hidden_pages import HiddenPages
from stratakv.tiers.block import BlockLayout

BLOCK, HEADS, DIM = 8, 2, 4


@pytest.mark.parametrize("kernel_block", [BLOCK, 4])
@pytest.mark.parametrize(("kv_dtype", "dtype", "hidden_size", "num_places"), [
    ("float64", torch.float64, 16, 1), ("float64", torch.float64, 40, 3),
    ("bfloat16", torch.bfloat16, 31, 2), ("fp8_e4m3", torch.bfloat16, 20, 3),
])  # fmt: skip
def test_states_come_back(
    kernel_block: int, kv_dtype: str, dtype: torch.dtype, hidden_size: int, num_places: int
) -> None:
    """Of two rows, whose pages are of two cache groups; what was in the slots before is gone."""
    tables = [BlockTable(2, 4, BLOCK, kernel_block) for _ in range(2)]
    batch = MultiGroupBlockTable(tables)
    batch.add_row(([1, 2], [3, 4]), 0)
    batch.add_row(([6, 5], [8, 7]), 1)
    places = [LayerPlace(1, 1), LayerPlace(1, 2), LayerPlace(0, 2)][-num_places:]
    layout = BlockLayout(4, kernel_block, HEADS, DIM, kv_dtype)
    each = BLOCK // kernel_block
    shape = (9 * each, *block_shape(layout))
    tensor = torch.ones(shape, dtype=torch.float64).to(pool_dtype(kv_dtype))
    pages = ModelPages(tensor, layout, places, each)
    states = HiddenPages(pages, batch, hidden_size, dtype)
    rows, positions = np.array([0, 0, 1, 1, 1]), np.array([0, 9, 7, 8, 15])
    written = torch.randn(5, hidden_size).to(dtype)
    states.write_states(rows, positions, written)
    order = np.array([3, 1, 4, 0, 2])
    found = states.read_states(rows[order], positions[order])
    assert found.dtype == dtype
    assert torch.equal(found, written[torch.from_numpy(order)])
    slot = tensor.view(torch.uint8).view(len(tensor), 4, kernel_block, -1)
    block, offset = divmod(int(tables[places[-1].group].slot_mapping(rows, positions)[0]),
                           kernel_block)  # fmt: skip
    last = slot[block, places[-1].in_page, offset]
    rest = len(last) * num_places - hidden_size * dtype.itemsize
    assert rest == 0 or not last[-rest:].any()
    assert (slot[:, 0] == slot[0, 0]).all()
