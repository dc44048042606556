# SPDX-License-Identifier: Apache-2.0
"""Futures that depend on other futures, for transfers with several servers at once."""

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
    """Return a future with `work(future.result())`, or with the error of `future` or `work`."""
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
    """Return a future with `work()`, which is called when all `futures` have ended. The new future
    fails only if all `futures` failed, so that one failing server does not fail a call."""
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
    """Complete `future` with the result or error of `work`, so that no caller waits for ever."""
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - the future gets the error
        future.set_exception(error)


def submit(transfers: Transfers[_T], transfer: Transfer) -> Future[list[_T]]:
    """Call `Transfers.submit`, but return a TierError in the future instead of raising it: other
    servers may already use the caller's buffers until all futures have ended."""
    try:
        return transfers.submit(transfer)
    except TierError as error:
        refused: Future[list[_T]] = Future()
        refused.set_exception(error)
        return refused


def raise_if_none_began(begun: Sequence[Future[list[_T]]]) -> None:
    """Raise the first TierBusy or TierClosed if every server refused, so no buffer is in use."""
    errors = [future.exception() for future in begun if future.done()]
    refusals = [error for error in errors if isinstance(error, (TierBusy, TierClosed))]
    if begun and len(refusals) == len(begun):
        raise refusals[0]
