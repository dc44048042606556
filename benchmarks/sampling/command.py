# SPDX-License-Identifier: Apache-2.0
"""The command `stratakv bench sampling`; the package's docstring describes the measurements."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...engine.batch.batch_update import AddedRow, BatchUpdate
from ...engine.request.sampling_params import SamplingParams
from ...engine.sampling.processor_set import LogitsRows, ProcessorSet
from ...engine.sampling.processors.base import ProcessorContext
from ...engine.sampling.sampler import Sampler
from ..harness.comparison import Comparison, WrongWork, take_rounds
from ..harness.gate import Gate
from ..harness.plots import add_gate_legend, caption, draw_gated, new_figure, save_figure
from ..harness.report import Report, median, print_table, ratios, run_and_tell
from ..harness.timer import Timer
from .grammar_step import grammar_step
from .hostile import hostile_beside

GREEDY, FEATURES, PROCESSORS, GRAMMAR, HOSTILE = (
    "greedy_over_argmax", "all_features_over_argmax_softmax", "processors_over_transformers",
    "grammar_step", "hostile_p99",
)  # fmt: skip
GATES = {
    GREEDY: Gate(most=1.05),
    FEATURES: Gate(most=4.0),
    PROCESSORS: Gate(least=5.0),
    GRAMMAR: Gate(most=1.05),
    HOSTILE: Gate(most=1.2),
}
THEIR_ROWS = 16
END = 2  # the token id that ends an answer
PROMPT, OUTPUT = 256, 64  # tokens of each request's prompt and output


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run."""

    rows: int
    vocab_size: int
    rounds: int
    decodes: tuple[int, ...]  # numbers of requests in the embedded model's decode steps
    step_rounds: int  # rounds of the decode steps
    hostile_steps: int  # measured steps during hostile grammars
    hostile_rounds: int


FULL = Scale(256, 151_936, 11, (1, 4, 16, 64), 41, 400, 9)
QUICK = Scale(16, 32_000, 3, (4,), 5, 40, 3)


class Requests:
    """The requests of a batch, each with its own sampling parameters, and their logits."""

    def __init__(self, scale: Scale) -> None:
        random = np.random.default_rng(7)
        self.scale = scale
        self.rows = np.arange(scale.rows)
        self.texts = random.integers(3, scale.vocab_size, (scale.rows, PROMPT + OUTPUT))
        self.biases = random.integers(3, scale.vocab_size, (scale.rows, 8))
        self.bad_words = random.integers(3, scale.vocab_size, (scale.rows, 4))
        self.bad_words[:, 1] = self.texts[:, -1]  # begins a banned pair
        logits = random.standard_normal((scale.rows, scale.vocab_size), np.float32)
        self.logits = torch.from_numpy(logits).mul_(3.0)

    def update(self, **wishes: Any) -> BatchUpdate:
        """Return an update that adds all requests, with `wishes` added to their parameters."""
        added = []
        for row, text in enumerate(self.texts):
            params = SamplingParams(max_tokens=1024, **self._own(row, wishes))
            prompt = text[:PROMPT].astype(np.int32)
            added.append(AddedRow(row, params, prompt, text[PROMPT:].tolist()))
        return BatchUpdate(len(added), (), added, ())

    def _own(self, row: int, wishes: dict[str, Any]) -> dict[str, Any]:
        if wishes.get("temperature") == 0.0:
            return wishes
        one, *two = self.bad_words[row].tolist()
        own = {
            "repetition_penalty": 1.1 + row / 1000,
            "min_p": 0.05,
            "min_tokens": 100,
            "bad_words_token_ids": ((one,), tuple(two[:2])),
            "logit_bias": dict.fromkeys(self.biases[row].tolist(), 1.5),
        }
        return own | wishes


class TimedComparison(NamedTuple):
    """A comparison, and the timer of each side."""

    comparison: Comparison
    ours: Timer
    limit: Timer

    def take(self, report: Report, rounds: int) -> None:
        """Measure `rounds` rounds, and add the figures in processor time and in wall-clock time."""
        take_rounds(self.comparison, rounds).add_to(report)
        # The first call of each side is a warm-up and left out.
        clock = median(ratios(self.ours.by_clock[1:], self.limit.by_clock[1:]))
        report.figures["by_clock"][self.comparison.name] = clock


