# SPDX-License-Identifier: Apache-2.0
"""BegunStep: a step in the model runner, from its forward pass to its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..batch.batch_update import IntArray
from ..sampling.sampler import Choice
from ..scheduler.output import ModelRunnerOutput, SchedulerOutput
from .input_batch import ExpectedTokens
from .speculation.drafted_rows import DraftedRows


@dataclass(slots=True)
class BegunStep:
    """A step whose forward pass has begun."""

    output: SchedulerOutput
    result: ModelRunnerOutput
    hidden: Tensor | None = None  # [rows, hidden]; None: no request reaches its last known token
    rows: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # of the batch
    drafted: DraftedRows | None = None  # None: one row of logits for each of them
    sampled: SampledStep | None = None  # None: before `sample`, or no request gets a token
    error: Exception | None = None  # a fault since its forward pass


class SampledStep(NamedTuple):
    """The tokens of a step, while the device chooses them."""

    choice: Choice
    expected: ExpectedTokens
    drafted: DraftedRows | None
