# SPDX-License-Identifier: Apache-2.0
"""The section that times a decode step of the engine, and its bound: a read of weights and KV.

    bound = (weights + K and V of all requests) / rate of the copy on the GPU in the same run

The time of a step is from the scheduler's output to the sampled ids on the host: batch, buffers,
model and sampler. Steps run as CUDA graphs ("recorded"), without graphs ("launched"), and as graphs
with K and V in float8."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....engine.config.engine_options import engine_config
from ....engine.core.executor import load_runner
from ....engine.core.setup.resolve_placement import dtype_for, placement_of
from ....engine.models.spec.spec_parser import load_model_spec
from ....engine.request.sampling_params import SamplingParams
from ....engine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from ..plots import draw_steps
from ..section import Place, Results, Row, Section, Target, Timing, WrongResult, run_cases
from .model import engine_options, model_directory, read_weight_bytes

NAME = "engine-step"
BLOCK_SIZE = 16
WARM_UPS = 4
Shape = tuple[int, int]  # requests, context tokens per request
STEPS = (40, 20, 3)  # timed steps per batch: full, quick, rehearsal
SAMPLED = SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True)
SECONDS = 240.0  # limit of the section, which makes a model for each of WAYS
TARGETS = (
    Target("engine_step_over_bound", "decode step's bound over its time, 64 x 8k", least=0.85),
)


@dataclass(frozen=True, slots=True)
class Way:
    """The name of a way to compute steps, and its engine options."""

    name: str
    enforce_eager: bool = False
    kv_cache_dtype: str = "auto"


WAYS = (Way("recorded"), Way("launched", enforce_eager=True), Way("fp8 KV", kv_cache_dtype="fp8"))


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of requests with equal contexts."""

    way: Way
    requests: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.way.name}, {self.requests} x {self.context}"


def run(place: Place, results: Results) -> None:
    """Add a row for each of WAYS and each batch."""
    place.start_section(SECONDS)
    shapes: Sequence[Shape] = place.choose(
        ((1, 1024), (1, 32768), (16, 8192), (64, 1024), (64, 8192), (256, 1024)),
        ((1, 1024), (64, 8192)),
        ((1, 32), (3, 64)),
    )
    with model_directory(place) as path:
        for way in WAYS:
            place.check_time()
            bench = _Bench(place, path, way, shapes)
            cases = [Case(way, bench.fitting(*shape), shape[1]) for shape in shapes]
            run_cases(place, results, NAME, cases, partial(_add, bench, results))
            del bench
            gc.collect()  # CUDA graphs of steps are part of a reference cycle
            place.release_memory()
    set_ratio(results)


def _add(bench: _Bench, results: Results, case: Case) -> None:
    timing, read_bytes = bench.measure(case)
    row: Row = {
        "case": case.name,
        "way": case.way.name,
        "requests": case.requests,
        "context": case.context,
        "seconds": timing.median,
        "p10_seconds": timing.p10,
        "p90_seconds": timing.p90,
        "read_bytes": read_bytes,
        "tokens_per_second": case.requests / timing.median,
        "gb_per_second": read_bytes / timing.median / 1e9,
    }
    share = results.ratio_to_ceiling(row["gb_per_second"], "device_copy_gb_per_second")
    results.add_row(NAME, row | ({} if share is None else {"bound_over_step": share}))


