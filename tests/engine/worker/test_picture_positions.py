# SPDX-License-Identifier: Apache-2.0
"""PicturePositions: the positions that transformers gives to text and pictures, chunk by chunk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from stratakv.engine.request.pictures import Picture
from stratakv.engine.worker.pictures.picture_positions import PicturePositions

SIDE = 32  # pixels of a token


def picture(start: int, rows: int, columns: int) -> Picture:
    return Picture(bytes(32), start, rows * columns, rows * SIDE, columns * SIDE)


def request(name: str, num_tokens: int, *pictures: Picture) -> Any:
    return SimpleNamespace(
        request_id=name, pictures=list(pictures), prompt_token_ids=[0] * num_tokens
    )


def theirs(num_tokens: int, pictures: tuple[Picture, ...]) -> np.ndarray[Any, Any]:
    """Positions by axis, of the prompt and of twenty tokens behind it."""
    kinds = torch.zeros(1, num_tokens, dtype=torch.int32)
    for each in pictures:
        kinds[0, each.start : each.end] = 1
    grids = torch.tensor([[1, p.height // SIDE * 2, p.width // SIDE * 2] for p in pictures])
    shape = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    model: Any = SimpleNamespace(config=shape)
    model.get_vision_position_ids = lambda *a, **k: Qwen3VLModel.get_vision_position_ids(
        model, *a, **k
    )
    ids = torch.zeros(1, num_tokens, dtype=torch.int64)
    found, deltas = Qwen3VLModel.get_rope_index(model, ids, kinds, grids)
    behind = torch.arange(num_tokens, num_tokens + 20) + deltas[0]
    return torch.cat((found[:, 0], behind.expand(3, -1)), dim=1).numpy()


PROMPTS: list[tuple[int, tuple[Picture, ...]]] = [
    (12, (picture(2, 2, 3),)),
    (9, (picture(0, 3, 3),)),
    (30, (picture(1, 1, 7), picture(9, 4, 2), picture(18, 2, 5))),
    (21, (picture(3, 3, 2), picture(10, 1, 1))),
]


@pytest.mark.parametrize(("num_tokens", "pictures"), PROMPTS)
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_positions_are_those_of_transformers(
    num_tokens: int, pictures: tuple[Picture, ...], chunk: int
) -> None:
    wanted = theirs(num_tokens, pictures)
    positions = PicturePositions(SIDE)
    text, one = request("t", 50), request("r", num_tokens, *pictures)
    for each in (text, one):
        positions.add_request(each)
    batch: Any = SimpleNamespace(requests=[text, one])
    rows = np.asarray([0, 1], np.int32)
    for start in range(0, num_tokens + 20, chunk):
        end = min(start + chunk, num_tokens + 20)
        places = np.concatenate((np.arange(3, 5), np.arange(start, end)))
        counts = np.asarray([2, end - start], np.int32)
        first, grid = positions.positions_of(batch, rows, counts, places)
        found = np.tile(first, (3, 1)) if grid is None else grid
        assert (found[:, :2] == [3, 4]).all()
        assert (found[:, 2:] == wanted[:, start:end]).all()
        assert (first == found[0]).all()


def test_ended_requests_are_forgotten() -> None:
    positions = PicturePositions(SIDE)
    num_tokens, pictures = PROMPTS[0]
    one = request("r", num_tokens, *pictures)
    positions.add_request(one)
    positions.remove_request("r")
    positions.remove_request("r")
    batch: Any = SimpleNamespace(requests=[one])
    places = np.arange(num_tokens)
    counts = np.asarray([num_tokens], np.int32)
    found, grid = positions.positions_of(batch, np.zeros(1, np.int32), counts, places)
    assert grid is None and (found == places).all()
