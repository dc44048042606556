# SPDX-License-Identifier: Apache-2.0
"""The command `stratakv bench speculation`; the package's docstring describes the measurements."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...engine.config.engine_options import EMBEDDED_MODEL, engine_config
from ...engine.config.speculative_config import DRAFT_MODEL, EAGLE
from ...engine.core.engine_core import EngineCore
from ...engine.request.core_messages import AddRequest
from ...engine.request.request import pack_token_ids
from ...engine.request.sampling_params import SamplingParams
from ...engine.text.tokenizer import Tokenizer
from ..harness.comparison import Comparison, Outcome, WrongWork, take_rounds
from ..harness.gate import Gate
from ..harness.plots import (
    COLOURS,
    REFERENCE,
    add_legend,
    caption,
    draw_bars,
    new_figure,
    save_figure,
)
from ..harness.report import Report, median, print_table, ratios, run_and_tell
from ..harness.timer import Timer
from .models import make_deep, make_random_head, make_unrelated
from .parts import prompts_of
from .quotes import QUOTE, Quotes
from .texts import ANSWER, UNIQUE, Asked, repetitive, unique

IN_PARTS = "first_token_in_parts"
GATES = {
    "speedup_repetitive_1": Gate(least=1.8),
    "speedup_repetitive_16": Gate(least=1.3),
    "speedup_draft_model_1": Gate(least=1.8),
    "speedup_draft_model_16": Gate(least=1.3),
    IN_PARTS: Gate(most=0.15),
    "speedup_where_it_does_not_pay": Gate(least=0.98),
    "speedup_where_an_eagle_head_does_not_pay": Gate(least=0.95),
}
METHODS = ("ngram", "suffix")
# Proposer → its label in the picture.
LABELS = {"ngram": "n-gram", "suffix": "suffix", DRAFT_MODEL: "draft model", EAGLE: "EAGLE head"}
NOT_PAYING = "speedup_where_it_does_not_pay"
EAGLE_NOT_PAYING = "speedup_where_an_eagle_head_does_not_pay"


AskedWith = tuple[Asked, SamplingParams]
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of work of a run."""

    rounds: int
    sizes: tuple[int, ...]  # numbers of concurrent requests
    answer: int  # tokens of an answer
    warm_rounds: int  # uncounted rounds, in which the benefit of drafts is measured
    prompt: int  # tokens of the prompt that is sent in parts


FULL = Scale(15, (1, 16), ANSWER, 3, 3600)
QUICK = Scale(3, (1, 4), 32, 1, 600)


@dataclass(slots=True)
class Answers:
    """An engine that answers different prompts in each round."""

    core: EngineCore
    rounds: Sequence[Sequence[AskedWith]]
    timer: Timer
    texts: dict[str, list[int]] = field(default_factory=dict)
    num_rounds: int = 0

    def run(self) -> float:
        """Run one round; return tokens per processor second of all threads."""
        asked = self.rounds[self.num_rounds]
        self._answer("prompt", [(each, _ONE_TOKEN) for each, _ in asked])

        def work() -> None:
            self.texts |= self._answer("answer", asked)

        rate = self.timer.rate_of(work)
        self.num_rounds += 1
        return rate

    def _answer(self, what: str, asked: Sequence[AskedWith]) -> dict[str, list[int]]:
        """Answer all requests. Raises WrongWork if a request fails."""
        texts: dict[str, list[int]] = {}
        for number, (each, params) in enumerate(asked):
            name = f"{what} {self.num_rounds}/{number}"
            texts[name] = []
            if self.core.add(AddRequest(name, pack_token_ids(each.prompt), params)):
                raise WrongWork(f"request {name} was refused")
        left = len(texts)
        while left:
            for output in self.core.step():
                texts[output.request_id] += output.new_token_ids
                left -= output.finish_reason is not None
                if output.error:
                    raise WrongWork(f"request {output.request_id} failed: {output.error}")
        return texts


