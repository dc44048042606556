# SPDX-License-Identifier: Apache-2.0
"""The processes of a cluster on one machine: nodes, the router, and a cache server.

Blocks are sent by TCP, as between machines: the cache server shares no memory with a node. Caches
are not reset, because each request has a new cache salt, for which no cache has blocks."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ...tiers.processes.python_command import python_command
from ..harness.load_client import GREEDY, RequestFailed, StreamedAnswer, ask
from ..harness.served import HOST, Server, ServerFailed, cache_server, free_ports

COMPLETIONS = "/v1/completions"
TICKETS = "kv_transfer_params"
# The request fields with which a node hands a prompt's blocks over to another node.
HAND_OVER: dict[str, Any] = {TICKETS: {"do_remote_decode": True}}
_SALTS = itertools.count()
_REQUEST_SECONDS = 300.0
_QUIET_SECONDS = 0.1
_SETTLE_SECONDS = 60.0


class Node(Server):
    """A process of the command in the first of `words`, `stratakv serve` or `stratakv route`."""

    def __init__(self, words: Sequence[str], scratch: Path) -> None:
        [port] = free_ports(1)
        command = python_command("-m", "stratakv.engine.cli.main", *words)
        command += ["--host", HOST, "--port", str(port), "--log-level", "warning"]
        super().__init__(command, port, scratch / f"{words[0]}-{port}.log")

    def figure(self, name: str, *labels: str) -> float:
        """Return the sum of the metric `name` over the rows that have all `labels`."""
        text = self._exchange("GET", "/metrics").decode()
        rows = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for shown, value in rows if all(each in shown for each in labels))

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a completion that is not streamed. Raises ServerFailed."""
        answer: dict[str, Any] = json.loads(self._exchange("POST", COMPLETIONS, body))
        return answer

    def stream(self, body: dict[str, Any]) -> StreamedAnswer:
        """Return the answer to a streamed completion. Raises ServerFailed."""
        try:
            return asyncio.run(ask(HOST, self.port, COMPLETIONS, body, _REQUEST_SECONDS))
        except RequestFailed as error:
            raise ServerFailed(f"{error}\n{self._tail()}") from error

    def settle(self) -> None:
        """Wait until the node loads and stores no blocks. Raises ServerFailed."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        before = None
        while (now := self._traffic()) != before or any(now[:2]):
            if time.monotonic() > deadline:
                raise ServerFailed(f"tiers were still at work after {_SETTLE_SECONDS:g} s")
            before = now
            time.sleep(_QUIET_SECONDS)

    def _traffic(self) -> tuple[float, ...]:
        names = ("stores_in_flight", "loads_in_flight", "tier_stored_blocks_total")
        return tuple(self.figure(f"stratakv:{name}") for name in names)

    def _check_ready(self) -> None:
        self._exchange("GET", "/health")

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=_REQUEST_SECONDS)
        content = None if body is None else json.dumps(body)
        with closing(connection):
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise ServerFailed(f"{method} {path}: HTTP {response.status} {answer[:500]!r}")
            return answer


class Cache(NamedTuple):
    """The ports of a running cache server."""

    port: int
    data_port: int

    def flags(self, host: str, slab: str) -> list[str]:
        """Return the flags of a node that reaches the cache server at `host`. The node loads all
        handed-over blocks, because the benchmark measures whether loading is faster than computing.
        """
        tiers = ["--kv-offload", f"cpu,grpc://{host}:{self.port}", "--kv-offload-cpu-bytes", slab]
        return [*tiers, "--kv-offload-load", "always"]


@contextmanager
def open_cache(cpu_bytes: int) -> Iterator[Cache]:
    """Start a cache server with `cpu_bytes` of memory that uses TCP only. Raises ServerFailed."""
    [data_port] = free_ports(1)
    flags = ("--data-port", str(data_port), "--no-shared-memory", "--log-level", "warning")
    with cache_server(cpu_bytes, *flags) as server:
        yield Cache(server.port, data_port)


def open_router(prefill: Sequence[Node], decode: Sequence[Node], scratch: Path) -> Node:
    """Start `stratakv route` as proxy of `prefill` and `decode` nodes."""
    words = ["route"]
    for role, nodes in (("--prefill", prefill), ("--decode", decode)):
        words += [word for node in nodes for word in (role, f"http://{HOST}:{node.port}")]
    return Node(words, scratch)


def body_of(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Return the body of a request with a new cache salt, so that no cache has its blocks."""
    fields = {"prompt": list(prompt), "max_tokens": max_tokens, "return_token_ids": True}
    return fields | GREEDY | {"cache_salt": f"bench-{os.getpid()}-{next(_SALTS)}"}


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Pin processes that start inside the context to `core`; None pins nothing."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
