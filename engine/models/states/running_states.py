# SPDX-License-Identifier: Apache-2.0
"""RunningStates: the states of requests in slots; a slot is one run of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..dtypes import dtype_name, pool_dtype
from .state_spec import StatePart, StateSpec


class LayerState(NamedTuple):
    """A layer's part of every slot: views into `RunningStates.raw`."""

    conv: Tensor  # [slots, channels, conv_width - 1], in the type of the computation
    recurrent: Tensor | None  # [slots, *recurrent_shape], float32 or float64


class RunningStates:
    """Slots of states. `raw` is uint8 `[slots, slot_bytes]`, zeros at first. A slot holds a
    request's state after some token. The caller knows which token, and which slots are in use."""

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
        """`slot_bytes`: the size of a slot with padding after its states; None: no padding."""
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
