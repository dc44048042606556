# SPDX-License-Identifier: Apache-2.0
"""TenantStores: opens a tenant's store when the first engine attaches a layout, and keeps it open.

    unknown ──attach──► making ──► ready
       ▲                  └──► failed (callers get the reason; tried again after a while)
       └── no layout is known ──┘

A thread opens each tenant store, because allocating its memory takes long. A tenant store with
blocks on the disk is opened when the server starts. If the disk is full or missing, the store
starts without the disk, and adds it when it can be opened. Thread-safe. Only `close`, and `start`
with required disks, wait."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..assemble import make_admission, make_slab, open_ssd
from ..base import StoreTier
from ..block import BlockLayout
from ..errors import TierClosed, TierConfigError, TierDown
from ..mac_key import MacKey
from ..settings.sizes import show_size
from ..tier_settings import SERVER_SSD, CpuSettings, SsdSettings
from ..wire.limits import Limits
from ..wire.status import NoDisk, NoMemory, NotAttached, NotReady, Unauthenticated, WrongLayout
from .access.tenants import Quota
from .key_salt import KeySalt
from .layout_note import read_layout_note, store_folder, write_layout_note
from .served_store import ServedStores
from .tenant_store import TenantStore

log = logging.getLogger(__name__)


RETRY_SECONDS = 5.0  # between two attempts to open a tenant store
LEAVE_SECONDS = 30.0  # time to write a removed tenant's blocks to the disk
SSD = "ssd"  # the name of the tier on the disk


@dataclass(slots=True, eq=False)
class _Place:
    """The state of one tenant store, which may be closed, being opened, open or failed."""

    quota: Quota
    layout: BlockLayout | None = None
    tenant_store: TenantStore | None = None
    maker: threading.Thread | None = None
    failure: Exception | None = None
    failed_at: float = 0.0
    is_gone: bool = False  # removed by a reload


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """The settings that all tenant stores of a server share; only quotas differ."""

    secret: bytes
    # The folder of all stores, or one folder on each disk, separated by commas. None: memory only.
    ssd_path: Path | None = None
    require: bool = False  # whether the start fails if a disk or a store on it is unavailable
    mac_key: MacKey | None = None  # authenticates the blocks on the disk
    cpu: CpuSettings = field(default_factory=CpuSettings)  # (the size is not used)
    ssd: SsdSettings = SERVER_SSD  # (size and path are not used)
    limits: Limits = field(default_factory=Limits)


class TenantStores(ServedStores):
    """The tenant stores by name."""

    def __init__(
        self,
        quotas: Mapping[str, Quota],
        settings: StoreSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = {name: _Place(quota) for name, quota in quotas.items()}
        self._settings = settings
        self._ssd_paths = replace(settings.ssd, path=settings.ssd_path).paths
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._leaving: list[threading.Thread] = []  # threads that close stores of removed tenants

    def start(self) -> None:
        """See ServedStores. Waits for required disks. Raises TierConfigError if one fails."""
        if self._settings.require:
            for path in self._ssd_paths:
                _check_writable(path)
        self._make_known(list(self._places))
        if self._settings.require:
            self._wait_made()

    def _wait_made(self) -> None:
        with self._lock:
            places = dict(self._places)
        for name, place in places.items():
            if place.maker is not None:
                place.maker.join()
            if place.failure is not None:
                raise TierConfigError(
                    f"what {name} has on the disk cannot be opened ({place.failure}); mend that, "
                    "or start without --require-tiers"
                ) from place.failure

    def _make_known(self, names: Iterable[str]) -> None:
        for name in names:
            place = self._places[name]
            if place.quota.ssd_bytes:
                layout = self._layout_on_disk(name)
                with self._lock:
                    if layout is not None and place.layout is None and not place.is_gone:
                        self._make(name, place, layout)

    def set_quotas(self, quotas: Mapping[str, Quota]) -> list[str]:
        """See ServedStores. The blocks of closed stores stay on the disk."""
        with self._lock:
            if self._closed:
                return []
            kept = [
                name
                for name, place in self._places.items()
                if name in quotas and quotas[name] != place.quota
            ]
            gone = {name: self._places[name] for name in self._places if name not in quotas}
            new = [name for name in quotas if name not in self._places]
            for place in gone.values():
                place.is_gone = True
            self._places = {
                name: self._places.get(name) or _Place(quota) for name, quota in quotas.items()
            }
            self._leaving = [thread for thread in self._leaving if thread.is_alive()]
            for name, place in gone.items():
                if place.tenant_store is not None:
                    self._leaving.append(_closing(place.tenant_store, LEAVE_SECONDS))
                log.info("%s is closed; what it has on the disk stays there", name)
        self._make_known(new)
        return kept

    def attach(self, name: str, layout: BlockLayout) -> TenantStore:
        with self._lock:
            place = self._find_place(name)
            if place.layout is not None and place.layout != layout:
                raise WrongLayout(
                    f"the blocks here are {place.layout} and the caller's are {layout}"
                    f"{self._how_to_begin_anew(name, place)}"
                )
            if place.tenant_store is None and place.maker is None and self._may_try(place):
                self._make(name, place, layout)
            return _ready(place)

    def ready(self, name: str) -> TenantStore:
        with self._lock:
            return _ready(self._find_place(name))

    def layout(self, name: str) -> BlockLayout | None:
        with self._lock:
            return self._find_place(name).layout

    def open_tenant_stores(self) -> dict[str, TenantStore]:
        with self._lock:
            return {
                name: p.tenant_store
                for name, p in self._places.items()
                if p.tenant_store is not None
            }

    def close(self, timeout_seconds: float) -> bool:
        """See ServedStores. Closes stores in parallel, and writes the blocks that disks lack."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            self._closed = True
            places = list(self._places.values())
        for place in places:
            if place.maker is not None:
                place.maker.join(max(0.0, deadline - time.monotonic()))
        closed: list[bool] = []
        threads = [
            threading.Thread(
                target=lambda tenant_store=place.tenant_store: closed.append(
                    tenant_store.close(max(0.0, deadline - time.monotonic()))
                ),
                name="stratakv-close-store",
                daemon=True,
            )
            for place in places
            if place.tenant_store is not None
        ]
        for thread in threads:
            thread.start()
        for thread in (*threads, *self._leaving):
            thread.join(max(0.0, deadline - time.monotonic()) + 1.0)
        return len(closed) == len(threads) and all(closed)

    def _find_place(self, name: str) -> _Place:
        if self._closed:
            raise TierClosed("the server is going down")
        place = self._places.get(name)
        if place is None:
            raise Unauthenticated("the tenant is not one of this server's any more")
        return place

    def _may_try(self, place: _Place) -> bool:
        return place.failure is None or self._clock() - place.failed_at >= RETRY_SECONDS

    def _how_to_begin_anew(self, name: str, place: _Place) -> str:
        if not self._ssd_paths or not place.quota.ssd_bytes:
            return "; a restart of the server forgets them"
        folders = ", ".join(f"{store_folder(path, name)}*" for path in self._ssd_paths)
        return f"; to begin anew, stop the server and remove {folders}"

    def _make(self, name: str, place: _Place, layout: BlockLayout) -> None:
        place.layout, place.failure = layout, None
        place.maker = threading.Thread(
            target=self._run, args=(name, place, layout), name="stratakv-make-store", daemon=True
        )
        place.maker.start()

    def _run(self, name: str, place: _Place, layout: BlockLayout) -> None:
        tenant_store: TenantStore | None = None
        failure: Exception | None = None
        try:
            tenant_store = self._build(name, place.quota, layout)
        except Exception as error:  # noqa: BLE001 - callers get the error, other tenants are served
            failure = error
            log.warning("the memory of %s cannot be made ready: %s", name, error)
        with self._lock:
            place.maker = None
            place.tenant_store, place.failure, place.failed_at = (
                tenant_store,
                failure,
                self._clock(),
            )
            if tenant_store is None and not self._is_on_disk(name):
                place.layout = None
            closed = self._closed or place.is_gone
        if tenant_store is None:
            return
        if closed:
            tenant_store.close(0.0)
            return
        log.info(
            "%s is ready: %d blocks of %d bytes",
            name,
            tenant_store.num_slots,
            tenant_store.page_bytes,
        )

    def _build(self, name: str, quota: Quota, layout: BlockLayout) -> TenantStore:
        """Open a tenant store. Raises TierConfigError, NoMemory, NoDisk, or OSError."""
        settings, limits = self._settings, self._settings.limits
        if quota.cpu_bytes < layout.slot_bytes:
            raise TierConfigError(
                f"a block takes {show_size(layout.slot_bytes)} and the tenant has "
                f"{show_size(quota.cpu_bytes)}"
            )
        cpu_bytes = min(quota.cpu_bytes, limits.max_slots * layout.slot_bytes)
        if cpu_bytes < quota.cpu_bytes:
            log.warning("%s uses %d of its bytes: blocks are so small", name, cpu_bytes)
        try:
            slab = make_slab(layout, replace(settings.cpu, capacity_bytes=cpu_bytes))
        except TierConfigError as error:
            raise NoMemory(str(error)) from error
        try:
            ssd = replace(settings.ssd, capacity_bytes=quota.ssd_bytes)
            admission = make_admission(layout, ssd)
            stores = self._stores(name, quota, layout)
        except BaseException:
            slab.close()
            raise
        salt = KeySalt(settings.secret, name)
        return TenantStore(slab, stores, salt, admission=admission, max_leases=limits.max_leases)

    def _stores(self, name: str, quota: Quota, layout: BlockLayout) -> list[StoreTier]:
        if not self._ssd_paths or not quota.ssd_bytes:
            return []
        # The namespace depends on the secret, as stored keys do.
        (namespace,) = KeySalt(self._settings.secret, name).salt_keys((bytes(40),))
        folders = ",".join(str(store_folder(path, name)) for path in self._ssd_paths)
        ssd = replace(self._settings.ssd, path=Path(folders), capacity_bytes=quota.ssd_bytes)

        def note_layout(folder: Path) -> None:
            path = folder.parent
            try:
                if read_layout_note(path, name) != layout:
                    write_layout_note(path, name, layout)
            except OSError as error:
                raise TierDown(f"{path} cannot be written to ({error}); make room there") from error

        try:
            store = open_ssd(
                layout,
                ssd,
                namespace=namespace,
                mac_key=self._settings.mac_key,
                require=self._settings.require,
                after_opening=note_layout,
            )
        except TierConfigError as error:
            raise NoDisk(str(error)) from error
        return [store]

    def _layout_on_disk(self, name: str) -> BlockLayout | None:
        """Return the layout in the first readable layout note on the disks, or None."""
        found = (read_layout_note(path, name) for path in self._ssd_paths)
        return next((layout for layout in found if layout is not None), None)

    def _is_on_disk(self, name: str) -> bool:
        return self._layout_on_disk(name) is not None


def _check_writable(path: Path) -> None:
    """Raise TierDown if the folder cannot be made or written to."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise TierDown(
            f"--ssd-path {path} cannot be used ({error.strerror}); mount it or change its "
            "permissions, or start without --require-tiers"
        ) from error


def _closing(tenant_store: TenantStore, seconds: float) -> threading.Thread:
    """Start and return a thread that closes the tenant store within `seconds`."""
    thread = threading.Thread(
        target=tenant_store.close, args=(seconds,), name="stratakv-close-store", daemon=True
    )
    thread.start()
    return thread


def _ready(place: _Place) -> TenantStore:
    if place.tenant_store is not None:
        return place.tenant_store
    if place.maker is not None:
        raise NotReady("the tenant's memory is being made ready")
    if place.failure is not None:
        raise place.failure.with_traceback(None)  # a kept traceback would grow with each raise
    raise NotAttached("the layout of the tenant's blocks is not known yet")
