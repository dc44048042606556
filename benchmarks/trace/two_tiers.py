# SPDX-License-Identifier: Apache-2.0
"""Two tiers, replayed: a small one (the pool, or the slab) over a larger one that is written to.

    write-through  every block goes to both at once
    write-back     the upper tier's victims go below if the filter admits them; a block that is read
                   up leaves its copy below, so it is never written twice while that copy stays
    exclusive      the same, but a block that is read up leaves the lower tier

The prefix rule holds over both: the leading run that is in either tier is served, each block from
the upper one where that has it. What a policy of the lower tier is told: a block was used when it
was read up or when the upper tier gave it up. Sequential, prompt blocks only, both start empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ...tiers.admission import AdmissionFilter, AdmitAll
from .replay import ReplayTier
from .trace import Trace


class Arrangement(Enum):
    """What the lower tier holds of what the upper one has."""

    WRITE_THROUGH = "write-through"
    WRITE_BACK = "write-back"
    EXCLUSIVE = "exclusive"


@dataclass(frozen=True, slots=True)
class TwoTierOutcome:
    """What each tier served, and what was written for it."""

    upper_percent: float  # hits, of the prompts' blocks
    lower_percent: float
    written_per_block: float  # blocks written below for each block of a prompt

    @property
    def hit_percent(self) -> float:
        """Of both tiers."""
        return self.upper_percent + self.lower_percent


class TwoTiers:
    """An upper and a lower tier and what moves between them."""

    def __init__(
        self,
        arrangement: Arrangement,
        upper: ReplayTier,
        lower: ReplayTier,
        admission: AdmissionFilter | None = None,
    ) -> None:
        self.arrangement = arrangement
        self.upper = upper
        self.lower = lower
        self.admission = admission or AdmitAll()
        self.upper_hits = 0
        self.lower_hits = 0
        self.written = 0

    def run(self, chain: Sequence[bytes], now: float) -> None:
        """One prompt, head first."""
        for policy in (self.upper.policy, self.lower.policy):
            policy.observe(chain, now)
        self.admission.observe(chain, now)
        upper_hits, lower_hits = self._find(chain)
        self.upper_hits += len(upper_hits)
        self.lower_hits += len(lower_hits)
        if self.arrangement is Arrangement.WRITE_THROUGH:
            new = [key for key in chain if key not in self.lower.resident]
            self.lower.policy.insert(reversed(self._make_and_take(new, wanted=chain)))
            self.lower.policy.touch(reversed(upper_hits + lower_hits))
        else:
            self.lower.policy.touch(reversed(lower_hits))
            self.admission.promoted(len(lower_hits))
        self._take_up(chain, upper_hits, now)

    def _find(self, chain: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        upper, lower = self.upper.resident, self.lower.resident
        upper_hits: list[bytes] = []
        lower_hits: list[bytes] = []
        for key in chain:
            if key in upper:
                upper_hits.append(key)
            elif key in lower:
                lower_hits.append(key)
            else:
                break
        return upper_hits, lower_hits

    def _take_up(self, chain: Sequence[bytes], upper_hits: list[bytes], now: float) -> None:
        upper, lower = self.upper, self.lower
        missing = [key for key in chain if key not in upper.resident]
        victims = upper.make_room(len(missing), chain)
        kept = upper.take_in(missing)
        # A prompt longer than the upper tier runs over into the lower one.
        lost = [*victims, *reversed(missing[len(kept) :])]
        if self.arrangement is Arrangement.EXCLUSIVE:
            moved = [key for key in missing if key in lower.resident]
            lower.policy.remove(moved)
            lower.resident.difference_update(moved)
        if self.arrangement is not Arrangement.WRITE_THROUGH:
            self._give_up(lost, now)
        upper.policy.insert(reversed(kept))
        upper.policy.touch(reversed(upper_hits))

    def _give_up(self, lost: Sequence[bytes], now: float) -> None:
        """What the upper tier lost, the coldest first: copies below were used until now, what has
        no copy there is written if it is admitted."""
        copies = {key for key in lost if key in self.lower.resident}
        new = [key for key in lost if key not in copies]
        verdicts = self.admission.admit(new, now)
        admitted = [key for key, admit in zip(new, verdicts, strict=True) if admit]
        written = set(self._make_and_take(admitted[::-1], wanted=lost))
        for key in lost:
            if key in copies:
                self.lower.policy.touch((key,))
            elif key in written:
                self.lower.policy.insert((key,))

    def _make_and_take(self, keys: Sequence[bytes], *, wanted: Sequence[bytes]) -> Sequence[bytes]:
        """Heads first, so that of what does not fit below it is the tails that go without."""
        self.lower.make_room(len(keys), wanted, keys)
        kept = self.lower.take_in(keys)
        self.written += len(kept)
        return kept


def replay_two_tiers(
    trace: Trace,
    arrangement: Arrangement,
    upper: ReplayTier,
    lower: ReplayTier,
    admission: AdmissionFilter | None = None,
) -> TwoTierOutcome:
    """Run a trace through both tiers, which must be empty; all blocks are admitted by default."""
    tiers = TwoTiers(arrangement, upper, lower, admission)
    for prompt, chain in zip(trace.prompts, trace.keyed_chains, strict=True):
        tiers.run(chain, prompt.arrival_seconds)
    blocks = trace.num_accesses
    return TwoTierOutcome(
        100 * tiers.upper_hits / blocks, 100 * tiers.lower_hits / blocks, tiers.written / blocks
    )
