# SPDX-License-Identifier: Apache-2.0
"""A drill: which faults befall which tiers of a running engine, on purpose.

Its text form is that of `plan.py`, where a rule may begin with the tier that it is for, and
one item may be the seed of the choice of faults:

    load:error=0.1                       every tier below the slab
    ssd:load:delay=0.2,net:store:hang=1  one each
    load:error=0.1,seed=7                the same calls give the same faults again; else 0

Knows nothing of how a fault is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..base import StoreTier
from ..errors import TierConfigError
from .plan import FaultPlan, parse_faults, parse_rule
from .store import FaultyStore

MAX_SEED = 2**63 - 1
_SEED = "seed="


@dataclass(frozen=True, slots=True)
class Drill:
    """The plan of each tier that is to fail, by name."""

    plans: Mapping[str, FaultPlan]
    seed: int = 0

    def wrap(self, store: StoreTier) -> StoreTier:
        """The store with its faults, if it has any."""
        plan = self.plans.get(store.name)
        return store if plan is None else FaultyStore(store, plan, seed=self.seed)


def parse_drill(text: str, tiers: Sequence[str]) -> Drill:
    """The drill of a text for the tiers below the slab of these names. Raises TierConfigError."""
    rules: dict[str, list[str]] = {}
    seed: int | None = None
    for item in [part.strip() for part in text.split(",")]:
        if item.startswith(_SEED):
            seed = _parse_seed(item, seed)
            continue
        tier, _, rule = item.partition(":")
        if ":" not in rule:
            tier, rule = "", item
            parse_rule(rule)
        elif tier not in tiers:
            known = (
                f"those below cpu are {', '.join(tiers)}" if tiers else "there is none below cpu"
            )
            raise TierConfigError(f"{item!r} is for a tier {tier!r} that cannot fail; {known}")
        for name in [tier] if tier else tiers:
            rules.setdefault(name, []).append(rule)
    if not tiers:
        raise TierConfigError(
            "faults befall tiers below cpu, and there is none; add one or drop them"
        )
    return Drill({name: parse_faults(",".join(rules[name])) for name in rules}, seed or 0)


def _parse_seed(item: str, earlier: int | None) -> int:
    digits = item.removeprefix(_SEED)
    if earlier is not None or not (digits.isascii() and digits.isdecimal()):
        raise TierConfigError(f"a drill takes one seed, a whole number as in seed=7, not {item!r}")
    if len(digits) > len(str(MAX_SEED)) or int(digits) > MAX_SEED:
        raise TierConfigError(f"a drill's seed is at most {MAX_SEED}, not {digits[:40]}")
    return int(digits)