def greedy(requests: Requests) -> TimedComparison:
    """Compare a greedy batch with `argmax`; the sampler also checks that logits are finite."""
    sampler = _sampler(requests, temperature=0.0)
    expected = requests.logits.argmax(dim=-1).tolist()
    ours_timer, limit_timer = Timer(), Timer()

    def ours() -> float:
        made: list[Any] = []
        seconds = ours_timer.rate_of(
            lambda: made.append(sampler.sample(requests.logits, requests.rows))
        )
        if made[0].token_ids != expected:
            raise WrongWork("a greedy token is not the likeliest one")
        return seconds

    limit = partial(limit_timer.rate_of, lambda: requests.logits.argmax(dim=-1).tolist())
    comparison = Comparison(GREEDY, "processor seconds", "argmax", ours, limit)
    return TimedComparison(comparison, ours_timer, limit_timer)


def all_features(requests: Requests) -> TimedComparison:
    """Compare rows with bans, biases, penalties, min-p, top-k, top-p, temperature and seeds."""
    sampler = _sampler(
        requests, temperature=0.8, top_k=50, top_p=0.95, presence_penalty=0.3,
        frequency_penalty=0.2, seed=5,
    )  # fmt: skip
    ours_timer, limit_timer = Timer(), Timer()

    def ours() -> float:
        logits, made = requests.logits.clone(), []
        seconds = ours_timer.rate_of(lambda: made.append(sampler.sample(logits, requests.rows)))
        banned = requests.bad_words[:, [0, 2]]  # with the end of each banned pair
        tokens = np.array(made[0].token_ids)
        if not all(made[0].has_choice) or (tokens[:, None] == banned).any() or END in tokens:
            raise WrongWork("a token was drawn that its request bans")
        return seconds

    def limit() -> float:
        logits = requests.logits
        return limit_timer.rate_of(lambda: (logits.softmax(dim=-1), logits.argmax(dim=-1).tolist()))

    comparison = Comparison(FEATURES, "processor seconds", "softmax and argmax", ours, limit)
    return TimedComparison(comparison, ours_timer, limit_timer)


def processors(requests: Requests) -> TimedComparison:
    """Compare StrataKV's logits processors with those of transformers, for the same five changes to
    the logits of each row. The time of transformers' processors grows with the rows, so their batch
    has only THEIR_ROWS rows."""
    scale = requests.scale
    context = ProcessorContext(scale.rows, scale.vocab_size, (END,))
    batch = ProcessorSet.built_in(context)
    update = requests.update(temperature=1.0)
    batch.update_state(update)
    lists = [_their_processors(added) for added in update.added[:THEIR_ROWS]]
    texts = torch.from_numpy(requests.texts)
    belongs = LogitsRows(requests.rows)

    def apply(logits: Tensor) -> Tensor:
        return batch.after_temperature(batch.before_choice(logits, belongs), belongs)

    def row_by_row(logits: Tensor) -> list[Tensor]:
        return [one(texts[row : row + 1], logits[row : row + 1]) for row, one in enumerate(lists)]

    ours = apply(requests.logits.clone())
    for row, one in enumerate(row_by_row(requests.logits.clone())):
        if not torch.allclose(ours[row], one[0], rtol=1e-5, atol=1e-5):
            raise WrongWork(f"our processors and those of transformers differ in row {row}")

    ours_timer, their_timer = Timer(scale.rows), Timer(len(lists))

    def rate(timer: Timer, work: Callable[[Tensor], object], rows: int) -> float:
        logits = requests.logits[:rows].clone()
        return timer.rate_of(lambda: work(logits))

    comparison = Comparison(
        PROCESSORS, "rows a processor second", "transformers",
        partial(rate, ours_timer, apply, scale.rows),
        partial(rate, their_timer, row_by_row, len(lists)),
    )  # fmt: skip
    return TimedComparison(comparison, ours_timer, their_timer)


