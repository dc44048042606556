# SPDX-License-Identifier: Apache-2.0
"""ModelLoader: loads the weights of the worker's model and draft model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from ....tiers.settings.values import ConfigError
from ...models.decoder import Decoder
from ...models.eagle.eagle_head import EagleHead
from ...models.model_source import ModelSource
from ...models.model_spec import ModelSpec
from ...models.vision.encoder import VisionEncoder
from ...models.vision.vision_loading import load_vision_encoder
from .placement import Placement
from .runtimes import check_kernels, check_room, choose_layer_parts


class LoadedModels(NamedTuple):
    """The models of a worker, in memory."""

    model: Decoder
    draft: Decoder | None
    encoder: VisionEncoder | None  # of pictures; None for a model that reads text alone


class ModelLoader:
    """Loads the model and the draft model. The constructor makes all checks without weights."""

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        draft: ModelSource | None,
        placement: Placement,
        compute: torch.dtype,
    ) -> None:
        """Raises ConfigError if no allowed kernel can compute a model, or if the weights do not fit
        into a GPU's memory."""
        self._sources = [ModelSource(path, spec), *([] if draft is None else [draft])]
        self._placement, self._compute = placement, compute
        for source in self._sources:
            check_kernels(source.spec, placement, compute)
        specs = [source.spec for source in self._sources]
        self._parts = [choose_layer_parts(each, placement, compute) for each in specs]
        check_room(specs, placement, compute)
        self._num_slots = self._max_rank = 0

    @property
    def is_plain(self) -> bool:
        """Whether torch's operators compute the layers, instead of the kernels of `kernels/`."""
        return self._parts[0].is_plain

    def allow_adapters(self, num_slots: int, max_rank: int) -> None:
        """Load the model with `num_slots` slots for adapters; 0: no adapters."""
        self._num_slots, self._max_rank = num_slots, max_rank

    def load_models(self, max_model_len: int) -> LoadedModels:
        """Load the model for a context of `max_model_len` tokens, the draft model or EAGLE head for
        the same context or, if that is shorter, the longest it supports, and the encoder. Raises
        ConfigError if the weights do not fit a specification."""
        found: list[Decoder] = []
        for source, parts in zip(self._sources, self._parts, strict=True):
            length = min(max_model_len, source.spec.max_context)
            common = (self._compute, self._placement.device, parts)
            is_random = self._placement.random_weights
            if source.spec.is_eagle:
                head = EagleHead.load_head(source, found[0], length, *common, is_random=is_random)
                found.append(head)
                continue
            found.append(
                Decoder.load(source.path, source.spec, length, *common, is_random=is_random)
            )
        if self._num_slots:
            found[0].allow_adapters(self._num_slots, self._max_rank)
        draft = found[1] if len(found) > 1 else None
        return LoadedModels(found[0], draft, self._load_encoder())

    def _load_encoder(self) -> VisionEncoder | None:
        path, spec = self._sources[0].path, self._sources[0].spec
        if spec.vision is None:
            return None
        if self._placement.random_weights:
            raise ConfigError(
                f"{path} reads pictures, and --load-format dummy makes no weights for these; leave "
                "it out"
            )
        device = self._placement.device
        return load_vision_encoder(path, spec.vision, spec.hidden_size, self._compute, device)
