# SPDX-License-Identifier: Apache-2.0
"""An engine with tiers and the same one without, in alternating pairs with equal prompts.

Every pair must give the same tokens on both sides. Engines compute in other batches when they find
other things cached, so rounding differs, and where the two likeliest tokens are as good as equal
either may come: such a tie is counted, anything else stops the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..harness.report import median
from .engines import MeasuredEngine, Prompts, Run

# Between log-probabilities; in float32 the last bits of this model's are a hundred times smaller.
TIE = 1e-3

Ask = Callable[[MeasuredEngine, Prompts], Run]


class OtherTokens(RuntimeError):
    """With tiers an engine said something else than without."""


@dataclass(slots=True)
class Pairs:
    """The runs of all pairs. `window`: so many neighbours together hold what is to be compared."""

    with_tiers: list[Run] = field(default_factory=list)
    without: list[Run] = field(default_factory=list)
    ties: int = 0
    window: int = 1

    def ratio(self, cost: Callable[[Run], float]) -> float:
        """The median over all windows of what it costs without tiers over what it costs with."""
        sides = [[cost(run) for run in runs] for runs in (self.without, self.with_tiers)]
        windows = range(len(self.without) - self.window + 1)
        return median(
            [
                sum(sides[0][i : i + self.window]) / sum(sides[1][i : i + self.window])
                for i in windows
            ]
        )

    @property
    def cpu_ratio(self) -> float:
        """Of processor seconds. Both sides did the same tokens, so it is the one for each token."""
        return self.ratio(lambda run: run.cpu_seconds)

    @property
    def wall_ratio(self) -> float:
        return self.ratio(lambda run: run.wall_seconds)

    def figures(self, tokens: int) -> dict[str, Any]:
        """What the JSON holds of them; `tokens` are those of one run, prompts and outputs."""
        found: dict[str, int] = {}
        for run in self.with_tiers:
            for tier, count in run.cached_tokens.items():
                found[tier] = found.get(tier, 0) + count
        sides = {"with_tiers": self.with_tiers, "without": self.without}
        return {
            "pairs": len(self.without),
            "window": self.window,
            "ties": self.ties,
            "tokens": tokens,
            "cached_tokens": found,
            "cpu_ratio": self.cpu_ratio,
            "wall_ratio": self.wall_ratio,
            **{
                f"cpu_seconds_per_token_{side}": median([run.cpu_seconds for run in runs]) / tokens
                for side, runs in sides.items()
            },
            **{
                f"wall_seconds_{side}": median([run.wall_seconds for run in runs])
                for side, runs in sides.items()
            },
        }


def take_pairs(
    engine: MeasuredEngine,
    plain: MeasuredEngine,
    prompts_of: Callable[[int], Prompts],
    ask: Ask,
    *,
    pairs: int,
    warm_up: int,
    told: Callable[[], None],
    window: int = 1,
    more: int = 0,
    needs_more: Callable[[Pairs], bool] = lambda _: False,
) -> Pairs:
    """Who comes first changes from pair to pair. Where those taken leave something open, `more` of
    them are. Raises OtherTokens and RunFailed."""
    taken = Pairs(window=window)
    number, total = -1, warm_up + pairs
    while (number := number + 1) < total:
        prompts = prompts_of(number)
        if number % 2:
            run, without = ask(engine, prompts), ask(plain, prompts)
        else:
            without, run = ask(plain, prompts), ask(engine, prompts)
        taken.ties += count_ties(plain, prompts, run.token_ids, without.token_ids)
        if number >= warm_up:
            taken.with_tiers.append(run)
            taken.without.append(without)
            if len(taken.without) == pairs and needs_more(taken):
                total += more
        told()
    return taken


def count_ties(
    plain: MeasuredEngine, prompts: Prompts, got: list[list[int]], expected: list[list[int]]
) -> int:
    """How many answers differ by a tie. Raises OtherTokens where one differs otherwise."""
    ties = 0
    for prompt, tokens, others in zip(prompts, got, expected, strict=True):
        if tokens == others:
            continue
        same = next(
            (i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None
        )
        if same is None or not _is_tie(
            plain, [*prompt, *others[:same]], tokens[same], others[same]
        ):
            raise OtherTokens(
                f"to a prompt of {len(prompt)} tokens an engine with tiers answered {tokens}, "
                f"without them {others}"
            )
        ties += 1
    return ties


def _is_tie(plain: MeasuredEngine, context: Sequence[int], token: int, other: int) -> bool:
    """Whether these two are the likeliest tokens after `context`, one as likely as the other."""
    likeliest = plain.likeliest(context, 2)
    return likeliest.keys() == {token, other} and abs(likeliest[token] - likeliest[other]) < TIE
