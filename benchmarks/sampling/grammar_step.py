# SPDX-License-Identifier: Apache-2.0
"""The case of decode steps with a JSON schema for the answers, and of steps without a schema.

Two engine cores with the embedded model decode the same number of requests with the same prompts. A
round is some steps of each core. The compared cost is the processor time of all threads of the
process, including threads that compute masks during the forward pass. Wall-clock ratios are
reported too."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...engine.config.engine_options import EMBEDDED_MODEL, engine_config
from ...engine.core.engine_core import EngineCore
from ...engine.request.core_messages import AddRequest, TokenOutput
from ...engine.request.request import pack_token_ids
from ...engine.request.sampling_params import SamplingParams
from ...engine.request.structured_params import StructuredOutputsParams
from ...engine.text.tokenizer import Tokenizer
from ..harness.comparison import Comparison, Outcome, WrongWork, take_rounds
from ..harness.report import Report, median, ratios
from ..harness.timer import Timer

PROMPT = 64  # tokens
STEPS_FIRST = 8  # uncounted tokens, while prompts and first masks are computed
STEPS = 4  # steps in a round; few, so that other work affects the two sides equally
START_SECONDS = 120.0
# On a busy machine, the first masks of some requests come late. Requests that have started have
# space for so many more tokens, and the core pauses for so many seconds between steps.
ROOM_AHEAD, AHEAD_SECONDS = 400, 0.25
# The schema of a list, as agents request, that is longer than all rounds.
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"enum": ["open", "read", "write", "close"]},
            "line": {"type": "integer", "minimum": 0, "maximum": 9999},
            "is_done": {"type": "boolean"},
            "score": {"type": ["number", "null"]},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "long tag"]}, "maxItems": 3},
        },
        "required": ["name", "line", "is_done", "score", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(slots=True)
class Decodes:
    """An engine core whose requests all decode, one token per request and step."""

    core: EngineCore
    num_rows: int
    texts: dict[str, list[int]] = field(default_factory=dict)
    timer: Timer = field(default_factory=Timer)

    def start(self, asked: StructuredOutputsParams | None) -> None:
        """Add all requests, and step until each has STEPS_FIRST tokens."""
        chosen = random.Random(17)
        for row in range(self.num_rows):
            prompt = chosen.choices(range(4, 4000), k=PROMPT)
            params = SamplingParams(
                max_tokens=4096, temperature=0.0, ignore_eos=asked is None,
                structured_outputs=asked,
            )  # fmt: skip
            name = f"r{row}"
            self.texts[name] = []
            self._take(self.core.add(AddRequest(name, pack_token_ids(prompt), params)))
        deadline = time.monotonic() + START_SECONDS
        while (least := min(counts := [*map(len, self.texts.values())])) < STEPS_FIRST:
            if time.monotonic() > deadline:
                raise WrongWork(f"{self.num_rows} requests did not begin to decode")
            if self.core.has_work():
                self._take(self.core.step())
            else:  # a grammar is being compiled
                time.sleep(0.002)
            if max(counts) > least + self.num_rows:
                time.sleep(AHEAD_SECONDS)

    def run(self, steps: int) -> float:
        """Run `steps` steps; return the processor seconds of all threads."""
        outputs: list[list[TokenOutput]] = []

        def work() -> None:
            outputs.extend(self.core.step() for _ in range(steps))

        seconds = self.timer.rate_of(work)
        for step in outputs:
            if len(step) != self.num_rows:
                raise WrongWork(f"a step made {len(step)} of {self.num_rows} tokens")
            self._take(step)
        return seconds

    def _take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                raise WrongWork(f"{output.request_id} ended: {output.error or 'too soon'}")
            self.texts[output.request_id] += output.new_token_ids


def grammar_step(report: Report, name: str, sizes: Sequence[int], rounds: int) -> None:
    """Measure all sizes, and add all to the report; the figure `name` is that of the size with the
    highest ratio. Raises WrongWork."""
    outcomes, report.figures["grammar_steps"] = [], {}
    for rows in sizes:
        outcome, by_clock = compare(name, rows, rounds)
        outcomes.append((outcome.ratio, by_clock, outcome))
        report.figures["grammar_steps"][str(rows)] = {
            "ratio": outcome.ratio,
            "by_clock": by_clock,
            "seconds": median(outcome.limits) / STEPS,
        }
    _, by_clock, worst = max(outcomes, key=lambda one: one[0])
    worst.add_to(report)
    report.figures["by_clock"][name] = by_clock


def compare(name: str, rows: int, rounds: int, backend: str = "auto") -> tuple[Outcome, float]:
    """Return rounds of STEPS steps in processor seconds, and the median ratio in wall-clock time.
    Raises WrongWork if an answer does not follow its schema."""
    asked = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    # Requests have more tokens than counted steps, because they start one after the other if their
    # prompts do not fit into one step.
    num_tokens = 2 * STEPS_FIRST + rows + ROOM_AHEAD + (rounds + 2) * STEPS
    with (
        decodes(rows, num_tokens, backend, asked) as ours,
        decodes(rows, num_tokens, backend, None) as free,
    ):
        comparison = Comparison(
            name, "processor seconds", "without a grammar", lambda: ours.run(STEPS),
            lambda: free.run(STEPS),
        )  # fmt: skip
        outcome = take_rounds(comparison, rounds)
        tokenizer = Tokenizer.load(EMBEDDED_MODEL)
        for text in ours.texts.values():
            check_begins_as_asked(tokenizer.decode(text))
        # The first call of each side is a warm-up and left out.
        return outcome, median(ratios(ours.timer.by_clock[1:], free.timer.by_clock[1:]))


@contextmanager
def decodes(
    rows: int, num_tokens: int, backend: str, asked: StructuredOutputsParams | None
) -> Iterator[Decodes]:
    """Yield decoding requests with space for `num_tokens` tokens each."""
    with open_core(rows, PROMPT + num_tokens, backend) as core:
        made = Decodes(core, rows)
        made.start(asked)
        yield made


@contextmanager
def open_core(rows: int, length: int, backend: str) -> Iterator[EngineCore]:
    """Yield an engine core with the embedded model for `rows` requests of `length` tokens."""
    config = engine_config(EMBEDDED_MODEL, {
        "dtype": "float32", "num_threads": 1, "max_num_seqs": rows, "block_size": 16,
        "num_blocks": rows * (length // 16 + 2) + 1, "max_model_len": length,
        "max_num_batched_tokens": 512, "enable_prefix_caching": False,
        "structured_outputs_backend": backend,
    })  # fmt: skip
    core = EngineCore(config, max_steps_in_flight=1)
    try:
        yield core
    finally:
        core.shutdown(5.0)


def check_begins_as_asked(text: str) -> None:
    """Raise WrongWork unless the text begins a list of objects of the schema."""
    first, end, _ = text.partition("}")
    if not end:
        is_right = first.replace(" ", "").startswith('[{"name":')
    else:
        try:
            is_right = (
                list(json.loads(first.removeprefix("[") + end)) == SCHEMA["items"]["required"]
            )
        except ValueError:
            is_right = False
    if not is_right:
        raise WrongWork(f"an answer does not follow its schema: {text[:200]!r}")
