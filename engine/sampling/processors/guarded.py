# SPDX-License-Identifier: Apache-2.0
"""A guard around a logits processor of another package: an exception fails only the requests that
cause it.

The processor gets copies of logits, only of requests to which it applies. If the processor raises,
the guard makes a new processor and adds the requests to it one by one, then calls it with each
request's logits alone. The retry is correct because the state and the result of a row depend on one
request only. Requests for which the new processor raises fail, with the processor's name in the
error; all other requests get their normal result. Device errors that appear after the call cannot
be attributed to a request, and fail the whole step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...batch.batch_update import AddedRow, BatchUpdate, IntArray
from ..copies import to_device
from ..row_states import RowStates
from .base import Drafts, LogitsProcessor, ProcessorContext, RowsFailed

logger = logging.getLogger(__name__)

MAX_ERROR_CHARACTERS = 300  # limit of a processor's error text in messages to clients


class _LogitsRows(NamedTuple):
    """The arguments of `apply` after the logits."""

    rows: IntArray
    offsets: IntArray | None
    drafts: Drafts | None

    def at(self, indices: IntArray) -> _LogitsRows:
        if self.offsets is None or self.drafts is None:
            return _LogitsRows(self.rows[indices], None, None)
        drafts = [self.drafts[index] for index in indices.tolist()]
        return _LogitsRows(self.rows[indices], self.offsets[indices], drafts)


class GuardedProcessor(LogitsProcessor):
    """A wrapper of a processor of another package. The wrapper calls `note_failure(row, error)` for
    each failed request; the receiver of the call must end the request.

    The constructor raises what the processor's constructor raises. No other method raises."""

    def __init__(
        self,
        name: str,
        kind: type[LogitsProcessor],
        context: ProcessorContext,
        note_failure: Callable[[int, str], None],
    ) -> None:
        super().__init__(context)
        self.name = name
        self._kind = kind
        self._note_failure = note_failure
        self._processor: LogitsProcessor | None = kind(context)
        self._is_argmax_invariant = bool(self._processor.is_argmax_invariant)
        # The requests to which the processor applies and for which it has not failed.
        self._added = RowStates(context.max_rows, self._added_if_applied)

    @property
    def is_argmax_invariant(self) -> bool:
        return self._is_argmax_invariant

    @property
    def is_active(self) -> bool:
        if not self._added or self._processor is None:
            return False
        try:
            return bool(self._processor.is_active)
        except Exception as error:  # noqa: BLE001 - code of others
            self._fail_all(error)
            return False

    def concerns(self, rows: IntArray) -> IntArray:
        """Return the processor's result or, if it raises, all rows to which the processor
        applies."""
        indices = np.array([index for index, _ in self._added.of(rows)], np.int64)
        if self._processor is None or len(indices) == 0:
            return indices
        try:
            chosen: IntArray = indices[self._processor.concerns(rows[indices])]
        except Exception:  # `apply` then gets all rows, and raises for the faulty ones
            logger.debug("%s.concerns raised", self.name, exc_info=True)
            return indices
        return chosen

    def refuses_drafts(self, rows: IntArray) -> IntArray:
        """Return the indices of the rows among `rows` whose requests must get no draft tokens."""
        return np.empty(0, np.int64) if self._kind.follows_drafts else self.concerns(rows)

    def update_state(self, update: BatchUpdate) -> None:
        self._added.update(update)
        if self._processor is None:
            self._make_anew()  # a new processor, for one more try
            return
        try:
            self._processor.update_state(update)
        except Exception as error:  # noqa: BLE001 - code of others
            self._log("update_state", error)
            self._make_anew()

    def apply(
        self,
        logits: Tensor,
        rows: IntArray,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Tensor:
        concerned = self.concerns(rows)
        if len(concerned) == 0:
            return logits
        belongs = _LogitsRows(rows, offsets, drafts)
        try:
            return self._apply(logits, belongs, concerned)
        except Exception as error:  # noqa: BLE001 - code of others
            self._log("apply", error)
            return self._apply_one_by_one(logits, belongs, concerned)

    def _apply(self, logits: Tensor, belongs: _LogitsRows, indices: IntArray) -> Tensor:
        """Change rows `indices` of the logits, or raise the processor's error, changing nothing."""
        assert self._processor is not None
        is_all = len(indices) == len(logits)
        places = None if is_all else to_device(indices, logits.device)
        part = logits.clone() if places is None else logits[places]
        errors: dict[int, Exception] = {}
        try:
            result = self._processor.apply(part, *belongs.at(indices))
        except RowsFailed as failed:
            mine = set(belongs.rows[indices].tolist())  # other rows' errors are ignored
            errors = {row: error for row, error in failed.errors.items() if row in mine}
            result = failed.logits
        _check_result(result, part)
        self._fail_rows(errors)
        if places is None:
            return result
        return logits.index_copy_(0, places, result)

    def _apply_one_by_one(self, logits: Tensor, belongs: _LogitsRows, indices: IntArray) -> Tensor:
        self._make_anew()
        for row in dict.fromkeys(belongs.rows[indices].tolist()):
            mine = indices[belongs.rows[indices] == row]
            # The row may have failed just now, and the new processor may choose other rows.
            mine = mine[self.concerns(belongs.rows[mine])]
            if len(mine) == 0 or self._processor is None:
                continue
            try:
                logits = self._apply(logits, belongs, mine)
            except Exception as error:  # noqa: BLE001 - code of others
                self._fail_rows({row: error})
                self._make_anew()
        return logits

    def _make_anew(self) -> None:
        """Make a new processor with all requests, and fail the requests for which it raises."""
        taken: list[AddedRow] = []
        try:
            processor = self._kind(self.context)
            for row, added in sorted(self._added.items()):
                now = added._replace(row=row)
                try:
                    processor.update_state(_update_of([now]))
                except Exception as error:  # noqa: BLE001 - code of others
                    self._fail_rows({row: error})
                    processor = self._kind(self.context)
                    processor.update_state(_update_of(taken))
                else:
                    taken.append(now)
        except Exception as error:  # noqa: BLE001 - its constructor, or a repeated update, raises
            self._processor = None
            self._fail_all(error)
            return
        self._processor = processor

    def _added_if_applied(self, added: AddedRow) -> AddedRow | None:
        try:
            return added if self._kind.applies_to(added.params) else None
        except Exception:  # unexpected: the same call has worked in the API server
            logger.debug("%s.applies_to raised", self.name, exc_info=True)
            return added

    def _fail_all(self, error: Exception) -> None:
        self._fail_rows(dict.fromkeys([row for row, _ in self._added.items()], error))

    def _fail_rows(self, errors: dict[int, Exception]) -> None:
        for row, error in errors.items():
            self._added.discard(row)
            text = str(error)
            if len(text) > MAX_ERROR_CHARACTERS:
                text = text[:MAX_ERROR_CHARACTERS] + "..."
            told = f"the logits processor {self.name} failed on this request"
            self._note_failure(row, f"{told}: {type(error).__name__}: {text}")
            logger.error("the logits processor %s fails a request", self.name, exc_info=error)

    def _log(self, method: str, error: Exception) -> None:
        logger.error(
            "the logits processor %s raised in %s; it is made anew and tried request by request",
            self.name,
            method,
            exc_info=error,
        )


def _update_of(rows: Sequence[AddedRow]) -> BatchUpdate:
    """Return a BatchUpdate that only adds the requests of `rows`."""
    return BatchUpdate(max((one.row for one in rows), default=-1) + 1, (), tuple(rows), ())


def _check_result(result: object, given: Tensor) -> None:
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"apply returned {type(result).__name__}; return the logits")
    expected = (given.shape, given.dtype, given.device)
    if (result.shape, result.dtype, result.device) != expected:
        raise TypeError(
            f"apply returned {list(result.shape)} {result.dtype} on {result.device}, and was given "
            f"{list(given.shape)} {given.dtype} on {given.device}; return the same"
        )
