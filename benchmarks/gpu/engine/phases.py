# SPDX-License-Identifier: Apache-2.0
"""The section that times the first token if a document is computed, or in pool, CPU or SSD.

For each length, an engine without a server answers questions about a few documents; its pool is
little larger than one document. A question about each document is sent with nothing cached
(`cold`), directly after another question about the document (`pool`), after the other documents
have evicted the document from the pool (`cpu`), and after a restart (`ssd`). A phase whose document
does not come from its tier is an error, and so is a first token that was unlikely."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ....engine.models.spec.spec_parser import load_model_spec
from ....engine.request.sampling_params import SamplingParams
from ...harness.report import median
from ...offload.workbench import MeasuredEngine
from ..plots import draw_phases
from ..section import Place, Results, Section, Target, WrongResult, run_cases
from .model import engine_options, model_directory

NAME = "engine-phases"
PHASES = ("cold", "pool", "cpu", "ssd")
BLOCK_SIZE = 16
QUESTION_TOKENS = 32
SEED = 20262
SECONDS = 420.0  # limit of the section: two engines for each length
WRITE_BACK_SECONDS = 120.0  # limit for writing 16 GB of documents to the disk
FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
# The least share of a document that a warm phase must load from its tier. The missing part is a
# partial block and the last tokens, which another document may have evicted.
LEAST_FOUND = 0.9
# The number of likely first tokens that are accepted: a cached prefix changes the order of bfloat16
# sums, which may change the likeliest token.
LIKELY = 20
TARGET_TOKENS = 8192
# (document, phase) → possible first tokens with their log-probabilities.
Likely = dict[tuple[int, str], dict[int, float]]
# The ratio of the phases cold and cpu has no target, because a faster prefill lowers the ratio. The
# time of the phase `pool`, which is one step, is subtracted.
TARGETS = (
    Target("ttft_cpu_load_over_transfer", "CPU less pool, over the link's time, 8k", most=1.35),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Documents of one length."""

    tokens: int

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens"


def run(place: Place, results: Results) -> None:
    """Add a row for each length and phase."""
    place.start_section(SECONDS)
    # The length of the target comes first.
    lengths = place.choose((8192, 1024, 2048, 32768), (8192, 1024), (320,))
    with model_directory(place) as model, TemporaryDirectory(prefix="stratakv-bench-") as scratch:

        def measure(case: Case) -> None:
            documents = _Documents(place, model, case.tokens)
            seconds = measure_phases(place, model, documents, Path(scratch) / str(case.tokens))
            num_bytes = case.tokens // BLOCK_SIZE * documents.layout.slot_bytes
            add_rows(results, case, seconds, num_bytes)

        run_cases(place, results, NAME, [Case(tokens) for tokens in lengths], measure)


