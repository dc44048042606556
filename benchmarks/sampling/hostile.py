# SPDX-License-Identifier: Apache-2.0
"""The case of requests that wait for tokens while hostile grammars are compiled and applied.

Some requests decode in one engine core during the whole round. In a hostile round, other requests
arrive one after the other, each with a grammar that is constructed to explode, to recurse or to be
huge. In a round without grammars, the same requests arrive without grammars. The figure is the 99th
percentile of the wall-clock time between tokens in hostile rounds, divided by that in rounds
without grammars. Every hostile request must end at its last token or with an error. In a third kind
of round, without grammars, another process computes at low priority, to measure the slowdown by
load."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

from ...engine.core.engine_core import EngineCore
from ...engine.request.core_messages import AddRequest, TokenOutput
from ...engine.request.request import pack_token_ids
from ...engine.request.sampling_params import SamplingParams
from ...engine.request.structured_params import StructuredOutputsParams
from ...tiers.processes.python_command import python_command
from ..harness.comparison import Comparison, WrongWork, take_rounds
from ..harness.report import Report, median, percentile, ratios
from .grammar_step import open_core

VICTIMS = 4  # requests that decode during the whole round
EVERY = 10  # steps between the arrivals of two hostile requests
PROMPT, HOSTILE_TOKENS = 32, 24
CONTEXT = 4096
END_SECONDS = 300.0
_FIRST_STEPS = 16


def hostile_grammars(number: int) -> dict[str, dict[str, Any]]:
    """Return a grammar of each kind; each `number` gives grammars that no cache contains."""
    letter, least = chr(ord("a") + number % 26), 100 + number
    deep: dict[str, Any] = {"type": "integer", "minimum": number}
    for _ in range(40):
        deep = {"type": "array", "items": deep, "maxItems": 1000}
    return {
        "counts in counts": {"regex": f"((a{{1,{least}}}){{1,100}}){{1,100}}"},
        "plus of plus": {"regex": f"(({letter}+)+)+b{number}"},
        "optional ones": {"regex": f"(a?){{{least}}}a{{{least}}}"},
        "ambiguous rules": {"grammar": f'root ::= "{number}" root "a" | root root | ""'},
        "only itself": {"json": {"$ref": "#", "title": str(number)}},
        "arrays of arrays": {"json": deep},
        "every choice": {
            "json": {
                "$defs": {"n": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}}] * 30}},
                "$ref": "#/$defs/n",
                "title": str(number),
            }
        },
        "5,000 properties": {
            "json": {"type": "object", "properties": {f"p{number}-{i}": {} for i in range(5000)}}
        },
        "20,000 alternatives": {
            "grammar": f'root ::= "x{number}" | ' + " | ".join(f'"{i}"' for i in range(20_000))
        },
        "4,096 choices": {"choice": [f"{number}-{one}" for one in range(4096)]},
    }


class Beside:
    """An engine core, its decoding requests, and the results of the requests with grammars."""

    def __init__(self, core: EngineCore, num_steps: int) -> None:
        self.core = core
        self.ends: dict[str, str] = {}
        self._num_steps = num_steps
        self._numbers = count()
        self._prompts = random.Random(23)
        self._victims: set[str] = set()
        self._open: dict[str, str] = {}  # id of a request with a grammar → kind of grammar

    def round(self, *, is_hostile: bool) -> float:
        """Run a round; return the 99th percentile of the seconds between tokens."""
        number = next(self._numbers)
        self._victims = {f"victim-{number}-{one}" for one in range(VICTIMS)}
        for victim in self._victims:
            params = SamplingParams(max_tokens=CONTEXT - PROMPT - 1, **_GREEDY)
            self._note(self.core.add(self._request(victim, params)))
        for _ in range(_FIRST_STEPS):
            self._step()
        coming = self._coming(number)
        waits: list[float] = []
        for step in range(self._num_steps):
            added: list[AddRequest] = []
            if step % EVERY == 0:
                kind, asked = next(coming)
                structured = StructuredOutputsParams(**asked) if is_hostile else None
                params = SamplingParams(
                    max_tokens=HOSTILE_TOKENS, temperature=0.0, structured_outputs=structured
                )
                added = [self._request(f"{kind}-{number}-{step}", params)]
                self._open[added[0].request_id] = kind if is_hostile else ""
            began = time.perf_counter()
            for request in added:
                self._note(self.core.add(request))
            if not self._step():
                raise WrongWork("a request beside hostile ones got no token in a step")
            waits.append(time.perf_counter() - began)
        self.core.abort_requests(self._victims)
        deadline = time.monotonic() + END_SECONDS
        while self._open or self.core.has_work():  # all requests must end before the next round
            if time.monotonic() > deadline:
                raise WrongWork(f"these did not end: {', '.join(sorted(self._open))}")
            outputs = self.core.step() if self.core.has_work() else []
            self._note([each for each in outputs if each.request_id in self._open])
            time.sleep(0.0 if outputs else 0.002)
        return percentile(waits, 99.0)

    def _coming(self, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
        for turn in count():
            yield from hostile_grammars(1000 * number + turn).items()

    def _request(self, name: str, params: SamplingParams) -> AddRequest:
        prompt = self._prompts.choices(range(4, 4000), k=PROMPT)
        return AddRequest(name, pack_token_ids(prompt), params)

    def _step(self) -> bool:
        """Run one step; return whether a request of `_victims` got a token."""
        outputs = self.core.step()
        self._note(outputs)
        return any(output.request_id in self._victims for output in outputs)

    def _note(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.finish_reason is None:
                continue
            if output.request_id in self._victims:
                raise WrongWork(f"{output.request_id} ended: {output.error or 'too soon'}")
            kind = self._open.pop(output.request_id)
            if kind:
                self.ends[kind] = output.error or f"ended: {output.finish_reason}"


@contextmanager
def _computing() -> Iterator[None]:
    with subprocess.Popen(["nice", *python_command("-c", "while True: pass")]) as process:
        try:
            yield
        finally:
            process.kill()


_GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def hostile_beside(report: Report, name: str, num_steps: int, rounds: int) -> None:
    """Measure the figure `name`, and record each kind of grammar's result. Raises WrongWork."""
    with open_core(VICTIMS + num_steps // EVERY + 1, CONTEXT, "auto") as core:
        beside = Beside(core, num_steps)

        def floor() -> float:
            with _computing():
                return beside.round(is_hostile=False)

        comparison = Comparison(
            name, "seconds, 99th percentile", "without grammars",
            partial(beside.round, is_hostile=True), partial(beside.round, is_hostile=False), floor,
        )  # fmt: skip
        outcome = take_rounds(comparison, rounds)
    outcome.add_to(report)
    report.figures["by_clock"][name] = outcome.ratio
    report.figures["hostile_ends"] = beside.ends
    report.figures["hostile_floor"] = median(ratios(outcome.besides, outcome.limits))
