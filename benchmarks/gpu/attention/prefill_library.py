# SPDX-License-Identifier: Apache-2.0
"""Prefill of long chunks by a library over gathered K and V beside our kernel, on the same batches:
what `--attention-backend` may take. The gather is timed with the library."""

from __future__ import annotations

from functools import partial
from statistics import geometric_mean

from torch import Tensor

from ....kernels.attention.gathered_prefill import (
    LIBRARIES,
    SDPA,
    GatheredPrefill,
    reason_against_library,
)
from ..section import Place, Results, Section, one_line, run_cases, time_launches
from .cases import Batch, Case, check_attention, make_batch, time_checked
from .prefill import choose_cases, name_of

NAME = "prefill-library"
GRID = [name_of(2048, 8192), name_of(8192, 32768), name_of(8192, 8192)]


def run(place: Place, results: Results) -> None:
    """Measure all cases; the ratios are set from what was measured. A library that cannot run is a
    note and has no ratio."""
    cases = {case.name: case for case in choose_cases(place)}
    wanted = [cases[name] for name in GRID]
    try:
        run_cases(place, results, NAME, wanted, partial(measure, place, results))
    finally:
        for name in LIBRARIES:
            gains = [row[name] for row in results.rows(NAME) if name in row]
            if gains:
                results.set_ratio(f"prefill_{name}_over_triton", geometric_mean(gains))


def measure(place: Place, results: Results, case: Case) -> None:
    """One row: seconds of ours, and of each library and how many times as fast it is. Raises
    WrongResult."""
    batch = make_batch(place, case)
    expected, rounds = batch.reference(), place.choose(7, 5, 3)
    ours = time_checked(place, batch, expected, rounds=rounds).median
    row = {**case.describe(), "seconds": ours}
    for name in LIBRARIES:
        if reason := reason_against(place, batch, name):
            _tell(results, f"{name}, {case.name}: not measured, {reason}")
            continue
        try:
            gathered = GatheredPrefill(name, batch.layers[0], case.lengths[0], min_rows=1)
            launches = [partial(attend, batch, gathered, i) for i in range(len(batch.layers))]
            check_attention(f"{name}, {case.name}", launches[0](), expected)
            seconds = time_launches(place, launches, rounds=rounds).median
        except RuntimeError as error:
            _tell(results, f"{name}, {case.name}: not measured, {one_line(error)}")
            continue
        row |= {f"{name}_seconds": seconds, name: ours / seconds}
    results.add_row(NAME, row)


def reason_against(place: Place, batch: Batch, name: str) -> str | None:
    """Why a library cannot run, or None; a rehearsal has torch's."""
    if place.is_rehearsal and name == SDPA:
        return None
    return reason_against_library(name, batch.q, batch.layers[0])


def attend(batch: Batch, gathered: GatheredPrefill, layer: int) -> Tensor:
    """The attention of the only request over that layer, by a library."""
    case, q = batch.case, batch.q
    table, out = batch.block_tables[0], q.new_empty(q.shape)
    return gathered.run(q, batch.layers[layer], table, case.lengths[0], case.scale, out)


def _tell(results: Results, note: str) -> None:
    print(note, flush=True)
    results.add_note(NAME, note)


SECTION = Section(NAME, "Prefill by a library", run)
