# SPDX-License-Identifier: Apache-2.0
"""The sections that step engines themselves, in a process of their own that computes like a core.

An engine core gets an environment that must be there before Python starts; this process gets the
same. The parent writes one order to its standard input and reads lines from its standard output:
what was done, again and again, and at last the figures. Both sides stand here.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...engine.client.launcher import CORE_ENVIRONMENT

logger = logging.getLogger(__name__)

# What a child has to say when it fails, at most.
_ERROR_CHARACTERS = 4000


class ChildFailed(RuntimeError):
    """The sections could not be measured; the message says why."""


def measure_in_child(
    sections: Sequence[str], model: Path, scratch: Path, quick: bool, told: Callable[[str], None]
) -> dict[str, Any]:
    """`{"figures": {section: ...}, "ratios": {name: value}}`; `told` hears after every pair what
    it was a part of. Raises ChildFailed."""
    order = {"sections": list(sections), "model": str(model), "scratch": str(scratch)}
    log = scratch / "child.log"
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            env={**CORE_ENVIRONMENT, **os.environ},
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has ended already, and its log says why
                child.stdin.write(json.dumps(order | {"quick": quick}).encode())
                child.stdin.close()
            answer = _read(child.stdout, told)
        except BaseException:
            child.kill()
            raise
    if answer is None:
        words = log.read_text(errors="replace")[-_ERROR_CHARACTERS:]
        raise ChildFailed(f"the measuring process ended with code {child.returncode}\n{words}")
    if "error" in answer:
        raise ChildFailed(answer["error"])
    return answer


def _read(lines: Any, told: Callable[[str], None]) -> dict[str, Any] | None:
    for line in lines:
        answer: dict[str, Any] = json.loads(line)
        if "done" not in answer:
            return answer
        told(answer["done"])
    return None


def measure_here(
    sections: Sequence[str], model: Path, scratch: Path, quick: bool, told: Callable[[str], None]
) -> dict[str, Any]:
    """The same in this process. Raises RunFailed and OtherTokens."""
    # Imported here: the parent computes nothing.
    from .scale import FULL_COSTS, QUICK_COSTS
    from .sections import MEASURE
    from .workbench import Bench

    figures, ratios = {}, {}
    for name in sections:
        bench = Bench(model, scratch, QUICK_COSTS if quick else FULL_COSTS, told)
        figures[name], found = MEASURE[name](bench)
        ratios.update(found)
    return {"figures": figures, "ratios": ratios}


def main() -> int:
    """The child's side."""
    # Libraries print; only answers may reach the parent.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # That a close in no time writes nothing back is what is wanted here.
    logging.basicConfig(level=logging.ERROR)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    order = json.load(sys.stdin)
    try:
        tell(
            measure_here(
                order["sections"],
                Path(order["model"]),
                Path(order["scratch"]),
                order["quick"],
                lambda what: tell({"done": what}),
            )
        )
    except Exception as error:
        logger.exception("a section failed")
        tell({"error": str(error) or type(error).__name__})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
