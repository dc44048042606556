# SPDX-License-Identifier: Apache-2.0
"""The history's runs: which are queued, and in which order they are worth something."""

from __future__ import annotations

from stratakv.tiers.policies.history import History
from stratakv.tiers.policies.reuse_model import UPPER, ReuseModel

MUCH_LATER = 2 * UPPER[-1]


def held_history(*chains: tuple[float, list[bytes]]) -> History:
    """Each chain is used at its time, and then held whole."""
    history = History(1000, ReuseModel())
    for now, chain in chains:
        history.record_prompt(chain, now)
        history.mark_held(chain)
    return history


def queued(history: History, now: float) -> list[list[bytes]]:
    """The keys of each run that is queued, in the order of the queues."""
    return [list(run.blocks) for _, runs in history.queues.by_value(now) for run in runs]


def test_the_oldest_run_of_a_queue_goes_first_however_late_it_is_looked_at() -> None:
    """Runs of ages far apart move to the last queue together."""
    old, middle, young = [b"old"], [b"middle"], [b"young"]
    history = held_history((0.0, old), (UPPER[20], middle), (UPPER[20] + UPPER[10], young))
    now = UPPER[20] + UPPER[10]
    history.queues.reorder()
    assert sorted(queued(history, now)) == sorted([old, middle, young])
    assert queued(history, now + MUCH_LATER) == [old, middle, young]


def test_a_run_of_which_nothing_is_held_is_in_no_queue() -> None:
    history = held_history((1.0, [b"a", b"b"]), (1.0, [b"c"]))
    history.mark_gone([b"a", b"b"])
    assert queued(history, 1.0) == [[b"c"]]
    history.mark_held([b"b"])
    assert sorted(queued(history, 1.0)) == [[b"b"], [b"c"]]
