# SPDX-License-Identifier: Apache-2.0
"""Faults in the tiers of a running vLLM, planted from within its process, one at a time.

The commands of vllm_process.py with "fault" in them come here:

    {"fault": "figures"}                      counters of every tier, and how often what was planted
                                              has struck
    {"fault": "clear", "tiers": [names]}      these tiers forget every block
    {"fault": "unlearn"}                      the client of cache servers forgets what they have
    {"fault": "drill", "tier": …, "plan": …}  a plan of tiers/testing/fault_plan.py
    {"fault": "disk", "call": …, "way": …}    calls to the disk fail, or hang until this is lifted
    {"fault": "slab_damage", "way": …}               bytes of every slot change
    {"fault": "room", "way": …}               the slab has no room
    {"fault": "trap", "tier": …, "call": …}   at the next such call: "path", a Unix socket, is told
                                              and answers; or "way", the call's bytes change
    {"fault": "lift"}                         everything works again
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lmdb

sys.path.append(str(Path(__file__).resolve().parents[2] / "tiers" / "ssd"))
from faulty_files import COMMIT, EVENTS, watch_calls

READ, WRITE = 7, 8  # of <linux/aio_abi.h>, with vectors
_OPCODE = struct.Struct("<16xH")
_REQUEST_BYTES = 64
STUCK_SECONDS = 120.0  # longer than any fault stands
SLOW_SECONDS = 0.3
TOLD_SECONDS = 60.0

_ERRORS = {
    name: OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
    for name in ("EIO", "ENOSPC", "EDQUOT", "EROFS", "ENOMEM", "EINVAL", "ENODEV", "ESTALE")
}
_COMMITS = {
    "disk": lmdb.DiskError("as asked"),
    "full": lmdb.MapFullError("as asked"),
    "panic": lmdb.PanicError("as asked"),
    "corrupted": lmdb.CorruptedError("as asked"),
}


class Planter:
    """Of the tiers behind `hierarchy`, each of which is in a drill's wrapper. `damaged` counts the
    blocks whose bytes had changed in memory."""

    def __init__(self, lock: Any, slab: Any, hierarchy: Any, damaged: Callable[[], int]) -> None:
        self._lock = lock
        self._slab = slab
        self._hierarchy = hierarchy
        self._damaged = damaged
        self._strikes = 0
        self._planted = ExitStack()

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """One command."""
        given = {name: value for name, value in command.items() if name != "fault"}
        done: Callable[..., Any] = getattr(self, f"_{command['fault']}")
        return {command["fault"]: done(**given)}

    def _figures(self) -> dict[str, Any]:
        with self._lock:
            stats, traffic = self._hierarchy.stats(), self._hierarchy.traffic()
            is_idle = not self._hierarchy.num_unwritten
            is_up = all(store.is_up for store in self._hierarchy.stores)
        shown: dict[str, Any] = {"planted.strikes": self._strikes, "cpu.damaged": self._damaged()}
        for name, each in stats.items():
            for counter in ("blocks", "misses", "dropped_stores", "loaded_blocks"):
                shown[f"{name}.{counter}"] = getattr(each, counter)
            shown |= {f"{name}.errors.{reason}": n for reason, n in each.errors.items()}
            shown |= {f"{name}.rejected.{reason}": n for reason, n in each.rejected.items()}
        for name, moved in traffic.items():
            for counter in (
                "promotion_failures", "promotion_allocation_failures", "cascade_failures",
                "breaker_opened", "write_breaker_opened",
            ):  # fmt: skip
                shown[f"{name}.{counter}"] = getattr(moved, counter)
        breakers = [b for t in traffic.values() for b in (t.breaker, t.write_breaker)]
        shown["well"] = is_up and is_idle and set(breakers) == {"closed"}
        return shown

    def _clear(self, tiers: Sequence[str]) -> None:
        with self._lock:
            if "cpu" in tiers:
                self._slab.clear()
                self._slab.sweep(self._slab.num_slots)
            for store in self._hierarchy.stores:
                if store.name in tiers:
                    store.clear()

    def _unlearn(self) -> None:
        for server in self._store("remote").inner._servers:
            server.link.presence.clear()

    def _lift(self) -> None:
        self._planted.close()

    def _drill(self, tier: str, plan: str) -> None:
        from stratakv.tiers.testing.fault_plan import FaultPlan, parse_faults
        from stratakv.tiers.testing.faulty_store import InjectedFault

        store = self._store(tier)
        store.plan = parse_faults(plan)

        def end() -> None:
            store.plan = FaultPlan()
            if "hang" in plan:  # what hung ends, as when a disk comes back
                for batch in [each for each in list(store._open) if each.part is None]:
                    if store._claim_batch(batch):
                        batch.future.set_exception(InjectedFault("it hung"))

        self._planted.callback(end)

    def _disk(self, call: str, way: str) -> None:
        lifted = threading.Event()
        around: Callable[..., Any]
        if call in ("read", "write"):
            opcode = READ if call == "read" else WRITE
            names = (EVENTS,)

            def around(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
                return self._requests(opcode, way, real, arguments, lifted)

        else:
            names = (COMMIT if call == "commit" else call,)

            def around(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
                self._strikes += 1
                if way == "stuck":
                    lifted.wait(STUCK_SECONDS)
                    return real(*arguments)
                raise (_COMMITS if call == "commit" else _ERRORS)[way]

        store = self._store("ssd").inner
        self._planted.enter_context(watch_calls(around, names, store))
        self._planted.callback(lifted.set)

    def _requests(
        self,
        opcode: int,
        way: str,
        real: Callable[..., Any],
        arguments: tuple[Any, ...],
        lifted: threading.Event,
    ) -> list[tuple[int, int]]:
        """What asynchronous requests brought, once they have been through `way`."""
        context = arguments[0]
        memory = {
            number: pieces
            for number, pieces in context._pieces.items()
            if _OPCODE.unpack_from(context._requests, _REQUEST_BYTES * number)[0] == opcode
        }
        if memory and way in ("stuck", "slow"):
            self._strikes += 1
            lifted.wait(STUCK_SECONDS if way == "stuck" else SLOW_SECONDS)
        changed = []
        for number, result in real(*arguments):
            if number in memory and way not in ("stuck", "slow"):
                self._strikes += 1
                if way == "short":
                    result //= 2
                elif way == "nothing":
                    result = 0
                elif way in _ERRORS:
                    result = -(_ERRORS[way].errno or errno.EIO)
                else:
                    _spoil(memory[number], way)
            changed.append((number, result))
        return changed

    def _slab_bytes(self, keys: Sequence[bytes], way: str) -> int:
        """Change the bytes of these blocks in their slots; how many."""
        with_slots = [
            (key, slot)
            for key, slot in zip(keys, self._slab.pin(keys, touch=False), strict=True)
            if slot is not None
        ]
        size = self._slab.layout.page_bytes
        pages = [self._slab.buffer(slot)[:size] for _, slot in with_slots]
        if way == "exchanged":
            first = bytes(pages[0])
            for page, other in itertools.pairwise(pages):
                page[:] = other
            pages[-1][:] = first
        else:
            for page in pages:
                spoil_page(page, way)
        self._slab.unpin([key for key, _ in with_slots])
        return len(with_slots)

    def _slab_damage(self, way: str) -> int:
        with self._lock:
            return self._slab_bytes(self._slab.keys(), way)

    def _room(self, way: str) -> None:
        slab, real = self._slab, self._slab.reserve
        if way == "taken":
            with self._lock:
                names = [b"taken" + bytes(27) + i.to_bytes(8, "big") for i in range(slab.num_slots)]
                pairs = zip(names, slab.reserve(names), strict=True)
                names = [name for name, slot in pairs if slot is not None]

            def free() -> None:
                with self._lock:
                    slab.commit(names, [False] * len(names))

            self._planted.callback(free)
            return

        def reserve(keys: Sequence[bytes], **options: Any) -> list[int | None]:
            self._strikes += 1
            count = 0 if way == "refused" else len(keys) // 2
            return [*real(keys[:count], **options), *[None] * (len(keys) - count)]

        slab.reserve = reserve
        self._planted.callback(lambda: delattr(slab, "reserve"))

    def _trap(self, tier: str, call: str, path: str = "", way: str = "") -> None:
        store = self._store(tier)
        run = store._run
        sprung = threading.Event()

        def trapped(called: str, keys: Sequence[bytes], *others: Any) -> Any:
            if called == call and not sprung.is_set():
                sprung.set()
                self._strikes += 1
                if path:
                    _tell(path)
                else:
                    self._slab_bytes(keys, way)
            return run(called, keys, *others)

        store._run = trapped
        self._planted.callback(lambda: delattr(store, "_run"))

    def _store(self, name: str) -> Any:
        return next(store for store in self._hierarchy.stores if store.name == name)


def spoil_page(page: memoryview, way: str) -> None:
    """Change the bytes of one block."""
    size = page.nbytes
    if way == "zeroed":
        page[:] = bytes(size)
    elif way == "halves":
        page[:] = bytes(page[size // 2 :]) + bytes(page[: size // 2])
    else:
        page[{"first": 0, "middle": size // 2, "last": size - 1}[way]] ^= 1


def _spoil(pieces: Sequence[int], way: str) -> None:
    """Change what a request has read: addresses and lengths of its buffers."""
    address, size = max(zip(pieces[::2], pieces[1::2], strict=True), key=lambda piece: piece[1])
    if way == "flipped":
        ctypes.c_ubyte.from_address(address + size // 3).value ^= 1
    elif way == "zeroed":
        ctypes.memset(address, 0, size)
    elif way == "header":
        ctypes.c_ubyte.from_address(pieces[0] + 40).value ^= 1
    else:
        raise ValueError(f"no way to spoil what was read: {way}")


def _tell(path: str) -> None:
    """Say on a Unix socket that it is time, and wait until the other end has done its part."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(TOLD_SECONDS)
        line.connect(path)
        line.sendall(b"!")
        if not line.recv(1):
            raise ConnectionError("the test could not plant its fault")
