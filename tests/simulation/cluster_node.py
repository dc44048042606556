# SPDX-License-Identifier: Apache-2.0
"""Node: an engine of the simulated cluster, and the books that must balance after each of its
steps."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stratakv.connector.prefill_decode.hand_overs import LEASE_SECONDS
from stratakv.connector.prefill_decode.hand_overs import MOST_SECONDS as MOVE_SECONDS
from stratakv.connector.prefill_decode.wait_limit import MOST_SECONDS as WAIT_SECONDS
from stratakv.connector.request_offload import Stage
from stratakv.engine.core.handover import MOST_SECONDS as GIVE_SECONDS
from stratakv.engine.request.core_messages import TokenOutput
from stratakv.engine.request.handover_ticket import Ticket
from stratakv.engine.request.request import Request

from ..engine.scheduler.conftest import HASHER, NO_WISHES, SIZE, fingerprint, reference
from ..engine.scheduler.test_random_lives import check_invariants
from .books import check_writes
from .clock import VirtualEvent
from .prompt_parts import PromptParts
from .shared_store import ClientStore
from .sim_core import SESSION_IDLE_SECONDS, SimCore
from .tiny_engine import LAYOUT, is_busy

if TYPE_CHECKING:
    from .cluster import Cluster

MAX_MODEL_LEN = 32
SLACK_SECONDS = 0.1  # more than a step takes


class Node:
    """An engine process with its loop; killed for good, a new one takes its place."""

    def __init__(self, cluster: Cluster, role: str, name: str) -> None:
        rng, clock = cluster.rng, cluster.clock
        self.role, self.name = role, name
        self._server, self._clock = cluster.server, clock
        self.woken = VirtualEvent(clock)
        self.is_awake = True
        self.sleeps_until = 0.0
        self.is_alive = True
        self.empty_steps = 0
        self.held_since: dict[str, float] = {}
        self.asked: dict[str, Asked] = {}
        self.store = ClientStore(
            cluster.server,
            LAYOUT,
            clock,
            rng,
            self.may_hold,
            cluster.wrong,
            refuses=0.2 if cluster.is_faulty and rng.random() < 0.3 else 0.0,
        )
        fault_rate = rng.choice([0.0, 0.0, 0.05]) if cluster.is_faulty else 0.0
        self.core = SimCore(
            role,
            self.store,
            clock,
            rng,
            cluster.contents,
            MAX_MODEL_LEN,
            fault_rate=fault_rate,
            pass_seconds=cluster.pass_seconds,
            fails=cluster.fails,
            spoils=cluster.spoils,
            speculation=cluster.make_speculation(),
            more=cluster.more,
        )
        self.core.set_wakeup(self.woken.set)

    def may_hold(self, key: bytes, page: bytes) -> bool:
        return self.core.engine.may_hold(key, page)

    @property
    def is_due(self) -> bool:
        return self.is_awake or self.woken.is_set() or self._clock.now >= self.sleeps_until

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(
            self.is_due
            or is_busy(self.core.engine)
            or len(self.core._held)
            or len(self.core.engine.parts.side.prompts_elsewhere.follows.prompts)
        )

    def check_released(self, outputs: list[TokenOutput], incomplete: int) -> None:
        """Answers that are said to be whole have blocks that the server has said it has."""
        held, now = self.core._held, self._clock.now
        released = [output for output in outputs if output.ticket is not None]
        kept = 0
        for output in released:
            since = self.held_since.pop(output.request_id, now)
            asked = self.asked[output.request_id]
            promised = self._server.promised
            keys = note_contents({}, asked.prompt)
            needed = keys if asked.hand_over_tokens == 1 else keys[: len(asked.prompt) // SIZE]
            kept_now = {key[:32] for key, moment in promised.items() if moment >= since}
            # Where a lease is not answered in time, what was stored and answered counts.
            kept += kept_now.union(self.store.believed).issuperset(needed)
        assert kept >= len(released) - incomplete, "an answer was released too early"
        for request_id in held._held:
            since = self.held_since.setdefault(request_id, now)
            assert now - since <= GIVE_SECONDS + MOVE_SECONDS + 1.0, f"{request_id} is held on"

    def check_books(self, began: float) -> None:
        """`began`: when the step did that has just ended; it looked at waits then, and may have
        taken long itself."""
        check_invariants(self.core.engine)
        slab, held = self.core.slab, self.core._held
        assert len(slab._free) + len(slab._slots) == slab.num_slots
        check_writes(self.core.engine.parts.side._hierarchy)
        side, now = self.core.engine.parts.side, self._clock.now
        known = self.core.scheduler.requests.keys()
        live = {name for name, o in side.requests.items() if o.stage is not Stage.FINISHED}
        assert known >= live, f"{self.name} keeps what nobody wants"
        assert known >= {*side.awaiting_prefill}, f"{self.name} awaits what nobody wants"
        for name in side.awaiting_prefill:
            wait = side.requests[name].wait
            assert began <= wait.began + WAIT_SECONDS + SLACK_SECONDS, (
                "a prompt is awaited for ever"
            )
            assert began <= wait.limit.ends_at() + SLACK_SECONDS, "a prompt is awaited too long"
        waiting = {*held._expected, *held._held}
        assert waiting <= self.asked.keys(), "an answer is held that nobody waits for"
        assert held._expected.keys() <= self.core.scheduler.requests.keys()
        assert all(end <= now + LEASE_SECONDS for end in self._server._leases.values())
        self._check_sessions(began)

    def _check_sessions(self, began: float) -> None:
        """Each has a client, and waits for a part as long as it may; blocks are kept for who goes
        on in them, and for nobody else."""
        core, states = self.core, self.core.scheduler._states
        open_sessions = core.sessions._open
        assert open_sessions.keys() <= self.asked.keys(), "a session goes on that nobody feeds"
        going_on = {each.continues for each in states.requests.values()}
        for session in open_sessions.values():
            going_on.add(session.before)
            if session.asked is None:
                # A step first ends those that have waited too long.
                waits = began - session.waits_since
                assert waits < SESSION_IDLE_SECONDS, "a session waits for ever"
        assert going_on.issuperset(states.kept.ended), "blocks are kept for nobody"


@dataclass(eq=False)
class Asked:
    """One request of a client, as the caller in front of the engines knows it."""

    name: str
    prompt: list[int]
    count: int
    hand_over_tokens: int  # that the prefill engine is asked for
    node: Node | None = None
    request_id: str = ""
    is_prefill: bool = False
    is_helper: bool = False  # the prefill leg of another one, whose answer nobody reads
    ticket: Ticket | None = None
    seed: int | None = None  # of one of several answers to its prompt
    parts: PromptParts | None = None  # its prompt comes in these
    fed_at: float = 0.0  # when the newest of them came
    tries: int = 0
    told: list[int] = field(default_factory=list)
    end: str = ""  # how it ended

    @functools.cached_property
    def right(self) -> list[int]:
        """What the client must be told."""
        return reference(self.prompt, self.count, MAX_MODEL_LEN, seed=self.seed)


def note_contents(contents: dict[bytes, list[int]], prompt: list[int]) -> list[bytes]:
    """The digests of a prompt's blocks, and what each of them holds."""
    request = Request("digests", prompt, NO_WISHES, block_hasher=HASHER)
    digests, numbers = list(request.block_hashes), fingerprint(prompt)
    if tail := request.prompt_tail_hash():
        digests.append(tail)
    for index, digest in enumerate(digests):
        contents[digest[:32]] = numbers[index * SIZE : (index + 1) * SIZE]
    return [digest[:32] for digest in digests]
