# SPDX-License-Identifier: Apache-2.0
"""Predicts from machine code alone how near the attention kernels come to a GPU's limits.

    python tools/kernel_model.py                    the shapes that docs/gpu.md has targets for
    python tools/kernel_model.py --only '*'         every attention kernel of the table
    python tools/kernel_model.py --table FILE       another table, such as that of Triton 3.6.0

The tool reads `kernels/resources.json`, which `compile_kernels.py` writes, and prints Markdown. A
pass of a kernel's inner loop computes one tile. The terms of its time, in cycles of a
multiprocessor, are

    bytes    K and V of the tile, at an even share of the rate of memory (decode) or L2 (prefill)
    tensor   the products, those on padding included
    issue    the instructions, at one of a warp in each cycle and scheduler
    mufu     exponentials
    shared   loads and stores of shared memory

With perfect overlap a tile takes the longest of these terms, and without overlap their sum. The
real time lies between, nearer to the longest if a multiprocessor runs more programs. Nothing here
is measured. The model leaves out latencies, waits at barriers, bank conflicts, the shared memory
that tensor cores read by themselves, a clock that falls under load, edges of the causal mask, and
launches."""

from __future__ import annotations

import argparse
import fnmatch
import json
from pathlib import Path
from typing import Any, NamedTuple

from stratakv.kernels.attention.paged_decode_launch import (
    FP8_PROGRAMS_PER_MULTIPROCESSOR,
    PROGRAM_TILES,
    PROGRAMS_PER_MULTIPROCESSOR,
    choose_splits,
)

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "kernels" / "resources.json"
TARGET = "sm_90"
# The shapes with targets in docs/gpu.md: heads of 128 numbers, 4 query heads for each KV head.
USUAL = ("paged_decode.*.d128.g4", "paged_decode.*.d128.g4.*-scales", "paged_prefill.*.d128.g4.*")

MULTIPROCESSORS = 132  # data sheets of H100 SXM and H200
MEMORY_BYTES = {"H100": 3.35e12, "H200": 4.8e12}  # bytes per second; the same data sheets
COPY_SHARE = 0.9  # the share of memory's rate that a plain copy gets: 4.3e12 was seen on an H200
# The clock with busy tensor cores ("Hopper architecture" white paper, table of peak rates): 132
# multiprocessors with 4,096 operations on 16-bit numbers in a cycle give 989.4 TFLOP/s.
CLOCK = 1.83e9
TENSOR_FLOPS = 4096
# The share of that rate for products that one warp issues instead of four together: 62.9 % on
# average, Luo et al. 2024, arXiv:2402.13499.
WARP_SHARE = 0.63
SCHEDULERS = 4  # the same white paper: four parts of a multiprocessor issue one instruction each
MUFU_RESULTS = 16  # per cycle; CUDA C++ programming guide, arithmetic throughput, capability 9.0
L2_BYTES = 5120  # per cycle of the whole device; A100 white paper (not published for the H100)
WARP, WARPGROUP = 32, 4  # threads of a warp; warps of a warpgroup

# Name, requests, tokens of each: the benchmark's cases (benchmarks/gpu/attention/decode.py) without
# that of one short request, whose time is all latency.
CASES = (
    ("4k x 32", 32, 4096),
    ("8k x 64", 64, 8192),
    ("32k x 8", 8, 32768),
    ("128k x 1", 1, 131072),
    ("1k x 64", 64, 1024),
)
KV_HEADS = 8


class Prediction(NamedTuple):
    """The prediction for one kernel on one device: for one tile, cycles of a multiprocessor by
    term."""

    cycles: dict[str, float]
    useful: float  # cycles of the resource that should be the limit: bytes, or products

    @property
    def limit(self) -> str:
        return max(self.cycles, key=lambda term: self.cycles[term])

    @property
    def best(self) -> float:
        """The share of that resource's rate that the kernel reaches if all terms overlap."""
        return self.useful / max(self.cycles.values())

    @property
    def worst(self) -> float:
        """The share of that resource's rate that the kernel reaches if no terms overlap."""
        return self.useful / sum(self.cycles.values())


def predict(name: str, found: dict[str, Any], device: str) -> Prediction:
    """Predict a tile's cycles. `found` is the kernel's row for sm_90; its `tile_bytes` must be set,
    which means that a pass is one tile."""
    one_pass = min(found["passes"], key=lambda each: each["instructions"])  # without a mask
    warps = found["warps"]
    bytes_a_cycle = MEMORY_BYTES[device] * COPY_SHARE / MULTIPROCESSORS / CLOCK
    is_decode = name.startswith("paged_decode")
    if not is_decode:
        bytes_a_cycle = L2_BYTES / MULTIPROCESSORS
    cycles = {
        "bytes": found["tile_bytes"] / bytes_a_cycle,
        "tensor": warps * sum(_tensor_cycles(*item) for item in one_pass["matrix"].items()),
        "issue": warps * one_pass["instructions"] / SCHEDULERS,
        "mufu": warps * one_pass["mufu"] * WARP / MUFU_RESULTS,
        "shared": float(warps * one_pass["shared_words"]),
    }
    useful = cycles["bytes"] if is_decode else found["tile_flops"] / TENSOR_FLOPS
    return Prediction(cycles, useful)


