# SPDX-License-Identifier: Apache-2.0
"""Random weights that replace a checkpoint's weights, with the same names and shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .tensor_shapes import STATE_CONV, STATE_DECAY, STATE_NORM, STATE_SKIP, STATE_TIME_BIAS

SEED = 20261
SPREAD = 0.02  # standard deviation of random matrices, as at the start of training
_OF_STATES = (STATE_CONV, STATE_DECAY, STATE_NORM, STATE_SKIP, STATE_TIME_BIAS)


class RandomTensors:
    """Random weights for benchmarks and trials, made on the device and read with the same methods
    as the weights of a checkpoint. With random weights, a directory needs only a config.json.

    The numbers depend on the order in which tensors are read. Each start on the same kind of device
    makes the same random weights, so blocks in the tiers stay valid. Different kinds of devices
    make different weights."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, norm: float = 1.0
    ) -> None:
        """`norm` is the weight of every norm, as a checkpoint stores it."""
        self.device, self._norm = device, norm
        self._shapes = shapes
        self._generator = torch.Generator(device).manual_seed(SEED)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Make a tensor: a constant for a norm, zeros for a bias, normal numbers for a matrix."""
        shape = self._shapes[name]
        if name.endswith(_OF_STATES):
            return self._read_of_state(name, shape).to(dtype)
        if len(shape) == 1:
            fill = 0.0 if name.endswith(".bias") else self._norm
            return torch.full(shape, fill, dtype=dtype, device=self.device)
        made = torch.empty(shape, dtype=dtype, device=self.device)
        return made.normal_(0.0, SPREAD, generator=self._generator)

    def _read_of_state(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Make a tensor of a layer that carries a state, with values as at the start of training: a
        different decay rate for each head, short time steps, small convolution weights."""
        made = torch.empty(shape, dtype=torch.float32, device=self.device)
        if name.endswith((STATE_NORM, STATE_SKIP)):
            return made.fill_(1.0)
        made.uniform_(generator=self._generator)
        if name.endswith(STATE_DECAY):
            return made.mul_(15.0).add_(1.0).log_()
        if name.endswith(STATE_TIME_BIAS):
            # softplus of the result gives the time steps, 0.001 to 0.1.
            return made.mul_(math.log(100.0)).add_(math.log(0.001)).exp_().expm1_().log_()
        return made.sub_(0.5).mul_(2.0 * shape[-1] ** -0.5)

    def has_tensor(self, name: str) -> bool:
        return name in self._shapes
