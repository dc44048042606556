# SPDX-License-Identifier: Apache-2.0
"""Child processes that do measured work, among them peers: other programs with the same work.

The parent writes lines of JSON to the child's standard input and reads lines from the child's
standard output. `Child` and `Peer` are for the parent, `answerer` and `serve` for the child. The
child has the environment variables of an engine core, which must be set before Python starts."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ...engine.client.launcher import CORE_ENVIRONMENT
from ...tiers.processes.python_command import python_command

_READ_BYTES = 1 << 16
_EXIT_SECONDS = 10.0
_SHOWN_CHARACTERS = 4000  # characters of the log in the message if the child ends early


class PeerFailed(RuntimeError):
    """The child did not start, failed, or did not answer in time; the message says why."""


class Child:
    """A process of `python WORDS`, by default of the running Python; a context manager. The
    process's standard error goes to `log`. Raises OSError if the process cannot be started."""

    def __init__(
        self, words: Sequence[str], log: Path, name: str, python: str | None = None
    ) -> None:
        self._name, self._log = name, log
        with log.open("ab") as sink:
            self._process: Any = subprocess.Popen(
                python_command(*words, python=python), stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=sink, env={**CORE_ENVIRONMENT, **os.environ},
            )  # fmt: skip
        self._pending = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self.close()

    def close(self) -> None:
        """End the child by closing its standard input."""
        with suppress(BrokenPipeError):  # raised if the child has already ended
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=_EXIT_SECONDS)
        self._process.stdout.close()

    def send(self, order: dict[str, Any]) -> None:
        """Write `order` as one line. If the child has ended, the next `read` raises PeerFailed."""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def read(self, timeout_seconds: float | None = None) -> dict[str, Any]:
        """Return the child's next answer. Raises PeerFailed."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while b"\n" not in self._pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise PeerFailed(f"{self._name} did not answer in {timeout_seconds:g} s")
            piece = os.read(self._process.stdout.fileno(), _READ_BYTES)
            if not piece:
                code = self._process.wait(timeout=_EXIT_SECONDS)
                raise PeerFailed(f"{self._name} ended with code {code}{self._last_words()}")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        answer: Any = None
        with suppress(ValueError):
            answer = json.loads(line)
        if not isinstance(answer, dict):
            shown = line.decode(errors="replace")[:100]
            raise PeerFailed(f"{self._name} answered {shown!r}, which is no JSON object")
        if "error" in answer:
            raise PeerFailed(f"{self._name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        return "\n" + self._log.read_text(errors="replace")[-_SHOWN_CHARACTERS:]


@dataclass(frozen=True, slots=True)
class PeerRun:
    """The output tokens of each prompt, and the seconds for all prompts."""

    seconds: float
    token_ids: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


class Peer(Child):
    """A peer, another program with the same work, as a child that runs `MODULE MODEL THREADS`."""

    def __init__(self, module: str, model: Path, threads: int, log: Path) -> None:
        name = module.rpartition(".")[2]
        super().__init__(["-m", module, str(model), str(threads)], log, name)

    def wait_ready(self, timeout_seconds: float = 120.0) -> None:
        """Wait until the peer has loaded the model. Must be the first call. Raises PeerFailed."""
        self.read(timeout_seconds)

    def run(
        self, mode: str, prompts: Sequence[list[int]], max_tokens: int, timeout_seconds: float
    ) -> PeerRun:
        """Return greedy outputs of `max_tokens` tokens for each prompt. Raises PeerFailed."""
        self.send({"mode": mode, "prompts": list(prompts), "max_tokens": max_tokens})
        run = PeerRun(**self.read(timeout_seconds))
        if [len(ids) for ids in run.token_ids] != [max_tokens] * len(prompts):
            raise PeerFailed(f"{self._name} did not make {max_tokens} tokens for each prompt")
        return run


def answerer() -> Callable[[dict[str, Any]], None]:
    """Return a function with which the child sends a line to the parent. From this call on, the
    output of libraries goes to the child's log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    return tell


Work = Callable[[str, list[list[int]], int], PeerRun]


def serve(make_work: Callable[[Path, int], Work]) -> int:
    """Run a peer: load the model, report readiness, then answer lines until the input ends."""
    tell = answerer()
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
