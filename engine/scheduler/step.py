# SPDX-License-Identifier: Apache-2.0
"""The step being scheduled: its requests, their token counts, and the changes sent to the worker.

The step describes a request that is new to the worker in full, and a known request by its changes
only; a resumed request replaces its block table. A request can be revoked until `build_output`.
From then on the step is in flight, until the worker returns the step's result."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

from ...connector.messages import ConnectorMetadata
from ..cache.kv_block import BlockIds, GroupBlocks
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.picture_cache import NO_PLAN, PictureCache
from ..cache.state_checkpoints import StateCheckpoints, StateSave
from ..request.request import Request, RequestStatus
from .output import CachedRequestData, NewRequestData, SchedulerOutput
from .speculation import Speculation


class EntryKind(Enum):
    """Whether a request continues, is new to the worker, or resumes after a preemption."""

    GOES_ON = "goes on"
    STARTS = "starts"
    RESUMES = "resumes"


class StepEntry(NamedTuple):
    request: Request
    num_tokens: int  # tokens to compute
    num_computed_tokens: int  # computed before the step
    num_preemptions: int  # before the step; if it changes, the results are dropped
    block_ids: BlockIds | None  # new for the worker; None: no new blocks
    kind: EntryKind
    num_placeholders: int  # the request's placeholders before the step
    draft_token_ids: Sequence[int] = ()  # the last tokens of the entry

    @property
    def is_current(self) -> bool:
        """Whether the request still runs, and was not preempted since the step was scheduled."""
        request = self.request
        is_running = request.status is RequestStatus.RUNNING
        return is_running and request.num_preemptions == self.num_preemptions

    @property
    def end(self) -> int:
        """The request's number of computed tokens after the step."""
        return self.num_computed_tokens + self.num_tokens


class Pipelining(NamedTuple):
    """The most steps in flight, and whether requests run ahead of tokens being sampled."""

    depth: int = 1
    # Whether a request is scheduled again while its last token is still being sampled.
    runs_ahead: bool = False


class StepInFlight(NamedTuple):
    """A step sent to the worker, with the entries that its requests had when it was scheduled."""

    output: SchedulerOutput
    entries: list[StepEntry]
    num_departed: int  # requests that had ended or been preempted before the step


NO_STEP = StepInFlight(SchedulerOutput([], CachedRequestData(), {}, 0, set(), set()), [], 0)

ONE_STEP = Pipelining()
_GOES_ON = EntryKind.GOES_ON
# Makes a StepEntry from a tuple at half the cost of the class.
_step_entry = partial(tuple.__new__, StepEntry)


