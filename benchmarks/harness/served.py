# SPDX-License-Identifier: Apache-2.0
"""A `stratakv serve` process and a client that times its first token, as a user would see it.

One request at a time over plain HTTP, so that the client's own work is in no figure.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

HOST = "127.0.0.1"
_POLL_SECONDS = 0.1
_TAIL_BYTES = 4000


class ServerFailed(RuntimeError):
    """The server did not start, or answered with an error; carries its last lines."""


@dataclass(slots=True)
class Answer:
    """One completion."""

    token_ids: list[int]
    first_token_seconds: float
    total_seconds: float
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int] = field(default_factory=dict)


class ServedModel:
    """Starts the server, asks it, stops it in an orderly way; a context manager."""

    def __init__(self, arguments: Sequence[str], log: Path, start_seconds: float = 120.0) -> None:
        self._log = log
        [self._port] = free_ports(1)
        command = [sys.executable, "-m", "stratakv.engine.cli.main", "serve", *arguments]
        command += ["--host", HOST, "--port", str(self._port), "--enable-dev-routes"]
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
            )
        try:
            self._wait_until_ready(start_seconds)
        except BaseException:
            self._process.kill()
            self._process.wait(timeout=10)
            raise

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self, timeout_seconds: float = 60.0) -> None:
        """SIGTERM: the tiers are written back. Raises ServerFailed where that takes too long."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
            raise ServerFailed(f"did not stop in {timeout_seconds:.0f} s\n{self._tail()}") from None

    def reset(self, tiers: str = "all") -> None:
        """Forget cached blocks: `pool`, or `all` the tiers."""
        self._exchange("POST", f"/reset_prefix_cache?tiers={tiers}")

    def metric(self, name: str) -> float:
        """The sum over labels of one metric."""
        text = self._exchange("GET", "/metrics").decode()
        rows = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in rows)

    def ask(self, prompt: Sequence[int], max_tokens: int, timeout_seconds: float = 120.0) -> Answer:
        """One greedy completion of token ids, streamed; the clock runs from before the request."""
        body = json.dumps(
            {
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        )
        connection = http.client.HTTPConnection(HOST, self._port, timeout=timeout_seconds)
        try:
            started = time.perf_counter()
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            return self._read_stream(connection.getresponse(), started)
        finally:
            connection.close()

    def _read_stream(self, response: http.client.HTTPResponse, started: float) -> Answer:
        if response.status != 200:
            raise ServerFailed(f"HTTP {response.status}: {response.read(_TAIL_BYTES)!r}")
        token_ids: list[int] = []
        usage: dict[str, object] | None = None
        first = 0.0
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ServerFailed(f"the stream ended with {event['error']}")
            new = [i for choice in event.get("choices", ()) for i in choice.get("token_ids") or ()]
            if new and not token_ids:
                first = time.perf_counter() - started
            token_ids += new
            usage = event.get("usage") or usage
        if usage is None or not token_ids:
            raise ServerFailed(f"the stream ended early\n{self._tail()}")
        return _answer(token_ids, first, time.perf_counter() - started, usage)

    def _wait_until_ready(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                code = self._process.returncode
                raise ServerFailed(f"the server ended with code {code}\n{self._tail()}")
            try:
                self._exchange("GET", "/health", timeout_seconds=2.0)
                return
            except (OSError, http.client.HTTPException, ServerFailed):
                time.sleep(_POLL_SECONDS)
        raise ServerFailed(f"not ready after {timeout_seconds:.0f} s\n{self._tail()}")

    def _exchange(self, method: str, path: str, timeout_seconds: float = 30.0) -> bytes:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=timeout_seconds)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise ServerFailed(f"{method} {path}: HTTP {response.status} {body[:500]!r}")
            return body
        finally:
            connection.close()

    def _tail(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace")


def _answer(token_ids: list[int], first: float, total: float, usage: dict[str, object]) -> Answer:
    details = usage.get("prompt_tokens_details") or {}
    if not isinstance(details, dict):
        raise ServerFailed(f"usage has no prompt_tokens_details: {usage}")
    return Answer(
        token_ids=token_ids,
        first_token_seconds=first,
        total_seconds=total,
        prompt_tokens=int(str(usage["prompt_tokens"])),
        cached_tokens=int(details["cached_tokens"]),
        cached_by_tier=dict(details.get("cached_tokens_by_tier") or {}),
    )


def free_ports(count: int) -> list[int]:
    """Ports of this host that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
