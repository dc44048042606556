# SPDX-License-Identifier: Apache-2.0
"""The sections that step engines themselves, in a process of their own that computes like a core.

The parent sends one order and reads what was done, again and again, and at last the figures. Both
sides stand here.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..harness.peer import Child, answerer

logger = logging.getLogger(__name__)


def measure_in_child(
    sections: Sequence[str], model: Path, scratch: Path, quick: bool, told: Callable[[str], None]
) -> dict[str, Any]:
    """`{"figures": {section: ...}, "ratios": {name: value}}`; `told` hears after every pair what
    it was a part of. Raises PeerFailed."""
    order = {"sections": list(sections), "model": str(model), "scratch": str(scratch)}
    with Child(__name__, [], scratch / "child.log", "the measuring process") as child:
        child.send(order | {"quick": quick})
        while "done" in (answer := child.read()):
            told(answer["done"])
    return answer


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
    tell = answerer()
    # That a close in no time writes nothing back is what is wanted here.
    logging.basicConfig(level=logging.ERROR)
    order = json.loads(sys.stdin.readline())
    paths = Path(order["model"]), Path(order["scratch"])
    try:
        tell(
            measure_here(
                order["sections"], *paths, order["quick"], lambda what: tell({"done": what})
            )
        )
    except Exception as error:
        logger.exception("a section failed")
        tell({"error": str(error) or type(error).__name__})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
