# SPDX-License-Identifier: Apache-2.0
"""A peer: the same work done in another way, in a process of its own that waits while others work.

The parent asks in lines of JSON on the peer's standard input and reads lines from its standard
output. Both sides stand here: `Peer` for the parent, `serve` for the child. The child gets the
environment that the engine core gets, which is to its advantage.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ...engine.client.launcher import CORE_ENVIRONMENT

_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 16 * 2**20
_EXIT_SECONDS = 10.0


class PeerFailed(RuntimeError):
    """The peer did not start, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class PeerRun:
    """The output tokens of each prompt, and the time for all of them."""

    seconds: float
    token_ids: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


class Peer:
    """A child that runs `MODULE MODEL THREADS`; a context manager."""

    def __init__(self, module: str, model: Path, threads: int, log: Path) -> None:
        self._name = module.rpartition(".")[2]
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(model), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**CORE_ENVIRONMENT, **os.environ},
            )
        self._pending = b""
        self._is_ready = False

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End of input ends the child."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it is gone already
        try:
            self._process.wait(timeout=_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=_EXIT_SECONDS)
        self._process.stdout.close()

    def wait_ready(self, timeout_seconds: float = 120.0) -> None:
        """Until the model is loaded. Raises PeerFailed. Idempotent."""
        if not self._is_ready:
            self._read_line(timeout_seconds)
            self._is_ready = True

    def run(
        self, mode: str, prompts: Sequence[list[int]], max_tokens: int, timeout_seconds: float
    ) -> PeerRun:
        """Greedy outputs of exactly `max_tokens` for each prompt. Raises PeerFailed."""
        assert self._process.stdin is not None
        order = {"mode": mode, "prompts": list(prompts), "max_tokens": max_tokens}
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(self._death()) from None
        answer = self._read_line(timeout_seconds)
        run = PeerRun(float(answer["seconds"]), answer["token_ids"])
        if [len(ids) for ids in run.token_ids] != [max_tokens] * len(prompts):
            raise PeerFailed(f"{self._name} did not make {max_tokens} tokens for each prompt")
        return run

    def _read_line(self, timeout_seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise PeerFailed(f"{self._name} did not answer in {timeout_seconds:g} s")
                piece = os.read(self._process.stdout.fileno(), _READ_BYTES)
                self._pending += piece
                if not piece or len(self._pending) > _MAX_LINE_BYTES:
                    raise PeerFailed(self._death())
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self._name}: {answer['error']}")
        return answer

    def _death(self) -> str:
        return f"{self._name} ended with code {self._process.poll()}; its words are in the log"


Work = Callable[[str, list[list[int]], int], PeerRun]


def serve(make_work: Callable[[Path, int], Work]) -> int:
    """The child's side: load, say so, then answer line by line until the input ends."""
    # Libraries print; only answers may reach the parent.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        work = make_work(Path(sys.argv[1]), int(sys.argv[2]))
    except Exception as error:  # noqa: BLE001 - the parent is told, whatever it is
        tell({"error": f"{type(error).__name__}: {error}"})
        return 1
    tell({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        tell(asdict(work(order["mode"], order["prompts"], order["max_tokens"])))
    return 0
