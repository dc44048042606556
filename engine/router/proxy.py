# SPDX-License-Identifier: Apache-2.0
"""Sends a client's request to a decode node, and a long prompt to a prefill node before that.

    long prompt   prefill node (one token) ── KV blocks ──▶ shared cache
                  then decode node (the client's request) ◀── KV blocks ──┘
    short prompt  decode node

    parts         decode node, each part as it arrives

Each request gets one answer or one error. A request is retried on another node only while no part
of an answer has been sent and no part of the prompt after the first has been passed on. A failed
prefill costs only time, because the decode node computes the KV blocks that the cache lacks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

import msgspec

from ..api.api_errors import ApiError, ClientGone
from . import legs
from .node_tls import NodeTls
from .nodes import Facts, Node, Nodes, Role
from .relay import HELD_BYTES, Reply, pass_on
from .router_metrics import RouterMetrics
from .router_settings import RouterConfig
from .upstream import NodeAnswer, NodeError, NodeRequest, NodeSlow, NodeUnreachable, exchange

logger = logging.getLogger(__name__)

# Statuses of a node's answer after which another node is tried.
ELSEWHERE_STATUSES = (429, 502, 503)
RETRY_SECONDS = 1
NODE = "node_error"
NO_SUCH_ROUTE = (404, 405)
FOLLOW = b"/follow"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """The path of a client's request, and the request in the form in which a node gets it."""

    path: str
    request: NodeRequest


