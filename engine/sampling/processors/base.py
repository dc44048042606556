# SPDX-License-Identifier: Apache-2.0
"""The interface of a logits processor, which changes the logits of a whole batch at once.

    made once for a sampler ──► update_state with every BatchUpdate ──► apply in every step

A processor keeps its state by row of the persistent batch. Only BatchUpdates say which request is
in which row; `RowStates` and `RowValues` (row_states.py) apply these updates.

With speculation a request has several rows of logits: one after its newest token, and one after
each of its draft tokens. The arguments `offsets` and `drafts` of `apply` distinguish these rows:

    output so far    a b c
    draft tokens           x y
    rows of logits        0 1 2        the offsets: draft tokens that lie before

`LogitsProcessor`, `StatefulProcessor`, `ProcessorContext` and BatchUpdate are the public interface
(`docs/logits-processors.md`), frozen since 0.1.0. Their names, arguments and meaning do not change;
every later addition to them has a default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...batch.batch_update import AddedRow, BatchUpdate, IntArray
from ...request.sampling_params import SamplingParams
from ..copies import to_device
from ..row_states import RowStates

# For each row of logits, its request's draft tokens. Rows of one request may share one list.
Drafts = Sequence[Sequence[int]]


def drafted(index: int, offsets: IntArray | None, drafts: Drafts | None) -> Sequence[int]:
    """Return the draft tokens before the row of logits with this index."""
    if offsets is None or drafts is None:
        return ()
    return drafts[index][: offsets[index]]


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """Properties of the engine that processors may need."""

    max_rows: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


class RowsFailed(Exception):
    """Raised by `apply` if it failed for some rows but processed all other rows. `errors` has error
    texts by row of the batch; `logits` is the result that `apply` would have returned. Only the
    requests in rows with an error fail. After any other exception `apply` is called again for each
    request alone, and each request for which it raises fails."""

    def __init__(self, errors: Mapping[int, Exception], logits: Tensor) -> None:
        super().__init__("; ".join(f"row {row}: {error}" for row, error in errors.items()))
        self.errors, self.logits = errors, logits


class LogitsProcessor(ABC):
    """A logits processor.

    A caller may rely on these properties:

    - Rows of the batch outside `rows` stay as they are.
    - A row whose request does not use the processor is returned unchanged, bit for bit.
    - A row's result depends on its own request alone, not on its index or on other rows.
    - A row after draft tokens gets the result as if these tokens ended the output.
    - The processor keeps no state of removed rows or draft tokens.
    - Token ids of a request outside the vocabulary are ignored.

    A processor may rely on these properties:

    - One thread calls the processor, and passes every BatchUpdate before the next `apply`.
    - The output list of a request in the batch only grows, and has every token sampled so far.
    - Draft tokens are never in an output list.
    - A request that returns after preemption is added again.

    A processor must change no argument except `logits`, and keep no argument after `apply`."""

    # Whether `apply` takes draft tokens into account. If False, requests to which the processor
    # applies get no draft tokens.
    follows_drafts: ClassVar[bool] = True

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context

    @classmethod  # noqa: B027 - most have nothing to refuse
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError, with a text for the client, for parameters that this processor does not
        support. Called once, in the process that receives the request, which may differ from the
        sampler's process."""

    @classmethod
    def applies_to(cls, params: SamplingParams) -> bool:
        """Whether the processor may ever change the logits of a request with these parameters.
        `apply` gets only rows of requests for which the result is True."""
        return True

    def concerns(self, rows: IntArray) -> IntArray:
        """Return the indices, ascending, of the rows among `rows` that `apply` may change now."""
        return np.arange(len(rows))

    @property
    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token always stays the most likely; a constant. If True, the
        processor is applied after the temperature, and only to rows that are sampled at random."""

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether any row may need `apply` now. If False, the processor is skipped."""

    @abstractmethod
    def update_state(self, update: BatchUpdate) -> None:
        """Apply the batch changes of one step: rows removed, then added, then moved."""

    @abstractmethod
    def apply(
        self,
        logits: Tensor,
        rows: IntArray,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Tensor:
        """Change `logits` `[len(rows), vocab]`, float32 or float64, in place or not, and return the
        result in the same shape and type. `rows` are the batch rows of these logits, in any order;
        some rows of the batch may be missing. A logit of -inf is a banned token and must stay -inf.

        With drafts, row i of the logits follows the draft tokens `drafts[i][: offsets[i]]` of its
        request; `drafts[i]` may have further tokens. A row of the batch may then occur in `rows`
        several times. Without drafts `offsets` `[len(rows)]` and `drafts` are None."""


State = TypeVar("State")


class StatefulProcessor(LogitsProcessor, Generic[State]):
    """A logits processor that keeps a state for each request that uses it.

    The processor may change the most likely token, and changes no row without a state. A subclass
    defines the state of a request and the effect of the state on the logits. In `apply`,
    `self._states.of(rows)` returns the states of the rows."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._states: RowStates[State] = RowStates(context.max_rows, self._state_of)

    @property
    def is_argmax_invariant(self) -> bool:
        return False

    @property
    def is_active(self) -> bool:
        return bool(self._states)

    def update_state(self, update: BatchUpdate) -> None:
        self._states.update(update)

    def concerns(self, rows: IntArray) -> IntArray:
        return np.array([index for index, _ in self._states.of(rows)], np.int64)

    @abstractmethod
    def _state_of(self, added: AddedRow) -> State | None:
        """Return the state to keep for a request; None if the request needs no state."""


class Entries(NamedTuple):
    """Positions in logits `[rows, vocab]`, as two index tensors for one indexing operation."""

    indices: Tensor  # row indices
    token_ids: Tensor


def entries_of(parts: Sequence[tuple[int, IntArray]], device: torch.device) -> Entries:
    """Return, on `device`, the positions of `parts`, pairs of a row index and token ids."""
    sizes = [len(ids) for _, ids in parts]
    indices = np.repeat(np.array([index for index, _ in parts], np.int64), sizes)
    token_ids = np.concatenate([np.empty(0, np.int64), *(ids for _, ids in parts)])
    return Entries(to_device(indices, device), to_device(token_ids, device))


def ban(logits: Tensor, parts: Sequence[tuple[int, IntArray]]) -> Tensor:
    """Set the logits of `parts` (pairs of a row index and token ids) to -inf, in place."""
    if parts:
        banned = logits.new_full((), -torch.inf)
        logits.index_put_(tuple(entries_of(parts, logits.device)), banned)
    return logits


def known_ids(token_ids: Iterable[int], vocab_size: int) -> IntArray:
    """Return the ids that are in the vocabulary, ascending and without duplicates."""
    return np.array(sorted({i for i in token_ids if 0 <= i < vocab_size}), np.int64)
