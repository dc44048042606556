# SPDX-License-Identifier: Apache-2.0
"""The nodes, what is known of each, and the choice between them.

What the rest of the router may rely on: `pick` gives a node that is believed up, unless all of its
role are believed down; a node that is drained or refused gets nothing; `busy` counts what is in
flight.

A node is refused if it was started for another role, or differs from the *reference*: what the
decode nodes are that answer now. At first that is the first one on the command line that is up. It
stays so while a decode node that agrees with it lives and is not drained, so that one node that
comes back with another model cannot put out all others; then the next one that is up sets it anew.
A prefill node never does, for answers do without it.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from .node_identity import Difference, Identity, explain_role, find_difference, read_identity
from .node_tls import NodeTls
from .router_settings import NodeAddress
from .upstream import NodeError, NodeRequest, NodeSlow, exchange

logger = logging.getLogger(__name__)

# A node that failed so many looks at its health in a row is taken for dead or hung: what waits for
# it is given up, so that it can be tried elsewhere. And one that was not well for so many does not
# say any more what the others have to be.
HOPELESS_LOOKS = 5
_MAX_ANSWER_BYTES = 64 * 1024
_NOT_IMPLEMENTED = 501
_TOO_MANY = 429


class Role(StrEnum):
    """What a node is for."""

    PREFILL = "prefill"
    DECODE = "decode"


class Node:
    """One node as this router sees it."""

    def __init__(self, address: NodeAddress, role: Role) -> None:
        self.address = address
        self.role = role
        self.is_up = False
        self.is_draining = False
        self.in_flight = 0  # requests of ours
        self.num_requests = 0
        self.last_error = ""
        self.failed_looks = 0  # in a row, without any answer
        self.looks_down = 0  # in a row
        self.identity: Identity | None = None  # as it told it last; None: other software
        self.refused = ""  # why it is not used beside the others
        self.difference: Difference | None = None  # where that is why
        self.follows = True  # as far as is known, it knows the route for that
        self.last_pick = 0  # of all picks, which one this node got last
        self.transports: set[asyncio.WriteTransport] = set()

    @property
    def name(self) -> str:
        """The node in a sentence."""
        return f"{self.role} node {self.address.url}"

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around a request of ours."""
        self.in_flight += 1
        self.num_requests += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def mark_down(self, reason: str) -> None:
        """Nothing more for it until it looks healthy again."""
        if self.is_up or not self.last_error:
            logger.warning("%s is down: %s", self.name, reason)
        self.is_up = False
        self.last_error = reason

    def mark_up(self) -> None:
        """It looks healthy."""
        if not self.is_up:
            logger.info("%s is up", self.name)
        self.is_up = True
        self.last_error = ""

    def refuse(self, reason: str, difference: Difference | None = None) -> None:
        """Nothing for it as long as it is what it is. Told once, and again for another reason."""
        if not self.refused or difference != self.difference:
            logger.warning("%s is not used: %s", self.name, reason)
        self.refused = reason
        self.difference = difference

    def accept(self) -> None:
        """It is what it should be."""
        if self.refused:
            logger.info("%s fits the other nodes now", self.name)
        self.refused = ""
        self.difference = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a request when a node is chosen for it."""

    path: str
    prompt_tokens: int = 0  # of its longest prompt; 0: it has none, or nobody can say
    is_exact: bool = False  # counted, and not estimated from the text's length
    # The request's fields as they came, for a choice that looks at the prompt.
    fields: Mapping[str, msgspec.Raw] = field(default_factory=dict)


class Choice(ABC):
    """Which node gets a request. It is told nothing else and keeps what else it wants to know
    itself: routing by what nodes have cached is another of these."""

    @abstractmethod
    def choose(self, facts: Facts, nodes: Sequence[Node]) -> Node:
        """One of `nodes`, which all have one role and of which there is at least one."""


class LeastLoaded(Choice):
    """The node with the fewest requests of ours in flight; of equal ones, in turn."""

    def choose(self, facts: Facts, nodes: Sequence[Node]) -> Node:
        return min(nodes, key=lambda node: (node.in_flight, node.last_pick))


class Nodes:
    """All nodes, and what looks after their health. Belongs to one event loop."""

    def __init__(
        self,
        prefill: Sequence[NodeAddress],
        decode: Sequence[NodeAddress],
        choice: Choice,
        *,
        health_seconds: float,
        tls: NodeTls | None = None,
    ) -> None:
        self._choice = choice
        self._health_seconds = health_seconds
        self._tls = tls
        self._num_picks = 0
        self._reference: Identity | None = None  # what nodes have to be; None: nobody told
        self._holder = ""  # the decode node that is so
        self.of_role: dict[Role, list[Node]] = {
            Role.PREFILL: [Node(each, Role.PREFILL) for each in prefill],
            Role.DECODE: [Node(each, Role.DECODE) for each in decode],
        }

    def __iter__(self) -> Iterator[Node]:
        for nodes in self.of_role.values():
            yield from nodes

    def num_up(self, role: Role) -> int:
        """How many could get a request; none that is drained or refused."""
        return len(self._up(role))

    def num_refused(self, role: Role) -> int:
        return sum(node.is_up and bool(node.refused) for node in self.of_role[role])

    def num_in_flight(self, role: Role) -> int:
        return sum(node.in_flight for node in self.of_role[role])

    def by_url(self, url: str) -> Node | None:
        """The node of that URL, a slash at its end or not."""
        wanted = url.rstrip("/")
        return next((node for node in self if node.address.url == wanted), None)

    def candidates(self, role: Role, tried: Collection[Node] = ()) -> list[Node]:
        """Those that a request may go to which `tried` have failed. Prefill nodes only if up,
        since there is an answer without them."""
        nodes = self._up(role)
        if not nodes and role is Role.DECODE:
            nodes = [n for n in self.of_role[role] if not n.is_draining and not n.refused]
        return [node for node in nodes if node not in tried]

    def pick(self, role: Role, facts: Facts, tried: Collection[Node] = ()) -> Node | None:
        """The node for a request, or None where none is left."""
        nodes = self.candidates(role, tried)
        if not nodes:
            return None
        node = self._choice.choose(facts, nodes)
        self._num_picks += 1
        node.last_pick = self._num_picks
        return node

    def _up(self, role: Role) -> list[Node]:
        return [
            node
            for node in self.of_role[role]
            if node.is_up and not node.is_draining and not node.refused
        ]

    def judge(self) -> None:
        """Refuse the nodes that do not fit, as far as they have told what they are; take back those
        that do now."""
        if (holder := self._find_holder()) is not None:
            self._reference, self._holder = holder.identity, holder.name
        for node in self:
            if error := _role_error(node):
                node.refuse(error)
            elif difference := self._difference(node):
                node.refuse(difference.explain(self._holder), difference)
            else:
                node.accept()

    def _find_holder(self) -> Node | None:
        """A decode node that is what the reference says; where none is left, the one that sets it
        anew."""
        able = [
            node
            for node in self.of_role[Role.DECODE]
            if node.identity is not None and not node.is_draining and not _role_error(node)
        ]
        for node in able:
            is_alive = node.is_up or node.looks_down < HOPELESS_LOOKS
            if self._reference is not None and is_alive and self._difference(node) is None:
                return node
        return next((node for node in able if node.is_up), None)

    def _difference(self, node: Node) -> Difference | None:
        if node.identity is None or self._reference is None:
            return None
        with_blocks = bool(self.of_role[Role.PREFILL])
        return find_difference(node.identity, self._reference, with_blocks=with_blocks)

    async def probe_all(self) -> None:
        await asyncio.gather(*(self._look_at(node) for node in self))
        self.judge()

    async def poll_health(self) -> None:
        """Look at all of them again and again, each on its own, until cancelled."""
        await asyncio.gather(*(self._watch_node(node) for node in self))

    async def _watch_node(self, node: Node) -> None:
        while True:
            await asyncio.sleep(self._health_seconds)
            await self._look_at(node)
            self.judge()  # before anybody can send it a request

    async def _look_at(self, node: Node) -> None:
        """Ask how it is, and what it is: a node can be another one by the next look."""
        try:
            status, _ = await self._get(node, b"/health")
        except NodeError as error:
            self._note_silence(node, f"does not answer: {error}")
        else:
            node.failed_looks = 0  # it may be ill, and it lives
            if status != 200:
                node.mark_down(f"its /health answers {status}")
            elif await self._read_identity(node):
                node.mark_up()
        node.looks_down = 0 if node.is_up else node.looks_down + 1

    async def _read_identity(self, node: Node) -> bool:
        """Have it tell what it is. Whether it did, or is other software, which does not; that is
        asked once each time that it comes up."""
        if node.is_up and node.identity is None:
            return True
        try:
            status, body = await self._get(node, b"/node")
        except NodeError as error:
            node.mark_down(f"its /node does not answer: {error}")
            return False
        if status == _TOO_MANY or (status >= 500 and status != _NOT_IMPLEMENTED):
            node.mark_down(f"its /node answers {status}")
            return False
        node.identity = read_identity(body) if status == 200 else None
        if node.identity is None:
            logger.info(
                "%s does not tell what it is (its /node answers %d), so it is used unchecked",
                node.name,
                status,
            )
        return True

    async def _get(self, node: Node, path: bytes) -> tuple[int, bytes]:
        """Status and body of what it answers. Raises NodeError."""
        try:
            async with asyncio.timeout(self._health_seconds):
                async with exchange(
                    node.address,
                    NodeRequest(b"GET", path),
                    connect_seconds=self._health_seconds,
                    wait_seconds=self._health_seconds,
                    tls=self._tls,
                ) as answer:
                    return answer.status, await answer.read_whole(_MAX_ANSWER_BYTES)
        except TimeoutError:
            raise NodeSlow(f"nothing whole came in {self._health_seconds:g} s") from None

    def _note_silence(self, node: Node, reason: str) -> None:
        node.failed_looks += 1
        node.mark_down(f"its /health {reason}")
        if node.failed_looks >= HOPELESS_LOOKS:
            for transport in list(node.transports):
                transport.abort()


def _role_error(node: Node) -> str:
    """Why a node was started for something else than what it is listed for, or nothing."""
    [other] = [role for role in Role if role is not node.role]
    return explain_role(node.identity or {}, node.role, other)
