# SPDX-License-Identifier: Apache-2.0
"""The promise of a logits processor: it changes the logits of a whole batch at once.

    made once for a sampler ──► update_state with every BatchUpdate ──► apply in every step

State is kept by row of the persistent batch and follows requests through BatchUpdates alone
(`RowStates` and `RowValues` in row_states.py do that).

A row of logits is not a request. With speculation a request has several: one after its newest
token, one after each of its draft tokens. `offsets` and `drafts` of `apply` say which is which:

    output so far    a b c
    draft tokens           x y
    rows of logits        0 1 2        the offsets: draft tokens that lie before

`LogitsProcessor`, `StatefulProcessor`, `ProcessorContext` and the BatchUpdate are the public
interface (`docs/logits-processors.md`), frozen since 0.1.0: names, arguments and their meaning
stay, and what is added later has a default.
"""

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

# For each row of logits the draft tokens of its request; rows of one request may share a list.
Drafts = Sequence[Sequence[int]]


def drafted(index: int, offsets: IntArray | None, drafts: Drafts | None) -> Sequence[int]:
    """The draft tokens before the row of logits `index`."""
    if offsets is None or drafts is None:
        return ()
    return drafts[index][: offsets[index]]


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """Facts about the engine for processors."""

    max_rows: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


class RowsFailed(Exception):
    """Raised by an `apply` that could not treat some rows and has treated all others: `errors` by
    row of the batch, and `logits` as `apply` would have returned them. Only the requests in these
    rows fail. Any other exception fails those for which `apply` raises when it is tried one by
    one."""

    def __init__(self, errors: Mapping[int, Exception], logits: Tensor) -> None:
        super().__init__("; ".join(f"row {row}: {error}" for row, error in errors.items()))
        self.errors, self.logits = errors, logits


class LogitsProcessor(ABC):
    """One kind of change.

    A caller may rely on: rows it has not asked for stay as they are; a row whose request asked for
    nothing comes back unchanged, bit for bit; what a row becomes depends on its own request alone,
    not on its index nor on other rows; a row behind draft tokens becomes what it would if they were
    the end of the output; nothing is kept of a removed row, nor of draft tokens; token ids of a
    request that lie outside the vocabulary are ignored.

    A processor may rely on: one thread calls it; every BatchUpdate arrives before the next `apply`;
    an output list only grows while its request holds a row, and has every token sampled before;
    draft tokens are never in it; a request that returns after preemption is added again. It must
    not change what it is given but `logits`, nor keep it after `apply`.
    """

    # Whether `apply` takes draft tokens into account. A request that a processor without that
    # applies to is never given any; other requests of the batch are.
    follows_drafts: ClassVar[bool] = True

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context

    @classmethod  # noqa: B027 - most have nothing to refuse
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError, in a sentence for the client, for parameters that this processor cannot
        follow. Called once for every request where it arrives, which may be another process than
        the one with the sampler."""

    @classmethod
    def applies_to(cls, params: SamplingParams) -> bool:
        """Whether it may ever change the logits of a request with these parameters. `apply` is
        given no other rows, and requests that it does not apply to survive whatever goes wrong in
        it."""
        return True

    def concerns(self, rows: IntArray) -> IntArray:
        """The indices, ascending, of those of `rows` that `apply` may change now."""
        return np.arange(len(rows))

    @property
    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token always stays the likeliest; never changes. Such a processor
        is applied to rows that draw at random only, after the temperature."""

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether any row may need `apply` now; it is left out otherwise."""

    @abstractmethod
    def update_state(self, update: BatchUpdate) -> None:
        """Take in one step's changes: rows removed, then added, then moved."""

    @abstractmethod
    def apply(
        self,
        logits: Tensor,
        rows: IntArray,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Tensor:
        """Change `logits` `[len(rows), vocab]`, float32 or float64, in place or not, and return
        them, of the same shape and type. `rows` are the rows of the batch that they belong to, in
        any order and not always all of them. A logit of -inf is a banned token and must stay so.

        `offsets` `[len(rows)]` says how many draft tokens of its request lie before each row of
        logits: they are `drafts[i][: offsets[i]]`, and `drafts[i]` may go on behind them. A row of
        the batch may then stand in `rows` several times. None, both at once: there are none."""


State = TypeVar("State")


class StatefulProcessor(LogitsProcessor, Generic[State]):
    """A logits processor that keeps a state for each request that asks for something.

    It may change which token is the likeliest, and leaves rows without a state alone. A subclass
    says what a request's state is and what it does to the logits: `self._states.of(rows)` are the
    states among the rows of an `apply`.
    """

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
        """The state to keep for a request; None for one that asks for nothing."""


class Entries(NamedTuple):
    """A few logits of a few rows, reached with one operation: each pair is a position in
    `[rows, vocab]`."""

    indices: Tensor  # of rows
    token_ids: Tensor


def entries_of(parts: Sequence[tuple[int, IntArray]], device: torch.device) -> Entries:
    """The positions of `(index of a row, token ids there)`, on the device of the logits."""
    sizes = [len(ids) for _, ids in parts]
    indices = np.repeat(np.array([index for index, _ in parts], np.int64), sizes)
    token_ids = np.concatenate([np.empty(0, np.int64), *(ids for _, ids in parts)])
    return Entries(to_device(indices, device), to_device(token_ids, device))


def ban(logits: Tensor, parts: Sequence[tuple[int, IntArray]]) -> Tensor:
    """Make these tokens impossible, in place."""
    if parts:
        banned = logits.new_full((), -torch.inf)
        logits.index_put_(tuple(entries_of(parts, logits.device)), banned)
    return logits


def known_ids(token_ids: Iterable[int], vocab_size: int) -> IntArray:
    """The ids that are in the vocabulary, ascending, each once."""
    return np.array(sorted({i for i in token_ids if 0 <= i < vocab_size}), np.int64)
