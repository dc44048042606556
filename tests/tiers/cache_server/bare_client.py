# SPDX-License-Identifier: Apache-2.0
"""A process that does nothing but use cache servers, and tells how long every call took.

    with BareClient(ports..., host="127.0.0.2", load_seconds=0.2) as client:
        client.wait_good(after=time.monotonic())      until a block was loaded that began later
        ...
    client.report                                     what it has seen

Nothing else runs in it, so what a call takes is the tier's own doing. In the
process: `python -m tests.tiers.cache_server.bare_client '{...}'`, ended by the end of its input.
Prints the start of each round in which blocks came back, and in the end one line of JSON.
"""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...nursery_site.nursery_client import popen

ROOT = Path(__file__).resolve().parents[3]
HANG_SECONDS = 20.0
_BLOCKS, _BATCH = 64, 8
_TELL_SECONDS = 0.01
_AT_ONCE_SECONDS = 0.001


@dataclass
class Report:
    """`late[call]` holds, of every call that was made of a server, the seconds it took beyond its
    deadline (0 or more), without those in which threads of this process waited for a processor:
    these are the machine's doing."""

    late: dict[str, list[float]] = field(default_factory=dict)
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: int = 0
    hung: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    def percentile(self, call: str, share: float = 0.99) -> float:
        times = sorted(self.late[call])
        return times[int(share * (len(times) - 1))]


class BareClient:
    """The process, seen from a test."""

    def __init__(
        self,
        *ports: int,
        host: str = "127.0.0.1",
        seed: int = 0,
        credentials: dict[str, str] | None = None,
        tls: bool = False,
        prefix: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        """`credentials` are paths by the names of `Credentials`, `prefix` is put before the
        command, as to run it elsewhere."""
        task = {
            "host": host,
            "ports": ports,
            "tls": tls,
            "seed": seed,
            "credentials": credentials or {},
            "settings": settings,
        }
        self.report: Report | None = None
        self._goods: list[float] = []
        self._process = popen(
            [
                *prefix,
                sys.executable,
                "-m",
                "tests.tiers.cache_server.bare_client",
                json.dumps(task),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> BareClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def last_good(self) -> float:
        """When the last round began in which blocks came back."""
        return self._goods[-1] if self._goods else 0.0

    def wait_good(self, after: float, seconds: float = 30.0) -> float:
        """Wait for a round that began after then (monotonic) and brought blocks back; how long
        after."""
        end = time.monotonic() + seconds
        while self.last_good <= after:
            assert self._process.poll() is None, "the client has ended"
            assert time.monotonic() < end, f"no block for {seconds:g} s after a fault had ended"
            time.sleep(0.002)
        return time.monotonic() - after

    def close(self) -> None:
        """End it and take the report. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(2 * HANG_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError("the client hangs") from None
        self._reader.join(HANG_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                values = json.loads(line)
                values["outcomes"] = collections.Counter(values["outcomes"])
                self.report = Report(**values)
            else:
                self._goods.append(float(line))


class _Loop:
    """In the process: calls in turn, until told to end."""

    def __init__(self, task: dict[str, Any]) -> None:
        from stratakv.tiers.contract import make_buffers, make_keys, payload_of
        from stratakv.tiers.remote.credentials import Credentials
        from stratakv.tiers.remote.membership import ServerAddress
        from stratakv.tiers.remote.remote_settings import RemoteSettings
        from stratakv.tiers.remote.remote_store import open_remote

        from .rig import LAYOUT

        self.layout = LAYOUT
        paths = {name: Path(path) for name, path in task["credentials"].items()}
        self.settings = RemoteSettings(credentials=Credentials(**paths), **task["settings"])
        addresses = [ServerAddress(task["host"], port, task["tls"]) for port in task["ports"]]
        self.store = open_remote(addresses, LAYOUT, self.settings)
        self.rng = random.Random(task["seed"])
        self.keys = make_keys(_BLOCKS, "faults")
        self.payloads = {key: payload_of(key, LAYOUT) for key in self.keys}
        self.inward = make_buffers(_BATCH, LAYOUT)
        self.outward = make_buffers(_BATCH, LAYOUT)
        self.report = Report(late={call: [] for call in ("lookup", "ask", "load", "store", "drop")})
        self.told = 0.0

    def run(self, stopped: threading.Event) -> None:
        while not stopped.is_set():
            began = time.monotonic()
            keys = self.rng.sample(self.keys, _BATCH)
            self.timed(
                "ask",
                self.settings.lookup_seconds,
                lambda keys=keys: self.store.prefetch_lookup(keys),
            )
            self.timed("lookup", 0.0, lambda keys=keys: self.store.lookup(keys))
            self.timed("store", self.settings.store_seconds, lambda keys=keys: self.put(keys))
            wanted = self.rng.sample(keys, 4) + self.rng.sample(self.keys, 4)
            if self.get(wanted) and began - self.told > _TELL_SECONDS:
                self.told = began
                print(began, flush=True)
            if self.rng.random() < 0.1:
                self.timed("drop", 0.0, lambda keys=keys: self.store.drop(keys[:2]))
            time.sleep(0.001)
        self.report.errors = self.store.stats().errors
        self.store.close(5.0)

    def put(self, keys: list[bytes]) -> Future[Any]:
        for key, buffer in zip(keys, self.outward, strict=True):
            buffer[: self.layout.page_bytes] = self.payloads[key]
        return self.store.store(keys, self.outward)

    def get(self, keys: list[bytes]) -> bool:
        """Whether blocks came back."""
        for buffer in self.inward:
            buffer[:16] = bytes(16)
        proofs = self.timed(
            "load", self.settings.load_seconds, lambda: self.store.load(keys, self.inward)
        )
        hits = 0
        for key, proof, buffer in zip(keys, proofs or (), self.inward, strict=bool(proofs)):
            if proof is not None:
                hits += 1
                self.report.wrong += buffer[: self.layout.page_bytes] != self.payloads[key]
        return hits > 0

    def timed(self, name: str, seconds: float, call: Any) -> Any:
        """Make a call and note what it took beyond its time; None where it failed."""
        from stratakv.tiers.errors import TierError

        began, waits = time.monotonic(), processor_waits()
        result = None
        try:
            answer = call()
            result = answer.result(HANG_SECONDS) if isinstance(answer, Future) else answer
            outcome = "ok"
        except TimeoutError:
            self.report.hung += 1
            outcome = "hung"
        except TierError as error:
            outcome = type(error).__name__
        took = time.monotonic() - began
        # What fails at once, because a server is known to be down, would hide what does not.
        if outcome == "ok" or took >= _AT_ONCE_SECONDS:
            late = took - seconds
            if late > 0.0:
                late -= sum(now - waits.get(tid, 0.0) for tid, now in processor_waits().items())
            self.report.late[name].append(max(0.0, late))
        self.report.outcomes[f"{name} {outcome}"] += 1
        return result


def processor_waits() -> dict[str, float]:
    """Of each thread of this process: the seconds for which it was ready and had no processor."""
    waits = {}
    for tid in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{tid}/schedstat") as file:  # it may end
            waits[tid] = int(file.read().split()[1]) / 1e9
    return waits


def main() -> int:
    """The exit status."""
    loop = _Loop(json.loads(sys.argv[1]))
    stopped = threading.Event()
    thread = threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True)
    thread.start()
    loop.run(stopped)
    print(json.dumps(vars(loop.report)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