@dataclass(slots=True, eq=False)
class StepBuilder:
    """A step under construction."""

    manager: KVCacheManager
    step_id: int
    budget: int  # tokens that the step may still add
    runs_ahead: bool = False  # see `Pipelining`
    held: Set[str] = frozenset()  # ids of requests that are left out of this step
    speculation: Speculation | None = None  # None: no drafts
    # Room had to be made for a running request, so this step admits no waiting one.
    pressed: bool = False
    entries: list[StepEntry] = field(default_factory=list)  # in batch order
    has_forks: bool = False  # whether forks have entries, which compute no tokens
    pictures: PictureCache | None = None  # None: the model reads no pictures
    num_spare_states: int = 0  # the worker's slots for checkpoints in the middle of chunks
    num_used_states: int = 0  # the spare slots that planned chunks use
    state_saves: dict[str, list[StateSave]] = field(default_factory=dict)
    wanted_drafts: dict[str, int] = field(default_factory=dict)
    _to_tell: dict[str, StepEntry] = field(default_factory=dict)  # entries sent in full

    def __contains__(self, request: Request) -> bool:
        return any(entry.request is request for entry in self.entries)

    def go_on(self, request: Request, num_tokens: int, added: GroupBlocks) -> None:
        """Add a running request's next `num_tokens`; `added` are the new blocks."""
        self._grant(request, num_tokens, self._ids_of(added), EntryKind.GOES_ON)

    def decode(self, requests: list[Request]) -> None:
        """Add one token for each request, in a block that the request has already. The method is
        faster than `go_on`: only `num_scheduled_tokens` names these requests to the worker."""
        entries, runs_ahead = self.entries, self.runs_ahead
        speculates = self.speculation is not None
        for request in requests:
            computed = request.num_computed_tokens
            entries.append(_step_entry(
                (request, 1, computed, request.num_preemptions, None, _GOES_ON,
                 request.num_placeholders, ())
            ))  # fmt: skip
            request.num_computed_tokens = request.num_told_tokens = computed + 1
            if speculates and self._waits_for_drafts(request):
                continue
            if runs_ahead and computed + 2 < request.max_num_tokens:
                request.num_placeholders = computed + 2 - request.num_tokens
        self.budget -= len(requests)

    def add_drafts(self, index: int, drafts: Sequence[int], added: GroupBlocks) -> None:
        """Add drafts to the entry at `index`, after its one token; `added` are new blocks."""
        entry, count = self.entries[index], len(drafts)
        entry = entry._replace(num_tokens=entry.num_tokens + count, draft_token_ids=drafts)
        self._put_entry(index, entry, added)
        self.budget -= count
        request = entry.request
        request.num_computed_tokens = request.num_told_tokens = entry.end

    def add_room(self, index: int, added: GroupBlocks) -> None:
        """Add blocks, for drafts that the worker will propose, to the entry at `index`."""
        self._put_entry(index, self.entries[index], added)

    def _put_entry(self, index: int, entry: StepEntry, added: GroupBlocks) -> None:
        """Replace the entry at `index` by `entry`, extended by the blocks `added`."""
        block_ids, request_id = self._ids_of(added), entry.request.request_id
        if block_ids is not None:
            if entry.block_ids is not None:
                both = zip(entry.block_ids, block_ids, strict=True)
                block_ids = tuple([[*first, *more] for first, more in both])
            entry = entry._replace(block_ids=block_ids)
        self.entries[index] = entry
        if entry.block_ids is not None or request_id in self._to_tell:
            self._to_tell[request_id] = entry

    def most_tokens(self, request: Request, computed: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` after `computed` a request may compute in this step. A
        chunk ends before a picture that cannot be encoded in this step. For a model with states,
        each state checkpoint inside the chunk takes a spare slot of the worker."""
        if request.pictures and self.pictures is not None:
            num_tokens = self.pictures.fit_chunk(request, computed, num_tokens)
        states = self.manager.states
        if states is None or num_tokens <= 1:
            return num_tokens
        spare = self.num_spare_states - self.num_used_states
        num_tokens, num_used = states.most_tokens(request, computed, num_tokens, spare)
        self.num_used_states += num_used
        return num_tokens

    def save_states(self, states: StateCheckpoints) -> None:
        """Plan the state checkpoints of this step. Called after all entries have their blocks."""
        spare = self.num_spare_states
        for entry in self.entries:
            # The drafts' tokens are not certain.
            computed, end = entry.num_computed_tokens, entry.end - len(entry.draft_token_ids)
            if saves := states.save(entry.request, computed, end, spare):
                self.state_saves[entry.request.request_id] = saves
                spare -= sum(save.position < end for save in saves)
        states.free_saved()

    def start(self, request: Request, num_tokens: int) -> None:
        """Add a request that is new to the worker, with `num_tokens` after its cached tokens."""
        block_ids = self.manager.get_block_ids(request.request_id)
        self._grant(request, num_tokens, block_ids, EntryKind.STARTS)

    def fork(self, parent: Request, child: Request) -> None:
        """Add a request that is new to the worker and uses the blocks of `parent`. The common
        prompt ends in this step, and its logits give the first token of both requests."""
        self.has_forks = child.progress.is_known = True
        self.start(child, 0)
        # Either request may write to a shared block next, so both need `allocate_slots`.
        parent.num_told_tokens = child.num_told_tokens = -1

    def resume(self, request: Request, num_tokens: int) -> None:
        """Add a preempted request that the worker remembers, with a new block table."""
        block_ids = self.manager.get_block_ids(request.request_id)
        self._grant(request, num_tokens, block_ids, EntryKind.RESUMES)

    def revoke(self, request: Request) -> None:
        """Remove a request from the step. The request's tokens return to the budget, its new blocks
        are released, and the blocks that the step cached are uncached. A running request returns to
        its state before the step; a starting or resumed request then has no blocks and no computed
        tokens.

        Raises KeyError if the request is not in the step. Raises RuntimeError, and changes nothing,
        if another request of the step has found blocks that this request was to compute."""
        entry = next((each for each in self.entries if each.request is request), None)
        if entry is None:
            raise KeyError(request.request_id)
        self.manager.revoke(request, entry.num_computed_tokens, entry.block_ids)
        self.entries.remove(entry)
        self._to_tell.pop(request.request_id, None)
        request.num_told_tokens = -1
        self.wanted_drafts.pop(request.request_id, None)
        self.budget += entry.num_tokens
        request.num_placeholders = entry.num_placeholders
        goes_on = entry.kind is EntryKind.GOES_ON
        request.num_computed_tokens = entry.num_computed_tokens if goes_on else 0

    def build_output(
        self,
        finished_ids: set[str],
        preempted_ids: set[str],
        connector_meta: ConnectorMetadata | None,
        last_failed_id: int = 0,
    ) -> SchedulerOutput:
        """Return the finished step. The worker will forget the requests in `finished_ids`, and
        remove those in `preempted_ids` from its batch."""
        new, cached = self._describe()
        tokens = {entry[0].request_id: entry[1] for entry in self.entries}
        if self.has_forks:
            tokens = {request_id: count for request_id, count in tokens.items() if count}
        drafts = {}
        if self.speculation is not None:
            with_drafts = [entry for entry in self.entries if entry.draft_token_ids]
            drafts = {each.request.request_id: list(each.draft_token_ids) for each in with_drafts}
        tails = self.manager.shared_tails
        copies = tails.take_copies() if tails.sources else []
        pictures = self.pictures
        new_pictures, dropped = NO_PLAN if pictures is None else pictures.take_plan(tokens)
        return SchedulerOutput(
            step_id=self.step_id,
            last_failed_id=last_failed_id,
            new_requests=new,
            cached_requests=cached,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            finished_request_ids=finished_ids,
            preempted_request_ids=preempted_ids,
            connector_meta=connector_meta,
            draft_token_ids=drafts,
            wanted_drafts=self.wanted_drafts,
            block_copies=copies,
            state_saves=self.state_saves,
            new_pictures=new_pictures,
            dropped_pictures=dropped,
        )

    def _describe(self) -> tuple[list[NewRequestData], CachedRequestData]:
        """Return the data of requests new to the worker, and the changes of its known requests."""
        new, cached = [], CachedRequestData()
        states = self.manager.states
        for entry in self._to_tell.values():
            request = entry.request
            request_id = request.request_id
            state_pages: list[int] = []
            if states is not None and entry.kind is not EntryKind.GOES_ON:
                state_pages = states.take_start(request_id)
            if entry.kind is EntryKind.STARTS:
                assert entry.block_ids is not None
                new.append(
                    NewRequestData(
                        request_id=request_id,
                        prompt_token_ids=request.prompt_token_ids,
                        sampling_params=request.sampling_params,
                        block_ids=entry.block_ids,
                        num_computed_tokens=entry.num_computed_tokens,
                        output_token_ids=list(request.output_token_ids),
                        prompt_embeds=request.prompt_embeds,
                        pooling=request.pooling,
                        cache_salt=request.cache_salt or b"",
                        fork_of="" if entry.num_tokens else request.fork_of,
                        state_page_ids=state_pages,
                        num_likeliest=request.num_likeliest,
                        routed_from=request.routed_from,
                        adapter=b"" if request.adapter is None else request.adapter.fingerprint,
                        pictures=[each.without_pixels() for each in request.pictures],
                    )
                )
                continue
            cached.request_ids.append(request_id)
            cached.new_block_ids.append(entry.block_ids)
            cached.num_computed_tokens.append(entry.num_computed_tokens)
            if entry.kind is EntryKind.RESUMES:
                cached.resumed_request_ids.add(request_id)
                cached.output_token_ids[request_id] = list(request.output_token_ids)
                if state_pages:
                    cached.state_page_ids[request_id] = state_pages
        return new, cached

    def _grant(
        self, request: Request, num_tokens: int, block_ids: BlockIds | None, kind: EntryKind
    ) -> None:
        """Add an entry with the present `request.num_computed_tokens`, which then advances."""
        computed, placeholders = request.num_computed_tokens, request.num_placeholders
        entry = _step_entry((
            request, num_tokens, computed, request.num_preemptions, block_ids, kind, placeholders,
            (),
        ))  # fmt: skip
        self.entries.append(entry)
        self._to_tell[request.request_id] = entry
        self.budget -= num_tokens
        request.num_computed_tokens = request.num_told_tokens = computed = computed + num_tokens
        if computed != request.num_tokens + placeholders:
            return  # the request is in the middle of its prompt
        if self.speculation is not None and self._waits_for_drafts(request):
            return
        # A request whose length limit is reached by this step's token needs no further step.
        if self.runs_ahead and computed + 1 < request.max_num_tokens:
            request.num_placeholders = placeholders + 1

    def _waits_for_drafts(self, request: Request) -> bool:
        """Whether the request's next step must wait for this step's result: the worker will propose
        drafts, or this step checks drafts of the request."""
        assert self.speculation is not None
        most = self.speculation.most_drafts_of(request)
        if most:
            self.wanted_drafts[request.request_id] = most
        return most > 0 or bool(request.draft_token_ids)

    def _ids_of(self, added: GroupBlocks) -> BlockIds | None:
        is_nothing = added is self.manager.no_blocks or not any(added)
        return None if is_nothing else self.manager.page_ids(added)
