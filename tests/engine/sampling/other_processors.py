# SPDX-License-Identifier: Apache-2.0
"""Logits processors as other packages bring them, and what each does to one row, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stratakv.engine.batch.batch_update import BatchUpdate
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.sampling.processors.adapter import (
    AdapterLogitsProcessor,
    RequestLogitsProcessor,
)
from stratakv.engine.sampling.processors.base import (
    LogitsProcessor,
    ProcessorContext,
    StatefulProcessor,
    drafted,
)


def arg(params: SamplingParams, name: str) -> Any:
    return (params.extra_args or {}).get(name)


class Boom(RuntimeError):
    """What the processors here raise when they are told to."""


class Halve(LogitsProcessor):
    """Divides the logits of a request by its `halve`, with a dict as the interface gives it; raises
    in `update_state` for `boom: update`, in `apply` for `boom: apply`."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self.params: dict[int, SamplingParams] = {}

    @classmethod
    def applies_to(cls, params: SamplingParams) -> bool:
        return arg(params, "halve") is not None

    @property
    def is_argmax_invariant(self) -> bool:
        return False

    @property
    def is_active(self) -> bool:
        return bool(self.params)

    def update_state(self, update: BatchUpdate) -> None:
        for row in update.removed:
            self.params.pop(row, None)
        for added in update.added:
            self.params.pop(added.row, None)
            if self.applies_to(added.params):
                if arg(added.params, "boom") == "update":
                    raise Boom("told to, in update_state")
                self.params[added.row] = added.params
        for source, target in update.moved:
            moved = self.params.pop(source, None)
            self.params.pop(target, None)
            if moved is not None:
                self.params[target] = moved

    def apply(self, logits: Tensor, rows: Any, offsets: Any = None, drafts: Any = None) -> Tensor:
        for index, row in enumerate(rows.tolist()):
            logits[index] /= arg(self.params[row], "halve")  # a KeyError for anybody else's
            if arg(self.params[row], "boom") == "apply":
                raise Boom("told to, in apply")
        return logits


class LastCounts(StatefulProcessor[tuple[float, list[int]]]):
    """Adds to the logit of the token that came last, after the draft tokens."""

    def _state_of(self, added: Any) -> tuple[float, list[int]] | None:
        value = arg(added.params, "last")
        return None if value is None else (value, added.output_token_ids)

    def apply(self, logits: Tensor, rows: Any, offsets: Any = None, drafts: Any = None) -> Tensor:
        for index, (value, output) in self._states.of(rows):
            for token in [*output, *drafted(index, offsets, drafts)][-1:]:
                if 0 <= token < self.context.vocab_size:
                    logits[index, token] += value
        return logits


class Callables(AdapterLogitsProcessor):
    """`two` and `three`: callables of so many parameters."""

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        if arg(params, "two") is not None:
            return Counting(arg(params, "two"))
        return three_parameters if arg(params, "three") else None


class Counting:
    """Adds the number of output tokens to one logit; raises at a length."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        if len(output_ids) > 30:
            raise Boom("too long")
        logits[self.token] += len(output_ids)
        return logits


def three_parameters(prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
    """Another tensor, from the ends of both lists."""
    ends = [i for i in (prompt_ids[0], *output_ids[-2:]) if 0 <= i < len(logits)]
    return logits.index_fill(0, torch.tensor(ends, dtype=torch.int64), -3.5)


def expected_row(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int], logits: Tensor
) -> Tensor:
    """What the three do to one row, in their order, said once more in a few lines."""
    logits = logits.clone()
    if (halve := arg(params, "halve")) is not None:
        logits /= halve
    if (value := arg(params, "last")) is not None and output and 0 <= output[-1] < len(logits):
        logits[output[-1]] += value
    if (token := arg(params, "two")) is not None:
        logits[token] += len(output)
    elif arg(params, "three"):
        for end in (prompt[0], *output[-2:]):
            if 0 <= end < len(logits):
                logits[end] = -3.5
    return logits