def make_options(place: Place, way: Way, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Return the options of an engine with space for the batches of `shapes`, if possible."""
    room = WARM_UPS + place.choose(*STEPS) + 1
    longest = -(-(max(context for _, context in shapes) + room) // BLOCK_SIZE)
    requests = max(requests for requests, _ in shapes)
    options = engine_options(place) | {
        "enforce_eager": way.enforce_eager,
        "kv_cache_dtype": way.kv_cache_dtype,
        "block_size": BLOCK_SIZE,
        "max_model_len": longest * BLOCK_SIZE,
        "max_num_seqs": requests,
    }
    return options | ({"num_blocks": requests * longest + 1} if place.is_rehearsal else {})


class _Bench:
    """A model runner without a scheduler, whose requests have blocks of random numbers."""

    def __init__(self, place: Place, path: Path, way: Way, shapes: Sequence[Shape]) -> None:
        self._steps, self._room = place.choose(*STEPS), WARM_UPS + place.choose(*STEPS) + 1
        config = engine_config(path, make_options(place, way, shapes))
        spec, placement = load_model_spec(path), placement_of(config)
        self._runner = load_runner(
            config, config.cache.num_blocks, config.model.max_model_len or spec.max_context,
            spec=spec, dtype=dtype_for(config, spec, placement.device), placement=placement,
            connector=None, progress=logging.getLogger(__name__).info,
        )  # fmt: skip
        self._layout, pool = self._runner.pool.layout, self._runner.pool.tensor
        # The pool has random numbers, because zeros would give equal scores and take less power.
        for pages in torch.split(pool, 64):
            pages.copy_(torch.randn(pages.shape, device=pool.device, dtype=torch.bfloat16))
        place.synchronise()  # the runner's stream does not wait for the current stream
        self._weight_bytes = read_weight_bytes(spec, self._runner.model.element_bytes)

    def fitting(self, requests: int, context: int) -> int:
        """Return the number of requests, up to `requests`, for which the pool has blocks."""
        each = -(-(context + self._room) // BLOCK_SIZE)
        return min(requests, (self._runner.pool.num_blocks - 1) // each)

    def measure(self, case: Case) -> tuple[Timing, int]:
        """Return the timing of a step, and the bytes that the middle step reads. Raises WrongResult
        if a request gets no token."""
        names = [f"{case.name} {number}" for number in range(case.requests)]
        taken = []
        for number, step in enumerate(self._steps_of(case, names)):
            began = time.perf_counter()
            result = self._runner.execute(step)
            seconds = time.perf_counter() - began
            if result.nan_request_ids or not all(result.sampled_token_ids.values()):
                raise WrongResult(f"{case.name}: a request got no token")
            if number >= WARM_UPS:
                taken.append(seconds)
        over = SchedulerOutput([], CachedRequestData(), {}, 0, set(names), set())
        self._runner.execute(over)
        middle = case.context + WARM_UPS + self._steps // 2
        kv_bytes = case.requests * middle * self._layout.token_bytes
        return Timing.of(taken), self._weight_bytes + kv_bytes

    def _steps_of(self, case: Case, names: list[str]) -> Iterator[SchedulerOutput]:
        """Yield the steps. The first step adds requests with all but one token computed."""
        each = -(-(case.context + self._room) // BLOCK_SIZE)
        scheduled = dict.fromkeys(names, 1)
        prompt = np.arange(case.context, dtype=np.int32) % 500
        new = [
            NewRequestData(
                name,
                prompt,
                SAMPLED,
                (list(range(1 + number * each, 1 + (number + 1) * each)),),
                case.context - 1,
            )
            for number, name in enumerate(names)
        ]
        nothing = CachedRequestData()
        yield SchedulerOutput(new, nothing, scheduled, len(names), set(), set())
        for computed in range(case.context, case.context + WARM_UPS + self._steps - 1):
            going_on = CachedRequestData(list(names), [None] * len(names), [computed] * len(names))
            yield SchedulerOutput([], going_on, scheduled, len(names), set(), set())


def set_ratio(results: Results) -> None:
    """Set the target's figure from the recorded batch whose steps read the most bytes."""
    rows = [row for row in results.rows(NAME) if row["way"] == WAYS[0].name]
    largest = max(rows, key=lambda row: row["read_bytes"], default=None)
    if largest is not None and "bound_over_step" in largest:
        results.set_ratio("engine_step_over_bound", largest["bound_over_step"])


SECTION = Section(NAME, "One step of the engine against its bound", run, draw_steps, TARGETS)
