# SPDX-License-Identifier: Apache-2.0
"""Tenant stores are made when they are asked for, remembered on the disk, and closed with all they
hold.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stratakv.tiers import assemble
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.cache_server.access.tenants import Quota
from stratakv.tiers.cache_server.layout_note import read_layout_note, store_folder
from stratakv.tiers.cache_server.tenant_store import TenantStore
from stratakv.tiers.cache_server.tenant_stores import StoreSettings, TenantStores
from stratakv.tiers.contract import make_keys, payload_of
from stratakv.tiers.errors import TierClosed, TierConfigError, TierDown
from stratakv.tiers.mac_key import MacKey
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.store_check import check_store
from stratakv.tiers.tier_settings import SsdSettings
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.limits import Limits
from stratakv.tiers.wire.status import NoDisk, NoMemory, NotAttached, NotReady, WrongLayout

from ...open_files import open_paths
from .rig import LARGE, LAYOUT, SECRET, WAIT_SECONDS, proof_of

OTHER = BlockLayout(2, 16, 1, 32, "float32")
QUOTA = Quota(16 * LAYOUT.slot_bytes, 4 * 2**20)
NAMES = ("tenant:ann", "tenant:bob")


def _tenant_stores(
    path: Path | None = None,
    secret: bytes = SECRET,
    *,
    max_slots: int = 1000,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> TenantStores:
    limits = Limits(max_slots=max_slots)
    store_settings = StoreSettings(secret=secret, ssd_path=path, limits=limits, **settings)
    return TenantStores(dict.fromkeys(NAMES, QUOTA), store_settings, clock)


def _wait(call: Callable[[], TenantStore]) -> TenantStore:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return call()
        except NotReady:
            assert time.monotonic() < deadline
        time.sleep(0.002)


def _attach(
    tenant_stores: TenantStores, name: str = NAMES[0], layout: BlockLayout = LAYOUT
) -> TenantStore:
    return _wait(lambda: tenant_stores.attach(name, layout))


def _store(tenant_store: TenantStore, keys: Sequence[bytes]) -> list[State]:
    write_lease = tenant_store.begin_store(keys)
    for key, slot in zip(keys, write_lease.slots, strict=True):
        if slot is not None:
            tenant_store.buffer(slot)[:] = payload_of(key, LAYOUT)
    proofs = [proof_of(key, memoryview(payload_of(key, LAYOUT))) for key in keys]
    return tenant_store.end_store(write_lease, proofs)


def _load(tenant_store: TenantStore, keys: Sequence[bytes]) -> list[bytes | None]:
    read_lease = tenant_store.begin_load(keys)
    tenant_store.wait_loaded(read_lease, time.monotonic() + WAIT_SECONDS)
    blocks = [
        None if slot is None else bytes(tenant_store.buffer(slot)) for slot in read_lease.slots
    ]
    tenant_store.end_load(read_lease)
    return blocks


def test_a_room_is_made_when_it_is_asked_for() -> None:
    tenant_stores = _tenant_stores()
    with pytest.raises(NotAttached):
        tenant_stores.ready(NAMES[0])
    assert tenant_stores.layout(NAMES[0]) is None
    with pytest.raises(NotReady):
        tenant_stores.attach(NAMES[0], LAYOUT)
    tenant_store = _attach(tenant_stores)
    assert tenant_stores.ready(NAMES[0]) is tenant_store is _attach(tenant_stores)
    assert tenant_stores.layout(NAMES[0]) == LAYOUT
    assert list(tenant_stores.open_tenant_stores()) == [NAMES[0]]
    assert tenant_store.num_slots == 16
    with pytest.raises(WrongLayout, match="a restart of the server forgets them"):
        tenant_stores.attach(NAMES[0], OTHER)
    assert _attach(tenant_stores, NAMES[1], OTHER).layout == OTHER
    assert tenant_stores.close(WAIT_SECONDS) and tenant_stores.close(WAIT_SECONDS)
    for call in (
        lambda: tenant_stores.ready(NAMES[0]),
        lambda: tenant_stores.attach(NAMES[0], LAYOUT),
    ):
        with pytest.raises(TierClosed):
            call()


def test_rooms_survive_a_restart_on_the_disk(tmp_path: Path) -> None:
    keys = make_keys(10)
    tenant_stores = _tenant_stores(tmp_path)
    assert _store(_attach(tenant_stores), keys) == [State.KEPT] * 10
    assert tenant_stores.close(WAIT_SECONDS)

    again = _tenant_stores(tmp_path)
    again.start()
    tenant_store = _wait(lambda: again.ready(NAMES[0]))  # nobody has attached
    assert tenant_store.lookup(keys) == [State.HIT] * 10
    assert _load(tenant_store, keys) == [payload_of(key, LAYOUT) for key in keys]
    with pytest.raises(WrongLayout, match=f"remove {store_folder(tmp_path, NAMES[0])}"):
        again.attach(NAMES[0], OTHER)
    with pytest.raises(NotAttached):
        again.ready(NAMES[1])
    assert again.close(WAIT_SECONDS)


def test_another_secret_finds_nothing(tmp_path: Path) -> None:
    tenant_stores = _tenant_stores(tmp_path)
    _store(_attach(tenant_stores), make_keys(3))
    assert tenant_stores.close(WAIT_SECONDS)
    other = _tenant_stores(tmp_path, secret=b"another secret of 32 bytes or more")
    with pytest.raises(NoDisk, match="another model or block hash"):
        _attach(other)
    assert other.close(WAIT_SECONDS)


def test_a_mac_key_seals_what_lies_on_the_disk(tmp_path: Path) -> None:
    keys, key = make_keys(3), MacKey(bytes(32))
    tenant_stores = _tenant_stores(tmp_path, mac_key=key)
    assert _store(_attach(tenant_stores), keys) == [State.KEPT] * 3
    assert tenant_stores.close(WAIT_SECONDS)
    folder = store_folder(tmp_path, NAMES[0])
    assert not check_store(folder).payloads_verified
    assert check_store(folder, mac_key=key).whole == 3
    for other in (None, MacKey(b"\1" * 32)):
        tenant_stores = _tenant_stores(tmp_path, mac_key=other)
        with pytest.raises(NoDisk, match=f"made for the MAC key {key.id.hex()}, and"):
            _attach(tenant_stores)
        assert tenant_stores.close(WAIT_SECONDS)
    tenant_stores = _tenant_stores(tmp_path, mac_key=key)
    assert _load(_attach(tenant_stores), keys) == [payload_of(each, LAYOUT) for each in keys]
    assert tenant_stores.close(WAIT_SECONDS)


def test_keys_on_the_disk_are_not_those_of_prompts(tmp_path: Path) -> None:
    keys = make_keys(3)
    tenant_stores = _tenant_stores(tmp_path)
    _store(_attach(tenant_stores), keys)
    assert tenant_stores.close(WAIT_SECONDS)
    found = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert payload_of(keys[0], LAYOUT)[:64] in found
    assert not any(key[:32] in found for key in keys)


def test_a_damaged_note_costs_nothing_but_time(tmp_path: Path) -> None:
    tenant_stores = _tenant_stores(tmp_path)
    _store(_attach(tenant_stores), make_keys(3))
    assert tenant_stores.close(WAIT_SECONDS)
    note = store_folder(tmp_path, NAMES[0]).with_suffix(".layout")
    assert read_layout_note(tmp_path, NAMES[0]) == LAYOUT
    assert note.stat().st_mode & 0o777 == 0o600
    for damage in (b"", b"{", note.read_bytes().replace(b"float32", b"float99")):
        note.write_bytes(damage)
        assert read_layout_note(tmp_path, NAMES[0]) is None
    note.unlink()
    note.mkdir()
    assert read_layout_note(tmp_path, NAMES[0]) is None
    assert str(note) not in open_paths()
    note.rmdir()
    note.write_bytes(b"{")
    again = _tenant_stores(tmp_path)
    again.start()
    with pytest.raises(NotAttached):
        again.ready(NAMES[0])
    assert _attach(again).lookup(make_keys(3)) == [State.HIT] * 3
    assert read_layout_note(tmp_path, NAMES[0]) == LAYOUT
    assert again.close(WAIT_SECONDS)


def test_a_failure_is_told_and_tried_again_after_a_while(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "stores"
    path.write_text("in the way")
    tenant_stores = _tenant_stores(path, clock=lambda: now[0])
    for _ in range(3):
        with pytest.raises(NoDisk):
            _attach(tenant_stores)
    path.unlink()
    with pytest.raises(NoDisk):
        _attach(tenant_stores)
    now[0] = 5.0
    assert _attach(tenant_stores).num_slots == 16
    assert tenant_stores.close(WAIT_SECONDS)


def test_more_memory_than_the_host_has() -> None:
    tenant_stores = TenantStores(
        {NAMES[0]: Quota(2**50, 0)},
        StoreSettings(secret=SECRET, limits=Limits(max_slots=2**30)),
    )
    with pytest.raises(NoMemory, match="iB of memory available"):
        _attach(tenant_stores, layout=LARGE)
    assert tenant_stores.layout(NAMES[0]) is None, "another layout may be tried"
    assert tenant_stores.close(WAIT_SECONDS)


def test_the_number_of_slots_is_bounded() -> None:
    tenant_stores = _tenant_stores(max_slots=3)
    assert _attach(tenant_stores).num_slots == 3
    assert tenant_stores.close(WAIT_SECONDS)


def test_closing_while_a_room_is_being_made() -> None:
    tenant_stores = TenantStores(
        {NAMES[0]: Quota(64 * 2**20, 0)},
        StoreSettings(secret=SECRET, limits=Limits(max_slots=2**20)),
    )
    with pytest.raises(NotReady):
        tenant_stores.attach(NAMES[0], LAYOUT)
    assert tenant_stores.close(WAIT_SECONDS)
    with pytest.raises(TierClosed):
        tenant_stores.ready(NAMES[0])


def _over_disks(*paths: Path, **settings: Any) -> TenantStores:
    return _tenant_stores(Path(",".join(map(str, paths))), **settings)


def test_several_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tenant has a share of every disk; without one of them a restart finds the others'."""
    disks, keys = (tmp_path / "a", tmp_path / "b"), make_keys(12)
    tenant_stores = _over_disks(*disks)
    assert _store(_attach(tenant_stores), keys) == [State.KEPT] * 12
    assert tenant_stores.close(WAIT_SECONDS)
    blocks = [check_store(store_folder(disk, NAMES[0])).rows for disk in disks]
    assert sum(blocks) == 12 and min(blocks) > 0
    tenant_stores = _over_disks(*reversed(disks))
    tenant_stores.start()
    tenant_store = _wait(lambda: tenant_stores.ready(NAMES[0]))
    assert _load(tenant_store, keys) == [payload_of(key, LAYOUT) for key in keys]
    with pytest.raises(WrongLayout, match=f"{tmp_path}/b/.*, {tmp_path}/a/"):
        tenant_stores.attach(NAMES[0], OTHER)
    assert tenant_stores.close(WAIT_SECONDS)
    shutil.rmtree(disks[0])
    real = assemble._open_disk

    def open_disk(layout: BlockLayout, ssd: SsdSettings, create: bool, **options: Any) -> SsdStore:
        if ssd.paths[0].is_relative_to(disks[0]):
            raise TierDown("nothing is mounted there")
        return real(layout, ssd, create, **options)

    monkeypatch.setattr(assemble, "_open_disk", open_disk)
    tenant_stores = _over_disks(*disks)
    tenant_stores.start()  # the layout is known from the other one
    found = _load(_wait(lambda: tenant_stores.ready(NAMES[0])), keys)
    right = [payload_of(key, LAYOUT) for key in keys]
    assert found.count(None) == blocks[0]
    assert all(each in (None, expected) for each, expected in zip(found, right, strict=True))
    assert tenant_stores.close(WAIT_SECONDS)


def test_disks_that_are_required(tmp_path: Path) -> None:
    """The start fails where one is not there, or what lies there cannot be opened."""
    good = tmp_path / "a"
    for bad in (Path("/proc/nothing"), Path("/dev/null")):
        stores = _over_disks(good, bad, require=True)
        with pytest.raises(TierConfigError, match=f"--ssd-path {bad} cannot be used"):
            stores.start()
        assert stores.close(WAIT_SECONDS)
    stores = _over_disks(good, require=True)
    stores.start()
    _store(_attach(stores), make_keys(3))
    assert stores.close(WAIT_SECONDS)
    (store_folder(good, NAMES[0]) / "blocks").unlink()
    (store_folder(good, NAMES[0]) / "blocks").mkdir()
    stores = _over_disks(good, require=True)
    with pytest.raises(TierConfigError, match="tenant:ann has on the disk cannot be opened"):
        stores.start()
    assert stores.close(WAIT_SECONDS)
