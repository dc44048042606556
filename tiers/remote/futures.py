# SPDX-License-Identifier: Apache-2.0
"""Futures that depend on other futures, and transfers with several servers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import TierBusy, TierClosed, TierError
from .transfers import Transfer, Transfers

_T = TypeVar("_T")
_R = TypeVar("_R")


def then(future: Future[_T], work: Callable[[_T], _R]) -> Future[_R]:
    """A future that gets `work(future.result())`, or the error of `future` or of `work`."""
    result: Future[_R] = Future()

    def done(ended: Future[_T]) -> None:
        error = ended.exception()
        if error is not None:
            result.set_exception(error)
        else:
            _set_result(result, lambda: work(ended.result()))

    future.add_done_callback(done)
    return result


def all_of(futures: Sequence[Future[Any]], work: Callable[[], _R]) -> Future[_R]:
    """A future that gets `work()` once all `futures` have ended. It fails only if all of them
    failed, so that a failing server does not cost the blocks of the other servers."""
    result: Future[_R] = Future()
    lock = threading.Lock()
    left = len(futures)
    errors: list[BaseException] = []

    def done(ended: Future[Any]) -> None:
        nonlocal left
        error = ended.exception()
        with lock:
            left -= 1
            if error is not None:
                errors.append(error)
            if left:
                return
        if errors and len(errors) == len(futures):
            result.set_exception(errors[0])
        else:
            _set_result(result, work)

    if not futures:
        _set_result(result, work)
    for future in futures:
        future.add_done_callback(done)
    return result


def _set_result(future: Future[_R], work: Callable[[], _R]) -> None:
    """End `future` with the result of `work` or its error, so that no caller waits for ever."""
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - the future gets the error
        future.set_exception(error)


def submit(transfers: Transfers[_T], transfer: Transfer) -> Future[list[_T]]:
    """Call `Transfers.submit`; a TierError goes into the future. Another server may already use the
    caller's buffers, which are free once all futures have ended."""
    try:
        return transfers.submit(transfer)
    except TierError as error:
        refused: Future[list[_T]] = Future()
        refused.set_exception(error)
        return refused


def raise_if_none_began(begun: Sequence[Future[list[_T]]]) -> None:
    """Raise the first refusal if every server refused at once: then no server uses the buffers."""
    errors = [future.exception() for future in begun if future.done()]
    refusals = [error for error in errors if isinstance(error, (TierBusy, TierClosed))]
    if begun and len(refusals) == len(begun):
        raise refusals[0]
