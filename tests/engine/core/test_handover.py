# SPDX-License-Identifier: Apache-2.0
"""One core computes a prompt, another one goes on with it; between them a real cache server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.handover import MOST_SECONDS
from stratakv.engine.request.core_messages import AddRequest, RequestExtras, TokenOutput
from stratakv.engine.request.handover_ticket import Ticket
from stratakv.proto.v1 import cache_service_pb2 as messages

from ...tiers.cache_server.rig import WAIT_SECONDS, ServerProcess, server_process
from ...two_engines import secured
from .conftest import MakeCore, Reference, prompt_of, request, run

BLOCK = 8
MakeNode = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process("--cpu-bytes", "32MiB") as server:
        yield server


@pytest.fixture
def make_node(make_core: MakeCore, server: ServerProcess, patient_clients: None) -> MakeNode:
    """Cores that share the server, which loses everything before."""

    def make(role: str = "both", **options: Any) -> EngineCore:
        return make_core(
            role=role,
            kv_offload=f"cpu,grpc://127.0.0.1:{server.port}",
            kv_offload_cpu_bytes="1MiB",
            kv_offload_load="always",
            require_tiers=True,
            **options,
        )

    return make


def prefilled(core: EngineCore, prompt: list[int], **fields: Any) -> TokenOutput:
    """The only output of a prompt of which one token is wanted."""
    outputs = core.add(request("p", prompt, **{"max_tokens": 1, **fields}))
    while not any(output.finish_reason for output in outputs):
        assert core.has_work() or core.idle_seconds() >= 0
        outputs += core.step() if core.has_work() else []
    (output,) = outputs
    return output


def gone_on(core: EngineCore, prompt: list[int], ticket: Ticket | None, **fields: Any) -> Any:
    extras = RequestExtras(ticket=ticket)
    return run(core, request("d", prompt, extras=extras, **fields))["d"]


def computed_tokens(core: EngineCore) -> int:
    return int(core.scheduler.counts["scheduled_tokens"])


@pytest.mark.parametrize("length", [3, 8, 9, 15, 16, 17, 40, 100])
def test_the_second_core_computes_nothing_of_the_prompt(
    make_node: MakeNode, greedy_reference: Reference, length: int
) -> None:
    prompt = prompt_of(length)
    one, two = make_node("prefill"), make_node("decode")
    output = prefilled(one, prompt)
    ticket = output.ticket
    assert ticket is not None and ticket.num_tokens == length
    assert one.call("stats", "")["handover"]["incomplete"] == 0
    assert computed_tokens(one) == length
    answer = gone_on(two, prompt, ticket)
    assert answer.new_token_ids == greedy_reference(prompt, 6)
    assert answer.new_token_ids[0] == output.new_token_ids[0]
    assert computed_tokens(two) == 5, "one for each token behind the first"
    assert answer.cached_tokens_by_tier == {"pool": 0, "remote": length}


@pytest.mark.parametrize("length", [3, 8, 9, 15, 16, 17, 40, 100])
def test_without_a_ticket_the_last_token_is_computed_again(
    make_node: MakeNode, greedy_reference: Reference, length: int
) -> None:
    prompt = prompt_of(length)
    one, two = make_node("prefill"), make_node("decode")
    prefilled(one, prompt)
    answer = gone_on(two, prompt, None)
    assert answer.new_token_ids == greedy_reference(prompt, 6)
    assert computed_tokens(two) == 6


WISHES: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.7, "seed": 7, "top_p": 0.8, "logprobs": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"min_tokens": 3, "ignore_eos": False, "stop_token_ids": [1, 2, 3]},
    {"logit_bias": {5: 4.0}, "bad_words_token_ids": [[7], [9, 9]]},
    {"logprobs": 0},
]


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_every_parameter_gives_what_one_core_gives(
    make_node: MakeNode, make_core: MakeCore, executor: str
) -> None:
    one, two = [
        make_node(role, distributed_executor_backend=executor) for role in ("prefill", "decode")
    ]
    plain = make_core()
    for number, wishes in enumerate(WISHES):
        prompt = prompt_of(43, seed=100 + number)
        first = {**wishes, "min_tokens": min(1, wishes.get("min_tokens", 0))}
        output = prefilled(one, prompt, **first)
        before = computed_tokens(two)
        extras = RequestExtras(ticket=output.ticket)
        told = all_of(two, request("d", prompt, extras=extras, **wishes))
        expected = all_of(plain, request("d", prompt, **wishes))
        for each in (tokens_of, logprobs_of):
            assert each(told) == each(expected), wishes
        assert told[0].new_token_ids == output.new_token_ids
        assert computed_tokens(two) - before == len(told) - 1
        assert told[1].num_cached_tokens == len(prompt)


def all_of(core: EngineCore, message: AddRequest) -> list[TokenOutput]:
    outputs = core.add(message)
    while not outputs or outputs[-1].finish_reason is None:
        outputs += core.step() if core.has_work() else []
    return outputs


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def logprobs_of(outputs: list[TokenOutput]) -> list[list[int]]:
    return [each.token_ids for output in outputs for each in output.logprobs or ()]


def test_a_first_token_that_ends_the_answer_ends_it_there_too(make_node: MakeNode) -> None:
    prompt = prompt_of(20)
    one, two = make_node("prefill"), make_node("decode")
    output = prefilled(one, prompt)
    wishes = {"stop_token_ids": output.new_token_ids}
    answer = gone_on(two, prompt, output.ticket, **wishes)
    assert (answer.new_token_ids, answer.finish_reason) == (output.new_token_ids, "stop")
    (only,) = two.add(
        request("e", prompt, max_tokens=1, extras=RequestExtras(ticket=output.ticket))
    )
    assert (only.new_token_ids, only.finish_reason) == (output.new_token_ids, "length")
    assert computed_tokens(two) == 0 and not two.scheduler.requests


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 42},
        {"prompt": "00" * 32},
        {"params": "0" * 32},
        {"first_token": -1},
        {"first_token": 10**9},
    ],
    ids=str,
)
def test_a_ticket_that_does_not_fit_is_not_used(
    make_node: MakeNode, greedy_reference: Reference, change: dict[str, Any]
) -> None:
    prompt = prompt_of(43)
    one, two = make_node("prefill"), make_node("both")
    ticket = prefilled(one, prompt).ticket
    assert ticket is not None
    answer = gone_on(two, prompt, msgspec.structs.replace(ticket, **change))
    assert answer.new_token_ids == greedy_reference(prompt, 6)
    assert computed_tokens(two) == 6, "its blocks are found all the same"


def test_another_tenant_gets_neither_blocks_nor_token(make_node: MakeNode) -> None:
    prompt = prompt_of(43)
    one, two = make_node("prefill"), make_node("decode")
    ticket = prefilled(one, prompt, tenant="ann").ticket
    gone_on(two, prompt, ticket, tenant="eve")
    assert computed_tokens(two) == 43 + 5
    gone_on(two, prompt, ticket, tenant="ann")
    assert computed_tokens(two) == 43 + 5 + 5


def test_a_ticket_without_the_log_probabilities_that_are_asked_for(make_node: MakeNode) -> None:
    prompt = prompt_of(43)
    one, two = make_node("prefill"), make_node("decode")
    ticket = prefilled(one, prompt, logprobs=1).ticket
    gone_on(two, prompt, ticket, logprobs=2)
    assert computed_tokens(two) == 6


def test_an_answer_is_not_held_for_a_server_that_is_gone(
    make_core: MakeCore, greedy_reference: Reference
) -> None:
    with server_process("--cpu-bytes", "32MiB") as server:
        core = make_core(
            role="prefill",
            kv_offload=f"cpu,grpc://127.0.0.1:{server.port}",
            kv_offload_cpu_bytes="1MiB",
            require_tiers=True,
        )
        prefilled(core, prompt_of(20))
        server.kill()
        began = time.monotonic()
        for seed in range(3):
            output = prefilled(core, prompt_of(40, seed))
            assert output.new_token_ids == greedy_reference(prompt_of(40, seed), 1)
        assert time.monotonic() - began < MOST_SECONDS
        assert core.call("stats", "")["handover"]["incomplete"] == 3


def test_a_server_that_lends_no_more_has_the_blocks_all_the_same(make_core: MakeCore) -> None:
    slot_bytes = 8192  # of blocks of 8 tokens of this model, and a little
    with server_process("--cpu-bytes", str(20 * slot_bytes)) as server:
        core = make_core(
            role="prefill",
            kv_offload=f"cpu,grpc://127.0.0.1:{server.port}",
            kv_offload_cpu_bytes="1MiB",
            require_tiers=True,
        )
        for seed in range(6):
            assert prefilled(core, prompt_of(40, seed)).ticket
        stats = core.call("stats", "")
        assert stats["handover"]["incomplete"] == 0
        errors = stats["connector"]["tiers"]["remote"]["errors"]
        assert errors["busy"], "half of its blocks are lent"
        assert server.stub().stats(messages.StatsRequest()).leases < 6


def test_a_client_that_leaves_while_its_answer_is_held(make_node: MakeNode) -> None:
    core = make_node("prefill")
    outputs = core.add(request("p", prompt_of(40), max_tokens=1))
    while not len(core._held):
        outputs += core.step()
    core.abort_requests(["p"])
    assert not outputs and not len(core._held)
    for seed in range(3):  # the next ones are handed over as ever
        assert prefilled(core, prompt_of(50, seed)).ticket
    assert core.call("stats", "")["handover"]["incomplete"] == 0


@pytest.mark.parametrize("place", ["slab", "pool"])
def test_what_the_server_has_lost_is_stored_again(make_core: MakeCore, place: str) -> None:
    """The pool has the prompt, so nothing of it is computed, and nothing would be stored."""
    prompt = prompt_of(43)
    with server_process("--cpu-bytes", "32MiB") as server:
        core = make_core(
            role="prefill",
            kv_offload=f"cpu,grpc://127.0.0.1:{server.port}",
            kv_offload_cpu_bytes="1MiB",
            require_tiers=True,
        )
        prefilled(core, prompt)
        if place == "pool":
            slab = core._connector._hierarchy._slab  # type: ignore[attr-defined]
            slab.forget(slab.keys())
        server.kill()
        server.start()
        deadline = time.monotonic() + WAIT_SECONDS
        incomplete = 1
        while incomplete:  # until the engine is attached again
            assert time.monotonic() < deadline
            time.sleep(0.05)
            before = core.call("stats", "")["handover"]["incomplete"]
            prefilled(core, prompt)
            incomplete = core.call("stats", "")["handover"]["incomplete"] - before
        assert computed_tokens(core) < 43 + 8 * core.call("stats", "")["handover"]["handed_over"]
        stub = server.stub()
        assert stub.stats(messages.StatsRequest()).leases


def test_a_longer_answer_is_handed_over_as_far_as_whole_blocks_go(
    make_node: MakeNode, greedy_reference: Reference
) -> None:
    prompt = prompt_of(43, 99)
    one, two = make_node("prefill"), make_node("decode")
    outputs = all_of(one, request("p", prompt))
    assert one.call("stats", "")["handover"]["incomplete"] == 0
    answer = gone_on(two, prompt, outputs[-1].ticket)
    assert answer.new_token_ids == greedy_reference(prompt, 6)
    assert computed_tokens(two) == 43 - 40 + 5


def test_blocks_are_read_into_the_slab_while_the_other_core_computes(
    make_node: MakeNode, greedy_reference: Reference
) -> None:
    prompt = prompt_of(95, seed=5)
    one, two = make_node("prefill", max_num_batched_tokens=16), make_node("decode")
    followed = msgspec.json.encode(request("f", prompt)).decode()
    assert two.call("follow", followed) is True
    two.has_work()
    slab = two._connector._hierarchy._slab  # type: ignore[attr-defined]
    outputs = one.add(request("p", prompt, max_tokens=1))
    deadline = time.monotonic() + WAIT_SECONDS
    while computed_tokens(one) < 64:  # more of it is to come
        outputs += one.step()
    one.call("pause", "all")
    while len(slab.keys()) < 8:
        assert time.monotonic() < deadline, "what has come is not followed"
        one.step()
        two.has_work()
        time.sleep(0.001)
    assert computed_tokens(one) < 95 and not outputs
    one.call("resume", "")
    while not outputs:
        outputs += one.step() if one.has_work() else []
    while len(slab.keys()) < 12:
        assert time.monotonic() < deadline
        two.has_work()
    answer = gone_on(two, prompt, outputs[0].ticket)
    assert answer.new_token_ids == greedy_reference(prompt, 6)
    assert answer.cached_tokens_by_tier == {"pool": 0, "cpu": 95}
    assert computed_tokens(two) == 5
    two.has_work()
    assert not two._connector.prompts_elsewhere.follows.prompts  # type: ignore[attr-defined]


@pytest.mark.parametrize("argument", ["", "{}", "[]", '["add","a"]', '["add","a","AAAA",{}]'])
def test_what_cannot_be_followed_is_refused(make_node: MakeNode, argument: str) -> None:
    with pytest.raises(ValueError, match=r"no request|empty or no list"):
        make_node("decode").call("follow", argument)


def test_over_tls_with_a_token(
    make_core: MakeCore, greedy_reference: Reference, tmp_path: Path
) -> None:
    flags, told = secured(tmp_path)
    flags += ["--cpu-bytes", "32MiB", "--no-shared-memory"]
    with server_process(*flags, start=False) as server:
        server.tls = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
        server.host = "localhost"
        server.start()
        one, two = [
            make_core(
                role=role,
                kv_offload=f"cpu,grpcs://127.0.0.1:{server.port}",
                kv_offload_cpu_bytes="1MiB",
                kv_offload_load="always",
                require_tiers=True,
                **told,
            )
            for role in ("prefill", "decode")
        ]
        for length in (17, 48, 100):
            prompt = prompt_of(length)
            answer = gone_on(two, prompt, prefilled(one, prompt).ticket)
            assert answer.new_token_ids == greedy_reference(prompt, 6)
        assert computed_tokens(two) == 3 * 5
        assert one.call("stats", "")["handover"]["incomplete"] == 0


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_prompts_that_share_beginnings_over_nodes_with_other_chunks(
    make_node: MakeNode, make_core: MakeCore, algorithm: str, seed: int
) -> None:
    """Each goes to any prefill node, or to none, and then to any decode node."""
    rng = random.Random(f"{seed} {algorithm}")
    common = {"block_hash": algorithm}
    first = [make_node("prefill", max_num_batched_tokens=n, **common) for n in (8, 24)]
    then = [make_node("decode", max_num_batched_tokens=n, **common) for n in (16, 64)]
    plain = make_core()
    documents = [prompt_of(120, seed=number) for number in range(100, 103)]
    for number in range(25):
        text = rng.choice(documents)[: rng.randint(1, 100)]
        text = text + rng.choices(range(256), k=rng.choice([0, 0, 1, 5]))
        wishes: dict[str, Any] = {"temperature": rng.choice([0.0, 0.9]), "seed": number}
        ticket = prefilled(rng.choice(first), text, **wishes).ticket if rng.random() < 0.8 else None
        node = rng.choice(then)
        before = computed_tokens(node)
        got = gone_on(node, text, ticket, **wishes).new_token_ids
        assert got == run(plain, request("d", text, **wishes))["d"].new_token_ids, number
        if ticket is not None:
            assert computed_tokens(node) - before <= 5, number


def test_a_client_that_leaves_when_its_blocks_have_just_arrived(make_node: MakeNode) -> None:
    """The hand-over has ended, and the step that would release the answer has not come yet."""
    core = make_node("prefill")
    outputs = core.add(request("p", prompt_of(40, 7), max_tokens=1))
    hand_overs = core._connector.handover  # type: ignore[attr-defined]
    deadline = time.monotonic() + WAIT_SECONDS
    while not hand_overs.ended:
        assert not outputs and time.monotonic() < deadline
        if core.has_work() and not hand_overs.ended:
            outputs += core.step()
    core.abort_requests(["p"])
    assert core.step() == []
    outputs = core.add(request("q", prompt_of(50, 8), max_tokens=1))
    while not outputs:
        assert time.monotonic() < deadline
        outputs += core.step() if core.has_work() else []
    assert outputs[0].ticket and core.call("stats", "")["handover"]["handed_over"] == 1


def test_the_core_sleeps_while_blocks_are_on_their_way(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When their time is over is the connector's business, which wakes the core."""
    core = make_node("prefill")
    monkeypatch.setattr(core._connector.handover, "hand_over", lambda *_facts: None)  # never ends
    outputs = core.add(request("p", prompt_of(40, 9), max_tokens=1))
    held = core._held._held
    while "p" not in held or not held["p"].is_moving:
        outputs += core.step()
    held["p"].give_up_at = time.monotonic() - 1
    assert not outputs and not core._held.is_due and core.idle_seconds() > 1
    core.abort_requests(["p"])
