# SPDX-License-Identifier: Apache-2.0
"""Nodes that do not fit each other: which of them are used, and what is said of the others."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.engine.router.node_identity import find_difference, read_identity
from stratakv.engine.router.nodes import HOPELESS_LOOKS, LeastLoaded, Node, Nodes, Role
from stratakv.engine.router.router_settings import NodeAddress

from .fake_node import FakeNode
from .rig import WAIT_SECONDS, Rig, check, rig

ONE = {
    "object": "stratakv.node",
    "model": "m",
    "fingerprint": "aa",
    "revision": "",
    "tokenizer": "t1",
    "chat_template": "c1",
    "kv_dtype": "bfloat16",
    "block_size": "16",
    "layout_version": "1",
    "layout": "l1",
    "cache_groups": "1",
    "block_hash": "sha256",
    "tag_key": "none",
    "tenant_secret": "none",
    "tenant_header": "none",
    "role": "both",
    "tiers": "cpu,remote",
}
OTHER = ONE | {"fingerprint": "bb", "layout": "l2"}
OF_ANSWERS = ("model", "fingerprint", "revision", "tokenizer", "chat_template")
OF_BLOCKS = ("kv_dtype", "block_size", "layout_version", "layout", "cache_groups", "block_hash",
             "tag_key", "tenant_secret", "tenant_header")  # fmt: skip
SHORT = "a short prompt"


def go(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


async def states(it: Rig) -> dict[str, Any]:
    answer = await it.request("GET", "/nodes")
    return {node["url"]: node for node in answer.json["nodes"]}


async def refused(it: Rig) -> dict[str, str]:
    """URL → why, of those that are."""
    return {url: node["refused"] for url, node in (await states(it)).items() if node["refused"]}


async def num_refused(it: Rig, role: str) -> float:
    text = (await it.request("GET", "/metrics")).body.decode()
    name = f'stratakv_router_nodes_refused{{role="{role}"}} '
    [line] = [line for line in text.splitlines() if line.startswith(name)]
    return float(line.removeprefix(name))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "is not used" in r.getMessage()]


@pytest.mark.parametrize("field", [*OF_ANSWERS, *OF_BLOCKS])
def test_a_prefill_node_that_differs_in_one_thing_computes_nothing(
    field: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with rig(prefill=2, decode=1, identities=[ONE | {field: "x1"}, ONE, ONE]) as it:
            wrong, right, decode = *it.prefill, it.decode[0]
            for _ in range(3):
                assert check(await it.complete())
                await it.router.nodes.probe_all()
            assert not wrong.seen and len(right.seen) == 3
            [(url, reason)] = (await refused(it)).items()
            assert url == wrong.url
            told = f"its {field} is 'x1' and that of decode node {decode.url} is {ONE[field]!r}"
            assert reason.startswith(told)
            assert (await states(it))[url]["is_up"]
            assert [await num_refused(it, role) for role in ("prefill", "decode")] == [1, 0]
            [warning] = warnings_in(caplog)
            assert warning == f"prefill node {wrong.url} is not used: {reason}"

    go(run)


@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize("field", [*OF_ANSWERS, *OF_BLOCKS])
def test_decode_nodes_alone_may_have_blocks_that_differ(num_prefill: int, field: str) -> None:
    """Of the nodes with the one that differs first and the others' answer known to be right."""

    async def run() -> None:
        identities = [ONE] * (num_prefill + 1) + [ONE | {field: "x1"}]
        async with rig(prefill=num_prefill, decode=2, identities=identities) as it:
            for _ in range(4):
                assert check(await it.complete(SHORT), SHORT)
            is_refused = bool(num_prefill) or field in OF_ANSWERS
            assert list(await refused(it)) == ([it.decode[1].url] if is_refused else [])
            assert [len(node.seen) for node in it.decode] == ([4, 0] if is_refused else [2, 2])

    go(run)


def test_every_difference_is_compared() -> None:
    """Both ways round, and no field that only one of the two tells."""
    for field in (*OF_ANSWERS, *OF_BLOCKS):
        other = ONE | {field: "x1"}
        found = find_difference(ONE, other, with_blocks=True)
        assert found is not None and found[:3] == (field, ONE[field], "x1")
        older = {name: value for name, value in ONE.items() if name != field}
        assert find_difference(older, other, with_blocks=True) is None
        assert find_difference(other, older, with_blocks=True) is None
    assert find_difference(ONE, ONE | {"role": "decode", "tiers": ""}, with_blocks=True) is None


