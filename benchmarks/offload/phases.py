# SPDX-License-Identifier: Apache-2.0
"""The phases of `stratakv bench offload`: what is asked in each, and what no figure is made of."""

from __future__ import annotations

from collections.abc import Callable

from ..harness.served import Answer, ServedModel
from .report import WARM_PHASES, Phase, Plan

# What a warm phase must find of the document in its tier; the rest is block rounding.
_EXPECTED_HIT = 0.95
_PAID_METRIC = "stratakv:load_seconds_paid_total"

Ask = Callable[[str, int, str], Answer]


class BenchmarkFailed(RuntimeError):
    """A phase gave other tokens, or was not answered from its tier."""


def warm_up(server: ServedModel) -> None:
    """The first request of a process pays for lazy initialisation; that is not what is measured."""
    server.ask([1, 2, 3], 2)


def ask_cold(
    server: ServedModel, ask: Ask, count: int, phase: Phase
) -> dict[tuple[str, int], list[int]]:
    """Every question of every warm phase with empty caches; the tokens all must agree on."""
    warm_up(server)
    expected = {}
    for document in range(count):
        for name in WARM_PHASES:
            server.reset("all")
            answer = ask("cold", document, name)
            phase.answers.append(answer)
            expected[name, document] = answer.token_ids
    server.reset("all")
    return expected


def ask_pool(server: ServedModel, ask: Ask, count: int, phase: Phase) -> None:
    """Each document right after another question about it."""
    for document in range(count):
        ask("pool: first question", document, "prime")
        phase.answers.append(ask("pool", document, "pool"))


def ask_tier(server: ServedModel, ask: Ask, count: int, tier: str, phase: Phase) -> None:
    """Each document in turn, so that the ones before it have taken its place in the pool."""
    paid = server.metric(_PAID_METRIC)
    for document in range(count):
        phase.answers.append(ask(tier, document, tier))
    phase.seconds_loading = server.metric(_PAID_METRIC) - paid


def check_phases(
    plan: Plan, phases: dict[str, Phase], expected: dict[tuple[str, int], list[int]]
) -> None:
    """Raise BenchmarkFailed unless tokens agree and each phase was answered from its tier."""
    for answer in phases["cold"].answers:
        if answer.cached_tokens:
            raise BenchmarkFailed(f"a cold request found {answer.cached_tokens} cached tokens")
    for name in WARM_PHASES:
        for document, answer in enumerate(phases[name].answers):
            if answer.token_ids != expected[name, document]:
                raise BenchmarkFailed(
                    f"phase {name}, document {document + 1}: tokens {answer.token_ids} differ from "
                    f"the cold ones {expected[name, document]}"
                )
            found = answer.cached_by_tier.get(name, 0)
            if found < _EXPECTED_HIT * plan.prefix_tokens:
                raise BenchmarkFailed(
                    f"phase {name}, document {document + 1}: {found} of {plan.prefix_tokens} "
                    f"tokens came from there, the others from {answer.cached_by_tier}"
                )
