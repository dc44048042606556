# SPDX-License-Identifier: Apache-2.0
"""RunningStates: the states of running requests, each in a slot of contiguous bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..dtypes import dtype_name, pool_dtype
from .state_spec import StatePart, StateSpec


class LayerState(NamedTuple):
    """A layer's part of every slot, as views into `RunningStates.raw`."""

    conv: Tensor  # [slots, channels, conv_width - 1], in the type of the computation
    recurrent: Tensor | None  # [slots, *recurrent_shape], float32 or float64


class RunningStates:
    """A number of slots, each for one state of all layers. `raw` is uint8 `[slots, slot_bytes]`,
    with zeros at first. A slot has a request's state after one of its tokens. The caller records
    the token of each slot, and which slots are in use."""

    __slots__ = ("layers", "raw", "spec")

    def __init__(
        self,
        spec: StateSpec,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        slot_bytes: int | None = None,
    ) -> None:
        """`slot_bytes` is the size of a slot, with padding at its end; None means no padding."""
        name = dtype_name(dtype)
        self.spec = spec
        shape = (num_slots, slot_bytes or spec.slot_bytes(name))
        if device.type == "cpu":  # numpy's zeros take no memory for unused slots
            self.raw = torch.from_numpy(np.zeros(shape, np.uint8))
        else:
            self.raw = torch.zeros(shape, dtype=torch.uint8, device=device)
        convs: dict[int, Tensor] = {}
        recurrents: dict[int, Tensor] = {}
        for part in spec.parts(name):
            (recurrents if part.is_recurrent else convs)[part.layer] = self._view(part)
        self.layers: Mapping[int, LayerState] = {
            layer: LayerState(convs[layer], recurrents.get(layer)) for layer in spec.layers
        }

    def _view(self, part: StatePart) -> Tensor:
        run = self.raw[:, part.offset : part.offset + part.num_bytes]
        return run.view(pool_dtype(part.dtype)).view(len(run), *part.shape)
