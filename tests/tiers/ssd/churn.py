# SPDX-License-Identifier: Apache-2.0
"""What a child does until it is killed: puts, gets, drops, evicts, closes and opens again.

Everything that a judge must know is announced in a log before it may be true: rows that come and
go, and afterwards what the store acknowledged. The log is written with single calls, so a kill
loses none of it; `ledger.py` reads it. Job fields: `path` of the store, `log`, `capacity`, `seed`,
`plants` (guards to take away, see `PLANTS`), `durability` and `mac_key` (hexadecimal) of churn,
`kill_at` of a script.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import lmdb

from stratakv.tiers.contract import SECONDS, fetch, filled_buffers, make_keys, put
from stratakv.tiers.mac_key import MacKey
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.index import row_writer
from stratakv.tiers.ssd.index.index_file import IndexFile, Row

from ..blocks import ODD
from .faulty_files import COMMIT, FOLDERS, OPEN_INDEX, WRITES, watch_calls

Job = dict[str, Any]
CHANGING = (*WRITES, *FOLDERS, COMMIT, OPEN_INDEX)


class Log:
    """Appends lines, each group with one call."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._write = os.write

    def say(self, word: str, *items: str) -> None:
        self._write(self._file, (" ".join([word, *items]) + "\n").encode())

    def keys(self, word: str, keys: Iterable[bytes]) -> None:
        names = [key.hex() for key in keys]
        if names:
            self.say(word, *names)


def announce_rows(log: Log) -> None:
    """Say which rows come and go, before they do."""
    real_put, real_delete = IndexFile.put, IndexFile.delete

    def put_rows(self: IndexFile, rows: Iterable[Row], deleted: Sequence[int] = ()) -> None:
        rows = list(rows)
        log.say("gone", *map(str, deleted))
        log.say("rows", *(f"{row.slot}:{row.key.hex()}" for row in rows))
        real_put(self, rows, deleted)

    def delete_rows(self: IndexFile, slots: Sequence[int]) -> None:
        log.say("gone", *map(str, slots))
        real_delete(self, slots)

    IndexFile.put, IndexFile.delete = put_rows, delete_rows  # type: ignore[method-assign]


def churn(job: Job) -> None:
    """At random until killed."""
    log, rng = Log(job["log"]), random.Random(job["seed"])
    for plant in job["plants"]:
        PLANTS[plant]()
    announce_rows(log)
    row_writer.SYNC_SECONDS = 0.2  # of an asynchronous store, so that there is something to lose
    keys = make_keys(20_000, str(job["seed"]))
    known = 0
    mac_key = MacKey(bytes.fromhex(job["mac_key"])) if job.get("mac_key") else None
    while True:
        log.say("open")
        store = SsdStore(
            job["path"],
            ODD,
            job["capacity"],
            durability=job["durability"],
            mac_key=mac_key,
            policy=rng.choice(("lru", "adaptive")),  # one store may be opened with either
        )
        for _ in range(rng.randrange(5, 200)):
            known = _churn_once(store, log, rng, keys, known % (len(keys) - 100))
        store.close(SECONDS)


def _churn_once(
    store: SsdStore, log: Log, rng: random.Random, keys: list[bytes], known: int
) -> int:
    """One or two batches and what else comes along; the number of keys used so far."""
    batches = []
    for _ in range(rng.choice([1, 1, 2])):
        new = keys[known : known + rng.randrange(1, 13)]
        known += len(new)
        batch = new + rng.sample(keys[:known], rng.randrange(2))
        store.observe(batch, float(known))
        batches.append((batch, store.store(batch, filled_buffers(batch, ODD))))
    for batch, future in batches:
        answers = future.result(SECONDS)
        log.keys("kept", (key for key, kept in zip(batch, answers, strict=True) if kept))
    if rng.random() < 0.3:
        fetch(store, rng.sample(keys[:known], min(known, 8)))
    if rng.random() < 0.2:
        dropped = rng.sample(keys[:known], min(known, 3))
        log.keys("drop", dropped)
        store.drop(dropped)
    return known


def script(job: Job) -> None:
    """The same steps every time, ended at the start or at the end of the call `kill_at`.

    Put, read, drop, evict, close; open again and put; open again smaller. Ends by itself where
    there are fewer calls, and says how many there were.
    """
    log = Log(job["log"])
    announce_rows(log)
    lock, seen = threading.Lock(), [0]

    def step(where: str) -> None:
        with lock:
            seen[0] += 1
            if seen[0] == job["kill_at"]:
                log.say("killed", where)
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()

    def around(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if name == "open" and not arguments[1] & os.O_CREAT:
            return call(*arguments)
        step(f"before {name} {arguments[:2]}")
        result = call(*arguments)
        if name in (COMMIT, "rename", "replace"):
            step(f"after {name} {arguments[:2]}")
        return result

    keys = make_keys(200, "script")
    with watch_calls(around, CHANGING):
        for opening, capacity in enumerate([*[job["capacity"]] * 2, job["smaller"]]):
            log.say("open" if capacity == job["capacity"] else "shrink")
            store = SsdStore(job["path"], ODD, capacity)
            slots = store.stats().capacity_blocks
            batch = keys[40 * opening : 40 * opening + slots // 2 + 2]
            for part in (batch, keys[:2], keys[40 * opening + 30 :][: slots // 2]):
                answers = put(store, part)
                log.keys("kept", (k for k, kept in zip(part, answers, strict=True) if kept))
            fetch(store, batch)
            log.keys("drop", batch[-2:])
            store.drop(batch[-2:])
            store.close(SECONDS)
            log.say("closed")
    log.say("steps", str(seen[0]))


def _no_sync() -> None:
    os.fdatasync = os.fsync = lambda _descriptor: None  # type: ignore[assignment]


def _no_direct_writes() -> None:
    real = os.open

    def open_buffered(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        return real(path, flags & ~os.O_DIRECT, *rest, **options)

    os.open = open_buffered


def _no_index_sync() -> None:
    lmdb.open = partial(lmdb.open, sync=False, metasync=False)


def _no_rows() -> None:
    IndexFile.put = lambda *_arguments: None  # type: ignore[method-assign]


def _no_removal() -> None:
    real = IndexFile.put
    IndexFile.delete = lambda *_arguments: None  # type: ignore[method-assign]
    IndexFile.put = lambda self, rows, _deleted=(): real(self, rows)  # type: ignore[method-assign]


# Guards that a test takes away to see whether it would notice.
PLANTS: dict[str, Callable[[], None]] = {
    "no_sync": _no_sync,
    "no_direct_writes": _no_direct_writes,
    "no_index_sync": _no_index_sync,
    "no_rows": _no_rows,
    "no_removal": _no_removal,
}
JOBS: dict[str, Callable[[Job], None]] = {"churn": churn, "script": script}
