# SPDX-License-Identifier: Apache-2.0
"""PicturePositions: rotary positions of prompts with pictures, for models with three axes.

A token of text has one position for all three axes. The tokens of a picture share one time, and
their height and width are their row and column in the picture. The positions of the text after a
picture continue after the picture's largest position, and are smaller than its token indices.

    text text | picture of 2 x 3 | text          time    0 1  2 2 2 2 2 2  5
                                                 height  0 1  2 2 2 3 3 3  5
                                                 width   0 1  2 3 4 2 3 4  5
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...batch.batch_update import IntArray
from ...request.pictures import Picture
from ...scheduler.output import NewRequestData
from ..input_batch import InputBatch

_Grid = npt.NDArray[np.int64]


class _OfPrompt(NamedTuple):
    """The positions of one request."""

    grid: _Grid  # [3, prompt tokens]
    shift: int  # position minus index of the tokens after the prompt


class PicturePositions:
    """The positions of all requests with pictures that the worker remembers."""

    def __init__(self, pixels_of_token: int) -> None:
        """A token of a picture is a square of `pixels_of_token` pixels a side."""
        self._pixels_of_token = pixels_of_token
        self._of_requests: dict[str, _OfPrompt] = {}

    def add_request(self, new: NewRequestData) -> None:
        if new.pictures:
            grid, shift = self._grid_of(new.pictures, len(new.prompt_token_ids))
            self._of_requests[new.request_id] = _OfPrompt(grid, shift)

    def remove_request(self, request_id: str) -> None:
        """Forget an ended request; a request without pictures is ignored."""
        self._of_requests.pop(request_id, None)

    def positions_of(
        self, batch: InputBatch, rows: IntArray, counts: IntArray, places: IntArray
    ) -> tuple[IntArray, _Grid | None]:
        """Return the positions of a step's tokens, whose `places` in their sequences are given
        request by request; and the grid `[3, tokens]`, or None if no token of the step has
        different positions by axis. `rows` of the batch compute `counts` tokens each."""
        if not self._of_requests:
            return places, None
        positions, grid = places.copy(), None
        first = 0
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            request = batch.requests[row]
            own = None if request is None else self._of_requests.get(request.request_id)
            if own is not None:
                here = slice(first, first + count)
                in_prompt = places[here] < own.grid.shape[1]
                behind = np.where(in_prompt, 0, places[here] + own.shift)
                inside = own.grid[:, np.where(in_prompt, places[here], 0)]
                of_rows = np.where(in_prompt, inside, behind)
                positions[here] = of_rows[0]
                if (of_rows != of_rows[0]).any():
                    grid = np.tile(positions, (3, 1)) if grid is None else grid
                    grid[:, here] = of_rows
                elif grid is not None:
                    grid[:, here] = of_rows[0]
            first += count
        return positions, grid

    def _grid_of(self, pictures: Sequence[Picture], num_tokens: int) -> tuple[_Grid, int]:
        grid = np.zeros((3, num_tokens), np.int64)
        place = position = 0
        for each in pictures:
            num_before = each.start - place
            grid[:, place : each.start] = np.arange(position, position + num_before)
            position += num_before
            height, width = (
                each.height // self._pixels_of_token,
                each.width // self._pixels_of_token,
            )
            grid[0, each.start : each.end] = position
            grid[1, each.start : each.end] = position + np.repeat(np.arange(height), width)
            grid[2, each.start : each.end] = position + np.tile(np.arange(width), height)
            position += max(height, width)
            place = each.end
        grid[:, place:] = np.arange(position, position + num_tokens - place)
        return grid, position - place
