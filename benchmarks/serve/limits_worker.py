# SPDX-License-Identifier: Apache-2.0
"""Worker: the child process for the work of `--limits`, and the results of each kind of work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..harness.peer import Child

START_SECONDS, ANSWER_SECONDS = 300.0, 300.0


class Worker(Child):
    """A child process that runs a module of this package; `plan` is the first line of its input."""

    def __init__(self, module: str, plan: dict[str, Any], log: Path) -> None:
        super().__init__(["-m", module], log, "limits")
        self.taken: dict[str, list[dict[str, float]]] = {}
        self.send(plan)

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the child is ready; return its first answer. Raises PeerFailed."""
        return self.read(START_SECONDS)

    def rate_of(self, work: str) -> Callable[[], float]:
        """Return a function that does the work once and returns its wall-clock rate."""

        def do() -> float:
            self.send({"work": work})
            found = self.read(ANSWER_SECONDS)
            self.taken.setdefault(work, []).append(found)
            return float(found["amount"] / found["seconds"])

        return do

    def processor_rates(self, work: str, rounds: int) -> list[float]:
        """Return the amounts of work per processor second in the last `rounds` rounds."""
        taken = self.taken[work][-rounds:]
        return [each["amount"] / each["processor_seconds"] for each in taken]
