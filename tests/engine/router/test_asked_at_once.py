# SPDX-License-Identifier: Apache-2.0
"""A prefill node and a decode node that are asked at once, as some routers do: processes, sockets,
and the embedded model in float64, so that tokens are the same however the work is split."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from ...nursery_site.nursery_client import Nursery
from ...tiers.cache_server.rig import server_process
from .test_real_nodes import NODE_FLAGS, complete, figure, prompt_of, started, wait_for

pytestmark = pytest.mark.timeout(300)

LENGTH = 2_500  # of a prompt that is not to be computed before its node is killed
SHORT = 1_200
BLOCK_TOKENS = 16
SLOW = ("--max-num-batched-tokens", "32", "--max-num-seqs", "4")
COMPUTED = "stratakv:scheduled_tokens_total"
STORED = "stratakv:tier_stored_blocks_total"


@dataclass
class Nodes:
    """URLs, and the process of the prefill node."""

    prefill: str
    decode: str
    process: Any

    def figure(self, name: str, *labels: str) -> float:
        return figure(self.decode, name, *labels)

    def waits(self, end: str) -> float:
        return self.figure("stratakv:prefill_waits_total", f'end="{end}"')


@pytest.fixture
def nodes(worker_nursery: Nursery) -> Iterator[Nodes]:
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="stratakv-test-"))
        cache = stack.enter_context(server_process("--cpu-bytes", "96MiB"))
        flags = [*NODE_FLAGS, "--kv-offload", f"cpu,grpc://{cache.address}"]
        process, prefill = stack.enter_context(
            started(worker_nursery, scratch, "serve", *flags, "--role", "prefill", *SLOW)
        )
        _, decode = stack.enter_context(
            started(worker_nursery, scratch, "serve", *flags, "--role", "decode")
        )
        yield Nodes(prefill, decode, process)


class Leg:
    """A request on a thread of its own."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.answer: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._ask, args=(url, body))
        self._thread.start()

    def join(self) -> Any:
        self._thread.join()
        return self.answer

    def _ask(self, url: str, body: dict[str, Any]) -> None:
        try:
            self.answer = complete(url, body)
        except Exception as error:
            self.error = error


def body_of(seed: int, length: int) -> dict[str, Any]:
    prompt = prompt_of(seed, length)
    return {"prompt": prompt, "temperature": 0, "max_tokens": 6, "return_token_ids": True}


# What two kinds of routers send to the prefill node and to the decode node, beside the client's.
ROOM = {
    "bootstrap_host": "127.0.0.1",
    "bootstrap_port": 8998,
    "bootstrap_room": 2865019243262358119,
}
TRANSFER = [
    {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "x"}, "max_tokens": 1},
    {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": "x"}},
]


def test_the_decode_node_computes_next_to_nothing(nodes: Nodes) -> None:
    for count, (to_prefill, to_decode) in enumerate([(ROOM, ROOM), TRANSFER], 1):
        body = body_of(count, SHORT)
        computed = nodes.figure(COMPUTED)
        decode = Leg(nodes.decode, {**body, **to_decode})
        prefill = Leg(nodes.prefill, {**body, **to_prefill})
        answer, other = decode.join(), prefill.join()
        assert other["usage"]["completion_tokens"] == 1
        assert nodes.waits("whole") == count
        assert nodes.figure(COMPUTED) - computed <= SHORT % BLOCK_TOKENS + BLOCK_TOKENS + 6
        details = answer["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] >= SHORT - BLOCK_TOKENS
        assert nodes.figure("stratakv:prefill_wait_seconds_count") == count
        assert nodes.figure("stratakv:prefill_waiting") == 0
        assert answer["choices"] == complete(nodes.prefill, body)["choices"]


def test_the_prefill_node_is_killed_in_the_middle(nodes: Nodes) -> None:
    body = body_of(3, LENGTH)
    decode = Leg(nodes.decode, {**body, **ROOM})
    wait_for(lambda: nodes.figure("stratakv:prefill_waiting") == 1, "it waits")
    prefill = Leg(nodes.prefill, {**body, **ROOM})
    # Blocks come into the slab while it waits.
    wait_for(lambda: nodes.figure(STORED, 'tier="cpu"') >= 8, "blocks come")
    nodes.process.kill()
    answer = decode.join()
    assert prefill.join() is None
    by_tier = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert 8 * BLOCK_TOKENS <= by_tier["cpu"] + by_tier["remote"] < LENGTH - BLOCK_TOKENS
    assert nodes.waits("stalled") == 1 and nodes.figure("stratakv:prefill_waiting") == 0
    # Its blocks are in the pool by now, so the same prompt under another salt is computed.
    alone = complete(nodes.decode, {**body, "cache_salt": "another"})
    assert answer["choices"] == alone["choices"]
