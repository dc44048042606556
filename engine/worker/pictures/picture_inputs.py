# SPDX-License-Identifier: Apache-2.0
"""PictureInputs holds the embeddings of pictures in the worker, and adds them to a step's input.

The scheduler decides which pictures are encoded and dropped (`cache/picture_cache.py`). Encoding is
queued before the forward pass of the step that needs it first. A step takes the part of each
picture that its chunks touch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...batch.batch_update import IntArray
from ...models.decoder import Embeds, PictureRows
from ...models.model_spec import ModelSpec
from ...models.vision.encoder import VisionEncoder
from ...request.pictures import Picture
from ...sampling.copies import to_device
from ...scheduler.output import NewRequestData, SchedulerOutput
from ..forward.forward import HostEmbeds
from ..input_batch import InputBatch
from .picture_positions import PicturePositions


class PictureInputs:
    """The pictures of all requests that the worker remembers, and their embeddings."""

    def __init__(self, encoder: VisionEncoder, spec: ModelSpec, device: torch.device) -> None:
        assert spec.vision is not None
        self._encoder, self._device, self._hidden_size = encoder, device, spec.hidden_size
        self._pictures: dict[str, Sequence[Picture]] = {}  # by request id
        # By digest: [tokens, hidden], or more columns, which are additions after the first layers.
        self._embeds: dict[bytes, Tensor] = {}
        self._positions: PicturePositions | None = None  # None: a token's position is its place
        if spec.rope_axes is not None:
            self._positions = PicturePositions(spec.vision.pixels_of_token)

    def add_request(self, new: NewRequestData) -> None:
        if new.pictures:
            self._pictures[new.request_id] = new.pictures
            if self._positions is not None:
                self._positions.add_request(new)

    def remove_request(self, request_id: str) -> None:
        """Forget the pictures of an ended request; a request without pictures is ignored."""
        self._pictures.pop(request_id, None)
        if self._positions is not None:
            self._positions.remove_request(request_id)

    def drop_pictures(self, output: SchedulerOutput) -> None:
        """Forget the embeddings that a step drops. A step that fails drops them too."""
        for digest in output.dropped_pictures:
            self._embeds.pop(digest, None)

    def encode_pictures(self, output: SchedulerOutput) -> None:
        """Encode the new pictures of a step, which may compute no token. Raises ValueError if the
        embeddings do not fit the prompt."""
        if not output.new_pictures:
            return
        pixels = [
            # A copy, since torch takes no memory that may not be written.
            np.frombuffer(each.pixels, np.uint8).reshape(each.height, each.width, 3).copy()
            for each in output.new_pictures
        ]
        found = self._encoder.encode_pictures(pixels)
        for picture, embeds in zip(output.new_pictures, found, strict=True):
            if len(embeds) != picture.num_tokens:
                raise ValueError(
                    f"a picture of {picture.height} x {picture.width} has {len(embeds)} tokens, "
                    f"and the prompt has {picture.num_tokens} for it"
                )
            self._embeds[picture.digest] = embeds

    def plan_step(
        self,
        batch: InputBatch,
        rows: IntArray,
        counts: IntArray,
        places: IntArray,
        embeds: HostEmbeds | Embeds | None,
    ) -> tuple[IntArray, HostEmbeds | Embeds | None, PictureRows | None]:
        """Return the rotary positions of a step's tokens, the rows whose input is embeddings
        (`embeds` and pictures), and what else pictures change. `rows` of the batch compute `counts`
        tokens each, at these `places` in their sequences. Raises ValueError if the embeddings of a
        picture are missing."""
        grid = None
        found = self._rows_of(batch, rows, counts, places)
        if self._positions is not None:
            places, grid = self._positions.positions_of(batch, rows, counts, places)
        if found is None:
            return places, embeds, None
        at, whole = found
        seen = Embeds(at, whole[:, : self._hidden_size])
        deep = whole[:, self._hidden_size :].reshape(len(whole), -1, self._hidden_size)
        changes = PictureRows(
            at,
            deep if deep.shape[1] else None,
            None if grid is None else to_device(grid, self._device),
        )
        if embeds is not None:
            seen = seen.joined_with(embeds.to(self._device))
        has_changes = changes.deep is not None or grid is not None
        return places, seen, changes if has_changes else None

    def _rows_of(
        self, batch: InputBatch, rows: IntArray, counts: IntArray, places: IntArray
    ) -> tuple[Tensor, Tensor] | None:
        """Return the rows of the step that are of pictures, int64 `[n]`, and their embeddings."""
        if not self._pictures:
            return None
        first_row, found, values = 0, [], []
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            request = batch.requests[row]
            own = () if request is None else self._pictures.get(request.request_id, ())
            start = int(places[first_row]) if count else 0
            for each in own if count else ():
                first, last = max(start, each.start), min(start + count, each.end)
                if first >= last:
                    continue
                embeds = self._embeds.get(each.digest)
                if embeds is None:
                    raise ValueError(f"a picture of request {row} of the batch was not encoded")
                found.append(np.arange(first, last) - start + first_row)
                values.append(embeds[first - each.start : last - each.start])
            first_row += count
        if not found:
            return None
        return to_device(np.concatenate(found), self._device), torch.cat(values)