def test_a_node_that_comes_back_with_another_model_is_refused_until_it_is_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first on the command line too: the others answer with what they have."""

    async def run() -> None:
        async with rig(decode=3, identities=[ONE, ONE, ONE]) as it:
            first = it.decode[0]
            await first.stop()
            await it.router.nodes.probe_all()
            first.identity = OTHER
            await first.start()
            await it.router.nodes.probe_all()
            [reason] = (await refused(it)).values()
            assert it.decode[1].url in reason
            for _ in range(4):
                assert check(await it.complete(SHORT), SHORT)
            assert not first.seen
            first.identity = ONE  # between two looks
            await it.router.nodes.probe_all()
            assert not await refused(it)
            for _ in range(3):
                assert check(await it.complete(SHORT), SHORT)
            assert first.seen and len(warnings_in(caplog)) == 1

    go(run)


def test_all_can_be_restarted_with_another_model() -> None:
    """One by one, the prefill node last; the router goes on with what is up."""

    async def run() -> None:
        async with rig(prefill=1, decode=2, identities=[ONE, ONE, ONE]) as it:
            for fake in it.decode:
                await fake.stop()
                await it.router.nodes.probe_all()
                fake.identity = OTHER
                await fake.start()
                await it.router.nodes.probe_all()
            # The last of the old ones is gone, so the new ones are right.
            assert list(await refused(it)) == [it.prefill[0].url]
            assert check(await it.complete()) and not it.prefill[0].seen
            it.prefill[0].identity = OTHER
            await it.router.nodes.probe_all()
            assert not await refused(it)
            assert check(await it.complete()) and len(it.prefill[0].seen) == 1

    go(run)


def test_the_last_old_node_counts_until_it_is_gone_for_good() -> None:
    async def run() -> None:
        async with rig(decode=2, identities=[ONE, OTHER]) as it:
            old, new = it.decode
            assert list(await refused(it)) == [new.url]
            await old.stop()
            for _ in range(HOPELESS_LOOKS - 1):
                await it.router.nodes.probe_all()
                assert list(await refused(it)) == [new.url]
                assert (await it.complete(SHORT)).status == 503 and not new.seen
                assert (await it.request("GET", "/health")).status == 503
            await it.router.nodes.probe_all()
            assert list(await refused(it)) == [old.url]
            assert check(await it.complete(SHORT), SHORT) and len(new.seen) == 1
            await old.start()
            await it.router.nodes.probe_all()
            assert list(await refused(it)) == [old.url]

    go(run)


def test_draining_the_last_old_node_changes_over_at_once() -> None:
    async def run() -> None:
        async with rig(decode=2, identities=[ONE, OTHER]) as it:
            old, new = it.decode
            assert (await it.request("POST", f"/nodes/drain?url={old.url}")).status == 200
            assert list(await refused(it)) == [old.url]
            assert check(await it.complete(SHORT), SHORT) and len(new.seen) == 1

    go(run)


@pytest.mark.parametrize("roles", [("decode", "prefill"), ("decode", "decode")])
def test_nodes_that_are_listed_under_the_wrong_role(roles: tuple[str, str]) -> None:
    async def run() -> None:
        identities = [ONE | {"role": role} for role in roles]
        async with rig(prefill=1, decode=1, identities=identities) as it:
            reasons = await refused(it)
            assert reasons[it.prefill[0].url] == (
                "it was started with --role decode and is listed with --prefill; list it with "
                "--decode, or start it with --role prefill"
            )
            answer = await it.complete()
            if roles[1] == "prefill":
                assert "started with --role prefill" in reasons[it.decode[0].url]
                assert answer.status == 503 and len(reasons) == 2
            else:
                assert check(answer) and len(reasons) == 1
            assert not it.prefill[0].seen

    go(run)


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("both", "both"), ("prefill", "both")])
def test_nodes_of_the_right_role_or_of_none_are_used(roles: tuple[str, str]) -> None:
    async def run() -> None:
        identities = [ONE | {"role": role} for role in roles]
        async with rig(prefill=1, decode=1, identities=identities) as it:
            assert not await refused(it)
            assert check(await it.complete()) and len(it.prefill[0].seen) == 1

    go(run)


@pytest.mark.parametrize("answer", [404, 401, 501, [ONE], {"object": "model"}, "a page"])
def test_other_software_is_used_unchecked_and_asked_once(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if "unchecked" in r.getMessage()]

    async def run() -> None:
        async with rig(prefill=1, decode=1, identities=[ONE, answer]) as it:
            other = it.decode[0]
            status = answer if isinstance(answer, int) else 200
            await other.stop()
            await it.router.nodes.probe_all()
            caplog.clear()
            other.node_asked = 0
            await other.start()
            for _ in range(3):
                await it.router.nodes.probe_all()
            assert other.node_asked == 1
            assert lines() == [
                f"decode node {other.url} does not tell what it is (its /node answers {status}), "
                "so it is used unchecked"
            ]
            assert check(await it.complete()) and not await refused(it)
            other.health = 503
            await it.router.nodes.probe_all()
            other.health = 200
            await it.router.nodes.probe_all()
            assert other.node_asked == 2 and len(lines()) == 2

    go(run)


@pytest.mark.parametrize(
    ("answer", "text"),
    [(500, "answers 500"), (429, "answers 429"), ("hang", "nothing whole came"),
     ({"object": "stratakv.node", "model": "m" * 70_000}, "longer than 65536 bytes")],
)  # fmt: skip
def test_a_node_that_cannot_tell_what_it_is_is_down(answer: Any, text: str) -> None:
    async def run() -> None:
        async with rig(decode=2, identities=[ONE, answer], health_seconds=1.0) as it:
            [_, node] = (await states(it)).values()
            assert not node["is_up"] and text in node["last_error"] and not node["refused"]
            assert check(await it.complete(SHORT), SHORT) and not it.decode[1].seen
            it.decode[1].identity = ONE
            await it.router.nodes.probe_all()
            [_, node] = (await states(it)).values()
            assert node["is_up"] and node["identity"]["fingerprint"] == "aa"

    go(run)


def test_what_a_node_says_is_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        names = {"model": "x\nCRITICAL: \x1b[2J" + "y" * 5000, "more": {"a": [1]}, "tiers": 7}
        async with rig(decode=2, identities=[ONE, ONE | names]) as it:
            [warning] = warnings_in(caplog)
            assert warning.isprintable() and len(warning) < 500
            assert "tiers" not in (await states(it))[it.decode[1].url]["identity"]

    go(run)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 60_000, b"null", b'{"object": 1}'])
def test_what_is_no_account_of_a_node(body: bytes) -> None:
    assert read_identity(body) is None


def test_the_start_says_that_nodes_differ() -> None:
    async def run() -> None:
        fakes = [FakeNode() for _ in range(2)]
        for fake, identity in zip(fakes, (ONE, OTHER), strict=True):
            fake.identity = identity
            await fake.start()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "stratakv.engine.cli.main", "route", "--port", "0",
            "--decode", fakes[0].url, "--decode", fakes[1].url, "--health-seconds", "0.2",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
        )  # fmt: skip
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_SECONDS):
            ready = (await process.stdout.readline()).decode()
            assert "0 prefill and 2 decode nodes (1 up, 1 refused: see the log)" in ready
            asked = fakes[1].node_asked
            while fakes[1].node_asked < asked + 3:
                await asyncio.sleep(0.01)
            process.terminate()
            _, log = await process.communicate()
        assert process.returncode == 0
        told = [line for line in log.decode().splitlines() if "is not used" in line]
        assert len(told) == 1 and fakes[0].url in told[0] and fakes[1].url in told[0]
        for fake in fakes:
            await fake.stop()

    go(run)


# Any history of nodes, without sockets

IDENTITIES = (
    None,
    ONE,
    OTHER,
    ONE | {"kv_dtype": "float32"},
    OTHER | {"role": "prefill"},
    ONE | {"role": "decode"},
)
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 4), st.sampled_from(["up", "down", "drain"]), st.sampled_from(IDENTITIES)
    ),
    max_size=40,
)


def _is_able(node: Node) -> bool:
    role = (node.identity or {}).get("role")
    return node.is_up and not node.is_draining and role not in set(Role) - {node.role}


@given(EVENTS, st.booleans())
def test_in_any_history_those_in_use_agree_and_somebody_answers(
    events: list[tuple[int, str, Any]], has_prefill: bool
) -> None:
    addresses = [NodeAddress("10.0.0.1", port) for port in range(1, 6)]
    split = 2 if has_prefill else 0
    nodes = Nodes(addresses[:split], addresses[split:], LeastLoaded(), health_seconds=1)
    everybody = list(nodes)

    def look() -> None:
        for node in everybody:
            node.looks_down = 0 if node.is_up else node.looks_down + 1
            nodes.judge()

    for number, event, identity in events:
        node = everybody[number]
        if event == "up":
            node.identity, node.is_up = identity, True
        elif event == "down":
            node.is_up = False
        else:
            node.is_draining = not node.is_draining
        before = {n for n in everybody if _is_able(n) and n.identity and not n.refused}
        look()
        used = [n for n in everybody if _is_able(n) and n.identity and not n.refused]
        for one in used:
            for other in used:
                assert not find_difference(
                    one.identity or {}, other.identity or {}, with_blocks=has_prefill
                )
        assert not any(n.refused for n in everybody if n.identity is None)
        if any(n.role is Role.DECODE and n is not node for n in before):
            assert before - {node} <= set(used), "one node's life puts out none of the others"
    for _ in range(HOPELESS_LOOKS):
        look()
    decode = nodes.of_role[Role.DECODE]
    assert bool(nodes.num_up(Role.DECODE)) == any(_is_able(node) for node in decode)
    reasons = [node.refused for node in everybody]
    nodes.judge()
    assert [node.refused for node in everybody] == reasons
