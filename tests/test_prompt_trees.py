# SPDX-License-Identifier: Apache-2.0
"""Offloading changes no token, whatever breaks: trees of prompts, with tiers and without.

In float64, greedily and with seeded sampling, every answer equals that of the same engine without
offloading. The blocks take every path through the tiers, and of what a tier does nothing, a tenth
or all fails. No request fails, no block stays behind, and every reference has been given back.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratakv.engine.config.offload_config import OffloadConfig
from stratakv.engine.core.engine_core import EngineCore
from stratakv.tiers.ssd.store import SsdStore
from stratakv.tiers.testing.fault_plan import FaultPlan, parse_faults
from stratakv.tiers.testing.faulty_store import FaultyStore

from .faulty_parts import Mischief, patch_tiers
from .nursery_site.nursery_client import Nursery
from .offload_config import offload_config
from .other_process import OtherProcess
from .prompt_tree import Answers, Asker, Tree, grow, make_core
from .random_life import SSD_BASE_BYTES
from .stepping import noted
from .threads import check_threads

TREES = {"ci": 24, "long": 10_000}
TREES_OF_OTHER_PROCESSES = {"ci": 2, "long": 1_000}
PARTS = 6  # so that a failing tree does not hide the others
RATES = (0.0, 0.1, 1.0)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 8  # of `small_llama`: K and V, layers, heads, head size, float64

SOME = ("lookup:error={r},lookup:miss={r},load:error={r},load:miss={r},load:partial={r},"
        "load:busy={r},load:delay=0.0..0.02,load:reorder={r},store:error={r},store:miss={r},"
        "store:partial={r},store:busy={r},drop:error={r}")  # fmt: skip
# Where all of everything fails nothing is found, and nothing could be wrong with what comes up.
ALL = [SOME, "lookup:error=1", "load:error=1,drop:error=1", "load:miss=1", "load:partial=1",
       "load:busy=1", "load:hang=1", "load:delay=0.1", "store:error=1", "store:hang=1"]  # fmt: skip
READ_SECONDS = 0.03


@dataclasses.dataclass(frozen=True)
class Way:
    """Where the blocks of a tree go when the pool has no room for them, and what breaks there."""

    tiers: str
    rate: float

    def config(self, tree: Tree, directory: Path, load: str) -> OffloadConfig:
        """`load` is how it is decided what to load; a tiny model computes faster than a disk."""
        if self.tiers == "pool":
            return offload_config()
        with_ssd = self.tiers != "cpu"
        config = offload_config(
            tiers=("cpu", "ssd") if with_ssd else ("cpu",),
            ssd_path=directory,
            ssd_exclusive=self.tiers == "exclusive",
            io_threads=2,
            load=load,
        )
        slot = 4096 * -(-tree.cache.block_size * TOKEN_BYTES // 4096)
        longest = tree.blocks_of_longest
        slots = {"cpu": 8, "ssd": 0.5, "both": 2, "exclusive": 2}[self.tiers] * longest
        # Below what an operator may ask for, so that blocks go all the way down.
        object.__setattr__(config.cpu, "capacity_bytes", int(slots) * slot)
        object.__setattr__(
            config.ssd, "capacity_bytes", SSD_BASE_BYTES + 8 * longest * (slot + 4096)
        )
        return config


WAYS = [Way(tiers, rate) for tiers in ("cpu", "ssd", "both", "exclusive") for rate in RATES]


class Run:
    """One tree on engines with one set of tiers, the second of them on the SSD of the first."""

    def __init__(
        self,
        model: Path,
        tree: Tree,
        way: Way,
        seed: int,
        directory: Path,
        other: OtherProcess | None = None,
    ) -> None:
        """`other` has the model runner, None: this process."""
        self._model = model
        self._other = other
        self._tree = tree
        self._way = way
        self._rng = rng = random.Random(seed)
        self._directory = directory
        self._stores: list[FaultyStore] = []
        self.seen: Counter[str] = Counter()
        self._load = rng.choice(["always", "always", "both", "auto"])
        breaks = rng.choice(["store", "store", "copies", "files"])
        self._breaks = "copies" if way.tiers in ("pool", "cpu") else breaks
        self._plan = FaultPlan()
        if self._breaks == "store" and way.rate:
            text = rng.choice(ALL) if way.rate == 1.0 else SOME
            self._plan = parse_faults(text.format(r=way.rate))

    def answers(self, monkeypatch: pytest.MonkeyPatch) -> list[Answers]:
        """Those of the first engine, and perhaps those of one that is started after it."""
        rates = {"copy fails": self._way.rate if self._breaks == "copies" else 0.0}
        seed = self._rng.randrange(2**31)
        mischief = Mischief(seed, rates)
        if self._other is not None:
            self._other.patch(monkeypatch, seed, rates)
        patch_tiers(monkeypatch, mischief, self._make_store, READ_SECONDS)
        answers = [self._life()]
        if self._way.tiers in ("pool", "cpu") or self._rng.random() < 0.5:
            return answers
        if self._breaks == "files":
            damage_pages(self._directory / "blocks", self._way.rate, self._rng)
        return [*answers, self._life()]

    def _make_store(self, *args: Any, **options: Any) -> FaultyStore:
        inner = SsdStore(*args, **options)
        store = FaultyStore(inner, self._plan, seed=self._rng.randrange(2**31))
        self._stores.append(store)
        return store

    def _life(self) -> Answers:
        config = self._way.config(self._tree, self._directory, self._load)
        before = frozenset(threading.enumerate())
        other = self._other
        core = make_core(self._model, self._tree, config, "uni" if other is None else "mp")
        try:
            asker = Asker(core)
            answers = asker.ask(self._tree)
            self._count(core)
            for store in self._stores:
                if any(rule.kind == "hang" for rule in store.plan.rules):
                    store.close(5.0)  # what hangs keeps its slots until then, as it must
            asker.calm_down(None if other is None else other.look)
        finally:
            # A store that keeps failing is tried until the time is over.
            core.shutdown(0.3 if self._breaks == "store" and self._way.rate else 20.0)
        check_threads(before)
        if other is not None:
            other.check_gone()
        return answers

    def _count(self, core: EngineCore) -> None:
        self.seen["meetings"] += core.scheduler.counts["meetings"]
        for name, count in core.scheduler.counts.items():
            if name.startswith("reused_tokens_"):
                self.seen[f"{self._way.tiers} {name} {self._way.rate}"] += count
        stats = core.call("stats", "")["connector"]
        if stats is None:
            return
        self.seen[f"failed loads {self._way.rate}"] += sum(stats["failures"].values())
        for tier in stats["tiers"].values():
            self.seen["rejected records"] += sum(tier["rejected"].values())
            for error, count in tier["errors"].items():
                self.seen[error] += count


def damage_pages(path: Path, rate: float, rng: random.Random) -> None:
    """Flip a bit in so many of the pages that hold anything."""
    content = np.memmap(path, np.uint8, "r+")
    for page in range(0, len(content), 4096):
        if rng.random() < rate and content[page : page + 4096].any():
            # In the page of a header, what is behind its 128 bytes is padding that nobody reads.
            content[page + rng.randrange(128)] ^= 1 << rng.randrange(8)
    content.flush()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What all trees together went through."""
    return Counter()


