# SPDX-License-Identifier: Apache-2.0
"""Which faults befall which tiers, from a text that a person has written."""

from __future__ import annotations

import pytest

from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.testing.fault_plan import parse_faults
from stratakv.tiers.testing.faulty_store import MAX_SEED, FaultyStore, parse_drill
from stratakv.tiers.testing.memory_store import MemoryStore

from ..rig import LAYOUT


def test_a_rule_is_for_every_tier_unless_it_names_one() -> None:
    drill = parse_drill("load:error=0.1, net:store:hang=1,ssd:load:delay=0.1..0.2", ("ssd", "net"))
    assert drill.plans == {
        "ssd": parse_faults("load:error=0.1,load:delay=0.1..0.2"),
        "net": parse_faults("load:error=0.1,store:hang=1"),
    }
    assert drill.seed == 0
    assert parse_drill("net:drop:every=2,seed=77", ("ssd", "net")).seed == 77


def test_only_the_tiers_that_are_to_fail_are_wrapped() -> None:
    drill = parse_drill("ssd:load:error=1", ("ssd", "net"))
    ssd, net = (MemoryStore(LAYOUT, 4096, name=name) for name in ("ssd", "net"))
    assert isinstance(drill.wrap(ssd), FaultyStore)
    assert drill.wrap(net) is net


@pytest.mark.parametrize(
    ("text", "tiers", "words"),
    [
        ("load:error=0.1", (), "there is none"),
        ("cpu:load:error=0.1", ("ssd",), "'cpu' that cannot fail; those below cpu are ssd"),
        ("net:load:error=0.1", ("ssd",), "'net' that cannot fail"),
        (":load:error=0.1", ("ssd",), "'' that cannot fail"),
        ("ssd:load:error=2", ("ssd",), "a probability from 0 to 1"),
        ("load:error=1,ssd:load:error=1", ("ssd",), "stands twice"),
        ("load", ("ssd",), "CALL:KIND=VALUE"),
        ("load:error=1,", ("ssd",), "CALL:KIND=VALUE"),
        ("", ("ssd",), "CALL:KIND=VALUE"),
        ("seed=x,load:error=1", ("ssd",), "a whole number"),
        ("seed=1,seed=2,load:error=1", ("ssd",), "one seed"),
        (f"seed={MAX_SEED + 1},load:error=1", ("ssd",), "at most"),
        ("seed=" + "9" * 5000, ("ssd",), "at most"),
    ],
)
def test_a_bad_text_is_refused(text: str, tiers: tuple[str, ...], words: str) -> None:
    with pytest.raises(TierConfigError) as caught:
        parse_drill(text, tiers)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("seed", [1, 2])
def test_the_seed_chooses_the_faults(seed: int) -> None:
    def faults(seed: int) -> list[bool]:
        drill = parse_drill(f"lookup:error=0.5,seed={seed}", ("ssd",))
        store = drill.wrap(MemoryStore(LAYOUT, 4096, name="ssd"))
        failed = []
        for _ in range(40):
            try:
                store.lookup([])
                failed.append(False)
            except Exception:
                failed.append(True)
        return failed

    assert faults(seed) == faults(seed) != faults(seed + 10)
