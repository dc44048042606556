# SPDX-License-Identifier: Apache-2.0
"""The plan of a drill: which calls of a store fail, how, and how often.

The text form of a plan is a list of rules CALL:KIND=VALUE, separated by commas:

    load:error=0.1          a tenth of the calls raise InjectedFault, or their futures do
    lookup:every=7          every seventh call raises InjectedFault
    store:busy=0.2          a fifth of the calls raise TierBusy, as from a full queue
    load:delay=0.01..0.2    each call begins 0.01 to 0.2 s later; also 0.05, or exp(0.05) as mean
    load:hang=0.01          a hundredth of the futures do not end before the store is closed
    load:miss=0.3           three tenths of the blocks are answered MISS, or not stored by `store`
    store:partial=0.5       in half of the batches only a leading part is done
    load:reorder=0.5        half of the completions wait until a later completion has passed them

`FaultyStore` carries out the plan."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import TierConfigError

CALLS = ("lookup", "load", "store", "drop")
BATCHES = ("load", "store")  # calls whose future can be late
# Kind of fault → the calls to which the kind applies.
KINDS = {
    "error": CALLS,
    "every": CALLS,
    "busy": BATCHES,
    "delay": BATCHES,
    "hang": BATCHES,
    "miss": ("lookup", "load", "store"),
    "partial": BATCHES,
    "reorder": BATCHES,
}
MAX_DELAY_SECONDS = 3600.0
MAX_EVERY = 10**9

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_PROBABILITY = re.compile(_NUMBER, re.ASCII)
_DELAYS = [
    re.compile(form, re.ASCII)
    for form in (_NUMBER, rf"{_NUMBER}\.\.{_NUMBER}", rf"exp\({_NUMBER}\)")
]


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of fault for a kind of call. `value` is a probability; for `every` a number of calls;
    for `delay` the exact seconds, or the least if `upper` is set, or the mean if `exponential`."""

    call: str
    kind: str
    value: float
    upper: float | None = None
    exponential: bool = False


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """A plan of faults, with at most one rule for each call and kind of fault."""

    rules: tuple[Rule, ...] = ()

    def find_rule(self, call: str, kind: str) -> Rule | None:
        """Return the rule of this kind for this call, or None."""
        for rule in self.rules:
            if rule.call == call and rule.kind == kind:
                return rule
        return None


def parse_faults(text: str) -> FaultPlan:
    """Parse a plan; an empty text gives no rules. Raises TierConfigError."""
    rules: list[Rule] = []
    for part in text.split(",") if text.strip() else ():
        rule = parse_rule(part.strip())
        if FaultPlan(tuple(rules)).find_rule(rule.call, rule.kind) is not None:
            raise TierConfigError(
                f"{rule.call}:{rule.kind} stands twice in the faults {text!r}; remove one of them"
            )
        rules.append(rule)
    return FaultPlan(tuple(rules))


def parse_rule(text: str) -> Rule:
    """Parse a rule, CALL:KIND=VALUE. Raises TierConfigError."""
    call, colon, rest = text.partition(":")
    kind, equals, value = rest.partition("=")
    if not (colon and equals):
        raise TierConfigError(
            f"a fault is written CALL:KIND=VALUE, as in load:error=0.1, not {text!r}"
        )
    if call not in CALLS:
        raise TierConfigError(f"faults befall {', '.join(CALLS)}; there is no call {call!r}")
    if kind not in KINDS:
        raise TierConfigError(f"the kinds of faults are {', '.join(KINDS)}, not {kind!r}")
    if call not in KINDS[kind]:
        raise TierConfigError(f"{kind} can befall {', '.join(KINDS[kind])}, not {call}")
    if kind == "delay":
        return _parse_delay(call, value)
    if kind == "every":
        if not _PROBABILITY.fullmatch(value) or "." in value or not 1 <= int(value) <= MAX_EVERY:
            raise TierConfigError(f"every takes a number of calls from 1 on, not {value!r}")
        return Rule(call, kind, int(value))
    if not _PROBABILITY.fullmatch(value) or float(value) > 1.0:
        raise TierConfigError(f"{kind} takes a probability from 0 to 1, not {value!r}")
    return Rule(call, kind, float(value))


def _parse_delay(call: str, text: str) -> Rule:
    constant, between, exponential = (form.fullmatch(text) for form in _DELAYS)
    found = constant or between or exponential
    seconds = [float(each) for each in found.groups()] if found else []
    if not seconds or seconds != sorted(seconds) or seconds[-1] > MAX_DELAY_SECONDS:
        raise TierConfigError(
            "delay takes seconds (0.05), a range of them (0.01..0.2) or a mean (exp(0.05)), up to "
            f"{MAX_DELAY_SECONDS:g}, not {text!r}"
        )
    return Rule(call, "delay", seconds[0], seconds[1] if between else None, bool(exponential))
