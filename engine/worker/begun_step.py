# SPDX-License-Identifier: Apache-2.0
"""BegunStep: the model runner's data of a step, from its forward pass to its sampled tokens."""

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
    """A step whose forward pass has been launched."""

    output: SchedulerOutput
    result: ModelRunnerOutput
    hidden: Tensor | None = None  # [rows, hidden]; None: no request gets a token
    rows: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # rows that get a token
    drafted: DraftedRows | None = None  # None: each of `rows` has one row of logits
    sampled: SampledStep | None = None  # None: before `sample`, or no row gets a token
    error: Exception | None = None  # an error after the forward pass was launched


class SampledStep(NamedTuple):
    """The tokens that the device is sampling for a step."""

    choice: Choice
    expected: ExpectedTokens
    drafted: DraftedRows | None
