# SPDX-License-Identifier: Apache-2.0
"""Grammars that run in the process that compiled them, instead of in the engine process.

A mask row takes a message to the process and an answer, so accepted tokens are sent together with
the next request for a row. The caller waits for the answer. A process over its limit on CPU time is
killed, and only requests with its grammar end with an error."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np

from ..base import BITS, LARGE_BYTES, Grammar, GrammarError, Matcher, Words
from .grammar_messages import Row, RowAnswer
from .grammar_processes import FollowingProcess
from .limited_thread import Limit


class GrammarApart(Grammar):
    """A grammar whose matchers run in a separate process. Any thread may call the methods. Freeing
    the grammar ends the process, so no step may wait for the thread that frees it."""

    num_bytes = LARGE_BYTES
    is_apart = True

    def __init__(self, process: FollowingProcess, limit: Limit, tenant: str) -> None:
        self.process = process
        self.limit = limit
        self.tenant = tenant
        self.used = time.monotonic()  # time of the last use
        self.num_matchers = 0
        self._numbers = itertools.count()
        self._counting = threading.Lock()

    @property
    def is_gone(self) -> bool:  # type: ignore[override]  # a property, since the process may end
        return self.process.is_gone

    def matcher(self) -> Matcher:
        self.note_matcher(+1)
        return _MatcherApart(self, next(self._numbers))

    def note_matcher(self, change: int) -> None:
        """Count a new matcher (`change` +1) or a matcher that ends (-1)."""
        with self._counting:
            self.num_matchers += change
            self.used = time.monotonic()

    def is_idle(self, seconds: float) -> bool:
        """Whether the process runs and has had no matcher for the last `seconds`."""
        return not (self.is_gone or self.num_matchers) and time.monotonic() - self.used > seconds

    def end_process(self) -> None:
        self.process.discard_process()

    def __del__(self) -> None:
        self.process.discard_process()


class _MatcherApart(Matcher):
    """A matcher whose position is stored in the process. One thread at a time may call it."""

    def __init__(self, grammar: GrammarApart, number: int) -> None:
        self._grammar = grammar
        self._number = number
        self._pending: list[int] = []  # accepted tokens that are not yet sent
        self._rollback = 0  # how many sent tokens to undo before `_pending`
        self._row: np.ndarray | None = None  # the mask row of the present position
        self._may_end: bool | None = None

    def __del__(self) -> None:
        self._grammar.note_matcher(-1)
        self._grammar.process.release_matcher(self._number)

    @property
    def may_end(self) -> bool:
        if self._may_end is None:
            self._query_process(is_wanted=False)
        assert self._may_end is not None
        return self._may_end

    def accept(self, token_id: int) -> bool:
        if token_id in self._grammar.process.end_ids:
            return False
        if self._row is not None:
            if not int(self._row[token_id // BITS]) >> token_id % BITS & 1:
                return False
            self._pending.append(token_id)
        else:
            self._pending.append(token_id)
            if self._query_process(is_wanted=False).num_accepted < 1:
                return False
        self._row = self._may_end = None
        return True

    def rollback(self, num_tokens: int) -> None:
        here = min(num_tokens, len(self._pending))
        del self._pending[len(self._pending) - here :]
        self._rollback += num_tokens - here
        self._row = self._may_end = None

    def fill(self, words: Words) -> None:
        if self._row is None:
            answer = self._query_process(is_wanted=True)
            self._row = np.frombuffer(answer.words, np.int32)
        words[:] = self._row

    def _query_process(self, *, is_wanted: bool) -> RowAnswer:
        """Send the pending tokens to the process, and return its answer for the present position.
        With `is_wanted` the answer has the mask row. Raises GrammarError."""
        if not is_wanted and len(self._pending) > 1:  # only the last token may be refused
            last = self._pending.pop()
            self._ask_with(self._pending, is_wanted=False)
            self._pending = [last]
        return self._ask_with(self._pending, is_wanted=is_wanted)

    def _ask_with(self, tokens: list[int], *, is_wanted: bool) -> RowAnswer:
        asked = Row(
            self._number, self._rollback, tokens, is_wanted, self._grammar.limit.cpu_seconds
        )
        answer = self._grammar.process.fetch_row(asked, self._grammar.limit)
        self._rollback, self._pending = 0, []
        self._may_end = answer.may_end
        if is_wanted and answer.num_accepted < len(tokens):
            raise GrammarError(f"it does not allow token {tokens[answer.num_accepted]} here")
        return answer
