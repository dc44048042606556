# SPDX-License-Identifier: Apache-2.0
"""The section that times launch parameters of decode and prefill outside of the launch tables.

The engine tunes nothing at run time; the tables are checked in and come from this section. Each row
has the parameters that the table chose, the best parameters, and all that were tried. The tables
are replaced in this process for one measurement at a time. The section runs only in the full form.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest.mock import patch

from ....kernels.attention import paged_decode_launch, paged_prefill_launch
from ....kernels.attention.paged_decode_launch import DOT, DOT_TOKEN_SCALES
from ....kernels.kernel_choice import probe_hardware
from ..plots import draw_sweep
from ..section import Place, Results, Row, Section, one_line, run_cases
from .cases import Batch, Case, decode_case, make_batch, time_checked

NAME = "launch-sweep"
DECODE_ROWS = tuple(
    paged_decode_launch.Row(tile, warps, stages)
    for tile in (64, 128, 32)
    for warps in (4, 8)
    for stages in (3, 5)
)
PREFILL_LAUNCHES = tuple(
    paged_prefill_launch.Launch(rows, keys, warps, stages)
    for rows, keys, warps in ((128, 64, 8), (128, 128, 8), (64, 64, 4), (128, 64, 4), (128, 32, 8))
    for stages in (5, 3)
)


def run(place: Place, results: Results) -> None:
    """Time alternatives to prefill's table, then to decode's table. Raises SectionOver."""
    if place.is_quick and not place.is_rehearsal:
        results.add_note(NAME, "only in the full form")
        return
    rows, launches = choose_cases(place)
    for cases, sweep in ((launches, sweep_prefill_launches), (rows, sweep_decode_rows)):
        run_cases(place, results, NAME, cases, partial(sweep, place, results))


def choose_cases(place: Place) -> tuple[list[Case], list[Case]]:
    """Return the cases for decode's table, and the cases for prefill's table."""
    if place.is_rehearsal:
        tiny = decode_case("2 requests", 2, 40, kv_heads=2, head_dim=16, block_size=8)
        chunk = Case(name="chunk", chunks=((9, 9),), kv_heads=2, head_dim=16, block_size=8)
        return [tiny], [chunk]
    fp8 = decode_case("8k x 64 fp8 head", 64, 8192, scales="head")
    return [decode_case("4k x 32", 32, 4096), fp8], [Case(name="8k + 8k", chunks=((8192, 8192),))]


def sweep_decode_rows(place: Place, results: Results, case: Case) -> None:
    """Time other tiles, warps and stages of decode than those of the table."""
    path = DOT_TOKEN_SCALES if case.scales == "token" else DOT
    size = next(s for s in paged_decode_launch.HEAD_SIZES if case.head_dim <= s)
    capability = _capability()
    key = (path, case.pool_dtype.itemsize, size)
    launch = _launch(case)
    chosen = paged_decode_launch.Row(launch.tile, launch.num_warps, launch.num_stages)
    batch = make_batch(place, case)
    trial = _Trials(place, results, batch, "decode table", chosen._asdict())
    for row in _chosen_first(chosen, place.choose(DECODE_ROWS, (), DECODE_ROWS[:2])):
        with patch.dict(paged_decode_launch.TABLE, {capability: {key: row}}):
            batch.plan_splits()  # the plan depends on the row's tile
            trial.add({**row._asdict(), "is_chosen": row == chosen})


def sweep_prefill_launches(place: Place, results: Results, case: Case) -> None:
    """Time other tiles, warps and stages of long prefill chunks than those of the table."""
    size = max(64, paged_prefill_launch.padded_head_dim(case.head_dim))
    chosen = paged_prefill_launch.choose_launch(
        probe_hardware().capability,
        case.head_dim,
        case.group,
        case.chunks[0][0],
        is_fp8=case.pool_dtype.itemsize == 1,
    )
    trial = _Trials(place, results, make_batch(place, case), "prefill table", asdict(chosen))
    tables = (
        paged_prefill_launch.WIDE, paged_prefill_launch.WIDE_FP8, paged_prefill_launch.NARROW,
    )  # fmt: skip
    for launch in _chosen_first(chosen, place.choose(PREFILL_LAUNCHES, (), PREFILL_LAUNCHES[:2])):
        both = {size: (launch, launch)}
        with ExitStack() as stack:
            for table in tables:
                stack.enter_context(patch.dict(table, both))
            trial.add({**asdict(launch), "is_chosen": launch == chosen})


class _Trials:
    """The launches that are tried on a case, whose row of results is updated after each launch."""

    def __init__(
        self, place: Place, results: Results, batch: Batch, what: str, chosen: Row
    ) -> None:
        self._place = place
        self._batch = batch
        self._expected = batch.reference()
        self._tried: list[Row] = []
        self._row: Row = {**batch.case.describe(), "swept": what, "chosen": chosen}
        self._row["tried"] = self._tried
        results.add_row(NAME, self._row)

    def add(self, entries: Row) -> None:
        """Add the seconds of one launch, or the reason for its failure. Raises SectionOver."""
        self._place.check_time()
        try:
            timing = time_checked(self._place, self._batch, self._expected, rounds=3)
        except Exception as error:  # noqa: BLE001 - launches outside the tables may not compile
            self._tried.append({**entries, "failed": one_line(error)})
            self._place.synchronise()
            return
        self._tried.append({**entries, "seconds": timing.median})
        measured = [trial for trial in self._tried if "seconds" in trial]
        best = min(measured, key=lambda trial: trial["seconds"])
        self._row["best"] = best
        chosen = [trial["seconds"] for trial in measured if trial["is_chosen"]]
        if chosen:
            self._row["best_over_chosen"] = best["seconds"] / chosen[0]


def _chosen_first(chosen: Any, others: tuple[Any, ...]) -> list[Any]:
    return [chosen, *(other for other in others if other != chosen)]


def _capability() -> tuple[int, int]:
    return probe_hardware().capability or paged_decode_launch.NEWEST


def _launch(case: Case) -> paged_decode_launch.Launch:
    return paged_decode_launch.choose_launch(
        _capability(), case.group, case.head_dim, case.pool_dtype, case.scales == "token"
    )


SECTION = Section(NAME, "Launch parameters", run, draw_sweep)