def check_tree(
    model: Path, seed: int, number: int, directory: Path, nursery: Nursery | None = None
) -> Counter[str]:
    """One tree: without tiers, and on every third of the ways, there with workers of the nursery's;
    what it went through."""
    tree = grow(random.Random(seed))
    seen: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as monkeypatch:
        [expected] = Run(model, tree, Way("pool", 0.0), seed, directory).answers(monkeypatch)
    assert set(expected) == {wish.name for wish in tree.wishes}
    for index, way in enumerate(WAYS):
        if (index + number) % len(RATES):
            continue
        path = directory / str(index)
        other = None if nursery is None else OtherProcess(nursery, path)
        run = Run(model, tree, way, seed, path, other)
        what = f"this was check_tree of seed {seed}, number {number}, {way}"
        with pytest.MonkeyPatch.context() as monkeypatch, noted(what):
            for answers in run.answers(monkeypatch):
                assert answers == expected
        seen += run.seen
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_tokens_are_those_of_an_engine_without_tiers(
    part: int,
    small_llama: Path,
    one_thread: None,
    seed: int,
    scale: str,
    tmp_path: Path,
    seen: Counter[str],
) -> None:
    for number in range(TREES[scale] // PARTS):
        seen += check_tree(small_llama, seed + number, number, tmp_path / str(number))


@pytest.mark.slow
def test_tokens_are_those_where_the_worker_is_another_process(
    small_llama: Path,
    one_thread: None,
    worker_nursery: Nursery,
    seed: int,
    scale: str,
    tmp_path: Path,
) -> None:
    for number in range(TREES_OF_OTHER_PROCESSES[scale]):
        check_tree(small_llama, seed + number, number, tmp_path / str(number), worker_nursery)


@pytest.mark.slow
def test_the_trees_have_been_everywhere(scale: str, seen: Counter[str]) -> None:
    """The test above is worth something only if blocks came from every tier, and if it broke."""
    if not seen:
        pytest.skip("no tree was grown in this run")
    for tiers, tier in [("cpu", "cpu"), ("ssd", "ssd"), ("both", "ssd"), ("exclusive", "ssd")]:
        for rate in RATES[:2]:
            assert seen[f"{tiers} reused_tokens_{tier} {rate}"] > 0, (tiers, tier, rate)
    assert seen["failed loads 0.1"] and seen["failed loads 1.0"]
    assert seen["meetings"], "nothing was loaded from the back"
    assert seen["rejected records"], "no damaged page was read"
    injected = sum(count for name, count in seen.items() if name.startswith("injected_"))
    assert injected > 5 * TREES[scale] // 3
