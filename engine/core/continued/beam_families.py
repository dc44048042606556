# SPDX-License-Identifier: Apache-2.0
"""BeamFamilies: the active beam searches, and the requests that compute their present rounds.

Every beam of a round is a request for one token. When all requests of a round have ended, the
requests of the next round continue in the blocks of their parent beams, which the scheduler keeps
until then. The scheduler treats a beam's request like a client's request."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from ...request.beam_params import wish_without_effect
from ...request.core_messages import NO_EXTRAS, AddRequest, TokenOutput
from ...request.request import Request
from ...request.sampling_params import SamplingParams
from ...scheduler.scheduler import Scheduler
from ..request_builder import Continued, RequestBuilder, context_of
from .beam_search import Answer, BeamSearch

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class BeamFamily:
    """A beam search and the requests of its present round."""

    message: AddRequest  # the client's request for the search
    choice_ids: list[str]  # ids of the answers, the best answer first
    search: BeamSearch
    beams: list[Request] = field(default_factory=list)  # requests of the present round
    before: list[Request] = field(default_factory=list)  # of the last round, blocks kept
    arrival_seconds: float = field(default_factory=time.monotonic)
    told: dict[str, TokenOutput] = field(default_factory=dict)  # of this round, by request id
    first: TokenOutput | None = None  # output of the prompt's request
    num_made: int = 0

    def next_id(self) -> str:
        self.num_made += 1
        return f"{self.message.request_id}\0{self.num_made}"  # a client's id has no NUL


class BeamFamilies:
    """The beam searches of one engine core. Called by the engine's thread."""

    def __init__(
        self, scheduler: Scheduler, builder: RequestBuilder, end_ids: Iterable[int], vocab_size: int
    ) -> None:
        self._scheduler, self._builder = scheduler, builder
        self._end_ids, self._vocab_size = frozenset(end_ids), vocab_size
        self._families: list[BeamFamily] = []

    def begin_search(self, message: AddRequest) -> None:
        """Queue the first request of a search. Raise QueueFull and ValueError like
        `Scheduler.add_request`, and ValueError for parameters that beam search does not support."""
        extras = message.extras or NO_EXTRAS
        assert extras.beams is not None
        _check_wishes(message)
        if 1 + len(extras.forks) != extras.beams.beam_width:
            raise ValueError(
                f"a search of {extras.beams.beam_width} beams has as many answers, and ids of "
                f"{1 + len(extras.forks)} were given"
            )
        wanted = message.sampling_params.max_tokens
        most = self._builder.max_new_tokens(message)
        search = BeamSearch(extras.beams, min(wanted, most), self._end_ids, self._vocab_size)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0)
        skips = message.sampling_params.skip_reading_prefix_cache
        choice_ids = [message.request_id, *(fork.request_id for fork in extras.forks)]
        bare = msgspec.structs.replace(extras, forks=[], beams=None)
        message = msgspec.structs.replace(
            message,
            sampling_params=params,
            extras=bare,
            skip_reading_prefix_cache=skips or message.skip_reading_prefix_cache,
        )
        family = BeamFamily(message, choice_ids, search)
        self._add_beams(family, [None])
        self._families.append(family)

    def take(self, outputs: Sequence[TokenOutput]) -> list[TokenOutput]:
        """Process the outputs of beams. Return the outputs for clients: the outputs of all other
        requests, and the answers of finished searches."""
        if not self._families:
            return list(outputs)
        owners = {request_id: family for family in self._families for request_id in family.told}
        told = []
        for output in outputs:
            family = owners.get(output.request_id)
            if family is None:
                told.append(output)
            elif family not in self._families:
                continue  # another beam's output has ended the search
            elif output.finish_reason not in (None, "length"):
                told += self._end_with_error(family, output)
            else:
                family.told[output.request_id] = output
                if all(each.finish_reason for each in family.told.values()):
                    told += self._advance_guarded(family)
        return told

    def abort_choices(self, request_ids: Iterable[str]) -> None:
        """Drop answers whose clients have disconnected. A search ends with its last answer."""
        gone = set(request_ids)
        for family in [each for each in self._families if gone.intersection(each.choice_ids)]:
            family.choice_ids = ["" if each in gone else each for each in family.choice_ids]
            if not any(family.choice_ids):
                self._end(family)

    def _advance_guarded(self, family: BeamFamily) -> list[TokenOutput]:
        """Call `_advance`. An exception in it ends this search only."""
        try:
            return self._advance(family)
        except Exception as error:
            logger.exception("the beam search %s failed", family.message.request_id)
            text = f"the beam search failed ({type(error).__name__}: {error})"
            return self._end_with_error(family, TokenOutput("", [], "error", error=text))

    def _advance(self, family: BeamFamily) -> list[TokenOutput]:
        """Begin the next round, or return the answers. All beams of the round have ended."""
        search, round_ = family.search, [family.told[each.request_id] for each in family.beams]
        family.first = family.first or round_[0]
        following = search.advance([_likeliest(output) for output in round_])
        if search.is_done:
            self._end(family)
            return _told_answers(family, search.answers)
        self._add_beams(family, [Continued(family.beams[b.place], [b.token_id]) for b in following])
        return []

    def _add_beams(self, family: BeamFamily, parents: Sequence[Continued | None]) -> None:
        """Queue, for each parent, a request that continues it. The parent None is the prompt."""
        made = []
        for parent in parents:
            message = msgspec.structs.replace(family.message, request_id=family.next_id())
            request = self._builder.make_request(message, continued=parent)
            request.keeps_blocks, request.hands_over = True, False
            request.num_likeliest = family.search.num_wanted
            request.arrival_seconds = family.arrival_seconds
            made.append(request)
        family.before, family.beams = family.beams, made
        family.told = {each.request_id: TokenOutput(each.request_id, []) for each in made}
        for request in made:
            self._scheduler.add_request(request, context_of(family.message))
        continued = [parent.request for parent in parents if parent is not None]
        self._scheduler.release_blocks([each for each in family.before if each not in continued])

    def _end_with_error(self, family: BeamFamily, output: TokenOutput) -> list[TokenOutput]:
        self._end(family)
        return [
            TokenOutput(
                each, [], output.finish_reason, error=output.error, error_code=output.error_code
            )
            for each in family.choice_ids
            if each
        ]

    def _end(self, family: BeamFamily) -> None:
        self._families.remove(family)
        self._scheduler.finish_requests([each.request_id for each in family.beams])
        self._scheduler.release_blocks([*family.before, *family.beams])


