# SPDX-License-Identifier: Apache-2.0
"""An adapter from one logits callable per request to the batch interface of logits processors.

    class Mine(AdapterLogitsProcessor):
        def new_req_logits_processor(self, params):
            return my_callable if "mine" in (params.extra_args or {}) else None

A callable takes (output token ids, logits) or (prompt token ids, output token ids, logits) and
returns the logits, `[vocab]`. The adapter calls a callable row by row, so each request costs a
Python call in each step. A `StatefulProcessor` can process all requests together."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from ...batch.batch_update import AddedRow, IntArray
from ...request.sampling_params import SamplingParams
from .base import Drafts, RowsFailed, StatefulProcessor, drafted

RequestLogitsProcessor = (
    Callable[[list[int], Tensor], Tensor] | Callable[[list[int], list[int], Tensor], Tensor]
)


@dataclass(frozen=True, slots=True)
class BoundCallable:
    """The callable of one request, and its arguments."""

    call: Callable[..., Any]
    output_token_ids: list[int]  # the request's own growing list
    prompt_token_ids: list[int] | None = None  # None: the callable takes no prompt

    def __call__(self, drafts: list[int], logits: Tensor) -> Tensor:
        """Call the callable with `logits` `[vocab]` and with these draft tokens after the output.
        Raises what the callable raises, and TypeError for a wrong result."""
        output = self.output_token_ids
        if drafts:
            output = [*output, *drafts]
        args = (output,) if self.prompt_token_ids is None else (self.prompt_token_ids, output)
        result = self.call(*args, logits)
        if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
            got = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise TypeError(f"its callable returned {got}; return the logits, {list(logits.shape)}")
        return result


class AdapterLogitsProcessor(StatefulProcessor[BoundCallable]):
    """A base class of processors with one callable for each request. A subclass defines
    `new_req_logits_processor`, and is loaded like any processor.

    If a callable raises, only its own request fails. A callable may be called more than once for a
    position, and with draft tokens that are rejected later, so it must not rely on state from
    earlier calls. A callable must not change its list arguments."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the callable of one request, or None if the request needs none. Called once, when
        the request enters the batch. The request fails if this method raises."""

    def apply(
        self,
        logits: Tensor,
        rows: IntArray,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Tensor:
        errors: dict[int, Exception] = {}
        for index, bound in self._states.of(rows):
            row = int(rows[index])
            if row in errors:  # another row of logits of the same request failed
                continue
            before = logits[index]
            try:
                after = bound(list(drafted(index, offsets, drafts)), before)
                if after is not before:
                    logits[index] = after
            except Exception as error:  # noqa: BLE001 - foreign code fails its own request only
                errors[row] = error
        if errors:
            for row in errors:
                self._states.discard(row)
            raise RowsFailed(errors, logits)
        return logits

    def _state_of(self, added: AddedRow) -> BoundCallable | None:
        output = added.output_token_ids
        try:
            call = self.new_req_logits_processor(added.params)
            if call is None:
                return None
            if not _takes_prompt(call):
                return BoundCallable(call, output)
            if not added.has_prompt_tokens:
                raise ValueError(
                    "its callable takes the prompt's token ids, and a prompt of embeddings has none"
                )
            return BoundCallable(call, output, added.prompt_token_ids.tolist())
        except Exception as error:  # noqa: BLE001 - `apply` raises it, and fails this request alone
            return BoundCallable(_raising(error), output)


def _raising(error: Exception) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise error

    return call


def _takes_prompt(call: object) -> bool:
    """Whether a callable takes three arguments instead of two. Raises TypeError for any other
    number."""
    if not callable(call):
        raise TypeError(
            f"new_req_logits_processor returned {type(call).__name__}; return a callable or None"
        )
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError as error:
        raise TypeError(f"the parameters of {call!r} cannot be seen; wrap it in a def") from error
    needed = [one for one in parameters if one.default is Parameter.empty]
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in needed if one.kind in kinds]
    others = [one.name for one in needed if one.kind is Parameter.KEYWORD_ONLY]
    if len(names) not in (2, 3) or others:
        raise TypeError(
            "its callable takes (output_token_ids, logits) or (prompt_token_ids, "
            f"output_token_ids, logits), not ({', '.join([*names, *others])})"
        )
    return len(names) == 3
