# SPDX-License-Identifier: Apache-2.0
"""The section for paged decode: the rate of reading K and V over the GPU's copy bandwidth.

The cases vary requests and context, then groups, head and block sizes, types, scales, window and
soft cap. The cases of the targets come first, because a section's time is limited."""

from __future__ import annotations

from functools import partial

import torch

from ..plots import draw_decode
from ..section import Place, Results, Row, Section, Target, run_cases
from .cases import Case, decode_case, make_batch, time_checked

NAME = "decode"
CEILING = "device_copy_gb_per_second"
LARGE_BYTES = 0.5e9  # bytes of K and V in a layer from which on only bandwidth limits a case
GRID = (
    ("1k x 1", 1, 1024),
    ("1k x 64", 64, 1024),
    ("4k x 32", 32, 4096),
    ("8k x 64", 64, 8192),
    ("32k x 8", 8, 32768),
    ("128k x 1", 1, 131072),
)
LARGE = ("4k x 32", "8k x 64", "32k x 8")  # without 128k x 1, which has its own target


def choose_cases(place: Place) -> list[Case]:
    """Return the cases of the run, the most important first."""
    if place.is_rehearsal:
        return _rehearsal_cases()
    grid = [decode_case(name, requests, context) for name, requests, context in GRID]
    fp8 = [
        decode_case(f"{name} fp8 {scales}", requests, context, scales=scales)
        for name, requests, context in GRID
        if name in ("1k x 64", "8k x 64", "32k x 8")
        for scales in ("head", "token")
    ]
    # A case with the block table of an engine whose context is 128k, because the split plan must
    # depend on the requests' lengths, not on the width of the table.
    grid.append(decode_case("8k x 64 wide table", 64, 8192, table_tokens=131072))
    if place.is_quick:
        return grid + [case for case in fp8 if case.name.startswith("8k x 64")]
    return grid + fp8 + _variants()


def _variants() -> list[Case]:
    """Return cases that each differ from the grid in one property."""
    return [
        decode_case("4k x 32 group 8", 32, 4096, group=8),
        decode_case("4k x 32 group 7", 32, 4096, group=7),
        decode_case("4k x 32 group 1", 32, 4096, group=1),
        decode_case("4k x 32 block 32", 32, 4096, block_size=32),
        decode_case("4k x 32 block 64", 32, 4096, block_size=64),
        decode_case("4k x 64 head 64", 64, 4096, head_dim=64),
        decode_case("4k x 64 head 64 group 8", 64, 4096, head_dim=64, group=8),
        decode_case("4k x 32 fp16", 32, 4096, dtype=torch.float16),
        decode_case("32k x 8 window 4096", 8, 32768, window=4096),
        decode_case("4k x 32 softcap 30", 32, 4096, softcap=30.0),
    ]


def _rehearsal_cases() -> list[Case]:
    """Return tiny cases of the same kinds, with the names of the targets' cases."""
    tiny: dict[str, object] = {"kv_heads": 2, "head_dim": 16, "block_size": 8}
    cases = [
        decode_case(name, min(requests, 2), 20 + 8 * index, **tiny)
        for index, (name, requests, _) in enumerate(GRID)
    ]
    cases += [
        decode_case(f"8k x 64 fp8 {scales}", 2, 20, scales=scales, **tiny)
        for scales in ("head", "token")
    ]
    cases.append(decode_case("8k x 64 wide table", 2, 20, table_tokens=400, **tiny))
    cases.append(decode_case("window", 2, 40, window=12, group=7, **tiny))
    cases.append(decode_case("softcap", 2, 40, softcap=5.0, dtype=torch.float16, **tiny))
    return cases


def run(place: Place, results: Results) -> None:
    """Measure all cases; set the ratios of the measured cases, even after an early end."""
    try:
        run_cases(place, results, NAME, choose_cases(place), partial(measure, place, results))
    finally:
        set_ratios(results)


def measure(place: Place, results: Results, case: Case) -> None:
    """Measure a case and add its row. Raises WrongResult."""
    batch = make_batch(place, case)
    timing = time_checked(place, batch, batch.reference(), rounds=place.choose(7, 5, 3))
    rate = case.read_bytes / timing.median / 1e9
    results.add_row(
        NAME,
        {
            **case.describe(),
            "layers": len(batch.layers),
            "read_bytes": case.read_bytes,
            **timing.figures(),
            "gb_per_second": rate,
            "over_device_copy": results.ratio_to_ceiling(rate, CEILING),
        },
    )


def set_ratios(results: Results) -> None:
    """Set the targets' figures; a target over several cases has the figure of the worst case."""
    rows = {row["case"]: row for row in results.rows(NAME)}
    shares = {name: row["over_device_copy"] for name, row in rows.items()}
    large = [shares[name] for name in LARGE if shares.get(name) is not None]
    if large:
        results.set_ratio("decode_over_device_copy", min(large))
    for name, ratio in (("128k x 1", "decode_128k_by_1"), ("1k x 64", "decode_1k_by_64")):
        if shares.get(name) is not None:
            results.set_ratio(ratio, shares[name])
    if (wide := rows.get("8k x 64 wide table")) and "8k x 64" in rows:
        narrow = rows["8k x 64"]["seconds"]
        results.set_ratio("decode_wide_table_over_narrow", wide["seconds"] / narrow)
    if "1k x 1" in rows:
        results.set_ratio("decode_1k_by_1_microseconds", 1e6 * rows["1k x 1"]["seconds"])
    gains = {scales: _fp8_gains(rows, scales) for scales in ("head", "token")}
    for scales, found in gains.items():
        if found:
            results.set_ratio(f"decode_fp8_{scales}_scales_speedup", min(found))
    if any(gains.values()):
        results.set_ratio(
            "decode_fp8_speedup", min(min(found) for found in gains.values() if found)
        )


def _fp8_gains(rows: dict[str, Row], scales: str) -> list[float]:
    """Return the seconds with a bf16 pool over the seconds with a float8 pool, for large cases that
    were measured with either pool."""
    return [
        rows[name]["seconds"] / rows[f"{name} fp8 {scales}"]["seconds"]
        for name in LARGE
        if name in rows and f"{name} fp8 {scales}" in rows
    ]


SECTION = Section(
    NAME,
    "Paged decode",
    run,
    partial(draw_decode, grid=frozenset(name for name, _, _ in GRID)),
    (
        Target(
            "decode_over_device_copy",
            "decode over device copy, 0.5 GB of KV and more (lowest)",
            least=0.88,
        ),
        Target(
            "decode_wide_table_over_narrow", "decode, 8k x 64, table of 128k over 8k", most=1.03
        ),
        Target("decode_128k_by_1", "decode over device copy, 128k x 1", least=0.80),
        Target("decode_1k_by_64", "decode over device copy, 1k x 64", least=0.75),
        Target("decode_1k_by_1_microseconds", "decode, 1k x 1", most=12, unit=" µs"),
        Target("decode_fp8_speedup", "decode, float8 pool over bf16 (lowest)", least=1.6),
    ),
)
