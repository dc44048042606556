# SPDX-License-Identifier: Apache-2.0
"""Two cores are asked for one prompt at once: one computes it, the other one waits for its blocks.
Between them a real cache server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from stratakv.connector.prefill_decode import prefill_waits
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import RequestExtras, TokenOutput

from ...leftovers import check_nothing_left, settle
from ...tiers.cache_server.rig import WAIT_SECONDS, ServerProcess, server_process
from .conftest import MakeCore, Reference, prompt_of, request

BLOCK = 8
CHUNK = 16  # tokens of a step of the one that computes
LENGTH = 203
FULL = LENGTH - LENGTH % BLOCK
ASKED = RequestExtras(asked_elsewhere=True)
COMPUTED = RequestExtras(computed_elsewhere=True)
MakeNode = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    with server_process("--cpu-bytes", "32MiB") as server:
        yield server


@pytest.fixture
def make_node(make_core: MakeCore, shared: ServerProcess, patient_clients: None) -> MakeNode:
    def make(role: str, server: ServerProcess = shared, **options: Any) -> EngineCore:
        return make_core(
            role=role,
            kv_offload=f"cpu,grpc://127.0.0.1:{server.port}",
            kv_offload_cpu_bytes="1MiB",
            kv_offload_load="always",
            require_tiers=True,
            **options,
        )

    return make


def make_slow(make_node: MakeNode, **options: Any) -> EngineCore:
    return make_node("prefill", max_num_batched_tokens=CHUNK, max_num_seqs=2, **options)


class Walk:
    """Cores that a test steps in turns, and what their requests were told."""

    def __init__(self, *cores: EngineCore) -> None:
        self.cores = list(cores)
        self.told: dict[str, list[int]] = {}
        self.ended: dict[str, TokenOutput] = {}

    def add(self, core: EngineCore, name: str, prompt: Sequence[int], **fields: Any) -> None:
        self._take(core.add(request(name, prompt, **fields)))

    def step(self, core: EngineCore) -> None:
        if core.has_work():
            self._take(core.step())

    def until(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not reached():
            assert time.monotonic() < deadline, what
            for core in self.cores:
                self.step(core)

    def wait_for_one(self, core: EngineCore) -> None:
        """Until a request of this core's waits for the others'."""
        deadline = time.monotonic() + WAIT_SECONDS
        while num_waiting(core) != 1:
            assert time.monotonic() < deadline, "it waits"
            self.step(core)

    def compute(self, core: EngineCore, num_steps: int) -> None:
        """So many steps with tokens; then it only moves blocks, until it is resumed."""
        core.call("resume", "")
        goal = computed_tokens(core) + num_steps * CHUNK
        while computed_tokens(core) < goal:
            self.step(core)
        core.call("pause", "all")

    def _take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            self.told.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ended[output.request_id] = output


def computed_tokens(core: EngineCore) -> int:
    return int(core.scheduler.counts["scheduled_tokens"])


def waits_of(core: EngineCore) -> dict[str, int]:
    connector = core.call("stats", "")["connector"]
    return {end: count for end, count in connector["prefill_waits"].items() if count}


def num_waiting(core: EngineCore) -> int:
    return int(core.call("stats", "")["connector"]["awaiting_prefill"])


def come(core: EngineCore) -> int:
    """Blocks that have come for the request that waits."""
    side: Any = core._connector
    waits = [offload.wait for offload in side.requests.values() if offload.wait is not None]
    return sum(wait.prompt.num_there for wait in waits)


def check_left(*cores: EngineCore) -> None:
    for core in cores:
        settle(core)  # and tell the worker who is gone
        check_nothing_left(core)


def test_the_decode_core_computes_only_the_end_of_the_prompt(
    make_node: MakeNode, greedy_reference: Reference
) -> None:
    prompt, other = prompt_of(LENGTH, 1), prompt_of(20, 2)
    prefill, decode = make_slow(make_node), make_node("decode")
    walk = Walk(decode, prefill)
    prefill.call("pause", "all")
    walk.add(prefill, "p", prompt, max_tokens=1)
    walk.add(decode, "d", prompt, extras=ASKED)
    walk.add(decode, "other", other, max_tokens=30)
    walk.until(lambda: "other" in walk.ended, "others pass it")
    assert walk.told["other"] == greedy_reference(other, 30)
    assert num_waiting(decode) == 1 and not waits_of(decode) and "d" not in walk.told
    assert decode.scheduler.manager.pool.is_idle, "it holds no blocks"
    before = computed_tokens(decode)
    for num_blocks in range(CHUNK // BLOCK, LENGTH // BLOCK // 2, CHUNK // BLOCK):
        walk.compute(prefill, 1)
        walk.until(lambda: come(decode) == num_blocks, "each step's blocks come")  # noqa: B023
        assert num_waiting(decode) == 1
    prefill.call("resume", "")
    walk.until(lambda: {"p", "d"} <= walk.ended.keys(), "both end")
    assert waits_of(decode) == {"whole": 1}
    assert walk.told["d"] == greedy_reference(prompt, 6)
    assert computed_tokens(decode) - before <= LENGTH - FULL + 5
    assert computed_tokens(prefill) == LENGTH
    check_left(prefill, decode)


def test_it_may_ask_before_the_other_one_is_asked(
    make_node: MakeNode, greedy_reference: Reference
) -> None:
    """By the request's own word, whatever the node's role; two answers of one prompt wait."""
    prompt = prompt_of(LENGTH, 3)
    prefill, decode = make_slow(make_node), make_node("both")
    walk = Walk(decode)
    for name in ("d", "e"):
        walk.add(decode, name, prompt, extras=COMPUTED)
    walk.until(lambda: num_waiting(decode) == 2, "both wait")
    walk.cores.append(prefill)
    walk.add(prefill, "p", prompt, max_tokens=1)
    walk.until(lambda: {"d", "e"} <= walk.ended.keys(), "both end")
    assert walk.told["d"] == walk.told["e"] == greedy_reference(prompt, 6)
    assert waits_of(decode) == {"whole": 2}
    assert computed_tokens(decode) <= 2 * (LENGTH - FULL + 5)
    check_left(prefill, decode)


@pytest.mark.parametrize("num_steps", [0, 5])
def test_the_prefill_core_is_lost(
    make_node: MakeNode,
    greedy_reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    num_steps: int,
) -> None:
    monkeypatch.setattr(prefill_waits, "ALWAYS_SECONDS", 1.0)
    prompt = prompt_of(LENGTH, 10 + num_steps)
    prefill, decode = make_slow(make_node), make_node("decode")
    walk = Walk(decode, prefill)
    walk.add(prefill, "p", prompt, max_tokens=1)
    walk.add(decode, "d", prompt, extras=ASKED)
    walk.wait_for_one(decode)
    walk.compute(prefill, num_steps)
    num_blocks = num_steps * CHUNK // BLOCK
    walk.until(lambda: come(decode) == num_blocks, "what it has computed comes")
    walk.cores.remove(prefill)
    walk.until(lambda: "d" in walk.ended, "the decode core computes the rest")
    assert waits_of(decode) == {"stalled": 1}
    assert walk.told["d"] == greedy_reference(prompt, 6)
    assert computed_tokens(decode) <= LENGTH - num_blocks * BLOCK + 5
    prefill.abort_requests(["p"])
    check_left(decode)


def test_the_cache_server_is_lost(
    make_node: MakeNode, greedy_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_waits, "ALWAYS_SECONDS", 3 * WAIT_SECONDS)
    prompt = prompt_of(LENGTH, 20)
    with server_process("--cpu-bytes", "32MiB") as server:
        prefill, decode = make_slow(make_node, server=server), make_node("decode", server)
        walk = Walk(decode, prefill)
        walk.add(prefill, "p", prompt, max_tokens=1)
        walk.add(decode, "d", prompt, extras=ASKED)
        walk.wait_for_one(decode)
        walk.compute(prefill, 4)
        walk.until(lambda: come(decode) == 4 * CHUNK // BLOCK, "some blocks come")
        walk.cores.remove(prefill)
        server.kill()
        walk.until(lambda: "d" in walk.ended, "it does not wait for a server that is gone")
        assert waits_of(decode) == {"lost": 1}
        assert walk.told["d"] == greedy_reference(prompt, 6)
        prefill.abort_requests(["p"])
        check_left(decode)


def test_without_evidence_a_decode_core_computes_at_once(
    make_node: MakeNode, greedy_reference: Reference
) -> None:
    prompt = prompt_of(LENGTH, 30)
    decode = make_node("decode")
    both = make_node("both")
    for core, extras in ((decode, None), (both, ASKED)):
        walk = Walk(core)
        walk.add(core, "d", prompt, extras=extras, cache_salt=core.config.role)
        walk.until(lambda: "d" in walk.ended, "it ends")  # noqa: B023
        assert walk.told["d"] == greedy_reference(prompt, 6)
        assert computed_tokens(core) == LENGTH + 5 and not waits_of(core)
        check_left(core)


def test_a_request_that_is_aborted_and_an_engine_that_is_paused(
    make_node: MakeNode, greedy_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_waits, "ALWAYS_SECONDS", 4.0)
    decode = make_node("decode")
    walk = Walk(decode)
    walk.add(decode, "gone", prompt_of(LENGTH, 40), extras=ASKED)
    walk.wait_for_one(decode)
    decode.abort_requests(["gone"])
    assert (num_waiting(decode), waits_of(decode)) == (0, {"gone": 1})
    prompt = prompt_of(LENGTH, 41)
    walk.add(decode, "d", prompt, extras=ASKED)
    walk.wait_for_one(decode)
    decode.call("pause", "all")
    walk.until(lambda: num_waiting(decode) == 0, "its wait ends in a pause too")
    assert waits_of(decode) == {"gone": 1, "stalled": 1}
    assert "d" not in walk.told
    decode.call("resume", "")
    walk.until(lambda: "d" in walk.ended, "it computes")
    assert walk.told["d"] == greedy_reference(prompt, 6)
    check_left(decode)