def _check_wishes(message: AddRequest) -> None:
    """Raise ValueError for parameters that beam search does not support."""
    extras, params = message.extras or NO_EXTRAS, message.sampling_params
    if extras.hand_over or extras.ticket is not None or extras.pooling or extras.prompt_embeds:
        raise ValueError("a beam search takes no prompt of another node and no prompt embeddings")
    if name := wish_without_effect(params):
        raise ValueError(f"{name} has no effect on a beam search; leave it out")


def _likeliest(output: TokenOutput) -> list[tuple[int, float]]:
    """Return the likeliest next tokens of a beam, with their log-probabilities."""
    assert output.logprobs is not None
    (position,) = output.logprobs
    return list(zip(position.token_ids[1:], position.logprobs[1:], strict=True))


def _told_answers(family: BeamFamily, answers: Sequence[Answer]) -> list[TokenOutput]:
    first, told = family.first, []
    assert first is not None
    total = time.monotonic() - family.arrival_seconds
    timings = {**(first.timings or {}), "total_seconds": total}
    timings["decode_seconds"] = total - timings.get("first_token_seconds", total)
    for choice_id, answer in zip(family.choice_ids, answers, strict=True):
        positions, reason = answer.beam.positions(), family.search.finish_reason_of(answer.beam)
        output = TokenOutput(choice_id, [each.token_ids[0] for each in positions], reason)
        output.num_cached_tokens = first.num_cached_tokens
        output.cached_tokens_by_tier = first.cached_tokens_by_tier
        output.timings, output.logprobs = timings, positions
        if choice_id:
            told.append(output)
    return told
