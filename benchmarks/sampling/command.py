# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench sampling`: from the logits of 256 rows with 151,936 tokens to a token each.

On the CPU. A greedy batch against `argmax` alone; a random batch with every wish at once against
`softmax` and `argmax`; and the logits processors of the batch against those of transformers, which
have one request's parameters each and so run row by row. Both sides of a figure are taken in turn
and must agree; a ratio is the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engine.batch.batch_update import AddedRow, BatchUpdate
from ...engine.sampling.processors.base import ProcessorContext
from ...engine.sampling.sampler import LogitsRows, ProcessorSet, Sampler
from ...engine.sampling_params import SamplingParams
from ..harness.comparison import Comparison, Gate, WrongWork, take_rounds
from ..harness.plots import caption, draw_bars, new_figure, save_figure
from ..harness.report import Report, print_table, run_and_tell

GREEDY, FEATURES, PROCESSORS = (
    "greedy_over_argmax", "all_features_over_argmax_softmax", "processors_over_transformers",
)  # fmt: skip
GATES = {GREEDY: Gate(most=1.05), FEATURES: Gate(most=4.0), PROCESSORS: Gate(least=5.0)}
THEIR_ROWS = 16
END = 2  # the token that ends an answer
PROMPT, OUTPUT = 256, 64  # tokens of each request


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done."""

    rows: int
    vocab_size: int
    rounds: int


FULL, QUICK = Scale(256, 151_936, 11), Scale(16, 32_000, 3)


class Requests:
    """The requests of a batch, each with wishes of its own, and their logits."""

    def __init__(self, scale: Scale) -> None:
        random = np.random.default_rng(7)
        self.scale = scale
        self.rows = np.arange(scale.rows)
        self.texts = random.integers(3, scale.vocab_size, (scale.rows, PROMPT + OUTPUT))
        self.biases = random.integers(3, scale.vocab_size, (scale.rows, 8))
        self.bad_words = random.integers(3, scale.vocab_size, (scale.rows, 4))
        self.bad_words[:, 1] = self.texts[:, -1]  # one sequence that is about to be completed
        logits = random.standard_normal((scale.rows, scale.vocab_size), np.float32)
        self.logits = torch.from_numpy(logits).mul_(3.0)

    def update(self, **wishes: Any) -> BatchUpdate:
        """All of them come, with the wishes that differ where these ask for any."""
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


def seconds_of(work: Callable[[], object]) -> float:
    """By the wall clock."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def greedy(requests: Requests) -> Comparison:
    """A greedy batch: the sampler also looks whether the logits are finite."""
    sampler = _sampler(requests, temperature=0.0)
    expected = requests.logits.argmax(dim=-1).tolist()

    def ours() -> float:
        made: list[Any] = []
        seconds = seconds_of(lambda: made.append(sampler.sample(requests.logits, requests.rows)))
        if made[0].token_ids != expected:
            raise WrongWork("a greedy token is not the likeliest one")
        return seconds

    limit = partial(seconds_of, lambda: requests.logits.argmax(dim=-1).tolist())
    return Comparison(GREEDY, "seconds", "argmax", ours, limit)


def all_features(requests: Requests) -> Comparison:
    """Bans, biases, penalties, min-p, top-k, top-p, temperature and seeds of every row."""
    sampler = _sampler(
        requests, temperature=0.8, top_k=50, top_p=0.95, presence_penalty=0.3,
        frequency_penalty=0.2, seed=5,
    )  # fmt: skip

    def ours() -> float:
        logits, made = requests.logits.clone(), []
        seconds = seconds_of(lambda: made.append(sampler.sample(logits, requests.rows)))
        banned = requests.bad_words[:, [0, 2]]  # what the sequence of two ends with, too
        tokens = np.array(made[0].token_ids)
        if not all(made[0].has_choice) or (tokens[:, None] == banned).any() or END in tokens:
            raise WrongWork("a token was drawn that its request bans")
        return seconds

    def limit() -> float:
        logits = requests.logits
        return seconds_of(lambda: (logits.softmax(dim=-1), logits.argmax(dim=-1).tolist()))

    return Comparison(FEATURES, "seconds", "softmax and argmax", ours, limit)


def processors(requests: Requests) -> Comparison:
    """The same five changes of the logits of each row, by two sets of processors. Theirs take as
    long for each row, so a round of theirs is of some rows only."""
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

    def rate(work: Callable[[Tensor], object], rows: int) -> float:
        logits = requests.logits[:rows].clone()
        return rows / seconds_of(lambda: work(logits))

    ours_rate, their_rate = partial(rate, apply, scale.rows), partial(rate, row_by_row, len(lists))
    return Comparison(PROCESSORS, "rows a second", "transformers", ours_rate, their_rate)


def _sampler(requests: Requests, **wishes: Any) -> Sampler:
    sampler = Sampler(requests.scale.rows, requests.scale.vocab_size, (END,), seed=0)
    sampler.update(requests.update(**wishes))
    return sampler


def _their_processors(added: AddedRow) -> Any:
    """What transformers has for one request's wishes, in our order."""
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
    """What a person reads: both sides, ratio, gate."""
    rows = []
    for name, gate in GATES.items():
        comparison, ratio = report.figures["contests"][name], report.ratios[name]
        sides = [f"{comparison[key]:.4g}" for key in ("median", "limit_median")]
        spread = "{:.2f} to {:.2f}".format(*report.figures["spreads"][name])
        verdict = f"{gate.wanted} {gate.verdict(ratio)}"
        rows.append([name, comparison["unit"], *sides, f"{ratio:.3f}", spread, verdict])
    columns = ["what", "in", "ours", "theirs", "ratio", "quartiles", "gate"]
    print_table("From logits to tokens on the CPU, in turn", columns, rows)


def plot_sampling(report: Report, path: Path) -> Path:
    """A bar for each ratio, with its gate in words."""
    figure, [[axes]] = new_figure(1, 1, 3.6)
    names = [f"{name.replace('_', ' ')}\npromised {gate.wanted}" for name, gate in GATES.items()]
    draw_bars(axes, names, {"": [report.ratios[name] for name in GATES]}, fmt="%.2f", size=7)
    caption(axes, "From logits to tokens on the CPU", "", "ratio")
    return save_figure(figure, report.environment, path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options beside `--quick` and `--out`, which are the dispatcher's."""


def run(arguments: argparse.Namespace) -> int:
    """Take all figures; 0, or 1 with the reason on the terminal."""
    report = Report("sampling", "stratakv bench sampling" + " --quick" * arguments.quick)
    work = partial(measure, report, QUICK if arguments.quick else FULL)
    return run_and_tell(report, arguments.out, work, print_sampling, plot_sampling, WrongWork)


@torch.inference_mode()
def measure(report: Report, scale: Scale) -> None:
    """Fill the report. Raises WrongWork where a side made something else than the other."""
    threads = torch.get_num_threads()
    report.figures |= {
        "plan": {"rows": scale.rows, "vocab_size": scale.vocab_size, "threads": threads},
        "contests": {},
        "spreads": {},
    }
    requests = Requests(scale)
    for make in (greedy, all_features, processors):
        take_rounds(make(requests), scale.rounds).add_to(report)
