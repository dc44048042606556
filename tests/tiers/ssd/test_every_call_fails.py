# SPDX-License-Identifier: Apache-2.0
"""Every Nth call to the disk fails, in every way it can: the store answers misses, and recovers.

While calls fail, the data path raises nothing, serves nothing wrong and leaves no call open; when
they work again, so does the store, without being opened anew; opened anew it has only what is
right. The long form (every N up to 200) is `pytest tests/tiers/ssd --scale long`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest

from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.ssd import SsdStore

from ..blocks import ODD, SMALL, make_keys
from ..store_contract import SECONDS, fetch, put
from .faulty_files import (
    COMMIT,
    EVENTS,
    OPEN_INDEX,
    EveryNth,
    corrupt_read,
    events_that_say,
    failing,
    short_read,
    short_write,
    waiting_disk,
    watch_calls,
)
from .ledger import check_sound
from .stores import put_proven

CAPACITY = 900_000  # 17 blocks
LARGEST_N = {"ci": 40, "long": 200}
Ways = dict[str, Callable[..., Any]]


def oserror(code: int) -> Callable[..., Any]:
    return failing(OSError(code, os.strerror(code)))


RUNNING: dict[str, Ways] = {
    "EIO": {
        "preadv": oserror(errno.EIO),
        "pwritev": oserror(errno.EIO),
        "fdatasync": oserror(errno.EIO),
        COMMIT: failing(lmdb.DiskError("as asked")),
    },
    "full": {
        "pwritev": oserror(errno.ENOSPC),
        "fdatasync": oserror(errno.EDQUOT),
        COMMIT: failing(lmdb.MapFullError("as asked")),
    },
    "panic": {COMMIT: failing(lmdb.PanicError("as asked"))},
    "short": {"preadv": short_read, "pwritev": short_write},
    "corrupt": {"preadv": corrupt_read},
    "asynchronous EIO": {EVENTS: events_that_say(lambda _result: -errno.EIO)},
    "asynchronous full": {EVENTS: events_that_say(lambda _result: -errno.ENOSPC)},
    "asynchronous short": {EVENTS: events_that_say(lambda result: result // 2)},
    "asynchronous odd": {EVENTS: events_that_say(lambda _result: -errno.EINVAL)},
}
OPENING: Ways = {
    "open": oserror(errno.EMFILE),
    "pwrite": oserror(errno.ENOSPC),
    "preadv": oserror(errno.EIO),
    "fsync": oserror(errno.EIO),
    "ftruncate": oserror(errno.EFBIG),
    "posix_fallocate": oserror(errno.ENOSPC),
    "mkdir": oserror(errno.ENOSPC),
    "rename": oserror(errno.EIO),
    COMMIT: failing(lmdb.DiskError("as asked")),
    OPEN_INDEX: failing(lmdb.Error("as asked")),
}


@pytest.mark.slow
def test_a_running_store_survives_every_nth_call_failing(
    memory_path: Path, scale: str, seed: int
) -> None:
    faults = 0
    for every in range(1, LARGEST_N[scale] + 1):
        for way in list(RUNNING) if scale == "long" else [list(RUNNING)[every % len(RUNNING)]]:
            told = f"{way} at every call {every}, seed {seed}"
            path = memory_path / f"{way}-{every}"
            # Every second time whole pages, which the library lays down for the disk.
            layout, put_some = (ODD, put) if every % 2 else (SMALL, put_proven)
            with contextlib.nullcontext() if EVENTS in RUNNING[way] else waiting_disk():
                store = SsdStore(path, layout, CAPACITY)
            fault = EveryNth(every, RUNNING[way])
            with watch_calls(fault, fault.names, store):
                use(store, put_some, random.Random(f"{seed}/{every}"))
                fault.active = False
                keys = make_keys(8, told)
                put_some(store, keys)  # meets, and ends, what a fault has left behind
                assert put_some(store, keys) == [True] * 8, told
                assert None not in fetch(store, keys), told
            store.close(SECONDS)
            check_sound(path)
            faults += fault.faults
    assert faults > LARGEST_N[scale]


def use(
    store: SsdStore, put_some: Callable[[SsdStore, Sequence[bytes]], list[bool]], rng: random.Random
) -> None:
    """Fill and turn over; `fetch` compares what is served."""
    keys = make_keys(60, "used")
    for start in range(0, 60, 6):
        put_some(store, keys[start : start + 6])
        fetch(store, rng.sample(keys[: start + 6], 5))
        store.drop(rng.sample(keys[: start + 6], 1))


@pytest.mark.slow
def test_opening_survives_every_nth_call_failing(memory_path: Path, scale: str) -> None:
    """A new store and one that holds blocks: opened, or refused with the cure; then it opens, and
    nothing was lost by the attempt."""
    path = memory_path / "used"
    keys = make_keys(10)
    store = SsdStore(path, ODD, CAPACITY)
    assert all(put(store, keys))
    store.close(SECONDS)
    refused = 0
    for every in range(1, (LARGEST_N[scale] if scale == "long" else 16) + 1):
        for target in (path, memory_path / f"new-{every}"):
            fault = EveryNth(every, OPENING)
            with contextlib.suppress(TierConfigError), watch_calls(fault, fault.names):
                store = SsdStore(target, ODD, CAPACITY)
                fault.active = False
                store.close(SECONDS)
            refused += fault.active
        store = SsdStore(path, ODD, CAPACITY)
        assert None not in fetch(store, keys), f"every {every}"
        assert store.stats().errors == {}, f"every {every}"
        store.close(SECONDS)
    assert refused > 10
    check_sound(path)