class _Documents:
    """Random documents, and questions about the documents."""

    def __init__(self, place: Place, model: Path, tokens: int) -> None:
        self.tokens = tokens
        self.count = place.choose(4, 3, 3)
        self.spec = load_model_spec(model)
        self.layout = self.spec.layout(BLOCK_SIZE, "float64" if place.is_rehearsal else "bfloat16")
        self._random = random.Random(SEED + tokens)
        self._texts = [self._draw(tokens) for _ in range(self.count)]
        self._questions = {phase: self._draw(QUESTION_TOKENS) for phase in (*PHASES, "prime")}

    def prompt(self, document: int, question: str) -> list[int]:
        return self._texts[document] + self._questions[question]

    def ask(
        self, engine: MeasuredEngine, document: int, phase: str, likely: Likely | None = None
    ) -> float:
        """Return the seconds to the first token. With `likely`, the document must come from the
        tier of the phase, and the token must be among the likeliest tokens that were computed with
        nothing cached. Raises WrongResult."""
        run_ = engine.run([self.prompt(document, phase)], FIRST_TOKEN)
        if likely is None:
            return run_.wall_seconds
        what, found = f"{phase}, {self.tokens} tokens", run_.cached_tokens[phase]
        if found < LEAST_FOUND * self.tokens:
            others = dict(run_.cached_tokens)
            raise WrongResult(f"{what}: {found} came from there, and of the others {others}")
        [[token]] = run_.token_ids
        if token not in likely[document, phase]:
            raise WrongResult(
                f"{what}: token {token} is none of the {LIKELY} likeliest that were computed"
            )
        return run_.wall_seconds

    @property
    def blocks(self) -> int:
        """The number of blocks of one document, a question and the first token."""
        return -(-(self.tokens + QUESTION_TOKENS + 1) // BLOCK_SIZE)

    def _draw(self, count: int) -> list[int]:
        return [self._random.randrange(3, self.spec.vocab_size) for _ in range(count)]


def measure_phases(
    place: Place, model: Path, documents: _Documents, ssd: Path
) -> dict[str, list[float]]:
    """Return the seconds to each first token, by phase. Raises WrongResult."""
    options = make_options(place, documents, ssd)
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    every = range(documents.count)
    engine = MeasuredEngine(model, options)
    try:
        # The first request of a length compiles kernels and allocates memory.
        documents.ask(engine, 0, "prime")
        likely = {
            (document, phase): engine.likeliest(documents.prompt(document, phase), LIKELY)
            for document in every
            for phase in PHASES
        }
        for document in every:
            engine.rest()
            engine.forget("all")
            seconds["cold"].append(documents.ask(engine, document, "cold"))
        engine.rest()
        engine.forget("all")
        for document in every:
            documents.ask(engine, document, "prime")
            seconds["pool"].append(documents.ask(engine, document, "pool", likely))
        for document in every:
            engine.rest()
            seconds["cpu"].append(documents.ask(engine, document, "cpu", likely))
    finally:
        engine.core.shutdown(WRITE_BACK_SECONDS)
    del engine
    gc.collect()  # CUDA graphs of steps are in a reference cycle
    place.release_memory()
    with contextlib.closing(MeasuredEngine(model, options)) as engine:
        # A short prompt, which reads no block of the documents, warms the engine up.
        engine.run([documents.prompt(0, "prime")[:1] * BLOCK_SIZE], FIRST_TOKEN)
        for document in every:
            engine.rest()
            seconds["ssd"].append(documents.ask(engine, document, "ssd", likely))
    return seconds


def make_options(place: Place, documents: _Documents, ssd: Path) -> dict[str, Any]:
    """Return the options of an engine whose pool is little larger than one document, and whose
    tiers have space for all documents."""
    slot_bytes = documents.layout.slot_bytes
    tier_bytes = max(2 * documents.count * documents.blocks * slot_bytes, 64 * 2**20)
    return engine_options(place) | {
        "block_size": BLOCK_SIZE,
        "max_model_len": documents.blocks * BLOCK_SIZE,
        "num_blocks": documents.blocks + documents.blocks // 8 + 2,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8192,
        "kv_offload": "cpu,ssd",
        "kv_offload_load": "always",
        "kv_offload_cpu_bytes": tier_bytes,
        "kv_offload_ssd_path": str(ssd),
        "kv_offload_ssd_bytes": 2 * tier_bytes,
    }


def add_rows(
    results: Results, case: Case, seconds: Mapping[str, Sequence[float]], num_bytes: int
) -> None:
    """Add the rows and ratios of one length, whose documents have `num_bytes` of KV."""
    medians = {phase: median(taken) for phase, taken in seconds.items()}
    for phase, taken in seconds.items():
        results.add_row(
            NAME,
            {
                "case": f"{case.name}, {phase}",
                "tokens": case.tokens,
                "phase": phase,
                "seconds": medians[phase],
                "all_seconds": list(taken),
                "cold_over_this": medians["cold"] / medians[phase],
            },
        )
    if case.tokens == TARGET_TOKENS:
        results.set_ratio("ttft_cold_over_cpu", medians["cold"] / medians["cpu"])
        results.set_ratio("ttft_cold_over_ssd", medians["cold"] / medians["ssd"])
        if rate := results.ceilings.get("pinned_to_device_gb_per_second"):
            load = medians["cpu"] - medians["pool"]
            results.set_ratio("ttft_cpu_load_over_transfer", load * rate * 1e9 / num_bytes)


SECTION = Section(
    NAME, "First token: computed, and from pool, CPU and SSD", run, draw_phases, TARGETS
)
