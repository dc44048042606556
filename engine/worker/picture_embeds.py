# SPDX-License-Identifier: Apache-2.0
"""PictureEmbeds: the embeddings of pictures, and the rows of a step that take them.

The scheduler decides which pictures are encoded and dropped (`cache/picture_cache.py`). Encoding is
queued before the forward pass of the step that needs it first. A step takes the part of each
picture that its chunks touch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..batch.batch_update import IntArray
from ..models.decoder import Embeds
from ..models.vision.encoder import VisionEncoder
from ..request.pictures import Picture
from ..sampling.copies import to_device
from ..scheduler.output import NewRequestData, SchedulerOutput
from .input_batch import InputBatch


class PictureEmbeds:
    """The pictures of all requests that the worker remembers, and their embeddings."""

    def __init__(self, encoder: VisionEncoder, device: torch.device) -> None:
        self._encoder, self._device = encoder, device
        self._pictures: dict[str, Sequence[Picture]] = {}  # by request id
        self._embeds: dict[bytes, Tensor] = {}  # by digest: [tokens, hidden]

    def add_request(self, new: NewRequestData) -> None:
        if new.pictures:
            self._pictures[new.request_id] = new.pictures

    def remove_request(self, request_id: str) -> None:
        """Forget the pictures of an ended request; a request without pictures is ignored."""
        self._pictures.pop(request_id, None)

    def encode_new(self, output: SchedulerOutput) -> None:
        """Drop the embeddings that the scheduler has given up, and compute those of new pictures.
        Raises ValueError if the encoder gives another number of tokens than the prompt has."""
        for digest in output.dropped_pictures:
            self._embeds.pop(digest, None)
        if not output.new_pictures:
            return
        found = self._encoder.encode_pictures(output.new_pictures)
        for picture, embeds in zip(output.new_pictures, found, strict=True):
            if len(embeds) != picture.num_tokens:
                raise ValueError(
                    f"a picture of {picture.height} x {picture.width} has {len(embeds)} tokens, "
                    f"and the prompt has {picture.num_tokens} for it"
                )
            self._embeds[picture.digest] = embeds

    def rows_of(
        self, batch: InputBatch, rows: IntArray, computed: IntArray, counts: IntArray
    ) -> Embeds | None:
        """Return the embeddings of a step, whose `rows` of the batch compute `counts` tokens each
        after `computed` ones. None if the step touches no picture. Raises ValueError if embeddings
        are missing."""
        if not self._pictures:
            return None
        ends = np.cumsum(counts)
        places, values = [], []
        for index, row in enumerate(rows.tolist()):
            request = batch.requests[row]
            if request is None or counts[index] == 0:
                continue
            start, end = int(computed[index]), int(computed[index] + counts[index])
            first_row = int(ends[index] - counts[index])
            for each in self._pictures.get(request.request_id, ()):
                first, last = max(start, each.start), min(end, each.end)
                if first >= last:
                    continue
                embeds = self._embeds.get(each.digest)
                if embeds is None:
                    raise ValueError(
                        f"request {request.request_id} needs a picture that was not encoded"
                    )
                places.append(np.arange(first, last) - start + first_row)
                values.append(embeds[first - each.start : last - each.start])
        if not places:
            return None
        return Embeds(to_device(np.concatenate(places), self._device), torch.cat(values))
