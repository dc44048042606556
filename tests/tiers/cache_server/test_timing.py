# SPDX-License-Identifier: Apache-2.0
"""Nobody learns from the time that an answer takes whether another tenant has a block.

Two kinds of question are asked in turn, in random order, so that what the machine does beside falls
on both. The area under the curve is 0.5 where nobody can tell them apart.
"""

from __future__ import annotations

import bisect
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.contract import make_buffers, make_keys
from stratakv.tiers.remote.transports.data_client import DataConnection
from stratakv.tiers.remote.transports.memory_client import MemoryConnection
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.rpc import Stub

from .rig import (
    WAIT_SECONDS,
    ServerProcess,
    load_blocks,
    server_process,
    store_blocks,
    tenant,
    token_of,
)

SAMPLES = (500, 10_000)  # of each kind; in CI, and in a long run
NOTHING_TOLD, ALL_TOLD = (0.42, 0.58), 0.9
# One's own: what the machine does beside is not in the quickest of several answers.
QUICKEST_OF, ATTEMPTS = 5, 4
# 4 MiB a block, so that one's own take longer than a miss.
BLOCKS = 8
LAYOUT = BlockLayout(num_layers=32, block_size=16, num_kv_heads=8, head_dim=128, kv_dtype="float32")
Ask = Callable[[bytes], State]


def area(ours: Sequence[float], others: Sequence[float]) -> float:
    """How likely it is that one of `ours` is larger than one of `others`."""
    ranked = sorted(others)
    above = sum(
        bisect.bisect_left(ranked, value) + bisect.bisect_right(ranked, value) for value in ours
    )
    return above / (2 * len(ours) * len(others))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Ann and eve have blocks, each their own."""
    cpu_bytes = BLOCKS * 2 * LAYOUT.slot_bytes
    path = tmp_path_factory.mktemp("timing") / "tenants.toml"
    path.write_text(
        "".join(
            f'[[tenant]]\nname = "{name}"\ntoken_sha256 = "{digest.hex()}"\n'
            f"cpu_bytes = {cpu_bytes}\n"
            for name in ("ann", "eve")
            for digest in tenant(name).token_digests
        )
    )
    with server_process(
        "--tenants", str(path), "--cpu-bytes", str(2 * cpu_bytes), "--shared-memory"
    ) as server:
        for name in ("ann", "eve"):
            stub = server.stub(token_of(name))
            server.attach(stub, LAYOUT)
            assert set(store_blocks(stub, make_keys(BLOCKS, name), LAYOUT)) == {State.KEPT}
        yield server


def by_call(server: ServerProcess, stub: Stub) -> Ask:
    def ask(key: bytes) -> State:
        request = messages.LookupRequest(keys=key)
        return State(stub.lookup(request, timeout=WAIT_SECONDS).states[0])

    return ask


def by_stream(server: ServerProcess, stub: Stub) -> Ask:
    def ask(key: bytes) -> State:
        return State.MISS if load_blocks(stub, [key]) == [None] else State.HIT

    return ask


def by_connection(memory: bool) -> Callable[[ServerProcess, Stub], Ask]:
    def make(server: ServerProcess, stub: Stub) -> Ask:
        offer = stub.open_data(messages.OpenDataRequest(), timeout=WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        connection: Any
        if memory:
            connection = MemoryConnection.open(offer.unix_path, offer.ticket, LAYOUT, deadline)
        else:
            connection = DataConnection.open(
                server.host, offer.port, offer.ticket, LAYOUT, deadline
            )
        buffers = make_buffers(1, LAYOUT)

        def ask(key: bytes) -> State:
            (proof,) = connection.load([key], buffers, time.monotonic() + WAIT_SECONDS)
            return State.MISS if proof is None else State.HIT

        return ask

    return make


WAYS = {
    "look-up": by_call,
    "stream": by_stream,
    "socket": by_connection(memory=False),
    "memory": by_connection(memory=True),
}


def times_of(
    ask: Ask, kinds: Sequence[tuple[Callable[[], bytes], State]], count: int, rng: random.Random
) -> list[list[float]]:
    """How long each kind of question took."""
    for make, _ in kinds * 20:
        ask(make())  # warm
    times: list[list[float]] = [[] for _ in kinds]
    order = [kind for kind in range(len(kinds)) for _ in range(count)]
    rng.shuffle(order)
    for kind in order:
        make, expected = kinds[kind]
        key = make()
        began = time.perf_counter()
        state = ask(key)
        times[kind].append(time.perf_counter() - began)
        assert state is expected
    return times


@pytest.mark.parametrize("way", WAYS)
def test_blocks_of_others_take_as_long_as_none(
    server: ServerProcess, way: str, scale: str, rng: random.Random
) -> None:
    eve = server.stub(token_of("eve"))
    anns = make_keys(BLOCKS, "ann")
    # As many, asked for as often: keys in the processor's caches are sent sooner than new ones.
    unknown = make_keys(BLOCKS, "nobody")
    kinds = [(lambda: rng.choice(anns), State.MISS), (lambda: rng.choice(unknown), State.MISS)]
    ask = WAYS[way](server, eve)
    theirs, nobodys = times_of(ask, kinds, SAMPLES[scale == "long"], rng)
    told = area(theirs, nobodys)
    print(f"{way}: {told:.3f}")
    assert NOTHING_TOLD[0] <= told <= NOTHING_TOLD[1]


@pytest.mark.parametrize("way", ["socket", "memory"])
def test_ones_own_blocks_can_be_told(
    server: ServerProcess, way: str, scale: str, rng: random.Random
) -> None:
    """Or the test above would see nothing."""
    eve = server.stub(token_of("eve"))
    own, anns = make_keys(BLOCKS, "eve"), make_keys(BLOCKS, "ann")
    kinds = [(lambda: rng.choice(own), State.HIT), (lambda: rng.choice(anns), State.MISS)]
    ask, told = WAYS[way](server, eve), list[float]()
    while len(told) < ATTEMPTS and max(told, default=0.0) <= ALL_TOLD:
        times = times_of(ask, kinds, SAMPLES[scale == "long"], rng)
        hits, misses = (
            [min(several) for several in zip(*[iter(kind)] * QUICKEST_OF, strict=True)]
            for kind in times
        )
        told.append(area(hits, misses))
    print(f"{way}: {told}")
    assert max(told) > ALL_TOLD


def test_the_area_under_the_curve() -> None:
    assert area([1.0], [0.0]) == 1.0
    assert area([0.0], [1.0]) == 0.0
    assert area([1.0, 1.0], [1.0, 1.0]) == 0.5
    values = [float(value) for value in itertools.chain(range(50), range(50))]
    assert area(values, values) == 0.5
