# SPDX-License-Identifier: Apache-2.0
"""One case after the other: what a fault of one means for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from .place import Place, SectionOver, WrongResult
from .results import Results

MAX_REASON = 300  # characters of an error in a note


class Named(Protocol):
    """Whatever is measured one after the other."""

    @property
    def name(self) -> str: ...


Some = TypeVar("Some", bound=Named)


def run_cases(
    place: Place,
    results: Results,
    section: str,
    cases: Sequence[Some],
    measure: Callable[[Some], None],
) -> None:
    """Each in turn. Too little memory is a note; another fault is one too, and raises RuntimeError
    after all other cases. A wrong result stops everything. Raises SectionOver, WrongResult."""
    failed = []
    for case in cases:
        place.check_time()
        try:
            measure(case)
        except (SectionOver, WrongResult):
            raise
        except torch.OutOfMemoryError:
            results.add_note(section, f"{case.name}: left out, the device has too little memory")
        except Exception as error:  # noqa: BLE001 - Triton's errors have no other base in common
            results.add_note(section, f"{case.name}: failed: {one_line(error)}")
            failed.append(case.name)
        place.release_memory()
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(cases)} cases failed: {', '.join(failed)}")


def one_line(error: BaseException) -> str:
    """What went wrong, without the pages that a compiler may add."""
    words = " ".join(str(error).split())[:MAX_REASON]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
