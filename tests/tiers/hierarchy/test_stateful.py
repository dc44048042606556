# SPDX-License-Identifier: Apache-2.0
"""A state machine: a user like the pool, slab, faulty SSD store, against a dict of what was stored.

Hypothesis chooses calls, faults, restarts and damage at random and shortens what fails. At any time
bytes are right, only what was stored is found, and the bounds hold; after each run nothing is
pinned or reserved, and what the store has is whole. The long form is
`pytest tests/tiers/hierarchy/test_stateful.py --scale long`; a failure prints how to replay it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stratakv.tiers.block import BlockLayout, pack_key
from stratakv.tiers.contract import payload_of
from stratakv.tiers.errors import TierError
from stratakv.tiers.hierarchy.hierarchy import Hierarchy, StoreTicket
from stratakv.tiers.hierarchy.hierarchy_options import HierarchyOptions
from stratakv.tiers.hierarchy.promotions import LoadTicket
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.store_check import check_store
from stratakv.tiers.testing.fault_plan import FaultPlan, parse_faults
from stratakv.tiers.testing.faulty_store import FaultyStore

LAYOUT = BlockLayout(1, 4, 1, 8, "float32")
CAPACITY = 800_000
WAIT_SECONDS = 20.0
RUNS = {"ci": (60, 40), "long": (20_000, 100)}

# Three chains of prompts that share heads; the key of a block is its chain and its place in it.
CHAINS = [
    [pack_key(bytes([shared if place < 4 else chain, place]) * 16) for place in range(12)]
    for chain, shared in ((1, 1), (2, 1), (3, 3))
]
PREFIXES = st.builds(
    lambda chain, length: chain[:length], st.sampled_from(CHAINS), st.integers(1, 12)
)
RARELY = st.sampled_from([False] * 7 + [True])  # or there would be little to find
FAULTS = [
    "load:error=1",
    "store:error=0.5,load:miss=0.3",
    "store:busy=0.7,lookup:every=3",
    "load:delay=0..0.003,store:delay=0..0.003",
    "load:partial=0.7,store:partial=0.7",
    "load:reorder=0.5,store:miss=0.5,lookup:miss=0.3",
]


class Tiers(RuleBasedStateMachine):
    """Calls come from one thread, as the hierarchy asks; tickets stay open for as long as
    Hypothesis likes, which is how slots stay pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = threading.Event()
        self.stored: set[bytes] = set()  # since all was forgotten; what may be found
        self.loads: list[LoadTicket] = []
        self.stores: list[tuple[StoreTicket, bool]] = []  # and whether all was forgotten since
        self.seed = 0
        self.plan = FaultPlan()

        self.num_slots, self.inclusive, self.policy = 0, True, "lru"

    @initialize(
        slots=st.integers(4, 12),
        inclusive=st.booleans(),
        policy=st.sampled_from(["lru", "adaptive"]),
    )
    def open(self, slots: int, inclusive: bool, policy: str) -> None:
        self.num_slots, self.inclusive, self.policy = slots, inclusive, policy
        self.folder = Path(tempfile.mkdtemp(prefix="stratakv-test-", dir=MEMORY))
        self.start()

    def start(self) -> None:
        self.slab = CpuSlab(LAYOUT, self.num_slots * LAYOUT.slot_bytes, populate_threads=1)
        ssd = SsdStore(self.folder / "ssd", LAYOUT, CAPACITY, io_threads=1, policy=self.policy)
        self.seed += 1
        self.store = FaultyStore(ssd, self.plan, seed=self.seed)
        self.hierarchy = Hierarchy(
            self.slab,
            [self.store],
            wakeup=self.woken.set,
            options=HierarchyOptions(inclusive=self.inclusive),
        )

    @rule(prompts=st.lists(PREFIXES, min_size=1, max_size=6))
    def serve(self, prompts: list[list[bytes]]) -> None:
        """What a pool does for a prompt: take what there is, store what it then computes."""
        for prompt in prompts:
            self.hierarchy.announce_prompt(prompt)
            self.begin_load(prompt)
            self.end_load(-1, waits=True)
            self.begin_store(prompt)
            self.end_store(-1, ok=True)
            self.hierarchy.poll()
            self.take_completion(0.003)  # or most would be displaced before it is written

    @rule(prompt=PREFIXES)
    def begin_store(self, prompt: list[bytes]) -> None:
        ticket = self.hierarchy.begin_store(prompt)
        for key, slot in zip(ticket.keys, ticket.slots, strict=True):
            self.slab.buffer(slot)[: LAYOUT.page_bytes] = payload_of(key, LAYOUT)
        self.stores.append((ticket, False))

    @precondition(lambda self: self.stores)
    @rule(which=st.integers(0, 100), ok=st.booleans())
    def end_store(self, which: int, ok: bool) -> None:
        ticket, forgotten = self.stores.pop(which % len(self.stores))
        if ok and not forgotten:
            self.stored.update(ticket.keys)
        self.hierarchy.end_store(ticket, ok)

    @rule(prompt=PREFIXES)
    def begin_load(self, prompt: list[bytes]) -> None:
        self.loads.append(self.hierarchy.begin_load(prompt))
        if len(self.loads) > 4:
            self.end_load(0, waits=False)

    @precondition(lambda self: self.loads)
    @rule(which=st.integers(0, 100), waits=st.booleans())
    def end_load(self, which: int, waits: bool) -> None:
        ticket = self.loads.pop(which % len(self.loads))
        deadline = time.monotonic() + WAIT_SECONDS
        while waits and ticket.waiting:
            assert self.take_completion(deadline - time.monotonic()), "no wake-up came"
        self.check(ticket)
        self.hierarchy.end_load(ticket)

    @rule(chain=st.sampled_from(CHAINS))
    def find(self, chain: list[bytes]) -> None:
        found = self.hierarchy.find_prefix(chain).tiers
        assert set(chain[: len(found)]) <= self.stored

    @rule()
    def poll(self) -> None:
        self.hierarchy.poll()

    @rule(really=RARELY, prompt=PREFIXES)
    def drop_below(self, really: bool, prompt: list[bytes]) -> None:
        if really:
            self.store.drop(prompt[-3:])

    @rule(really=RARELY, text=st.sampled_from(FAULTS))
    def break_store(self, really: bool, text: str) -> None:
        if really:
            self.plan = self.store.plan = parse_faults(text)

    @rule()
    def heal_store(self) -> None:
        self.plan = self.store.plan = FaultPlan()

    @rule(really=st.booleans())
    def forget_all(self, really: bool) -> None:
        if not really:
            return
        self.hierarchy.clear()
        self.stored.clear()
        self.stores = [(ticket, True) for ticket, _ in self.stores]
        for chain in CHAINS:
            self.find(chain)

    @rule(really=RARELY, flushes=st.booleans())
    def restart(self, really: bool, flushes: bool) -> None:
        if not really:
            return
        self.end_all()
        if flushes:
            self.heal_store()
            assert self.hierarchy.flush(WAIT_SECONDS)
        assert self.hierarchy.close(WAIT_SECONDS)
        self.start()

    @invariant()
    def bounds_hold(self) -> None:
        if not self.num_slots:
            return
        for stats in self.hierarchy.stats().values():
            assert 0 <= stats.used_bytes <= stats.capacity_bytes
            assert stats.blocks <= stats.capacity_blocks
            assert not stats.rejected
        for ticket in self.loads:
            if not ticket.waiting:
                self.check(ticket)

    def check(self, ticket: LoadTicket) -> None:
        """Slots of a load hold what was stored, for as long as it is open."""
        if not ticket.waiting:
            for key, slot in zip(ticket.keys, ticket.slots, strict=True):
                if slot is not None:
                    held = bytes(self.slab.buffer(slot)[: LAYOUT.page_bytes])
                    assert held == payload_of(key, LAYOUT)

    def end_all(self) -> None:
        for ticket in self.loads:
            self.check(ticket)
            self.hierarchy.end_load(ticket)
        for store_ticket, _ in self.stores:
            self.hierarchy.end_store(store_ticket, ok=False)
        self.loads, self.stores = [], []

    def teardown(self) -> None:
        if not self.num_slots:
            return
        try:
            self.end_all()
            self.heal_store()
            assert self.hierarchy.flush(WAIT_SECONDS)
            self.wait_until_idle()
            assert self.hierarchy.close(WAIT_SECONDS)
            assert check_store(self.folder / "ssd").is_clean
        finally:
            try:  # where something is broken it may raise too
                self.hierarchy.close(0.0)
            finally:
                shutil.rmtree(self.folder)

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while (slab := self.hierarchy.stats()["cpu"]).reserved_blocks or slab.pinned_blocks:
            assert time.monotonic() < deadline, f"{slab} after the last ticket was ended"
            self.take_completion(0.01)

    def take_completion(self, seconds: float) -> bool:
        """Wait for one so long; False if none came."""
        came = self.woken.wait(seconds)
        self.woken.clear()
        self.hierarchy.poll()
        return came


MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def run(examples: int, steps: int, **options: object) -> None:
    run_state_machine_as_test(
        Tiers,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **options,  # type: ignore[arg-type]
        ),
    )


@pytest.mark.slow
def test_tiers_against_a_dict(scale: str) -> None:
    run(*RUNS[scale])


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (CpuSlab, "_is_idle", lambda slab, key: slab._slots[key].committed),
        (SsdStore, "clear", lambda _store: None),
        (CpuSlab, "unpin", lambda _slab, _keys: None),
    ],
    ids=["pinned-slots-are-reused", "cleared-blocks-are-found", "pins-are-never-given-back"],
)
def test_what_is_broken_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., object]
) -> None:
    """The machine has power: it finds what is wrong in few examples. What fails for want of time
    need not fail again, which Hypothesis calls flaky; nothing but a failure can be."""
    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr(sys.modules[__name__], "WAIT_SECONDS", 0.5)
    with pytest.raises((AssertionError, TierError, Flaky)):
        run(200, 40, phases=[Phase.generate], report_multiple_bugs=False)
