# SPDX-License-Identifier: Apache-2.0
"""Several disks as one tier: what belongs where, one that fails alone, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stratakv.tiers.assemble import open_ssd
from stratakv.tiers.base import Answer, Stored, StoreTier
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.contract import (
    check_store_contract,
    fetch,
    make_buffers,
    make_keys,
    payload_of,
    put,
)
from stratakv.tiers.errors import TierBusy, TierConfigError, TierDown
from stratakv.tiers.reopening_store import ReopeningStore
from stratakv.tiers.settings.values import ConfigError
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.disk_array import HUNG, Disk, SeveralDisks
from stratakv.tiers.tag import Proof
from stratakv.tiers.testing.memory_store import MemoryStore
from stratakv.tiers.tier_settings import SsdSettings

from ..blocks import SMALL
from ..store_contract import SECONDS, wait_until

MIB = 2**20
KEYS = make_keys(60)


_Store = TypeVar("_Store", bound=StoreTier)


@contextmanager
def closing(store: _Store) -> Iterator[_Store]:
    try:
        yield store
    finally:
        store.close(SECONDS)


def over(*stores: StoreTier, hung_seconds: float = 60.0) -> SeveralDisks:
    named = [Disk(f"/mnt/{number}", store) for number, store in enumerate(stores)]
    return SeveralDisks(named, SMALL, hung_seconds=hung_seconds)


def settings(*paths: Path | str, capacity_bytes: int = 4 * MIB) -> SsdSettings:
    return SsdSettings(path=Path(",".join(map(str, paths))), capacity_bytes=capacity_bytes)


def open_both(folder: Path, **options: Any) -> SeveralDisks:
    store = open_ssd(SMALL, settings(folder / "a", folder / "b"), namespace=b"n", **options)
    assert isinstance(store, SeveralDisks)
    return store


class Broken(MemoryStore):
    """`fault` decides; `held` futures end when they are told to."""

    fails_with: type[Exception] | None = None
    holds = False

    def __init__(self, layout: BlockLayout, capacity_bytes: int) -> None:
        super().__init__(layout, capacity_bytes)
        self.held: list[tuple[Future[Any], Callable[[], Future[Any]]]] = []

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        if self.holds:
            later: Future[list[Proof | None]] = Future()
            load = super().load
            self.held.append((later, lambda: load(keys, buffers)))
            return later
        if self.fails_with is not None:
            failed: Future[list[Proof | None]] = Future()
            failed.set_exception(self.fails_with("the disk is gone"))
            return failed
        return super().load(keys, buffers)

    def let_go(self) -> None:
        self.holds = False
        for future, work in self.held:
            future.set_result(work().result(SECONDS))


def test_the_contract_of_a_store(tmp_path: Path) -> None:
    check_store_contract(over(*(MemoryStore(SMALL, MIB) for _ in range(3))))
    check_store_contract(open_both(tmp_path))


def test_blocks_are_spread_and_found_again(tmp_path: Path) -> None:
    with closing(open_both(tmp_path)) as tier:
        assert all(put(tier, KEYS))
        counts = [disk.stats().blocks for disk in tier._stores]
        assert sum(counts) == 60 and min(counts) >= 15
        lease = tier.lease([*KEYS, *make_keys(2, "nobody's")], 60.0)
        assert lease is not None and lease.result(SECONDS) == [True] * 60 + [False] * 2
        stats = tier.stats()
        assert (stats.blocks, stats.stored_blocks) == (60, 60)
        assert stats.capacity_bytes == sum(disk.stats().capacity_bytes for disk in tier._stores)
        assert stats.capacity_bytes <= 4 * MIB
    # In another order of names, after a restart.
    other = open_ssd(SMALL, settings(tmp_path / "b", tmp_path / "a"), namespace=b"n")
    with closing(other) as tier:
        assert fetch(tier, KEYS) == [payload_of(key, SMALL) for key in KEYS]
        assert tier.drop(KEYS[:5]) == 5 and tier.lookup(KEYS[:6])[4:] == [Answer.MISS, Answer.HIT]
        assert tier.wait_forgotten(SECONDS)


def test_a_disk_that_is_added_moves_its_share_alone() -> None:
    two = over(MemoryStore(SMALL, MIB), MemoryStore(SMALL, MIB))
    three = over(*(MemoryStore(SMALL, MIB) for _ in range(3)))
    keys = make_keys(3000)
    moved = [key for key in keys if two.disk_of(key) != three.disk_of(key)]
    assert {three.disk_of(key) for key in moved} == {2}
    assert 800 < len(moved) < 1200


def test_one_that_fails_alone() -> None:
    """Its blocks are misses, the others' bytes are right, and nothing of it is believed."""
    bad, good = Broken(SMALL, MIB), MemoryStore(SMALL, MIB)
    with closing(over(bad, good)) as tier:
        assert all(put(tier, KEYS))
        bad.fails_with = TierDown
        expected = [payload_of(k, SMALL) if tier.disk_of(k) else None for k in KEYS]
        assert None in expected and fetch(tier, KEYS) == expected
        assert tier.stats().errors["disk: TierDown"] == 1
        bad.fails_with = None
        assert None not in fetch(tier, KEYS)


