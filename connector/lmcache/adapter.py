# SPDX-License-Identifier: Apache-2.0
"""StrataL2Adapter: stores and loads chunks for LMCache's server, below the server's own memory.

LMCache's controllers submit tasks from two threads, sleep on event fds, and read each result once.
A task without end would hang a request in LMCache, so every task has a time limit, at which it
reports the chunks that have come. Without open tiers all chunks of a task are misses."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface

from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.values import ConfigError
from ..chunks.build import check_servers, chunk_layout
from ..chunks.chunk_settings import MAX_CHUNK_BYTES, MAX_LAYOUTS, chunk_host
from ..chunks.supported_versions import Supported
from ..chunks.tiers import ChunkTiers
from .identity import ChunkIdentity, read_identity
from .model_names import ModelNames
from .shelf import HOST, Shelf, identity_text

log = logging.getLogger(__name__)

SUPPORTED = Supported(HOST, "lmcache", (0, 5, 6), (0, 6, 0))
STORE, LOOKUP, LOAD = "store", "lookup", "load"

_FLAGS = os.EFD_NONBLOCK | os.EFD_CLOEXEC


class _Task:
    """A task of LMCache. Each `Shelf` handles the task's keys with the layout of the shelf."""

    __slots__ = ("answers", "id", "kind", "objects", "parts", "sizes")

    def __init__(self, id: int, kind: str, objects: Sequence[Any], num_keys: int) -> None:
        self.id = id
        self.kind = kind
        self.objects = objects  # their memory must live until the task ends
        self.answers = [False] * num_keys
        self.sizes = [0] * num_keys
        self.parts = 0  # how many parts have not ended