def params_of(asked: Asked, number: int, length: int, *, is_drawn: bool) -> SamplingParams:
    """Return the parameters of a request whose answer has `length` tokens."""
    if is_drawn:
        return SamplingParams(max_tokens=length, temperature=1.0, seed=number, ignore_eos=True)
    quote = asked.quote[:length]
    return SamplingParams(
        max_tokens=length, temperature=0.0, ignore_eos=True, extra_args={QUOTE: quote}
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """A model, and the proposer of draft tokens for the model."""

    method: str
    model: Path = EMBEDDED_MODEL
    draft: Path | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The engine options for the proposer and the proposer's model."""
        draft = {} if self.draft is None else {"speculative_model": str(self.draft)}
        return {"speculative_method": self.method, **draft}


@contextmanager
def answers(rounds: Sequence[Sequence[AskedWith]], pair: Pair) -> Iterator[Answers]:
    """Yield an engine with the model and proposer of `pair`."""
    count, length = len(rounds[0]), UNIQUE + ANSWER + 64
    config = engine_config(pair.model, {
        "dtype": "float32", "num_threads": 1, "max_num_seqs": count, "block_size": 16,
        "num_blocks": (count + 1) * (length // 16 + 2) * 3, "max_model_len": length,
        "max_num_batched_tokens": 2048, **pair.options,
        "logits_processors": f"{Quotes.__module__}:{Quotes.__name__}",
    })  # fmt: skip
    core = EngineCore(config, max_steps_in_flight=1)
    try:
        yield Answers(core, rounds, Timer(sum(each.max_tokens for _, each in rounds[0])))
    finally:
        core.shutdown(5.0)


def compare(
    report: Report, name: str, scale: Scale, count: int, pair: Pair, *, is_drawn: bool
) -> Outcome:
    """Compare `count` concurrent requests with the drafts of `pair` and without drafts. Raises
    WrongWork if more than an eighth of the answers differ."""
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    num_rounds = scale.warm_rounds + 1 + scale.rounds
    asked = (unique if is_drawn else repetitive)(tokenizer, count * num_rounds)
    if pair.draft is not None:  # a pair with a draft model needs no quotation
        asked = [each._replace(quote=[]) for each in asked]
    with_params = [
        (each, params_of(each, number, scale.answer, is_drawn=is_drawn))
        for number, each in enumerate(asked)
    ]
    rounds = [with_params[at : at + count] for at in range(0, len(with_params), count)]
    with ExitStack() as stack:
        ours = stack.enter_context(answers(rounds, pair))
        plain = stack.enter_context(answers(rounds, Pair("none", pair.model)))
        for _ in range(scale.warm_rounds):
            ours.run()
            plain.run()
        comparison = Comparison(
            name, "tokens in a processor second", "without drafts", ours.run, plain.run
        )
        outcome = take_rounds(comparison, scale.rounds)
        same = sum(ours.texts[key] == plain.texts[key] for key in plain.texts)
        speculation = ours.core.scheduler.speculation
        assert speculation is not None
        report.figures["cases"][name] = {
            "requests": count,
            "answers": len(plain.texts),
            "method": pair.method,
            "ratio": outcome.ratio,
            "by_clock": median(ratios(ours.timer.by_clock[-scale.rounds :],
                                      plain.timer.by_clock[-scale.rounds :])),
            "same_answers": same,
            "speculation": speculation.stats(),
        }  # fmt: skip
    # Some answers may differ, because steps of one token and of several tokens may round
    # differently, which matters for nearly equally likely tokens.
    if (differ := len(plain.texts) - same) > len(plain.texts) // 8:
        raise WrongWork(f"{name}: {differ} of {len(plain.texts)} answers differ from those without")
    return outcome


def compare_parts(report: Report, scale: Scale) -> None:
    """Compare the time to the first token of a prompt that is sent in parts with that of a whole
    prompt. Raises WrongWork if the tokens differ."""
    with prompts_of(scale.prompt) as prompts:
        prompts.send_whole()
        prompts.send_parts()
        comparison = Comparison(
            IN_PARTS, "seconds", "sent whole", prompts.send_parts, prompts.send_whole
        )
        take_rounds(comparison, scale.rounds).add_to(report)
        if prompts.said["parts"] != prompts.said["whole"]:
            raise WrongWork("prompts in parts are answered otherwise than whole ones")


def run(arguments: argparse.Namespace) -> int:
    """Measure all figures; return 0, or 1 after printing an error."""
    report = Report("speculation", "stratakv bench speculation" + " --quick" * arguments.quick)
    work = partial(measure, report, QUICK if arguments.quick else FULL)
    return run_and_tell(report, arguments.out, work, print_speculation, plot_speculation, WrongWork)


def measure(report: Report, scale: Scale) -> None:
    """Measure all figures and fill the report; a figure is the lowest ratio of all methods."""
    report.figures |= {"plan": {"rounds": scale.rounds}, "cases": {}, "contests": {}, "spreads": {}}
    few, many = scale.sizes
    pairs = [Pair(method) for method in METHODS]
    for size, name in ((few, "speedup_repetitive_1"), (many, "speedup_repetitive_16")):
        taken = [
            compare(report, f"{name}_{pair.method}", scale, size, pair, is_drawn=False)
            for pair in pairs
        ]
        _add_worst(report, name, taken)
    with TemporaryDirectory() as folder:
        deep = make_deep(Path(folder) / "deep")
        right = Pair(DRAFT_MODEL, deep, EMBEDDED_MODEL)
        for size, name in ((few, "speedup_draft_model_1"), (many, "speedup_draft_model_16")):
            case = compare(report, f"{name}_right", scale, size, right, is_drawn=False)
            _add_worst(report, name, [case])
        pairs.append(Pair(DRAFT_MODEL, deep, make_unrelated(Path(folder) / "unrelated")))
        taken = [
            compare(report, f"{NOT_PAYING}_{size}_{pair.method}", scale, size, pair, is_drawn=True)
            for size in scale.sizes
            for pair in pairs
        ]
        head = Pair(EAGLE, deep, make_random_head(Path(folder) / "head"))
        of_head = [
            compare(report, f"{EAGLE_NOT_PAYING}_{size}", scale, size, head, is_drawn=True)
            for size in scale.sizes
        ]
    _add_worst(report, NOT_PAYING, taken)
    _add_worst(report, EAGLE_NOT_PAYING, of_head)
    compare_parts(report, scale)


def _add_worst(report: Report, name: str, taken: Sequence[Outcome]) -> None:
    for outcome in taken:
        outcome.add_to(report)
        del report.ratios[outcome.comparison.name]
    worst = min(taken, key=lambda outcome: outcome.ratio)
    report.ratios[name] = worst.ratio
    report.figures["spreads"][name] = report.figures["spreads"][worst.comparison.name]


def print_speculation(report: Report) -> None:
    """Print the tables of all cases and of the gates."""
    rows = []
    for name, case in report.figures["cases"].items():
        counts, compared = case["speculation"], report.figures["contests"][name]
        drafts = counts["num_draft_tokens"]
        accepted = f"{counts['num_accepted_tokens'] / drafts:.2f}" if drafts else ""
        spread = "{:.2f} to {:.2f}".format(*report.figures["spreads"][name])
        rates = [f"{compared[side]:,.0f}" for side in ("median", "limit_median")]
        rows.append([
            name, *rates, f"{case['ratio']:.3f}", spread, f"{case['by_clock']:.3f}", accepted,
            f"{case['same_answers']} of {case['answers']}",
        ])  # fmt: skip
    columns = [
        "what", "tokens/s", "without", "ratio", "quartiles", "by the clock", "accepted", "the same",
    ]  # fmt: skip
    print_table("Answers with and without drafts, in turn; processor seconds", columns, rows)
    verdicts = [
        [name, f"{report.ratios[name]:.3f}", f"{gate.wanted} {gate.verdict(report.ratios[name])}"]
        for name, gate in GATES.items()
    ]
    print_table("The worst of the methods", ["what", "ratio", "gate"], verdicts)


def plot_speculation(report: Report, path: Path) -> Path:
    """Draw bars by proposer for one request and for many: texts with and without gain."""
    figure, [panels] = new_figure(1, 2, 3.6)
    cases: dict[str, dict[str, Any]] = report.figures["cases"]
    for axes, pays in zip(panels, (True, False), strict=True):
        shown = [case for name, case in cases.items() if _may_pay(name) == pays]
        sizes = sorted({case["requests"] for case in shown})
        ratios = {(case["method"], case["requests"]): case["ratio"] for case in shown}
        methods = [method for method in LABELS if any(method == each for each, _ in ratios)]
        draw_bars(
            axes,
            [f"{size} at once" if size > 1 else "one request" for size in sizes],
            {LABELS[method]: [ratios.get((method, size)) for size in sizes] for method in methods},
            [COLOURS[list(LABELS).index(method)] for method in methods],
            fmt="%.2f\N{MULTIPLICATION SIGN}",
        )
        axes.axhline(1.0, color=REFERENCE, linewidth=0.8, zorder=0)
        title = "Answers that quote or edit a text" if pays else "Words without an order"
        caption(
            axes, title, "", "" if axes is panels[1] else "tokens a second, over without drafts"
        )
    add_legend(figure, panels[1], len(LABELS))
    return save_figure(figure, report.environment, path)


def _may_pay(name: str) -> bool:
    return not name.startswith((NOT_PAYING, EAGLE_NOT_PAYING))