def test_where_none_can_it_says_so() -> None:
    stores = [Broken(SMALL, MIB) for _ in range(2)]
    with closing(over(*stores)) as tier:
        for store in stores:
            store.fails_with = TierDown
        with pytest.raises(TierDown):
            fetch(tier, KEYS)

        def busy(*_: Any) -> float:
            raise TierBusy("full")

        stores[0].fault = busy
        kept = tier.store(KEYS, make_buffers(len(KEYS), SMALL)).result(SECONDS)
        refused = {tier.disk_of(key) for key, one in zip(KEYS, kept, strict=True)
                   if one is Stored.REFUSED}  # fmt: skip
        assert refused == {0}, "the other takes its own"
        stores[1].fault = busy
        with pytest.raises(TierBusy):
            tier.store(KEYS, make_buffers(len(KEYS), SMALL))
        for store in stores:
            store.fault = None


def test_one_that_hangs_is_left_alone_until_it_answers() -> None:
    hung, good = Broken(SMALL, MIB), MemoryStore(SMALL, MIB)
    with closing(over(hung, good, hung_seconds=0.05)) as tier:
        assert all(put(tier, KEYS))
        hung.holds = True
        buffers = make_buffers(len(KEYS), SMALL)
        first = tier.load(KEYS, buffers)
        mine = [key for key in KEYS if tier.disk_of(key) == 0]
        wait_until(lambda: tier.lookup(mine) == [Answer.MISS] * len(mine))
        assert not first.done(), "it may still write into these buffers"
        assert not first.cancel()
        expected = [None if tier.disk_of(k) == 0 else payload_of(k, SMALL) for k in KEYS]
        assert fetch(tier, KEYS) == expected
        kept = dict(zip(make_keys(20, "new"), put(tier, make_keys(20, "new")), strict=True))
        assert all(is_kept == (tier.disk_of(key) == 1) for key, is_kept in kept.items())
        assert tier.is_up and tier.stats().errors[HUNG] == 1
        hung.let_go()
        assert None not in first.result(SECONDS)
        assert [bytes(each[: SMALL.page_bytes]) for each in buffers] == [
            payload_of(key, SMALL) for key in KEYS
        ]
        assert None not in fetch(tier, KEYS), "it is asked again"


def test_one_whose_files_are_cut_short_serves_no_wrong_byte(tmp_path: Path) -> None:
    """What a disk that was pulled out leaves: reads that fail, or find nothing."""
    with closing(open_both(tmp_path)) as tier:
        assert all(put(tier, KEYS))
        lost = next(n for n, disk in enumerate(tier._disks) if disk.name.endswith("/a"))
        with (tmp_path / "a" / "blocks").open("r+b") as file:
            file.truncate(0)
        for _ in range(3):
            for key, payload in zip(KEYS, fetch(tier, KEYS), strict=True):
                expected = None if tier.disk_of(key) == lost else payload_of(key, SMALL)
                assert payload == expected


def test_a_disk_that_is_down_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    paths = settings(tmp_path / "a", "/sys/stratakv")
    with pytest.raises(TierDown, match="/sys/stratakv"):
        open_ssd(SMALL, paths, namespace=b"n", require=True)
    with closing(open_ssd(SMALL, paths, namespace=b"n")) as tier:
        assert isinstance(tier, SeveralDisks) and tier.is_up
        assert [store.opened is None for store in tier._stores] == [False, True]
        kept = put(tier, KEYS)
        assert 0 < sum(kept) < len(KEYS)
        found = [
            payload_of(k, SMALL) if is_kept else None for k, is_kept in zip(KEYS, kept, strict=True)
        ]
        assert fetch(tier, KEYS) == found


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("FOLDER/a", "FOLDER/a"), "is given FOLDER/a twice; name each disk once"),
        (("FOLDER/a", "FOLDER/b/../a"), "is given FOLDER/a twice"),
        (("FOLDER/a", "FOLDER/link"), "is given FOLDER/a twice"),
        (("FOLDER/a", "FOLDER/a/b"), "one lies in the other"),
        (("FOLDER/a", ""), "between two commas is empty"),
        (tuple(f"FOLDER/{n}" for n in range(17)), "up to 16 disks, not 17"),
    ],
)
def test_places_that_are_refused(tmp_path: Path, paths: tuple[str, ...], message: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError) as refused:
        settings(*(path.replace("FOLDER", str(tmp_path)) for path in paths))
    assert message.replace("FOLDER", str(tmp_path)) in str(refused.value)


def test_a_disk_of_another_store_is_refused_by_name(tmp_path: Path) -> None:
    other = replace(SMALL, num_layers=SMALL.num_layers + 1)
    SsdStore(tmp_path / "b", other, 2 * MIB, namespace=b"n").close(SECONDS)
    with pytest.raises(TierConfigError, match=f"{tmp_path}/b"):
        open_both(tmp_path)
    # Nothing of the first one was left open.
    SsdStore(tmp_path / "a", SMALL, 2 * MIB, namespace=b"n").close(SECONDS)


def test_one_path_is_what_it_was(tmp_path: Path) -> None:
    with closing(open_ssd(SMALL, settings(tmp_path / "a"), namespace=b"n")) as store:
        assert isinstance(store, ReopeningStore) and store.opened is not None
    assert SsdSettings(path=Path("~/x")).paths == (Path("~/x").expanduser(),)
    assert SsdSettings().paths == ()
