# SPDX-License-Identifier: Apache-2.0
"""The router's nodes: their state, their health checks, and the choice of a node for a request.

`Nodes.pick` returns a node that is marked as up; if all decode nodes are marked as down, `pick`
returns one of the down nodes. Drained and refused nodes get no requests. `Node.busy` counts a
node's requests in flight.

A node is refused if it was started for another role, or if its identity differs from the
*reference*, the identity of the decode nodes in use. The first decode node on the command line that
is up sets the reference. The reference stays while a decode node with this identity is alive and
not drained, so a single node that restarts with another model cannot make all other nodes refused.
When no decode node with the reference is left, the next decode node that is up sets a new one. A
prefill node never sets the reference, because answers are possible without prefill nodes."""

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

# Failed health checks in a row after which a node counts as dead: the router aborts the node's
# requests, so that other nodes can get these requests, and the node loses the reference identity.
HOPELESS_LOOKS = 5
_MAX_ANSWER_BYTES = 64 * 1024
_NOT_IMPLEMENTED = 501
_TOO_MANY = 429


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Node:
    def __init__(self, address: NodeAddress, role: Role) -> None:
        self.address = address
        self.role = role
        self.is_up = False
        self.is_draining = False
        self.in_flight = 0  # open requests of this router at the node
        self.num_requests = 0
        self.last_error = ""
        self.failed_looks = 0  # health checks in a row that got no answer
        self.looks_down = 0  # health checks in a row that found the node down
        self.identity: Identity | None = None  # the node's last report; None: other software
        self.refused = ""  # the reason why the node is not used
        self.difference: Difference | None = None  # the difference that made the node refused
        self.follows = True  # False: the node lacks the route /follow
        self.last_pick = 0  # the value of Nodes._num_picks when the node was last picked
        self.transports: set[asyncio.WriteTransport] = set()

    @property
    def name(self) -> str:
        return f"{self.role} node {self.address.url}"

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request to this node as in flight during the block."""
        self.in_flight += 1
        self.num_requests += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def mark_down(self, reason: str) -> None:
        """Mark the node as down, without requests, until a health check succeeds. Log `reason`."""
        if self.is_up or not self.last_error:
            logger.warning("%s is down: %s", self.name, reason)
        self.is_up = False
        self.last_error = reason

    def mark_up(self) -> None:
        """Mark the node as up after a health check: the node may get requests. Log the change."""
        if not self.is_up:
            logger.info("%s is up", self.name)
        self.is_up = True
        self.last_error = ""

    def refuse(self, reason: str, difference: Difference | None = None) -> None:
        """Exclude the node from requests until `accept`. Log a new `reason` once."""
        if not self.refused or difference != self.difference:
            logger.warning("%s is not used: %s", self.name, reason)
        self.refused = reason
        self.difference = difference

    def accept(self) -> None:
        """End the exclusion by `refuse`, because the node now matches the other nodes."""
        if self.refused:
            logger.info("%s fits the other nodes now", self.name)
        self.refused = ""
        self.difference = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a request that determine which node gets the request."""

    path: str
    prompt_tokens: int = 0  # tokens of the request's longest prompt; 0: no prompt or unknown
    is_exact: bool = False  # False: `prompt_tokens` is estimated from the text's length
    # The request's undecoded JSON fields, for a `Choice` that reads the prompt.
    fields: Mapping[str, msgspec.Raw] = field(default_factory=dict)


class Choice(ABC):
    """A policy that chooses the node for a request. A policy gets only the request's facts and the
    nodes, and must keep any other state itself, such as which node has cached which blocks."""

    @abstractmethod
    def choose(self, facts: Facts, nodes: Sequence[Node]) -> Node:
        """Choose one of `nodes`, at least one node; all nodes have the same role."""


class LeastLoaded(Choice):
    """Chooses the node with the fewest of this router's requests in flight; of several such nodes,
    the node that was picked least recently."""

    def choose(self, facts: Facts, nodes: Sequence[Node]) -> Node:
        return min(nodes, key=lambda node: (node.in_flight, node.last_pick))


class Nodes:
    """All nodes of a router, with their health checks. Use a `Nodes` in one event loop only."""

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
        self._reference: Identity | None = None  # the identity that all nodes must have
        self._holder = ""  # the name of a decode node that has the reference
        self.of_role: dict[Role, list[Node]] = {
            Role.PREFILL: [Node(each, Role.PREFILL) for each in prefill],
            Role.DECODE: [Node(each, Role.DECODE) for each in decode],
        }

    def __iter__(self) -> Iterator[Node]:
        for nodes in self.of_role.values():
            yield from nodes

    def num_up(self, role: Role) -> int:
        """Return the number of nodes that may get a request: up, not drained, not refused."""
        return len(self._up(role))

    def num_refused(self, role: Role) -> int:
        return sum(node.is_up and bool(node.refused) for node in self.of_role[role])

    def num_in_flight(self, role: Role) -> int:
        return sum(node.in_flight for node in self.of_role[role])

    def by_url(self, url: str) -> Node | None:
        """Return the node with the URL `url`, with or without a slash at its end, or None."""
        wanted = url.rstrip("/")
        return next((node for node in self if node.address.url == wanted), None)

    def candidates(self, role: Role, tried: Collection[Node] = ()) -> list[Node]:
        """Return the nodes that a request may still try: neither in `tried` nor drained nor
        refused. The nodes must be up; decode nodes may be down if all decode nodes are down."""
        nodes = self._up(role)
        if not nodes and role is Role.DECODE:
            nodes = [n for n in self.of_role[role] if not n.is_draining and not n.refused]
        return [node for node in nodes if node not in tried]

    def pick(self, role: Role, facts: Facts, tried: Collection[Node] = ()) -> Node | None:
        """Return the chosen node for a request; None if no candidate is left."""
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
        """Refuse nodes whose known role or identity does not fit, and accept the other nodes."""
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
        """Return a decode node with the reference identity, else the node that sets a new one."""
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
        """Check every node's health repeatedly, each node in its own task, until cancelled."""
        await asyncio.gather(*(self._watch_node(node) for node in self))

    async def _watch_node(self, node: Node) -> None:
        while True:
            await asyncio.sleep(self._health_seconds)
            await self._look_at(node)
            self.judge()  # before the router can send a request to the node

    async def _look_at(self, node: Node) -> None:
        """Check a node's health and identity, which may change between two checks."""
        try:
            status, _ = await self._get(node, b"/health")
        except NodeError as error:
            self._note_silence(node, f"does not answer: {error}")
        else:
            node.failed_looks = 0  # the node answered, so the node is alive
            if status != 200:
                node.mark_down(f"its /health answers {status}")
            elif await self._read_identity(node):
                node.mark_up()
        node.looks_down = 0 if node.is_up else node.looks_down + 1

    async def _read_identity(self, node: Node) -> bool:
        """Request a node's identity; return whether the node answered. A node of other software,
        which reports no identity, gets this request only once each time the node comes up."""
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
        """Return the status and body of the node's answer. Raises NodeError."""
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
    """Return the reason why a node cannot have its listed role; "" if it can."""
    [other] = [role for role in Role if role is not node.role]
    return explain_role(node.identity or {}, node.role, other)
