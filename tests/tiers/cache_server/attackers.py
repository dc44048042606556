# SPDX-License-Identifier: Apache-2.0
"""A process of hostile clients, of one tenant and of strangers.

`python -m tests.tiers.cache_server.attackers PORT DATA_PORT TOKEN`: reads `on` and `off`, says so
when it is so, and at the end how often it did what. Begins with 10,000 calls at once that nothing
follows, and keeps their connections open. Then each attack is made again and again at its own pace:

    streams    calls that nothing follows
    large      messages of 4 MiB + 1
    lies       messages that say they have 1 GiB, and trickle
    loris      data connections that say one byte of their greeting at a time
    silence    connections that say nothing at all
    stores     streams of blocks that stop half-way
    rubbish    connections that say random bytes
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Callable

from stratakv.tiers.contract import make_keys
from stratakv.tiers.wire.frames import encode_greeting
from stratakv.tiers.wire.raw_messages import encode_piece

from .raw_http2 import RawConnection
from .rig import LAYOUT, pieces_of

_SERVICE = "/stratakv.cache.v1.CacheService/"
_FLOOD_CONNECTIONS, _FLOOD_CALLS = 100, 100


class Attackers:
    """Each attack on a thread of its own, while `on` is set."""

    def __init__(self, port: int, data_port: int, token: str) -> None:
        self.calls = ("127.0.0.1", port)
        self.data = ("127.0.0.1", data_port)
        self.token = token
        self.on = threading.Event()
        self.tally: collections.Counter[str] = collections.Counter()
        self.rng = random.Random(1)
        self.flooded: list[RawConnection] = []

    def start(self) -> None:
        attacks: list[tuple[Callable[[], None], float]] = [
            (self.streams, 0.01),
            (self.large, 0.3),
            (self.lies, 0.05),
            (self.loris, 0.1),
            (self.silence, 0.1),
            (self.stores, 0.1),
            (self.rubbish, 0.02),
        ]
        for attack, pause in attacks:
            threading.Thread(target=self._run, args=(attack, pause), daemon=True).start()

    def _run(self, attack: Callable[[], None], pause: float) -> None:
        while True:
            self.on.wait()
            with contextlib.suppress(OSError):
                attack()
            time.sleep(pause)

    def _hold(self, connections: list[RawConnection], count: int) -> None:
        """Keep the last so many."""
        while len(connections) > count:
            connections.pop(0).sock.close()

    def flood(self) -> None:
        for _ in range(_FLOOD_CONNECTIONS):
            connection = RawConnection(self.calls)
            self.flooded.append(connection)
            for number in range(_FLOOD_CALLS):
                connection.call(_SERVICE + "Lookup", self.token if number % 2 else None)
                self.tally["flood"] += 1

    def streams(self, held: list[RawConnection] = []) -> None:  # noqa: B006 - its memory
        if self.tally["streams"] % 100 == 0:
            held.append(RawConnection(self.calls))
            self._hold(held, 20)
        for token in (None, self.token):
            held[-1].call(_SERVICE + "Lookup", token)
            self.tally["streams"] += 1

    def large(self) -> None:
        with RawConnection(self.calls) as connection:
            stream = connection.call(_SERVICE + "Lookup", self.token)
            connection.message(stream, bytes(4 * 1024**2 + 1))
            self.tally["large"] += 1

    def lies(self, held: list[RawConnection] = []) -> None:  # noqa: B006
        connection = RawConnection(self.calls)
        for _ in range(3):
            stream = connection.call(_SERVICE + "Store", self.token)
            connection.message(stream, bytes(1000), 2**30)
            self.tally["lies"] += 1
        held.append(connection)
        self._hold(held, 5)

    def loris(self, held: list[tuple[socket.socket, bytes]] = []) -> None:  # noqa: B006
        held.append((socket.create_connection(self.data, 1.0), encode_greeting(bytes(32))))
        held[:] = held[-300:]
        self.tally["loris"] += 1
        for number, (sock, rest) in enumerate(held):
            with contextlib.suppress(OSError):
                sock.sendall(rest[:1])
            held[number] = sock, rest[1:]

    def silence(self, held: list[socket.socket] = []) -> None:  # noqa: B006
        held += [socket.create_connection(at, 1.0) for at in (self.calls, self.data)]
        held[:] = held[-200:]
        self.tally["silence"] += 2

    def stores(self, held: list[RawConnection] = []) -> None:  # noqa: B006
        connection = RawConnection(self.calls)
        (piece,) = pieces_of(make_keys(1, str(self.tally["stores"])), LAYOUT)
        piece.payload = piece.payload[:1000]
        for _ in range(2):
            connection.message(connection.call(_SERVICE + "Store", self.token), encode_piece(piece))
            self.tally["stores"] += 1
        held.append(connection)
        self._hold(held, 20)

    def rubbish(self) -> None:
        for at in (self.calls, self.data):
            with socket.create_connection(at, 1.0) as sock:
                sock.sendall(self.rng.randbytes(self.rng.randrange(2000)))
                self.tally["rubbish"] += 1


def _main() -> None:
    attackers = Attackers(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    attackers.flood()
    attackers.start()
    for line in sys.stdin:
        word = line.strip()
        (attackers.on.set if word == "on" else attackers.on.clear)()
        print(word, flush=True)
    print(json.dumps(attackers.tally))


if __name__ == "__main__":
    _main()