def _sampler(requests: Requests, **wishes: Any) -> Sampler:
    sampler = Sampler(requests.scale.rows, requests.scale.vocab_size, (END,), seed=0)
    sampler.apply_batch_update(requests.update(**wishes))
    return sampler


def _their_processors(added: AddedRow) -> Any:
    """Return transformers' processors for one request's parameters, in StrataKV's order."""
    from transformers.generation import logits_process as theirs

    params = added.params
    bad_words = [list(ids) for ids in params.bad_words_token_ids]
    biases: Any = [[[token], bias] for token, bias in params.logit_bias]
    return theirs.LogitsProcessorList(
        [
            theirs.MinNewTokensLengthLogitsProcessor(PROMPT, params.min_tokens, [END]),
            theirs.NoBadWordsLogitsProcessor(bad_words, eos_token_id=None),
            theirs.SequenceBiasLogitsProcessor(biases),
            theirs.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
            theirs.MinPLogitsWarper(params.min_p),
        ]
    )


def print_sampling(report: Report) -> None:
    """Print, for each figure, the values of the two sides, the ratio and the gate."""
    rows = []
    for name, gate in GATES.items():
        comparison, ratio = report.figures["contests"][name], report.ratios[name]
        sides = [f"{comparison[key]:.4g}" for key in ("median", "limit_median")]
        spread = "{:.2f} to {:.2f}".format(*report.figures["spreads"][name])
        clock = f"{report.figures['by_clock'][name]:.3f}"
        verdict = f"{gate.wanted} {gate.verdict(ratio)}"
        rows.append([name, *sides, f"{ratio:.3f}", spread, clock, verdict])
    columns = ["what", "ours", "theirs", "ratio", "quartiles", "by the clock", "gate"]
    title = "From logits to tokens on the CPU, in turn (seconds, or rows a second)"
    print_table(title, columns, rows)
    steps = [
        [str(rows), f"{one['seconds'] * 1e3:.2f}", f"{one['ratio']:.3f}", f"{one['by_clock']:.3f}"]
        for rows, one in report.figures["grammar_steps"].items()
    ]
    columns = ["requests", "a step without, ms", "ratio", "by the clock"]
    print_table("Steps of decodes with a JSON schema over those without", columns, steps)
    ends = [[name, one] for name, one in report.figures["hostile_ends"].items()]
    floor = f"beside plain arithmetic {HOSTILE} is {report.figures['hostile_floor']:.2f}"
    print_table(f"How hostile grammars ended; {floor}", ["grammar", "its request"], ends)


def plot_sampling(report: Report, path: Path) -> Path:
    """Draw a bar and the gate for each ratio."""
    figure, [[axes]] = new_figure(1, 1, 3.0)
    wanted = {f"{name} ({gate.wanted})": gate for name, gate in GATES.items()}
    ratios = {label: report.ratios[name] for label, name in zip(wanted, GATES, strict=True)}
    draw_gated(axes, ratios, wanted)
    caption(axes, "From logits to tokens on the CPU", "ratio")
    add_gate_legend(figure)
    return save_figure(figure, report.environment, path)


def run(arguments: argparse.Namespace) -> int:
    """Measure all figures; return 0, or 1 after printing an error."""
    report = Report("sampling", "stratakv bench sampling" + " --quick" * arguments.quick)
    work = partial(measure, report, QUICK if arguments.quick else FULL)
    return run_and_tell(report, arguments.out, work, print_sampling, plot_sampling, WrongWork)


@torch.inference_mode()
def measure(report: Report, scale: Scale) -> None:
    """Measure all figures and fill the report. Raises WrongWork if two sides' results differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _measure(report, scale)
    finally:
        torch.set_num_threads(threads)


def _measure(report: Report, scale: Scale) -> None:
    report.figures |= {
        "plan": {"rows": scale.rows, "vocab_size": scale.vocab_size, "threads": 1},
        "contests": {},
        "spreads": {},
        "by_clock": {},
    }
    requests = Requests(scale)
    for make in (greedy, all_features, processors):
        make(requests).take(report, scale.rounds)
    grammar_step(report, GRAMMAR, scale.decodes, scale.step_rounds)
    hostile_beside(report, HOSTILE, scale.hostile_steps, scale.hostile_rounds)