class StrataL2Adapter(L2AdapterInterface):
    """An L2 adapter of LMCache. `config` is the value of `adapter_params` in LMCache's
    configuration. Raises ConfigError, TierConfigError."""

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        # Capacity 0: LMCache evicts no chunks here, because the tiers have their own capacities.
        super().__init__(max_capacity_bytes=0)
        version = SUPPORTED.installed()
        given = dict(config)
        self._layouts = _number(given, "layouts", 1, MAX_LAYOUTS)
        self._chunk_bytes = _number(given, "chunk_bytes", 0, MAX_CHUNK_BYTES)
        self._settings = chunk_host(HOST).read(given)
        self._models = ModelNames(self._settings.revision)
        self._version = f"{version[0]}.{version[1]}"
        self._settings.remote.credentials()  # raises for a certificate without its key
        if self._chunk_bytes:
            check_servers(self._settings, chunk_layout(self._chunk_bytes))
        self._lock = threading.Lock()
        self._ids = count(1)
        self._fds = {kind: os.eventfd(0, _FLAGS) for kind in (STORE, LOOKUP, LOAD)}
        self._tasks: dict[int, _Task] = {}
        self._stored: dict[int, Any] = {}
        self._found: dict[int, Any] = {}
        self._shelves: dict[ChunkIdentity, Shelf] = {}
        self._refused: set[str] = set()  # reasons already logged
        self._closed = False

    def get_store_event_fd(self) -> int:
        return self._fds[STORE]

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._fds[LOOKUP]

    def get_load_event_fd(self) -> int:
        return self._fds[LOAD]

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store chunks. The task fails if a chunk has an unsupported layout."""
        return self._submit(STORE, keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            stored, self._stored = self._stored, {}
        return stored

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Look up chunks. No chunk is locked, because LMCache might never release a lock; a chunk
        evicted before its load is a miss."""
        task = self._register_task(LOOKUP, (), len(keys))
        models = self._models_of(keys)
        places: dict[Shelf, list[int]] = {}
        shelves: dict[int, Shelf | None] = {}
        for i, key in enumerate(keys):
            group = key.object_group_id
            if group not in shelves:
                shelves[group] = self._shelf_of_desc(group_layout_descs.get(group))
            shelf = shelves[group]
            if shelf is not None and models[key.model_name] is not None:
                places.setdefault(shelf, []).append(i)
        self._dispatch_task(task, keys, models, places)
        return task.id

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._take_found(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        pass

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load chunks. A chunk counts as loaded only if its bytes match the stored digest."""
        return self._submit(LOAD, keys, objects)

    def query_load_result(self, task_id: int) -> Any:
        return self._take_found(task_id)

    def delete(self, keys: list[Any]) -> None:
        models = self._models_of(keys)
        named = [(key, name) for key in keys if (name := models[key.model_name]) is not None]
        for shelf, tiers in self._open_shelves():
            tiers.drop_chunks([shelf.keys.derive_chunk_key(key, name) for key, name in named])

    def get_usage(self) -> Any:
        """Return the used and total bytes of all tiers; the tiers do not count by cache salt."""
        stats = [each for _, tiers in self._open_shelves() for each in tiers.stats().values()]
        return AdapterUsage(
            total_bytes_used=sum(each.used_bytes for each in stats),
            total_capacity_bytes=sum(each.capacity_bytes for each in stats),
        )

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            shelves = list(self._shelves.values())
            refused = sorted(self._refused)
        refused += self._models.refused
        layouts = []
        for shelf in shelves:
            tiers = shelf.tiers
            layouts.append(
                {
                    "layout": identity_text(shelf.identity),
                    "folder": shelf.folder,
                    "is_open": tiers is not None and not tiers.is_broken,
                    "refused_because": shelf.refusal,
                    "damaged_chunks": 0 if tiers is None else tiers.damaged,
                    "refused_chunks": 0 if tiers is None else tiers.refused,
                    "tiers": {} if tiers is None else _show(tiers),
                }
            )
        is_healthy = not refused and all(each["is_open"] for each in layouts)
        return {
            "is_healthy": is_healthy and not self._closed,
            "type": type(self).__name__,
            "refused": refused,
            "layouts": layouts,
        }

    def close(self) -> None:
        """Write unwritten chunks within `shutdown_seconds`, and release all resources."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            shelves = list(self._shelves.values())
        seconds = self._settings.shutdown_seconds / max(1, len(shelves))
        for shelf in shelves:
            shelf.close(seconds)
        with self._lock:
            for task in list(self._tasks.values()):
                self._finish_task(task)
            for fd in self._fds.values():
                os.close(fd)
            self._fds = dict.fromkeys(self._fds, -1)

    def _submit(self, kind: str, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        task = self._register_task(kind, objects, len(keys))
        models = self._models_of(keys)
        places: dict[Shelf, list[int]] = {}
        for i, each in enumerate(objects):
            task.sizes[i] = each.get_size()
            is_kept = models[keys[i].model_name] is not None
            shelf = self._shelf_of_object(each) if is_kept else None
            if shelf is not None and task.sizes[i] == shelf.identity.chunk_bytes:
                places.setdefault(shelf, []).append(i)
            elif shelf is not None:
                self._refuse(
                    f"LMCache gave {task.sizes[i]} bytes for a chunk of "
                    f"{shelf.identity.chunk_bytes}; leave out its serde, which packs chunks to "
                    "sizes of their own (ssd_codec packs them here)"
                )
        self._dispatch_task(task, keys, models, places)
        return task.id

    def _models_of(self, keys: Sequence[Any]) -> dict[str, str | None]:
        """Return the name of each model in these keys; None for a model that is not stored."""
        return {
            model: self._models.resolve_name(model) for model in {key.model_name for key in keys}
        }

    def _register_task(self, kind: str, objects: Sequence[Any], num_keys: int) -> _Task:
        with self._lock:
            task = _Task(next(self._ids), kind, objects, num_keys)
            self._tasks[task.id] = task
        return task

    def _dispatch_task(
        self,
        task: _Task,
        keys: Sequence[Any],
        models: Mapping[str, str | None],
        places: Mapping[Shelf, Sequence[int]],
    ) -> None:
        task.parts = len(places) + 1
        for shelf, indices in places.items():
            tier_keys = [
                shelf.keys.derive_chunk_key(keys[i], str(models[keys[i].model_name]))
                for i in indices
            ]
            shelf.when_open(partial(self._hand_over, task, indices, tier_keys))
        self._part_ended(task)

    def _hand_over(
        self, task: _Task, indices: Sequence[int], tier_keys: list[bytes], tiers: ChunkTiers | None
    ) -> None:
        if tiers is None:
            self._part_ended(task)
            return
        try:
            if task.kind == LOOKUP:
                future = tiers.lookup(tier_keys)
            else:
                call = tiers.store if task.kind == STORE else tiers.load
                future = call(tier_keys, [[task.objects[i].byte_array] for i in indices])
        except Exception:
            log.exception("a %s of LMCache's could not be begun", task.kind)
            self._part_ended(task)
            return
        future.add_done_callback(lambda done: self._answered(task, indices, done))

    def _answered(self, task: _Task, indices: Sequence[int], done: Future[list[bool]]) -> None:
        for i, answer in zip(indices, done.result(), strict=True):
            task.answers[i] = answer
        self._part_ended(task)

    def _part_ended(self, task: _Task) -> None:
        with self._lock:
            task.parts -= 1
            if not task.parts:
                self._finish_task(task)

    def _finish_task(self, task: _Task) -> None:
        if self._tasks.pop(task.id, None) is None:
            return
        if task.kind == STORE:
            num_bytes = sum(task.sizes)
            self._stored[task.id] = L2StoreResult(all(task.answers), num_bytes)
        else:
            bitmap = Bitmap(len(task.answers))
            for i, answer in enumerate(task.answers):
                if answer:
                    bitmap.set(i)
            self._found[task.id] = bitmap
        task.objects = ()
        fd = self._fds[task.kind]
        if fd >= 0:
            os.eventfd_write(fd, 1)

    def _take_found(self, task_id: int) -> Any:
        with self._lock:
            return self._found.pop(task_id, None)

    def _open_shelves(self) -> list[tuple[Shelf, ChunkTiers]]:
        with self._lock:
            pairs = [(shelf, shelf.tiers) for shelf in self._shelves.values()]
        return [(shelf, tiers) for shelf, tiers in pairs if tiers is not None]

    def _shelf_of_object(self, each: Any) -> Shelf | None:
        about = each.metadata
        shapes, dtypes = about.shapes, about.dtypes
        if not shapes:
            shapes, dtypes = [about.shape], [about.dtype]
        return self._shelf(shapes, dtypes)

    def _shelf_of_desc(self, desc: Any) -> Shelf | None:
        if desc is not None and desc.shapes:
            return self._shelf(desc.shapes, desc.dtypes)
        # LMCache did not describe the chunks' layout, which is clear only if there is one shelf.
        with self._lock:
            shelves = list(self._shelves.values())
        return shelves[0] if len(shelves) == 1 else None

    def _shelf(self, shapes: Sequence[Any], dtypes: Sequence[Any]) -> Shelf | None:
        """Return the shelf of a layout, new at the first call; None for an unsupported layout."""
        own = self._settings
        try:
            identity = read_identity(
                shapes, dtypes, own.revision or "", own.salt or "", self._version
            )
            chunk_layout(identity.chunk_bytes)
        except ConfigError as error:
            self._refuse(str(error))
            return None
        if self._chunk_bytes and identity.chunk_bytes != self._chunk_bytes:
            self._refuse(
                f"chunks of {identity_text(identity)} have {identity.chunk_bytes} bytes, and "
                f"chunk_bytes in adapter_params says {self._chunk_bytes}; give the right number, "
                "or leave it out"
            )
            return None
        with self._lock:
            shelf = self._shelves.get(identity)
            if shelf is None and not self._closed and len(self._shelves) < self._layouts:
                shelf = Shelf(identity, self._settings, self._layouts)
                self._shelves[identity] = shelf
        if shelf is None and not self._closed:
            self._refuse(
                f"chunks of {identity_text(identity)} are not kept, since `layouts` in "
                f"adapter_params allows {self._layouts}; raise it, which takes cpu_bytes and "
                "ssd_bytes once more for each"
            )
        return shelf

    def _refuse(self, reason: str) -> None:
        with self._lock:
            if reason in self._refused or len(self._refused) >= MAX_LAYOUTS:
                return
            self._refused.add(reason)
        log.error("StrataKV below LMCache: %s", reason)


def _number(given: dict[str, Any], name: str, default: int, most: int) -> int:
    if given.get(name) is None:
        given.pop(name, None)
        return default
    number = readers.size(name, given.pop(name))
    if not 1 <= number <= most:
        raise ConfigError(f"{name} takes a number of 1 to {most}, not {format_value(number)}")
    return number


def _show(tiers: ChunkTiers) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "blocks": each.blocks,
            "used_bytes": each.used_bytes,
            "capacity_bytes": each.capacity_bytes,
            "stored_blocks": each.stored_blocks,
            "loaded_blocks": each.loaded_blocks,
            "rejected": each.rejected,
            "errors": each.errors,
        }
        for name, each in tiers.stats().items()
    }
