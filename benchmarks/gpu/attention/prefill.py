# SPDX-License-Identifier: Apache-2.0
"""The section for paged prefill: operations per second for chunks over contexts of several lengths.

Masked keys are not counted. The cases of the target are first, because time is limited."""

from __future__ import annotations

from functools import partial
from statistics import geometric_mean

from ..plots import draw_prefill
from ..section import Place, Results, Section, Target, run_cases
from .cases import Case, make_batch, time_checked

NAME = "prefill"
CEILING = "matmul_bf16_tflops"
CHUNKS = (2048, 8192)
CONTEXTS = (0, 8192, 32768)
MIXED = ((4096, 8192), (256, 1024), (256, 0), (128, 4096), (64, 2048), (16, 512), (1, 3000))


def name_of(chunk: int, context: int) -> str:
    """Return the name of a case in the tables: `2k + 32k` is 2k new tokens after 32k."""
    return f"{chunk // 1024}k + {context // 1024}k"


GRID = tuple(name_of(chunk, context) for chunk in CHUNKS for context in CONTEXTS)


def choose_cases(place: Place) -> list[Case]:
    """Return the cases of the run, with the target's cases first."""
    if place.is_rehearsal:
        return _rehearsal_cases()
    grid = grid_cases()
    if place.is_quick:
        return [*grid, Case(name="mixed", chunks=MIXED)]
    return [
        *grid,
        Case(name="mixed", chunks=MIXED),
        *(
            Case(name=f"{name_of(chunk, context)} group 8", chunks=((chunk, context),), group=8)
            for chunk, context in ((2048, 8192), (8192, 8192))
        ),
        Case(name="mixed group 8", chunks=MIXED, group=8),
        Case(name="2k + 8k x 4", chunks=((2048, 8192),) * 4),
        Case(name="8k + 8k fp8 head", chunks=((8192, 8192),), scales="head"),
        Case(name="8k + 8k block 64", chunks=((8192, 8192),), block_size=64),
    ]


def grid_cases() -> list[Case]:
    """Return the cases of the targets, for StrataKV's kernel and for peers."""
    return [
        Case(name=name_of(chunk, context), chunks=((chunk, context),))
        for chunk in CHUNKS
        for context in CONTEXTS
    ]


def _rehearsal_cases() -> list[Case]:
    cases = [
        Case(name=name, chunks=((12, 8 * index),), kv_heads=2, head_dim=16, block_size=8)
        for index, name in enumerate(GRID)
    ]
    mixed = ((20, 9), (5, 3), (1, 30))
    cases.append(Case(name="mixed", chunks=mixed, group=8, kv_heads=1, head_dim=16, block_size=8))
    cases.append(
        Case(name="fp8", chunks=((9, 9),), kv_heads=2, head_dim=16, block_size=8, scales="head")
    )
    return cases


def run(place: Place, results: Results) -> None:
    """Measure all cases; set the target's figure from the measured cases."""
    try:
        run_cases(place, results, NAME, choose_cases(place), partial(measure, place, results))
    finally:
        rates = [row["tflops"] for row in results.rows(NAME) if row["case"] in GRID]
        if rates:
            results.set_ratio("prefill_tflops", geometric_mean(rates))


def measure(place: Place, results: Results, case: Case) -> None:
    """Measure a case and add its row. Raises WrongResult."""
    batch = make_batch(place, case)
    timing = time_checked(place, batch, batch.reference(), rounds=place.choose(7, 5, 3))
    rate = case.flops / timing.median / 1e12
    results.add_row(
        NAME,
        {
            **case.describe(),
            "layers": len(batch.layers),
            "flops": case.flops,
            **timing.figures(),
            "tflops": rate,
            "over_matmul": results.ratio_to_ceiling(rate, CEILING),
        },
    )


TARGET = Target(
    "prefill_tflops",
    "prefill, chunks of 2k to 8k over 0 to 32k (geometric mean)",
    least=400,
    unit=" TFLOP/s",
)
_DRAW = partial(draw_prefill, target=TARGET.least or 0.0, grid=frozenset(GRID))
SECTION = Section(NAME, "Paged prefill", run, _DRAW, (TARGET,))
