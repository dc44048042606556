# SPDX-License-Identifier: Apache-2.0
"""The grammars of an engine core: requests that wait for theirs, and the masks of those that run.

    ask ──► (compiled beside the steps) ──► take_compiled ──► follow ──► begin · masks, each step

A mask is made of what the request's output holds by then, so nothing has to be told of tokens, of
preemption or of steps that were given up. A thought follows no grammar: where an answer begins with
one, its grammar begins behind that. Called by the engine's step thread.
"""

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
    """A request that waits for its grammar. `built` was made of `message`."""

    message: AddRequest
    built: Request
    compilation: Compilation


class Ended(NamedTuple):
    """A request that goes on no more: at the end of its grammar, or with an error."""

    request: Request
    error: str


class Masks(NamedTuple):
    """Of one step; `mask` is None where it restricts nobody."""

    mask: TokenMask | None
    ended: list[Ended]


class _Across(NamedTuple):
    """Rows of a request on both sides of a border of its thought."""

    free: range  # those that think
    num_rows: int  # all


class _Followed(NamedTuple):
    request: Request
    grammar: Grammar
    follower: Follower
    thought: Thought
    end_ids: frozenset[int]  # of the model, as far as they end this request
    own_ids: frozenset[int]  # its stop ids
    has_own_ends: bool  # whether other ids end it than end the model's answers
    may_need_settling: bool  # whether its rows may have to be other than its matcher makes them
    is_json: bool  # in part, at least


