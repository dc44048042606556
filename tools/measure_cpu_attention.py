# SPDX-License-Identifier: Apache-2.0
"""Measures attention of the CPU kernels against the CPU's limits, and steps of the embedded model.

    .venv/bin/python tools/measure_cpu_attention.py [--pairs 9] [--only kernels|steps]

    decode      one token per request at context 4,000; limit: torch's sum over as many bytes
    prefill     3,600 tokens, in products per second; limit: torch's product of large matrices
    steps       1, 16 and 64 decodes and a prefill of 3,600: attention over the paged pool and
                attention over gathered K and V, alternating

All times are medians, in wall-clock seconds and in processor seconds. A ratio is the median of the
ratios of single pairs of runs."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from stratakv.engine.client.launcher import CORE_ENVIRONMENT

for name, value in CORE_ENVIRONMENT.items():
    os.environ.setdefault(name, value)

import numpy as np  # noqa: E402 - the variables come first
import torch  # noqa: E402

from stratakv.engine.models.spec.spec_parser import load_model_spec  # noqa: E402
from stratakv.engine.request.sampling_params import SamplingParams  # noqa: E402
from stratakv.engine.scheduler.output import (  # noqa: E402
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from stratakv.engine.worker.model_runner import ModelRunner  # noqa: E402
from stratakv.engine.worker.runtime.placement import Placement  # noqa: E402
from stratakv.kernels.attention.paged_decode import paged_decode  # noqa: E402
from stratakv.kernels.attention.paged_prefill import paged_prefill  # noqa: E402
from stratakv.kernels.cpu.library import Missing, cpu_library  # noqa: E402
from stratakv.kernels.kernel_choice import NATIVE  # noqa: E402

EMBEDDED = Path(__file__).resolve().parent.parent / "engine" / "models" / "embedded"
BLOCK_SIZE = 16
Timed = tuple[float, float]  # wall-clock seconds, processor seconds


def timed(work: Callable[[], object]) -> Timed:
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


def in_turns(
    first: Callable[[], object], second: Callable[[], object], pairs: int
) -> tuple[Timed, Timed, Timed]:
    """Return the median times of `first` and `second`, and the median ratio second over first."""
    first(), second()
    found = [(timed(first), timed(second)) for _ in range(pairs)]

    def median(pick: Callable[[Timed, Timed], float]) -> float:
        return statistics.median(pick(*pair) for pair in found)

    return (
        (median(lambda a, b: a[0]), median(lambda a, b: a[1])),
        (median(lambda a, b: b[0]), median(lambda a, b: b[1])),
        (median(lambda a, b: b[0] / a[0]), median(lambda a, b: b[1] / a[1])),
    )


def pool_of(
    tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, requests: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one layer of a pool with three layers, and block tables in random order."""
    blocks = -(-tokens // BLOCK_SIZE)
    pool = torch.randn(requests * blocks, 3, 2, BLOCK_SIZE, kv_heads, head_dim).to(dtype)
    order = torch.randperm(requests * blocks).to(torch.int32).view(requests, blocks)
    return pool[:, 1], order


def measure_decode(pairs: int) -> None:
    context = 4000
    for label, heads, kv_heads, head_dim, dtype, requests in (
        ("embedded, float32, 32 requests", 4, 2, 64, torch.float32, 32),
        ("embedded, float32, 1 request", 4, 2, 64, torch.float32, 1),
        ("Qwen3-0.6B, float32, 4 requests", 16, 8, 128, torch.float32, 4),
        ("Qwen3-0.6B, bfloat16, 8 requests", 16, 8, 128, torch.bfloat16, 8),
        ("Qwen3-0.6B, bfloat16, 1 request", 16, 8, 128, torch.bfloat16, 1),
    ):
        kv, tables = pool_of(context, kv_heads, head_dim, dtype, requests)
        lengths = torch.full((requests,), context, dtype=torch.int32)
        q = torch.randn(requests, heads, head_dim).to(dtype)
        size = requests * context * 2 * kv_heads * head_dim * dtype.itemsize
        read = torch.ones(size // 4)

        def attend(q=q, kv=kv, tables=tables, lengths=lengths) -> None:  # type: ignore[no-untyped-def]
            paged_decode(q, kv, tables, lengths, scale=0.1, kernel=NATIVE)

        limit, ours, ratio = in_turns(read.sum, attend, pairs)
        print(
            f"decode  {label}: {size / ours[0] / 1e9:.1f} GB/s, a sum {size / limit[0] / 1e9:.1f}; "
            f"of the limit {1 / ratio[0]:.2f} by the clock, {1 / ratio[1]:.2f} in processor time"
        )


def measure_prefill(pairs: int) -> None:
    tokens = 3600
    for label, heads, kv_heads, head_dim, dtype in (
        ("embedded, float32", 4, 2, 64, torch.float32),
        ("Qwen3-0.6B, float32", 16, 8, 128, torch.float32),
        ("Qwen3-0.6B, bfloat16", 16, 8, 128, torch.bfloat16),
    ):
        kv, tables = pool_of(tokens, kv_heads, head_dim, dtype, 1)
        lengths = torch.tensor([tokens], dtype=torch.int32)
        starts = torch.tensor([0, tokens], dtype=torch.int32)
        q = torch.randn(tokens, heads, head_dim).to(dtype)
        products = heads * tokens * (tokens + 1) // 2 * head_dim * 2
        a = torch.randn(1536, 1536)

        def attend(q=q, kv=kv, tables=tables, lengths=lengths, starts=starts) -> None:  # type: ignore[no-untyped-def]
            paged_prefill(
                q, kv, tables, lengths, starts, max_query_len=len(q), scale=0.1, kernel=NATIVE
            )

        limit, ours, _ = in_turns(lambda a=a: a @ a, attend, pairs)
        most, mine = 1536**3 / limit[0] * 2e-9, products / ours[0] * 2e-9
        print(
            f"prefill {label}: {mine:.0f} GFLOP/s, a product of matrices {most:.0f}; "
            f"{mine / most:.2f} of it, in processor time "
            f"{products / ours[1] / (1536**3 / limit[1]):.2f}"
        )


class Steps:
    """A model runner of the embedded model, with the scheduler outputs that its steps need."""

    def __init__(self, backend: str) -> None:
        self._runner = ModelRunner(
            load_model_spec(EMBEDDED),
            EMBEDDED,
            dtype="float32",
            num_blocks=6000,
            block_size=BLOCK_SIZE,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            max_model_len=4096,
            placement=Placement(attention_backend=backend),
        )
        self._free = np.random.default_rng(7).permutation(np.arange(1, 6000)).tolist()
        self._held: dict[str, tuple[int, list[int]]] = {}
        self._finished: set[str] = set()

    def begin(self, name: str, tokens: int) -> None:
        blocks = [self._free.pop() for _ in range(tokens // BLOCK_SIZE + 8)]
        ids = np.random.default_rng(1).integers(1, 4000, tokens).astype(np.int32)
        params = SamplingParams(temperature=0.0, max_tokens=400)
        self._execute([NewRequestData(name, ids, params, (blocks,), 0, [], None)], {name: tokens})
        self._held[name] = (tokens, blocks)

    def decode(self) -> None:
        cached = CachedRequestData()
        for name, (length, blocks) in self._held.items():
            cached.request_ids.append(name)
            cached.new_block_ids.append(None)
            cached.num_computed_tokens.append(length)
            self._held[name] = (length + 1, blocks)
        self._execute([], dict.fromkeys(self._held, 1), cached)

    def end(self, name: str) -> None:
        self._free += self._held.pop(name)[1]
        self._finished.add(name)

    def prefill(self) -> None:
        self.begin("long", 3600)
        self.end("long")

    def _execute(
        self,
        new: list[NewRequestData],
        counts: dict[str, int],
        cached: CachedRequestData | None = None,
    ) -> None:
        total = sum(counts.values())
        self._runner.execute(
            SchedulerOutput(
                new, cached or CachedRequestData(), counts, total, self._finished, set()
            )
        )
        self._finished = set()


def measure_steps(pairs: int) -> None:
    gathered, in_place = Steps("gather"), Steps("auto")

    def say(label: str, found: tuple[Timed, Timed, Timed]) -> None:
        before, after, ratio = found
        print(
            f"{label}: {before[0] * 1e3:.2f} -> {after[0] * 1e3:.2f} ms by the clock "
            f"({1 / ratio[0]:.2f} times as fast), {before[1] * 1e3:.2f} -> {after[1] * 1e3:.2f} "
            f"in processor time ({1 / ratio[1]:.2f})"
        )

    for requests in (1, 16, 64):
        for steps in (gathered, in_place):
            for number in range(requests):
                steps.begin(f"r{number}", 1000)
        say(f"{requests} decodes", in_turns(gathered.decode, in_place.decode, 2 * pairs + 1))
        for steps in (gathered, in_place):
            for number in range(requests):
                steps.end(f"r{number}")
    say("prefill of 3600", in_turns(gathered.prefill, in_place.prefill, pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description="attention on the CPU against its limits")
    parser.add_argument("--pairs", type=int, default=9, help="alternating pairs of each")
    parser.add_argument("--only", choices=("kernels", "steps"))
    args = parser.parse_args()
    library = cpu_library()
    if isinstance(library, Missing):
        raise SystemExit(f"there is nothing to measure: {library.reason}")
    print(f"{library.variant}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    with torch.inference_mode():
        if args.only != "steps":
            measure_decode(args.pairs)
            measure_prefill(args.pairs)
        if args.only != "kernels":
            measure_steps(args.pairs)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
