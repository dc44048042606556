# SPDX-License-Identifier: Apache-2.0
"""The router as an ASGI application: its own routes, and the routes that it passes to nodes.

Only API routes for clients are passed on. Routes that control a node (`/pause`, `/metrics`) need a
direct connection to the node."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...tiers.settings.values import MIB, ConfigError
from ...tiers.wire.listen import host_in
from ..api.api_errors import ApiError, ClientGone, error_response, to_api_error
from ..api.api_settings import LORA_ROUTES, ApiSettings
from ..api.http.hosts import check_host, hosts_to_check
from ..api.http.http_protocol import PARTS_PATH
from ..api.http.incoming_bytes import INCOMING
from ..api.http.origins import check_origin
from ..api.openai.request.body import JSON_LINES, check_kind, read_body
from ..api.openai.response.socket_messages import send_message
from ..api.openai.response.streaming import until_disconnect
from .held_bytes import HeldBytes, Share, too_many
from .node_tls import make_node_tls
from .nodes import Choice, LeastLoaded, Node, Nodes, Role
from .parts_body import HttpParts, PartsBody, PartsSource, SocketParts
from .proxy import NODE, RETRY_SECONDS, ClientRequest, Proxy
from .relay import Reply
from .router_metrics import CLIENT, RouterMetrics
from .router_settings import RouterConfig
from .socket_reply import SocketReply
from .upstream import NodeRequest

logger = logging.getLogger(__name__)

# Limit of the bytes of request bodies in memory at once, over all clients.
MAX_HELD_BYTES = 1024 * MIB
_PREFIX = "/v1/"
_OTHER_PATHS = ("/tokenize", "/detokenize", "/version", "/ping")
# The only client headers that nodes get, so that a client cannot send a proxy's headers to a node.
_PASSED_HEADERS = frozenset(
    (b"accept", b"accept-language", b"access-control-request-headers",
     b"access-control-request-method", b"authorization", b"content-encoding", b"content-type",
     b"origin", b"traceparent", b"tracestate", b"user-agent", b"x-job-id", b"x-job-last-step",
     b"x-request-id")
)  # fmt: skip

_KINDS = (b"content-type", b"content-encoding")  # headers of a body; a websocket has no body


class Router:
    """The router: its nodes, metrics and routes. Use a `Router` in one event loop only."""

    def __init__(
        self, config: RouterConfig, *, choice: Choice | None = None, admin_key: str | None = None
    ) -> None:
        self._config = config
        tls = make_node_tls(config)
        self.nodes = Nodes(
            config.prefill,
            config.decode,
            choice or LeastLoaded(),
            health_seconds=config.health_seconds,
            tls=tls,
        )
        self.num_open = 0
        self.held = HeldBytes(MAX_HELD_BYTES)
        self.metrics = RouterMetrics(self.nodes, lambda: self.num_open)
        self._proxy = Proxy(config, self.nodes, self.metrics, tls)
        self._body_limits = ApiSettings(
            max_body_bytes=config.max_body_bytes, body_timeout_seconds=config.body_seconds
        )
        self._key_digest = None if admin_key is None else _digest(admin_key)
        self._allowed_hosts = hosts_to_check(
            config.allowed_hosts or (), config.host, asks_for_key=False
        )
        self._passed = _PASSED_HEADERS
        if config.tenant_header is not None:
            self._passed = self._passed | {config.tenant_header.encode()}
        self._ended: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Check every node once, then start the repeated checks. Nodes that do not match only cause
        a warning, because a rolling restart may be running, and the matching nodes can answer."""
        self._ended = asyncio.get_running_loop().create_future()
        await self.nodes.probe_all()
        self._watch = asyncio.create_task(self.nodes.poll_health())

    def end_requests(self) -> None:
        """End all open answers at once, each with an error that says why. Idempotent."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def close(self) -> None:
        self.end_requests()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_socket = scope["type"] == "websocket"
        if scope["type"] != "http" and not is_socket:
            return
        try:
            if not scope["path"].startswith("/nodes"):  # _check_admin has a stricter check of Host
                check_host(scope, self._allowed_hosts)
            if is_socket:
                check_origin(scope, None)
                own = None
            else:
                own = self._answer_own(scope)
        except ApiError as error:
            own = error_response(error)
        if own is not None:
            await own(scope, receive, send)
            return
        await self._pass(scope, receive, send)

    # Routes that the router answers itself

    def _answer_own(self, scope: Scope) -> Response | None:
        path, method = scope["path"], scope["method"]
        if path == "/health":
            return self._health()
        if path == "/metrics":
            return Response(self.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
        if path == "/nodes":
            self._check_admin(scope)
            return self._show_nodes()
        if path in ("/nodes/drain", "/nodes/undrain"):
            if method != "POST":
                message = f"{path} does not take {method[:16]}; use POST"
                raise ApiError(message, status=405, code="method_not_allowed")
            self._check_admin(scope)
            return self._drain(scope, is_draining=path == "/nodes/drain")
        if (not path.startswith(_PREFIX) and path not in _OTHER_PATHS) or ".." in path.split("/"):
            message = (
                f"there is no route {path[:64]} here; the API lies under /v1, and other routes are "
                "asked of a node itself"
            )
            raise ApiError(message, status=404, code="not_found")
        if path in LORA_ROUTES:
            message = f"{path} would reach one node only; ask each node for it"
            raise ApiError(message, status=404, code="not_found")
        return None

    def _health(self) -> Response:
        if self.nodes.num_up(Role.DECODE):
            return _json({"status": "ok"})
        message = "no decode node can be used; start one, or see /nodes for why"
        raise ApiError(message, status=503, kind=NODE, code="no_node", retry_seconds=RETRY_SECONDS)

    def _show_nodes(self) -> Response:
        return _json(
            {"open_requests": self.num_open, "nodes": [_state_of(node) for node in self.nodes]}
        )

    def _drain(self, scope: Scope, *, is_draining: bool) -> Response:
        """Start or end a node's draining: the node finishes its requests and gets no more."""
        urls = parse_qs(scope["query_string"].decode("latin-1")).get("url", [])
        node = self.nodes.by_url(urls[0]) if len(urls) == 1 else None
        if node is None:
            came = f"{urls[0][:64]!r}" if len(urls) == 1 else f"{len(urls)} of them"
            known = ", ".join(each.address.url for each in self.nodes)
            raise ApiError(
                f"`url` takes one of {known}; {came} came", status=404, param="url", code="no_node"
            )
        node.is_draining = is_draining
        self.nodes.judge()
        logger.info("%s: draining %s", node.name, is_draining)
        return _json(_state_of(node))

    def _check_admin(self, scope: Scope) -> None:
        """Raise ApiError unless this client may read and control the nodes. The client must send
        the admin key; if the router has no admin key, the client must be on this machine."""
        headers = dict(scope["headers"])
        if b"origin" in headers:  # the request comes from a web page
            raise ApiError("this route takes no requests of web pages", status=403, code="origin")
        if self._key_digest is not None:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() == b"bearer" and hmac.compare_digest(
                hashlib.sha256(key.strip()).digest(), self._key_digest
            ):
                return
            message = "the key of --admin-key-file is needed: send `Authorization: Bearer <key>`"
            raise ApiError(message, status=401, kind="authentication_error", code="invalid_api_key")
        ends = [each[0] for each in (scope.get("client"), scope.get("server")) if each]
        # DNS rebinding: a web page's host name may resolve to this machine, and Host has that name.
        host = host_in(headers.get(b"host", b""))
        ends.append("127.0.0.1" if host == "localhost" else host)
        if len(ends) < 3 or not all(_is_loopback(each) for each in ends):
            message = (
                "without --admin-key-file this route is for this machine alone; start the router "
                "with one"
            )
            raise ApiError(message, status=403, code="admin_only")

    # Routes that nodes answer

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        is_socket = scope["type"] == "websocket"
        reply: Reply = SocketReply(send) if is_socket else Reply(send)
        outcome = "error"
        try:
            if is_socket:
                # This share counts a message's bytes until the connection is closed.
                scope["extensions"][INCOMING].may_hold = Share(self.held).takes
                await receive()  # the event websocket.connect
                await send_message(send, {"type": "websocket.accept"})
            with self._admitted() as share:
                is_parts = scope["path"] == PARTS_PATH
                if is_socket or (is_parts and scope["method"] == "POST"):
                    outcome = await self._forward_parts(scope, receive, reply, share)
                else:
                    outcome = await self._forward(scope, receive, reply, share)
        except ClientGone:
            outcome = "gone"
        except asyncio.CancelledError:
            outcome = "gone"
            raise
        except Exception as failure:  # noqa: BLE001 - every error becomes an HTTP answer
            error = to_api_error(failure)
            if error.code == "too_many_requests":
                outcome = "too_many"
            if reply.is_started:
                outcome = "cut"
            if reply.is_started or is_socket:
                await reply.fail(error)
            else:
                await error_response(error)(scope, receive, send)
        finally:
            self.metrics.record_outcome(CLIENT, outcome, time.monotonic() - began)

    async def _forward(self, scope: Scope, receive: Receive, reply: Reply, share: Share) -> str:
        """Pass a request to the nodes; return the request's outcome for the metrics."""
        body, limits = b"", self._body_limits
        if scope["method"] not in ("GET", "HEAD", "OPTIONS", "DELETE"):
            counted = share.counted(receive, limits.max_body_bytes)
            body = await read_body(Request(scope, counted), limits)
        client = ClientRequest(
            scope["path"],
            NodeRequest(scope["method"].encode(), _target(scope), self._headers(scope), body),
        )
        assert self._ended is not None
        await until_disconnect(receive, self._proxy.forward(client, reply), self._ended)
        return _outcome(reply)

    async def _forward_parts(
        self, scope: Scope, receive: Receive, reply: Reply, share: Share
    ) -> str:
        """Pass each part of a prompt on as the part arrives; return the outcome for the metrics."""
        assert self._ended is not None
        limits = self._body_limits
        headers = self._headers(scope)
        source: PartsSource
        if scope["type"] == "http":
            check_kind(Request(scope), JSON_LINES)
            source = HttpParts(receive, limits.max_body_bytes)
        else:
            incoming = scope["extensions"][INCOMING]
            source = SocketParts(receive, limits.max_body_bytes, incoming)
            headers = [each for each in headers if each[0] not in _KINDS]
            headers.append((b"content-type", JSON_LINES.encode()))
        body = PartsBody(source, limits.body_timeout_seconds, share.hold)
        first = await body.read_first(self._ended)
        client = ClientRequest(
            scope["path"], NodeRequest(b"POST", _target(scope), headers, first, rest=body)
        )
        await until_disconnect(body.receive_end, self._proxy.forward(client, reply), self._ended)
        return _outcome(reply)

    @contextmanager
    def _admitted(self) -> Iterator[Share]:
        """Count a request as open during the block, and yield the request's `Share`. Raises
        ApiError 429 if `max_waiting` requests are open."""
        if self.num_open >= self._config.max_waiting:
            raise too_many(f"{self.num_open} requests are open here, as many as the router takes")
        self.num_open += 1
        share = Share(self.held)
        try:
            yield share
        finally:
            self.num_open -= 1
            share.hold(0)

    def _headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        return [(name, value) for name, value in scope["headers"] if name in self._passed]


def read_admin_key(path: Path | None) -> str | None:
    """Return the key in a file. Raises ConfigError if the file is unreadable or has no key."""
    if path is None:
        return None
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-key-file {path} cannot be read as text ({error})") from error
    if not key or len(key.split()) != 1:
        raise ConfigError(f"--admin-key-file {path} holds no key; write one line without spaces")
    return key


def _outcome(reply: Reply) -> str:
    return "ok" if reply.status < 400 else "error"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _target(scope: Scope) -> bytes:
    """Return the path and query of a request's URL as the client's bytes."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path + (b"?" + query if query else b"")


def _state_of(node: Node) -> dict[str, object]:
    return {
        "url": node.address.url,
        "role": node.role,
        "is_up": node.is_up,
        "is_draining": node.is_draining,
        "in_flight": node.in_flight,
        "requests": node.num_requests,
        "last_error": node.last_error,
        "refused": node.refused,
        "identity": dict(node.identity or {}),
    }


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