class GrammarManager:
    """Of one engine core."""

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
        """`backend` is that of the settings; `opener` is what opens another one, whose grammars are
        compiled here."""
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(each for each in eos_token_ids if 0 <= each < vocab_size)
        self._shares = Shares(most_waiting)

        self._white: White | None = None  # once the vocabulary has been read

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
        self._made: Masks | None = None  # of the step begun, where nothing is waited for
        self._thinking: list[tuple[_Followed, int]] = []  # with their rows, in the step begun
        self._across: dict[str, _Across] = {}  # whose drafts open or end their thought there
        self.num_failed = 0  # requests that ended with an error of their grammar

    def __bool__(self) -> bool:
        """Whether any request that runs, or may run, has a grammar, or had one when the step in
        hand was begun."""
        return bool(self._followed) or self._has_begun

    def __contains__(self, request_id: str) -> bool:
        """Whether it waits for its grammar."""
        return request_id in self._waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_due(self) -> bool:
        """Whether `take_compiled` would have something, or a request need sit out no longer."""
        self._compiler.poll_compilations()
        if self._ahead.is_due:
            return True
        return any(waiting.compilation.is_done for waiting in self._waiting.values())

    @property
    def idle_seconds(self) -> float:
        """After which to ask `is_due` again, at the latest; no limit where nothing is under way.
        What nobody waits for any more has its limit too."""
        is_busy = self._compiler.num_waiting or self._waiting or self._ahead.num_open
        return POLL_SECONDS if is_busy else float("inf")

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """`wakeup` is called, from any thread, when `is_due` may have become True."""
        self._wakeup = wakeup

    def ask(self, message: AddRequest, built: Request) -> Waiting:
        """Have the grammar of a request compiled, which has one. Where that is not done at once,
        the request waits here. Raises TooManyGrammars."""
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
        """Requests that wait no more: with their grammars, or with the reason why not."""
        if not self.is_due:
            return []
        done = [each for each in self._waiting.values() if each.compilation.is_done]
        for waiting in done:
            del self._waiting[waiting.message.request_id]
            self._shares.remove_tenant(waiting.message.tenant)
        return done

    def cancel_waiting(self, request_ids: Iterable[str]) -> None:
        """Nobody wants these any more, if they still wait."""
        for request_id in request_ids:
            gone = self._waiting.pop(request_id, None)
            if gone is not None:
                self._shares.remove_tenant(gone.message.tenant)
                self._give_up(gone)

    def activate_grammar(self, waiting: Waiting) -> None:
        """Its request may run: from now on its answer follows its grammar."""
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
        """The requests that are to sit out the next step: their masks may take long and are being
        made, or wait for a token that is under way."""
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
        """The requests whose masks are made one by one, between steps: draft tokens would need
        several at once."""
        return [
            name
            for name, each in self._followed.items()
            if each.follower.row_seconds > SLOW_SECONDS or each.follower.ahead is not None
        ]

    def begin_masks(
        self, requests: Iterable[Request], drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS
    ) -> None:
        """Start on the masks of those that choose a token in a step, all tokens before it being
        known. `drafts` are draft tokens behind the outputs, by request id."""
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
        if len(jobs) + len(self._thinking) < len(self._followed):  # some may have ended
            for name in [n for n, each in self._followed.items() if each.request.is_finished]:
                self._let_go(name)
        if jobs:
            self._maker.start_jobs(jobs)
        if self._thinking or jobs:
            self._has_begun = True
            if self._maker.is_done:  # now, and not behind a forward pass, which empties the caches
                self._made = self._collect_masks()

    @property
    def has_begun(self) -> bool:
        """Whether `begin_masks` has found something to do for the step whose masks are asked for
        next."""
        return self._has_begun

    def masks(
        self, requests: Iterable[Request], drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS
    ) -> Masks:
        """The masks of a step, as `begin_masks` was told; begins them where it was not. In the
        mask a request with k drafts has 1 + k rows one after the other. Requests that are `ended`
        are not in it."""
        if not self._has_begun:
            self.begin_masks(requests, drafts)
        made = self._made if self._made is not None else self._collect_masks()
        self._has_begun, self._made = False, None
        return made

    def _collect_masks(self) -> Masks:
        """As `masks`, of what has begun."""
        thinking, self._thinking = self._thinking, []
        ids = [each.request.request_id for each, num_rows in thinking for _ in range(num_rows)]
        free = self._free_rows(thinking) if ids else None
        if not self._maker.has_begun:
            return Masks(None if free is None else TokenMask(ids, free), [])
        followed, self._begun = self._begun, []
        jobs, rows, num_rows = self._maker.wait_for_masks()
        words = rows.unsigned[:num_rows].copy()  # the rows are used again
        lost: list[int] = []  # rows
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
            if not each.request.is_finished:  # or another one may have its id by now
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
        """Part of the core's."""
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
        """End the threads. Idempotent."""
        self._waiting.clear()
        self._maker.close()
        self._ahead.close()
        self._compiler.close()

    def _let_go(self, name: str) -> None:
        """Of a request that has ended. Its grammar may be one that nobody else has any more."""
        gone = [self._followed.pop(name)]
        if gone[0].grammar.num_bytes >= LARGE_BYTES:
            self._compiler.free(gone)

    def _wake_up(self) -> None:
        self._wakeup()

    def _give_up(self, gone: Waiting) -> None:
        """One that waits no more; others may wait for the same."""
        if all(each.compilation is not gone.compilation for each in self._waiting.values()):
            self._compiler.give_up(gone.compilation)

    def _displace(self, tenant: str) -> None:
        """The last request of this tenant that waits makes room for another's."""
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
        """A matcher of it did not come back, which should not be: no other is asked, and grammars
        are taken over no more."""
        grammar.hangs = True
        self._compiler.stop_taking_over()

    def _free_rows(self, thinking: Sequence[tuple[_Followed, int]]) -> npt.NDArray[np.uint32]:
        """Rows `[rows, words]` of those that think: every token but those that would end the
        request, whose answer would not follow its grammar then."""
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
        """All rows of a request, in order, and as `_settle_ends`: those that think lie between what
        the grammar says of the first token and what it says behind the thought."""
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
        """Allow the ids that end this request where its grammar may end, and no others that would;
        `first` is how many drafts lie before the first of the rows. None: it goes on; else it ends,
        and why: empty at the end of its grammar."""
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
    """Nobody is to be woken."""