class Proxy:
    """Sends requests to nodes and relays the answers. Use a `Proxy` in one event loop only."""

    def __init__(
        self,
        config: RouterConfig,
        nodes: Nodes,
        metrics: RouterMetrics,
        tls: NodeTls | None = None,
    ) -> None:
        self._config = config
        self._nodes = nodes
        self._metrics = metrics
        self._tls = tls

    async def forward(self, client: ClientRequest, reply: Reply) -> None:
        """Send one request to the nodes, and the answer to `reply`. Raises ApiError if no node
        answered, and TimeoutError `request_seconds` after the start (for a prompt in parts: after
        the last part). `reply.is_started`: a part of an answer was sent before the error."""
        deadline = asyncio.get_running_loop().time() + self._config.request_seconds
        request, facts = client.request, Facts(client.path)
        if request.method == b"POST" and client.path in legs.GENERATING:
            fields = legs.read_fields(request.body)
            facts = legs.read_facts(client.path, fields)
            has_prefill = bool(self._nodes.of_role[Role.PREFILL])
            if has_prefill and legs.wants_prefill(facts, self._config.disaggregate_above):
                async with self._followed(request, facts) as follower:
                    params = await self._prefill(request, facts, deadline)
                if params is not None:
                    request = replace(request, body=legs.decode_body(fields, params))
                await self._forward_decode(request, facts, reply, deadline, follower)
                return
        elif request.rest is not None:
            # A prompt in parts needs no prefill node: the decode node computes each part as the
            # part arrives.
            first, _, _ = request.body.partition(b"\n")
            facts = legs.read_facts(client.path, legs.read_fields(first))
        await self._forward_decode(request, facts, reply, deadline)

    @asynccontextmanager
    async def _followed(self, request: NodeRequest, facts: Facts) -> AsyncIterator[Node | None]:
        """Make a decode node load the prompt's KV blocks while the prefill node stores the blocks.
        Yield this decode node, which is the first to get the request; None if no node follows."""
        node = None
        if self._config.kv_transfer_params == "on":
            node = self._nodes.pick(Role.DECODE, facts)
        if node is None or not node.follows:
            yield None
            return
        with node.busy():
            hint = asyncio.create_task(self._have_followed(node, request))
            try:
                yield node
            finally:
                hint.cancel()
                await asyncio.gather(hint, return_exceptions=True)

    async def _have_followed(self, node: Node, request: NodeRequest) -> None:
        request = replace(request, target=FOLLOW + request.target)
        try:
            async with self._exchange(node, request) as answer:
                node.follows = answer.status not in NO_SUCH_ROUTE
                await answer.read_whole(HELD_BYTES)
        except NodeError as error:
            logger.info("%s follows no prompt for now: %s", node.name, error)

    async def _prefill(
        self, request: NodeRequest, facts: Facts, deadline: float
    ) -> msgspec.Raw | None:
        """Make a prefill node compute the prompt; return the node's `kv_transfer_params`, or None.
        A failure is counted in the metrics and costs only time."""
        with_params = self._config.kv_transfer_params == "on"
        body = legs.prefill_body(facts.fields, with_kv_params=with_params)
        own_deadline = asyncio.get_running_loop().time() + self._config.prefill_seconds
        request = replace(request, body=body)
        tried: list[Node] = []
        with self._leg(Role.PREFILL) as leg:
            try:
                async with asyncio.timeout_at(min(deadline, own_deadline)):
                    while node := self._next_node(Role.PREFILL, facts, tried):
                        answer = await self._try_prefill(node, request, leg, tried)
                        if answer is not None:
                            return legs.handed_over(answer) if with_params else None
            except TimeoutError:
                leg.outcome = "timeout"
                logger.warning(
                    "a prefill took more than %g s; decode computes the prompt",
                    self._config.prefill_seconds,
                )
        return None

    async def _try_prefill(
        self, node: Node, request: NodeRequest, leg: _Leg, tried: list[Node]
    ) -> bytes | None:
        """Return the body of a prefill node's answer with the status 200, or None."""
        try:
            async with self._exchange(node, request) as answer:
                status = answer.status
                body = await answer.read_whole(HELD_BYTES)
        except NodeError as error:
            leg.outcome = error.outcome
            self._handle_node_error(node, error)
            return None
        if status == 200:
            leg.outcome = "ok"
            return body
        leg.outcome = "refused"
        if status not in ELSEWHERE_STATUSES:
            # The request causes the error, so every prefill node would refuse the request.
            tried.extend(self._nodes.of_role[Role.PREFILL])
        logger.info("%s answered %d to a prefill", node.name, status)
        return None

    async def _forward_decode(
        self,
        request: NodeRequest,
        facts: Facts,
        reply: Reply,
        deadline: float,
        first: Node | None = None,
    ) -> None:
        """Send a request to decode nodes until one answers, and to `first` before other nodes."""
        tried: list[Node] = []
        error: NodeError | None = None
        with self._leg(Role.DECODE) as leg:
            while node := self._next_node(Role.DECODE, facts, tried, first):
                try:
                    async with self._limited(request, deadline):
                        if await self._try_decode(node, request, leg, tried, reply):
                            return
                except TimeoutError:
                    leg.outcome = "timeout"
                    raise
                except NodeError as failure:
                    error = failure
                    leg.outcome = failure.outcome
                    self._handle_node_error(node, failure)
                    if reply.is_started or request.was_relayed or isinstance(failure, NodeSlow):
                        break
        raise _explain(error, is_started=reply.is_started, was_relayed=request.was_relayed)

    @asynccontextmanager
    async def _limited(self, request: NodeRequest, deadline: float) -> AsyncIterator[None]:
        """Raise TimeoutError if the block runs beyond the `deadline`. For a body in parts the limit
        is `request_seconds` after the last part, and the node limits the pauses between parts."""
        rest, seconds = request.rest, self._config.request_seconds
        async with asyncio.timeout_at(deadline if rest is None else None) as limit:
            if rest is not None:
                rest.when_stopped(lambda at: limit.reschedule(at + seconds))
            try:
                yield
            finally:
                if rest is not None:
                    rest.when_stopped(lambda at: None)

    async def _try_decode(
        self, node: Node, request: NodeRequest, leg: _Leg, tried: list[Node], reply: Reply
    ) -> bool:
        """Send a request to a node and pass the node's answer on. Return False, with no answer
        passed on, if another node should be tried. Raises NodeError."""
        async with self._exchange(node, request) as answer:
            leg.outcome = "ok" if answer.status < 400 else "refused"
            is_for_another = answer.status in ELSEWHERE_STATUSES and not request.was_relayed
            if is_for_another and self._has_another(Role.DECODE, tried):
                logger.info("%s answered %d", node.name, answer.status)
                return False
            if request.rest is not None:
                request.rest.stop_reading()
            await pass_on(answer, reply)
            return True

    def _next_node(
        self, role: Role, facts: Facts, tried: list[Node], first: Node | None = None
    ) -> Node | None:
        """Return the next node to try (`first` if `first` is a candidate) and add it to `tried`."""
        if tried and not self._has_another(role, tried):
            return None
        if not tried and first in self._nodes.candidates(role):
            node: Node | None = first
        else:
            node = self._nodes.pick(role, facts, tried)
        if node is not None:
            if tried:
                self._metrics.count_retry(role)
            tried.append(node)
        return node

    def _has_another(self, role: Role, tried: list[Node]) -> bool:
        return len(tried) <= self._config.retries and bool(self._nodes.candidates(role, tried))

    @asynccontextmanager
    async def _exchange(self, node: Node, request: NodeRequest) -> AsyncIterator[NodeAnswer]:
        with node.busy():
            async with exchange(
                node.address,
                request,
                connect_seconds=self._config.connect_seconds,
                wait_seconds=self._config.answer_seconds,
                tls=self._tls,
                transports=node.transports,
            ) as answer:
                yield answer

    @contextmanager
    def _leg(self, role: Role) -> Iterator[_Leg]:
        """Record the outcome and seconds of a leg (prefill or decode) in the metrics at the end of
        the block, also if the client disconnected or parts of a prompt could not be passed on."""
        leg = _Leg()
        began = time.monotonic()
        try:
            yield leg
        except (asyncio.CancelledError, GeneratorExit, ClientGone, ApiError):
            leg.outcome = "gone"
            raise
        finally:
            self._metrics.record_outcome(role, leg.outcome, time.monotonic() - began)

    def _handle_node_error(self, node: Node, error: NodeError) -> None:
        logger.warning("%s: %s", node.name, error)
        if isinstance(error, NodeUnreachable):
            node.mark_down(str(error))


@dataclass(slots=True)
class _Leg:
    """The outcome of a leg (prefill or decode) so far."""

    outcome: str = "no_node"


def _explain(error: NodeError | None, *, is_started: bool, was_relayed: bool) -> ApiError:
    """Return the error for a client. The error does not name the node; the log does."""
    if is_started:
        message = (
            "the node that was answering is lost, so this answer is not whole; send the request "
            "again"
        )
        return ApiError(message, status=502, kind=NODE, code="node_lost")
    if isinstance(error, NodeSlow):
        message = (
            "the node gave no answer in the time that the router waits; send a smaller request, or "
            "raise --answer-seconds"
        )
        return ApiError(message, status=504, kind="timeout_error", code="node_timeout")
    if was_relayed:
        message = (
            "the node that took this prompt's parts is lost, and the router keeps no parts; send "
            "them again from the first one"
        )
        return ApiError(message, status=502, kind=NODE, code="node_lost")
    if error is None or isinstance(error, NodeUnreachable):
        message = "no decode node can be reached; send the request again in a moment"
        return ApiError(message, status=503, kind=NODE, code="no_node", retry_seconds=RETRY_SECONDS)
    message = "the nodes that took this request were lost before they answered; send it again"
    return ApiError(message, status=502, kind=NODE, code="node_lost", retry_seconds=RETRY_SECONDS)