def _tensor_cycles(instruction: str, count: int) -> float:
    """The cycles of one warp's products. Four warps share an "HGMMA.64x128x16"; in "HMMA.16816" the
    last two sizes are 8 and 16."""
    mnemonic, shape = instruction.split(".")
    if mnemonic == "HGMMA":
        m, n, k = map(int, shape.split("x"))
        return count * 2 * m * n * k / WARPGROUP / TENSOR_FLOPS
    if mnemonic == "HMMA" and shape in ("16816", "1688"):
        return count * 2 * 16 * 8 * int(shape[3:]) / (TENSOR_FLOPS * WARP_SHARE)
    raise ValueError(f"expected HGMMA.MxNxK, HMMA.16816 or HMMA.1688, got {instruction}")


def used(name: str, found: dict[str, Any], requests: int, tokens: int) -> tuple[int, float]:
    """The number of splits that contexts are cut into, and the share of time that a full device
    would be at work, from the waves in which its programs run."""
    _, pool, head_dim, *_ = name.split(".")
    element = {"fp8e4nv": 1, "bf16": 2, "fp16": 2, "fp32": 4}[pool]
    tile = found["tile_bytes"] // (2 * int(head_dim[1:]) * element)  # tokens; each has K and V
    expected = FP8_PROGRAMS_PER_MULTIPROCESSOR if element == 1 else PROGRAMS_PER_MULTIPROCESSOR
    pairs, tiles = requests * KV_HEADS, -(-tokens // tile)
    splits = choose_splits(pairs, tokens, MULTIPROCESSORS, tile, expected)
    share = -(-tiles // splits)
    slots = MULTIPROCESSORS * found["programs"]
    waves = -(-pairs * -(-tiles // share) // slots)
    return splits, pairs * tiles / (slots * waves * (share + PROGRAM_TILES))


def of_one_tile(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A Markdown table: each kernel's terms, and the share that it reaches of its resource's
    rate."""
    lines = [
        "| kernel | programs | bytes | tensor | issue | mufu | shared | longest | H200 | H100 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        one, other = (predict(name, found, device) for device in ("H200", "H100"))
        cells = [name, str(found["programs"]), *(f"{one.cycles[it]:,.0f}" for it in one.cycles)]
        cells += [one.limit, *(f"{it.worst:.2f} to {it.best:.2f}" for it in (one, other))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def of_cases(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A Markdown table: decode of whole batches on an H200, as shares of a plain copy's rate."""
    names = [name for name in rows if name.startswith("paged_decode")]
    lines = [
        f"| kernel | {' | '.join(name for name, _, _ in CASES)} |",
        f"|---|{'---|' * len(CASES)}",
    ]
    for name in names:
        cells = []
        for _, requests, tokens in CASES:
            splits, share = used(name, rows[name], requests, tokens)
            one = predict(name, rows[name], "H200")
            range_ = f"{one.worst * share:.2f} to {one.best * share:.2f}"
            cells.append(f"{splits}, {share:.2f}, {range_}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def report(rows: dict[str, dict[str, Any]]) -> str:
    """Both tables, and a table of prefill in TFLOP/s."""
    peak = TENSOR_FLOPS * MULTIPROCESSORS * CLOCK / 1e12
    rates = []
    for name in rows:
        if name.startswith("paged_prefill"):
            one = predict(name, rows[name], "H200")
            rates.append(f"| {name} | {one.worst * peak:.0f} to {one.best * peak:.0f} |")
    parts = [of_one_tile(rows), of_cases(rows), ["| kernel | TFLOP/s |", "|---|---|", *rates]]
    return "\n\n".join("\n".join(part) for part in parts)


def read_rows(table: Path, patterns: tuple[str, ...] = USUAL) -> dict[str, dict[str, Any]]:
    """The sm_90 rows of the kernels that match a pattern and have `tile_bytes`."""
    configurations = json.loads(table.read_text())["configurations"]
    found = {
        name: row[TARGET]
        for name, row in configurations.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    return {name: row for name, row in found.items() if row["tile_bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=USUAL, help="names, as shell patterns")
    parser.add_argument("--table", type=Path, default=TABLE, help="what compile_kernels.py wrote")
    options = parser.parse_args()
    print(report(read_rows(options.table, tuple(options.only))))


if __name__ == "__main__":
    main()
