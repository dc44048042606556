# SPDX-License-Identifier: Apache-2.0
"""GrammarManager: an engine core's grammars, compiled for waiting requests, and their token masks.

    ask ──► (compiled during steps) ──► take_compiled ──► activate_grammar
        ──► begin_masks · masks, in each step

A mask is made from the request's present output, so the manager needs no notice of new tokens,
preemptions or dropped steps. Reasoning (a "thought") follows no grammar: if an answer begins with
reasoning, the grammar begins after it. The engine's step thread makes all calls of this module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..request.core_messages import AddRequest
from ..request.request import Request
from ..request.structured_params import Kind
from ..sampling.token_mask import TokenMask
from .answers import Thought, White, any_of, write_bits
from .backends import open_backend
from .base import BITS, LARGE_BYTES, Backend, Grammar
from .compiler import COMPILE_LIMIT, POLL_SECONDS, Compilation, GrammarCompiler, TooManyGrammars
from .mask_jobs import SLOW_SECONDS, Follower, MaskJob
from .masks import MASK_LIMIT, MaskMaker
from .masks_ahead import AheadMaker
from .processes.fair_queue import Shares
from .processes.grammar_processes import GrammarProcesses
from .processes.limited_thread import Limit
from .vocabulary import Vocabulary

_JSON_KINDS = (Kind.JSON, Kind.JSON_OBJECT, Kind.STRUCTURAL_TAG)
_NO_DRAFTS: Mapping[str, Sequence[int]] = {}

_FAILED = "the answer cannot follow its grammar any further"


class Waiting(NamedTuple):
    """A request that waits for its grammar. `built` is the request, made from `message`."""

    message: AddRequest
    built: Request
    compilation: Compilation


class Ended(NamedTuple):
    """A request that must end: at the end of its grammar (`error` is empty), or with an error."""

    request: Request
    error: str


class Masks(NamedTuple):
    """The masks of one step. `mask` is None if no grammar restricts a request."""

    mask: TokenMask | None
    ended: list[Ended]


class _Across(NamedTuple):
    """The mask rows of a request whose draft tokens begin or end its reasoning."""

    free: range  # the request's rows in the reasoning
    num_rows: int  # the number of all rows of the request in this step


class _Followed(NamedTuple):
    request: Request
    grammar: Grammar
    follower: Follower
    thought: Thought
    end_ids: frozenset[int]  # the model's end ids, empty with ignore_eos
    own_ids: frozenset[int]  # the request's stop ids
    has_own_ends: bool  # whether the request's end ids differ from the model's
    may_need_settling: bool  # whether `_settle_ends` may have to change rows
    is_json: bool  # whether the grammar is JSON, at least in part


class GrammarManager:
    """The grammars of one engine core."""

    def __init__(
        self,
        model_path: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        backend: str = "auto",
        most_waiting: int,
        opener: Callable[[], Backend] | None = None,
        compile_limit: Limit = COMPILE_LIMIT,
        mask_limit: Limit = MASK_LIMIT,
    ) -> None:
        """`backend` is the value of the setting. If `opener` is given, the backend that it opens is
        used instead, and compiles in this process."""
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(each for each in eos_token_ids if 0 <= each < vocab_size)
        self._shares = Shares(most_waiting)

        self._white: White | None = None  # None until the vocabulary has been read

        def read() -> Vocabulary:
            vocabulary = Vocabulary.load(model_path, vocab_size, eos_token_ids)
            self._white = White(vocabulary)
            return vocabulary

        self._wakeup: Callable[[], None] = _nothing
        processes = None
        if opener is None:
            processes = GrammarProcesses(backend, model_path, vocab_size, tuple(eos_token_ids))
        self._compiler = GrammarCompiler(
            opener or (lambda: open_backend(backend, read)),
            self._wake_up,
            vocab_size=vocab_size,
            processes=processes,
            limit=compile_limit,
        )
        self._maker = MaskMaker(vocab_size, mask_limit, self._note_hang)
        self._ahead = AheadMaker(vocab_size, mask_limit, self._wake_up, self._note_hang)
        self._waiting: dict[str, Waiting] = {}
        self._followed: dict[str, _Followed] = {}
        self._begun: list[_Followed] = []
        self._has_begun = False
        self._made: Masks | None = None  # masks of the begun step, once collected
        self._thinking: list[tuple[_Followed, int]] = []  # in reasoning, with row counts
        self._across: dict[str, _Across] = {}  # by request id
        self.num_failed = 0  # requests that a grammar's error ended

    def __bool__(self) -> bool:
        """Whether a request that may run has a grammar, or the masks of a step have begun."""
        return bool(self._followed) or self._has_begun

    def __contains__(self, request_id: str) -> bool:
        """Whether the request with this id waits for its grammar."""
        return request_id in self._waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_due(self) -> bool:
        """Whether `take_compiled` would return a request, or `held` may release a request."""
        self._compiler.poll_compilations()
        if self._ahead.is_due:
            return True
        return any(waiting.compilation.is_done for waiting in self._waiting.values())

    @property
    def idle_seconds(self) -> float:
        """The longest time, in seconds, until `is_due` must be checked again; infinite if no
        grammar or row is being made. Compilations without a waiting request count too, since they
        have a time limit."""
        is_busy = self._compiler.num_waiting or self._waiting or self._ahead.num_open
        return POLL_SECONDS if is_busy else float("inf")

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Set the function that is called, from any thread, when `is_due` may become True."""
        self._wakeup = wakeup

    def ask(self, message: AddRequest, built: Request) -> Waiting:
        """Start to compile the grammar of a request, which waits here unless the grammar is ready
        at once. Raises TooManyGrammars."""
        asked = built.sampling_params.structured_outputs
        assert asked is not None
        tenant = message.tenant
        if self._shares.is_over(tenant):
            raise TooManyGrammars(
                f"{self._shares.count_of(tenant)} requests of this client wait for grammars; send "
                "fewer at once, or try later"
            )
        waiting = Waiting(message, built, self._compiler.ask(asked.spec, tenant))
        if not waiting.compilation.is_done:
            if (largest := self._shares.who_gives_way()) is not None:
                self._displace(largest)
            self._waiting[message.request_id] = waiting
            self._shares.add(tenant)
        return waiting

    def take_compiled(self) -> list[Waiting]:
        """Remove and return the requests whose compilation has ended, perhaps in an error."""
        if not self.is_due:
            return []
        done = [each for each in self._waiting.values() if each.compilation.is_done]
        for waiting in done:
            del self._waiting[waiting.message.request_id]
            self._shares.remove_tenant(waiting.message.tenant)
        return done

    def cancel_waiting(self, request_ids: Iterable[str]) -> None:
        """Remove the requests with these ids that still wait."""
        for request_id in request_ids:
            gone = self._waiting.pop(request_id, None)
            if gone is not None:
                self._shares.remove_tenant(gone.message.tenant)
                self._give_up(gone)

    def activate_grammar(self, waiting: Waiting) -> None:
        """Make a request's answer follow its compiled grammar. The request may then run."""
        built, grammar = waiting.built, waiting.compilation.grammar
        assert grammar is not None
        params = built.sampling_params
        end_ids = frozenset() if params.ignore_eos else self._eos_ids
        own_ids = frozenset(params.stop_token_ids)
        thought = Thought(built)
        has_own_ends = bool(own_ids) or end_ids != self._eos_ids
        self._followed[built.request_id] = _Followed(
            built,
            grammar,
            Follower(
                grammar,
                waiting.compilation.first_words,
                waiting.compilation.first_seconds,
                built.tenant,
            ),
            thought,
            end_ids,
            own_ids,
            has_own_ends,
            has_own_ends or thought.opener is not None or params.min_tokens > 0,
            waiting.compilation.spec.kind in _JSON_KINDS,
        )

    def held(self) -> Set[str]:
        """Return the ids of requests to leave out of the next step. The mask of such a request is
        slow and being made, or depends on a token that the device has not sampled yet."""
        self._ahead.take_note()
        held: set[str] = set()
        for name, each in self._followed.items():
            follower, request = each.follower, each.request
            if follower.row_seconds <= SLOW_SECONDS and follower.ahead is None:
                continue
            output = request.output_token_ids
            start = each.thought.find_end(output)
            if start is None or request.is_finished:
                continue
            if request.num_placeholders or not self._ahead.is_ready(follower, output, start):
                held.add(name)
        return held

    def without_drafts(self) -> Iterable[str]:
        """Return the ids of requests that must get no draft tokens, because their masks are slow
        and made one by one between steps; draft tokens would need several masks at once."""
        return [
            name
            for name, each in self._followed.items()
            if each.follower.row_seconds > SLOW_SECONDS or each.follower.ahead is not None
        ]

    def begin_masks(
        self, requests: Iterable[Request], drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS
    ) -> None:
        """Start to make the masks of the requests that sample a token in a step. All earlier tokens
        must be known. `drafts` are the draft tokens after the outputs, by request id."""
        self._begun, self._thinking, self._across = [], [], {}
        self._has_begun, self._made = False, None
        jobs = []
        for request in requests:
            followed = self._followed.get(request.request_id)
            if followed is None or followed.request is not request:
                continue
            follower, output = followed.follower, request.output_token_ids
            behind = tuple(drafts.get(request.request_id, ()))
            start = followed.thought.find_end(output)
            free = followed.thought.free_rows(output, behind) if behind else range(0)
            if free and len(free) <= len(behind):
                self._across[request.request_id] = _Across(free, 1 + len(behind))
                jobs.append(MaskJob(follower, (), behind[free.stop :]))
                self._begun.append(followed)
                continue
            if start is None:
                self._thinking.append((followed, 1 + len(behind)))
                continue
            new = output[max(start, follower.num_taken) :]
            follower.num_taken = len(output)
            jobs.append(MaskJob(follower, new, behind))
            self._begun.append(followed)
        if len(jobs) + len(self._thinking) < len(self._followed):  # requests may have ended
            for name in [n for n, each in self._followed.items() if each.request.is_finished]:
                self._let_go(name)
        if jobs:
            self._maker.start_jobs(jobs)
        if self._thinking or jobs:
            self._has_begun = True
            if self._maker.is_done:  # before the forward pass empties the CPU caches
                self._made = self._collect_masks()

    @property
    def has_begun(self) -> bool:
        """Whether `begin_masks` found a request with a grammar, and `masks` must be called."""
        return self._has_begun

    def masks(
        self, requests: Iterable[Request], drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS
    ) -> Masks:
        """Return the masks that `begin_masks` started; without that call, make the masks now. A
        request with k drafts has 1 + k consecutive rows; requests in `ended` have none."""
        if not self._has_begun:
            self.begin_masks(requests, drafts)
        made = self._made if self._made is not None else self._collect_masks()
        self._has_begun, self._made = False, None
        return made

    def _collect_masks(self) -> Masks:
        """Wait for the masks, and allow or ban the tokens that end each request."""
        thinking, self._thinking = self._thinking, []
        ids = [each.request.request_id for each, num_rows in thinking for _ in range(num_rows)]
        free = self._free_rows(thinking) if ids else None
        if not self._maker.has_begun:
            return Masks(None if free is None else TokenMask(ids, free), [])
        followed, self._begun = self._begun, []
        jobs, rows, num_rows = self._maker.wait_for_masks()
        words = rows.unsigned[:num_rows].copy()  # the next step overwrites the rows
        lost: list[int] = []  # rows to leave out of the mask
        names_behind: list[str] = []
        ended: list[Ended] = []
        end, white = 0, self._white
        more: list[npt.NDArray[np.uint32]] = []
        for each, job in zip(followed, jobs, strict=True):
            start, end = end, end + 1 + len(job.drafts)
            error: str | None = job.error or None
            name = each.request.request_id
            across = self._across.get(name) if self._across else None
            if across is not None and error is None:
                own, error = self._rows_across(each, job, words[start:end], across)
            elif error is None and (each.may_need_settling or rows.is_empty(start)):
                error = self._settle_ends(each, job, words[start:end])
            if error is None and each.is_json and each.request.output_token_ids:
                error = (
                    None
                    if white is None
                    else white.why_given_up(
                        each.follower, each.request.output_token_ids, words[start]
                    )
                )
            if across is not None and error is None:
                more.append(own)
                names_behind += [name] * len(own)
                lost += range(start, end)
                continue
            if error is None:
                ids += [name] * (end - start) if job.drafts else (name,)
                continue
            lost += range(start, end)
            if not each.request.is_finished:  # a new request may have the id of a finished request
                ended.append(Ended(each.request, error and f"{_FAILED}: {error}"))
                self.num_failed += bool(error)
                self._let_go(name)
        if lost:
            words = np.delete(words, lost, axis=0)
        if free is not None:
            words = np.concatenate([free, words])
        if more:
            ids += names_behind
            words = np.concatenate([words, *more])
        return Masks(TokenMask(ids, words) if ids else None, ended)

    def stats(self) -> dict[str, int]:
        """Return counters and gauges of grammars, for the core's `stats`."""
        compiler = self._compiler
        return {
            "num_waiting": len(self._waiting),
            "num_followed": len(self._followed),
            "compiled": compiler.num_compiled,
            "compile_failed": compiler.num_failed,
            "cache_hits": compiler.num_found,
            "cached_bytes": compiler.num_cached_bytes,
            "failed": self.num_failed,
        }

    def close(self) -> None:
        """End the threads. A second call does nothing."""
        self._waiting.clear()
        self._maker.close()
        self._ahead.close()
        self._compiler.close()

    def _let_go(self, name: str) -> None:
        """Remove a request that has ended. This may drop the last reference to a large grammar, so
        the grammar is freed on the builder's thread."""
        gone = [self._followed.pop(name)]
        if gone[0].grammar.num_bytes >= LARGE_BYTES:
            self._compiler.free(gone)

    def _wake_up(self) -> None:
        self._wakeup()

    def _give_up(self, gone: Waiting) -> None:
        """Drop the compilation of `gone`, which waits no more, unless others need it."""
        if all(each.compilation is not gone.compilation for each in self._waiting.values()):
            self._compiler.give_up(gone.compilation)

    def _displace(self, tenant: str) -> None:
        """Refuse the last waiting request of this tenant, to make room for another tenant."""
        names = [
            name
            for name, each in self._waiting.items()
            if each.message.tenant == tenant and not each.compilation.is_done
        ]
        if not names:
            return
        gone = self._waiting[names[-1]]
        refused = Compilation(
            gone.compilation.spec,
            tenant,
            error="too many requests of this client wait for grammars; send fewer at once, or try"
            " later",
            may_be_later=True,
        )
        self._waiting[names[-1]] = gone._replace(compilation=refused)
        self._give_up(gone)

    def _note_hang(self, grammar: Grammar) -> None:
        """Mark a grammar of which a matcher did not return, which should not happen: its matchers
        are not called again, and later grammars stay in their processes."""
        grammar.hangs = True
        self._compiler.stop_taking_over()

    def _free_rows(self, thinking: Sequence[tuple[_Followed, int]]) -> npt.NDArray[np.uint32]:
        """Return mask rows `[rows, words]` for reasoning. The rows allow every token except those
        that end the request, because the answer must still follow the grammar."""
        num_rows = sum(count for _, count in thinking)
        rows = np.full((num_rows, -(-self._vocab_size // BITS)), ~np.uint32(0), np.uint32)
        at = 0
        for followed, count in thinking:
            for row in rows[at : at + count]:
                write_bits(row, self._eos_ids | followed.own_ids, allowed=False)
            at += count
        return rows

    def _rows_across(
        self, followed: _Followed, job: MaskJob, rows: npt.NDArray[np.uint32], across: _Across
    ) -> tuple[npt.NDArray[np.uint32], str | None]:
        """Return all rows of a request in order, and the result of `_settle_ends`. The order is:
        the grammar's row for the first token, the rows of the reasoning, the grammar's rows after
        the reasoning."""
        before, behind = (
            rows[: across.free.start].copy(),
            rows[: across.num_rows - across.free.stop],
        )
        error = self._settle_ends(followed, job, before) if len(before) else None
        if len(behind):
            self._settle_ends(followed, job, behind, across.free.stop)
        free = self._free_rows([(followed, len(across.free))])
        return np.concatenate([before, free, behind]), error

    def _settle_ends(
        self, followed: _Followed, job: MaskJob, rows: npt.NDArray[np.uint32], first: int = 0
    ) -> str | None:
        """Allow the request's end ids in the rows at which its grammar may end, and ban them in
        others. `first` is the number of drafts before the first row. Return None if the request
        continues, else the reason for its end ("" at the end of its grammar)."""
        request, own_ids, opener = followed.request, followed.own_ids, followed.thought.opener
        params = request.sampling_params
        missing = params.min_tokens - request.num_output_tokens - first
        if followed.has_own_ends or missing > 0:
            for offset, row in enumerate(rows):
                may_end = any_of(row, self._eos_ids) if self._eos_ids else job.may_end(offset)
                if missing > offset:
                    may_end = False
                write_bits(row, self._eos_ids, allowed=may_end and bool(followed.end_ids))
                write_bits(row, own_ids, allowed=may_end)
        if opener is not None and not first:
            write_bits(rows[0], (opener,), allowed=True)
        if rows[0].any():
            return None
        if not job.may_end():
            return "there is no token by which it could go on"
        if missing > 0:
            return (
                f"it ends after {request.num_output_tokens} tokens, and min_tokens is "
                f"{params.min_tokens}; ask for fewer"
            )
        return ""


def _nothing() -> None:
    """Do nothing: the default wakeup, for a caller that polls."""
