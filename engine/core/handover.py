# SPDX-License-Identifier: Apache-2.0
"""Holds back the last outputs of prompts until other engines can load the prompts' blocks.

    expect ──► (the request runs) ──► hold ──► its last blocks are given to the tiers ──►
        other engines can load all of the blocks, or never will ──► release

Only the last output of a request is held back, unless the request ends by an abort or an error."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from ...connector.base import HandOver
from ..cache.kv_cache_manager import KVCacheManager
from ..request.core_messages import TokenOutput
from ..request.handover_ticket import Ticket, params_digest
from ..request.logprobs import PositionLogprobs
from ..request.request import Request

# The longest wait until blocks are in the tiers; copies of earlier blocks may delay them.
MOST_SECONDS = 10.0


@dataclass(slots=True)
class _Held:
    """The last output of a request, held until its blocks are in the tiers."""

    output: TokenOutput
    keys: list[bytes]
    given_when: int  # `BlockPool.num_given` when the tiers have its blocks
    give_up_at: float  # monotonic
    is_moving: bool = False  # whether the connector moves the blocks
    is_second: bool = False


@dataclass(slots=True)
class HandOverCounts:
    """Counters of handed-over requests since the start; part of `stats`."""

    handed_over: int = 0
    incomplete: int = 0  # handed over, but other engines cannot load all blocks
    seconds: float = 0.0  # time that answers were held


@dataclass(slots=True, eq=False)
class HeldAnswers:
    """The requests of one engine core whose prompts other engines will load. The core's thread
    makes all calls."""

    manager: KVCacheManager
    handover: HandOver | None  # None: no request is handed over
    counts: HandOverCounts = field(default_factory=HandOverCounts)
    _expected: dict[str, Request] = field(default_factory=dict)
    _held: dict[str, _Held] = field(default_factory=dict)
    _first_logprobs: dict[str, PositionLogprobs] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_due(self) -> bool:
        """Whether the deadline of a held output has passed."""
        return self._give_up_at <= time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Seconds until the first deadline of a held output."""
        return max(0.0, self._give_up_at - time.monotonic())

    @property
    def _give_up_at(self) -> float:
        """The earliest deadline (monotonic seconds) of held outputs whose blocks have not been
        passed to the connector yet; infinity without any."""
        waiting = (held.give_up_at for held in self._held.values() if not held.is_moving)
        return min(waiting, default=math.inf)

    def expect(self, request: Request) -> None:
        """Remember a queued request if it is handed over, so that `filter_outputs` holds its last
        output."""
        if request.hands_over and self.handover is not None:
            self._expected[request.request_id] = request

    def drop_answer(self, request_id: str) -> None:
        """Forget a request whose client has disconnected, or which ended by an abort or an
        error."""
        self._first_logprobs.pop(request_id, None)
        if self._expected.pop(request_id, None) is None and request_id in self._held:
            del self._held[request_id]
            if self.handover is not None:
                self.handover.forget_hand_over(request_id)

    def filter_outputs(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Return the outputs of a step that may be sent now. Hold the last outputs of handed-over
        requests."""
        if not self._expected:
            return outputs
        passing = []
        for output in outputs:
            request = self._expected.get(output.request_id)
            if request is None:
                passing.append(output)
                continue
            if output.logprobs and request.num_output_tokens == len(output.new_token_ids):
                self._first_logprobs[output.request_id] = output.logprobs[0]
            if output.finish_reason is None:
                passing.append(output)
            elif output.finish_reason in ("stop", "length", "repetition"):
                self._defer_output(output, request)
            else:
                self.drop_answer(output.request_id)
                passing.append(output)
        return passing

    def release_answers(self) -> list[TokenOutput]:
        """Return the held outputs whose blocks other engines can load now, or never will."""
        if not self._held or self.handover is None:
            return []
        now = time.monotonic()
        for request_id, held in self._held.items():
            if not held.is_moving and self.manager.pool.num_given >= held.given_when:
                held.is_moving = True
                self.handover.hand_over(request_id, held.keys)
        released = []
        for request_id, missing in self.handover.take_handed_over():
            held = self._held[request_id]
            if missing and not held.is_second and now < held.give_up_at:
                # The pool still has some of the blocks that the tiers have lost.
                self.manager.pool.offer_again(missing)
                held.given_when = self.manager.pool.num_fresh
                held.is_moving, held.is_second = False, True
                continue
            released.append(self._pop_deferred(request_id, now, is_whole=not missing))
        for request_id, held in list(self._held.items()):
            if not held.is_moving and held.give_up_at <= now:
                released.append(self._pop_deferred(request_id, now, is_whole=False))
        return released

    def _defer_output(self, output: TokenOutput, request: Request) -> None:
        request_id = output.request_id
        del self._expected[request_id]
        # After more than one output token the prompt's last block contains output tokens as well.
        keys = self.manager.prompt_keys(request, with_tail=request.num_output_tokens == 1)
        output.ticket = self._ticket_of(request)
        pool, give_up_at = self.manager.pool, time.monotonic() + MOST_SECONDS
        self._held[request_id] = _Held(output, keys, pool.num_fresh, give_up_at)

    def _ticket_of(self, request: Request) -> Ticket:
        return Ticket(
            num_tokens=request.num_prompt_tokens,
            prompt=request.prompt_digest(),
            params=params_digest(request.sampling_params),
            first_token=request.output_token_ids[0],
            logprobs=self._first_logprobs.pop(request.request_id, None),
        )

    def _pop_deferred(self, request_id: str, now: float, *, is_whole: bool) -> TokenOutput:
        held = self._held.pop(request_id)
        self.counts.handed_over += 1
        self.counts.incomplete += not is_whole
        self.counts.seconds += now - (held.give_up_at - MOST_SECONDS)
        return held.output
