# SPDX-License-Identifier: Apache-2.0
"""Predicts, from machine code alone, which share of a GPU's peak rates the attention kernels reach.

    python tools/kernel_model.py                    the shapes that docs/gpu.md has targets for
    python tools/kernel_model.py --only '*'         every attention kernel of the table
    python tools/kernel_model.py --table FILE       another table, such as that of Triton 3.6.0

The tool reads `kernels/resources.json`, which `compile_kernels.py` writes, and prints Markdown. A
pass of a kernel's inner loop computes one tile. The time of a tile has these terms, in cycles of a
multiprocessor:

    bytes    K and V of the tile, at an even share of the rate of memory (decode) or L2 (prefill)
    tensor   the matrix products, including products of padding
    issue    the instructions, at one warp instruction per cycle and scheduler
    mufu     exponentials, in the special function unit
    shared   loads and stores of shared memory

With perfect overlap a tile takes the longest of these terms, and without overlap the sum of the
terms. The real time is between the two, and closer to the longest term if a multiprocessor runs
more programs. The tool measures nothing. The model ignores latencies, waits at barriers, bank
conflicts, reads of shared memory by tensor cores, a lower clock under load, edges of the causal
mask, and launches."""

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
# The kernels with targets in docs/gpu.md: heads of 128 elements, 4 query heads per KV head.
USUAL = ("paged_decode.*.d128.g4", "paged_decode.*.d128.g4.*-scales", "paged_prefill.*.d128.g4.*")

MULTIPROCESSORS = 132  # of a GPU, from the data sheets of H100 SXM and H200
MEMORY_BYTES = {"H100": 3.35e12, "H200": 4.8e12}  # bytes per second, from the data sheets
COPY_SHARE = 0.9  # share of the memory's rate that a copy reaches: an H200 reached 4.3e12
# The clock with busy tensor cores, in Hz ("Hopper architecture" white paper, table of peak rates):
# 132 multiprocessors with 4,096 16-bit operations per cycle have 989.4 TFLOP/s.
CLOCK = 1.83e9
TENSOR_FLOPS = 4096
# The share of the tensor cores' peak rate for products of one warp instead of a warpgroup: 62.9 %
# on average, Luo et al. 2024, arXiv:2402.13499.
WARP_SHARE = 0.63
SCHEDULERS = 4  # parts of a multiprocessor that issue one instruction each, same paper
MUFU_RESULTS = 16  # per cycle; CUDA C++ programming guide, arithmetic throughput, capability 9.0
L2_BYTES = 5120  # per cycle of the whole device; A100 white paper (not published for the H100)
WARP, WARPGROUP = 32, 4  # threads in a warp; warps in a warpgroup

# Name, requests, tokens of each request: the cases of benchmarks/gpu/attention/decode.py, without
# the case of one short request, whose time is only latency.
CASES = (
    ("4k x 32", 32, 4096),
    ("8k x 64", 64, 8192),
    ("32k x 8", 8, 32768),
    ("128k x 1", 1, 131072),
    ("1k x 64", 64, 1024),
)
KV_HEADS = 8


class Prediction(NamedTuple):
    """The prediction for a kernel on a GPU: a multiprocessor's cycles for one tile, by term."""

    cycles: dict[str, float]
    useful: float  # cycles of the limiting resource: bytes for decode, products for prefill

    @property
    def limit(self) -> str:
        return max(self.cycles, key=lambda term: self.cycles[term])

    @property
    def best(self) -> float:
        """The share of the limiting resource's rate with overlap of all terms."""
        return self.useful / max(self.cycles.values())

    @property
    def worst(self) -> float:
        """The share of the limiting resource's rate without overlap of terms."""
        return self.useful / sum(self.cycles.values())


def predict(name: str, found: dict[str, Any], device: str) -> Prediction:
    """Predict a tile's cycles. `found` is the kernel's row for sm_90; its `tile_bytes` must be set,
    so that a pass is one tile."""
    one_pass = min(found["passes"], key=lambda each: each["instructions"])  # no mask
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
    """Return the cycles of `count` products of one warp. A product "HGMMA.64x128x16" is shared by
    four warps; "HMMA.16816" has the sizes 16, 8 and 16."""
    mnemonic, shape = instruction.split(".")
    if mnemonic == "HGMMA":
        m, n, k = map(int, shape.split("x"))
        return count * 2 * m * n * k / WARPGROUP / TENSOR_FLOPS
    if mnemonic == "HMMA" and shape in ("16816", "1688"):
        return count * 2 * 16 * 8 * int(shape[3:]) / (TENSOR_FLOPS * WARP_SHARE)
    raise ValueError(f"expected HGMMA.MxNxK, HMMA.16816 or HMMA.1688, got {instruction}")


def used(name: str, found: dict[str, Any], requests: int, tokens: int) -> tuple[int, float]:
    """Return the number of splits of a context, and the used share of a GPU in waves of
    programs."""
    _, pool, head_dim, *_ = name.split(".")
    element = {"fp8e4nv": 1, "bf16": 2, "fp16": 2, "fp32": 4}[pool]
    tile = found["tile_bytes"] // (2 * int(head_dim[1:]) * element)  # tokens, each with K and V
    expected = FP8_PROGRAMS_PER_MULTIPROCESSOR if element == 1 else PROGRAMS_PER_MULTIPROCESSOR
    pairs, tiles = requests * KV_HEADS, -(-tokens // tile)
    splits = choose_splits(pairs, tokens, MULTIPROCESSORS, tile, expected)
    share = -(-tiles // splits)
    slots = MULTIPROCESSORS * found["programs"]
    waves = -(-pairs * -(-tiles // share) // slots)
    return splits, pairs * tiles / (slots * waves * (share + PROGRAM_TILES))


def of_one_tile(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return a Markdown table with the terms of each kernel, and the share of its resource's rate
    that the kernel reaches."""
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
    """Return a Markdown table of decode of whole batches on an H200, as shares of a copy's rate."""
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
    """Return the tables of tiles and of whole batches, and a table of prefill in TFLOP/s."""
    peak = TENSOR_FLOPS * MULTIPROCESSORS * CLOCK / 1e12
    rates = []
    for name in rows:
        if name.startswith("paged_prefill"):
            one = predict(name, rows[name], "H200")
            rates.append(f"| {name} | {one.worst * peak:.0f} to {one.best * peak:.0f} |")
    parts = [of_one_tile(rows), of_cases(rows), ["| kernel | TFLOP/s |", "|---|---|", *rates]]
    return "\n\n".join("\n".join(part) for part in parts)


def read_rows(table: Path, patterns: tuple[str, ...] = USUAL) -> dict[str, dict[str, Any]]:
    """Return the sm_90 rows of the kernels that match a pattern and have `tile_bytes`."""
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
