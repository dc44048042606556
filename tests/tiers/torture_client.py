# SPDX-License-Identifier: Apache-2.0
"""A client of a cache server that is meant to be stopped and killed: it stores and loads blocks as
fast as it can and looks at every byte that comes back.

    python -m tests.tiers.torture_client PORT SEED memory|socket SECONDS

`SECONDS` bound each of its calls, and with them its leases. Ends with the end of its input, or
after two minutes, and prints one line of JSON: what it saw.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import threading
import time
from collections import Counter

from stratakv.tiers.base import Stored
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.contract import make_buffers, make_keys, payload_of
from stratakv.tiers.errors import TierError
from stratakv.tiers.remote.membership import ServerAddress
from stratakv.tiers.remote.remote_settings import RemoteSettings
from stratakv.tiers.remote.remote_store import RemoteStore, open_remote

# Half a MiB a block: a copy takes long enough to be stopped in its middle.
LAYOUT = BlockLayout(num_layers=8, block_size=16, num_kv_heads=4, head_dim=128, kv_dtype="float32")
KEYS = make_keys(64, "torture")
BATCH = 6
LONGEST_SECONDS = 120.0


def open_store(port: int, shares_memory: bool, seconds: float = 5.0) -> RemoteStore:
    """The tier that talks to the server at `port`; each call takes `seconds` at the most."""
    settings = RemoteSettings(
        shares_memory=shares_memory, load_seconds=seconds, store_seconds=seconds
    )
    return open_remote([ServerAddress("127.0.0.1", port)], LAYOUT, settings)


@functools.cache
def payloads() -> dict[bytes, bytes]:
    """32 MiB, made once for all clients of a process."""
    return {key: payload_of(key, LAYOUT) for key in KEYS}


class Client:
    """One thread that moves blocks and counts."""

    def __init__(self, store: RemoteStore, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self._store = store
        self._rng = random.Random(seed)
        self._buffers = make_buffers(BATCH, LAYOUT)
        self._payloads = payloads()

    def turn(self) -> None:
        """One batch in, one batch out."""
        size = LAYOUT.page_bytes
        keys = self._rng.sample(KEYS, BATCH)
        for key, buffer in zip(keys, self._buffers, strict=True):
            buffer[:size] = self._payloads[key]
        try:
            outcomes = self._store.store(keys, self._buffers).result(60)
            self.seen["stored"] += outcomes.count(Stored.KEPT)
        except TierError:
            self.seen["store failed"] += 1
        self.load(self._rng.sample(KEYS, BATCH))

    def load(self, keys: list[bytes]) -> None:
        """Load blocks and compare them."""
        size = LAYOUT.page_bytes
        for buffer in self._buffers:
            buffer[:size] = bytes(size)
        try:
            proofs = self._store.load(keys, self._buffers).result(60)
        except TierError:
            self.seen["load failed"] += 1
            return
        for key, proof, buffer in zip(keys, proofs, self._buffers, strict=False):
            if proof is None:
                self.seen["misses"] += 1
            else:
                self.seen["hits"] += 1
                # Bytes are compared by the thousand, the items of a view one by one.
                self.seen["wrong"] += bytes(buffer[:size]) != self._payloads[key]


def main() -> int:
    """The exit status."""
    port, seed, kind, seconds = sys.argv[1:]
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    store = open_store(int(port), kind == "memory", float(seconds))
    client = Client(store, int(seed))
    until = time.monotonic() + LONGEST_SECONDS
    while not ended.is_set() and time.monotonic() < until:
        client.turn()
    store.close(5.0)
    print(json.dumps(client.seen), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
