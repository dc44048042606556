# SPDX-License-Identifier: Apache-2.0
"""Which server a block belongs to."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.tiers.remote.membership import Rendezvous, ServerAddress, StaticMembership

KEYS = [random.Random(i).randbytes(40) for i in range(20_000)]


def servers(count: int) -> list[ServerAddress]:
    return [ServerAddress(f"host-{i}", 9400) for i in range(count)]


def test_every_server_gets_its_share() -> None:
    owners = Rendezvous(servers(5)).owners(KEYS)
    shares = [owners.count(i) / len(KEYS) for i in range(5)]
    assert all(abs(share - 0.2) < 0.02 for share in shares)


def test_a_new_server_takes_its_share_and_moves_nothing_else() -> None:
    before = Rendezvous(servers(4)).owners(KEYS)
    after = Rendezvous(servers(5)).owners(KEYS)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {4}
    assert abs(len(moved) / len(KEYS) - 0.2) < 0.02


@given(st.permutations(range(6)))
def test_the_order_in_which_servers_are_named_does_not_matter(order: list[int]) -> None:
    members = servers(6)
    shuffled = [members[i] for i in order]
    ours = [members[i] for i in Rendezvous(members).owners(KEYS[:50])]
    theirs = [shuffled[i] for i in Rendezvous(shuffled).owners(KEYS[:50])]
    assert ours == theirs


def test_a_server_named_twice_is_one() -> None:
    (one, two) = servers(2)
    assert StaticMembership([one, two, one]).members() == (one, two)
    with pytest.raises(ValueError, match="at least one"):
        StaticMembership([])
