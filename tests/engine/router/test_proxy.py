# SPDX-License-Identifier: Apache-2.0
"""What the router sends to which node, and what it answers itself."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import trustme

from stratakv.engine.router.nodes import Choice, Facts, Node, Role
from stratakv.engine.router.router_metrics import OUTCOMES

from .fake_node import FakeNode, Fault, tokens_of
from .rig import LONG, check, rig, until

SHORT = "a short prompt"
HANDED_OVER = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "strata": {"ticket": "7"}}


ASKED = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


@pytest.mark.parametrize(
    ("with_params", "of_first_token"),
    [("off", {}), ("on", {"min_tokens": 1, "logprobs": 3, **ASKED})],
)
def test_a_long_prompt_goes_to_prefill_for_one_token_and_then_to_decode(
    with_params: str, of_first_token: dict[str, Any]
) -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=1, kv_transfer_params=with_params) as it:
            fields = {
                "stream": True,
                "stream_options": {"include_usage": True},
                "min_tokens": 4,
                "n": 2,
                "logprobs": 3,
                "temperature": 0.25,
                "seed": 12345678901234567890123,
                "cache_salt": "s",
                "max_tokens": 5,
            }
            headers = {"authorization": "Bearer k", "x-request-id": "r-1", "x-tenant": "other"}
            body = json.dumps({"prompt": LONG, **fields}).encode()
            answer = await it.request("POST", "/v1/completions", body, headers)
            assert check(answer, LONG, 5)
            [first], [second] = it.prefill[0].seen, it.decode[0].seen
            assert first.body == {
                "prompt": LONG,
                "stream": False,
                "n": 1,
                "temperature": 0.25,
                "seed": 12345678901234567890123,
                "cache_salt": "s",
                "max_tokens": 1,
                **of_first_token,
            }
            assert second.body == {"prompt": LONG, **fields}
            for seen in (first, second):
                assert seen.headers["authorization"] == "Bearer k"
                assert seen.headers["x-request-id"] == "r-1"
                assert "x-tenant" not in seen.headers
                assert seen.headers["host"].startswith("127.0.0.1:")
            assert await it.metric("prefill", "ok") == await it.metric("decode", "ok") == 1
            assert await it.metric("client", "ok") == 1

    asyncio.run(run())


def test_what_goes_to_a_decode_node_alone() -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=1, disaggregate_above=100) as it:
            for body in (
                {"prompt": SHORT},
                {"prompt": "x" * 403},
                {"prompt": [1] * 100},
                {"prompt": [[1] * 100, [2] * 100]},
                {"prompt": LONG, "kv_transfer_params": {"do_remote_prefill": True}},
                {"prompt": LONG, "prompt_logprobs": 1},
                {"prompt": LONG, "use_beam_search": True, "n": 2},
                {"messages": [{"role": "user", "content": SHORT}]},
            ):
                path = "chat/completions" if "messages" in body else "completions"
                await it.request("POST", f"/v1/{path}", body)
                assert it.decode[0].seen[-1].body == body
            assert not it.prefill[0].seen
            for number, body in enumerate(
                (
                    {"prompt": "x" * 404, "kv_transfer_params": None},
                    {"prompt": [1] * 101},
                    {"prompt": ["", [2] * 101]},
                    {"messages": [{"role": "user", "content": LONG}]},
                    {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
                )
            ):
                path = "chat/completions" if "messages" in body else "completions"
                await it.request("POST", f"/v1/{path}", body)
                assert len(it.prefill[0].seen) == number + 1, body
                assert it.decode[0].seen[-1].body == body

    asyncio.run(run())


def test_a_chat_keeps_its_own_name_of_the_limit() -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=1) as it:
            messages = [{"role": "user", "content": LONG}]
            body = {"messages": messages, "max_completion_tokens": 9, "logprobs": True}
            await it.request("POST", "/v1/chat/completions", body)
            assert it.prefill[0].seen[0].body == {
                "messages": messages, "max_completion_tokens": 1, "max_tokens": 1, "stream": False,
                "logprobs": True, **ASKED,
            }  # fmt: skip

    asyncio.run(run())


def test_what_prefill_hands_over_reaches_decode() -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=1, kv_transfer_params="on") as it:
            it.prefill[0].params = HANDED_OVER
            assert check(await it.complete(temperature=0.1))
            assert it.prefill[0].seen[0].body["kv_transfer_params"] == {
                "do_remote_decode": True,
                "do_remote_prefill": False,
            }
            assert it.decode[0].seen[0].body == {
                "prompt": LONG, "temperature": 0.1, "kv_transfer_params": HANDED_OVER,
            }  # fmt: skip
            it.prefill[0].params = None
            assert check(await it.complete())
            assert it.decode[0].seen[1].body == {"prompt": LONG}

    asyncio.run(run())


def test_the_decode_node_that_will_answer_follows_the_prompt() -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=3, kv_transfer_params="on") as it:
            it.prefill[0].script.extend([Fault("wait"), Fault("wait")])
            waiting = [asyncio.ensure_future(it.complete(LONG)) for _ in range(2)]
            await until(lambda: sum(len(node.followed) for node in it.decode) == 2, "two follow")
            assert not any(node.seen for node in it.decode)
            it.prefill[0].go_on.set()
            for answer in await asyncio.gather(*waiting):
                assert check(answer)
            for node in it.decode:
                assert len(node.followed) == len(node.seen) <= 1
                for hint, request in zip(node.followed, node.seen, strict=True):
                    assert hint.target == "/follow" + request.target
                    assert hint.body["prompt"] == LONG

    asyncio.run(run())


@pytest.mark.parametrize("follows", [False, None])
def test_a_decode_node_that_follows_no_prompts_answers_all_the_same(follows: bool | None) -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=1, kv_transfer_params="on") as it:
            it.decode[0].follows = follows
            for _ in range(2):
                it.prefill[0].script.append(Fault("wait"))
                waiting = asyncio.ensure_future(it.complete())
                await until(lambda: it.prefill[0].num_open == 1, "it is computed")
                await until(lambda: it.decode[0].followed, "it is asked to follow")
                await until(lambda: it.decode[0].num_open == (follows is None), "it has said no")
                it.prefill[0].go_on.set()
                assert check(await waiting)
                it.prefill[0].go_on.clear()
            # One that does not know the route is asked once.
            assert len(it.decode[0].followed) == (1 if follows is False else 2)

    asyncio.run(run())


def test_a_node_that_goes_down_while_it_follows_is_not_asked() -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=2, kv_transfer_params="on") as it:
            it.prefill[0].script.append(Fault("wait"))
            waiting = asyncio.ensure_future(it.complete())
            await until(lambda: it.decode[0].followed or it.decode[1].followed, "one follows")
            one, other = it.decode if it.decode[0].followed else it.decode[::-1]
            node = it.router.nodes.by_url(one.url)
            assert node is not None
            node.mark_down("it was to go")
            it.prefill[0].go_on.set()
            assert check(await waiting)
            assert (len(one.seen), len(other.seen)) == (0, 1)

    asyncio.run(run())


def test_without_the_setting_no_node_sees_the_field() -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=1, kv_transfer_params="off") as it:
            it.prefill[0].params = HANDED_OVER
            assert check(await it.complete())
            seen = [*it.prefill[0].seen, *it.decode[0].seen]
            assert not it.decode[0].followed
            assert not any("kv_transfer_params" in each.body for each in seen)

    asyncio.run(run())


def test_requests_are_spread_over_nodes() -> None:
    async def run() -> None:
        async with rig(decode=3) as it:
            for _ in range(6):
                assert check(await it.complete(SHORT), SHORT)
            assert [len(node.seen) for node in it.decode] == [2, 2, 2], "idle nodes in turn"
            it.decode[0].script.extend([Fault("wait"), Fault("wait")])
            waiting = [asyncio.ensure_future(it.complete(SHORT)) for _ in range(1)]
            await until(lambda: it.decode[0].num_open == 1, "one is busy")
            for _ in range(4):
                assert check(await it.complete(SHORT), SHORT)
            assert [len(node.seen) for node in it.decode] == [3, 4, 4], "none to the busy one"
            it.decode[0].go_on.set()
            assert all(check(answer, SHORT) for answer in await asyncio.gather(*waiting))

    asyncio.run(run())


def test_a_choice_of_ones_own_sees_the_facts() -> None:
    seen: list[Facts] = []

    class Last(Choice):
        def choose(self, facts: Facts, nodes: Sequence[Node]) -> Node:
            seen.append(facts)
            return nodes[-1]

    async def run() -> None:
        async with rig(prefill=2, decode=2, choice=Last()) as it:
            await it.complete([5] * 600)
            await it.complete(LONG)
            assert [len(node.seen) for node in (*it.prefill, *it.decode)] == [0, 2, 0, 2]

    asyncio.run(run())
    assert [(facts.prompt_tokens, facts.is_exact) for facts in seen[::2]] == [
        (600, True), (len(LONG) // 4, False),
    ]  # fmt: skip
    assert bytes(seen[0].fields["prompt"]).startswith(b"[5")


def test_other_routes_and_bodies_go_to_decode_nodes_as_they_are() -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=1) as it:
            for method, target in (
                ("GET", "/v1/models"),
                ("GET", "/v1/models/org%2Fname?x=%20y"),
                ("POST", "/tokenize"),
                ("POST", "/v1/embeddings"),
            ):
                answer = await it.request(method, target, {"a": 1} if method == "POST" else None)
                assert answer.json == {"path": target, "method": method}
                assert answer.headers["x-node"] == "yes" and "server" not in answer.headers
            for body in (b"no json", b"[1, 2]", b'{"prompt": ', b'"x"'):
                it.decode[0].script.append(Fault("status", status=400))
                it.decode[0].seen.clear()
                answer = await it.request("POST", "/v1/completions", body)
                assert answer.status == 400 and answer.json["error"]["message"] == "fault 400"
                assert it.decode[0].seen[0].raw == body
            assert not it.prefill[0].seen

    asyncio.run(run())


def test_routes_that_rule_a_node_are_not_passed_on() -> None:
    async def run() -> None:
        async with rig() as it:
            for path in ("/pause", "/reset_prefix_cache", "/v1/../pause", "/v1/%2e%2e/pause", "/"):
                answer = await it.request("POST", path, {})
                assert answer.status == 404 and "under /v1" in answer.json["error"]["message"]
            for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
                answer = await it.request("POST", path, {})
                assert answer.status == 404 and "each node" in answer.json["error"]["message"]
            assert not it.decode[0].seen

    asyncio.run(run())


def test_the_tenant_header_is_passed_on_where_it_is_named() -> None:
    async def run() -> None:
        async with rig(prefill=1, tenant_header="x-tenant") as it:
            body = {"prompt": LONG}
            await it.request("POST", "/v1/completions", body, {"X-Tenant": "a", "x-other": "b"})
            for node in (*it.prefill, *it.decode):
                assert node.seen[0].headers["x-tenant"] == "a"
                assert "x-other" not in node.seen[0].headers

    asyncio.run(run())


def test_nodes_learn_of_which_job_a_request_is_a_turn() -> None:
    async def run() -> None:
        async with rig(prefill=1) as it:
            job = {"X-Job-Id": "job-1", "X-Job-Last-Step": "true"}
            await it.request("POST", "/v1/completions", {"prompt": LONG}, job)
            for node in (*it.prefill, *it.decode):
                assert node.seen[0].headers["x-job-id"] == "job-1"
                assert node.seen[0].headers["x-job-last-step"] == "true"

    asyncio.run(run())


def test_events_in_crumbs_are_put_together() -> None:
    async def run() -> None:
        async with rig() as it:
            it.decode[0].script.append(Fault("crumbs"))
            assert check(await it.complete(SHORT, stream=True), SHORT)
            it.decode[0].script.append(Fault("no length", after=99))
            assert check(await it.complete(SHORT, stream=True), SHORT)

    asyncio.run(run())


def test_a_connection_is_used_again_by_its_client() -> None:
    async def run() -> None:
        async with rig() as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            for _ in range(3):
                writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
            writer.close()

    asyncio.run(run())


def test_fake_nodes_answer_what_is_right() -> None:
    """The rig itself: what `check` calls right is right without a router."""

    async def run() -> None:
        node = FakeNode()
        await node.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        body = json.dumps({"prompt": SHORT}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(body)
        answer = await reader.read()
        assert "".join(tokens_of(SHORT)) in answer.decode()
        writer.close()
        await node.stop()

    asyncio.run(run())


def test_who_may_rule_the_nodes() -> None:
    async def run() -> None:
        key = {"authorization": "Bearer admin"}
        async with rig(admin_key="admin") as it:
            drain = f"/nodes/drain?url={it.decode[0].url}"
            assert (await it.request("POST", drain)).status == 401
            wrong = {"authorization": "Bearer other"}
            assert (await it.request("GET", "/nodes", None, wrong)).status == 401
            page = {**key, "origin": "http://example.org"}
            assert (await it.request("POST", drain, None, page)).status == 403
            assert (await it.request("GET", drain, None, key)).status == 405
            for url in ("", "?url=http://127.0.0.1:1", "?url=a&url=b"):
                answer = await it.request("POST", f"/nodes/drain{url}", None, key)
                assert answer.status == 404 and it.decode[0].url in answer.json["error"]["message"]
            assert not it.router.nodes.of_role[Role.DECODE][0].is_draining
            state = (await it.request("GET", "/nodes", None, key)).json
            assert state["open_requests"] == 0
            [node] = state["nodes"]
            assert node["url"] == it.decode[0].url and node["role"] == "decode" and node["is_up"]
            assert (await it.request("POST", drain, None, key)).json["is_draining"]

    asyncio.run(run())


def test_without_a_key_the_nodes_are_ruled_from_this_machine_alone() -> None:
    async def run() -> None:
        async with rig() as it:
            for client, server, host in (
                ("10.0.0.1", "127.0.0.1", "127.0.0.1:8100"),
                ("127.0.0.1", "10.0.0.1", "10.0.0.1:8100"),
                ("127.0.0.1", "127.0.0.1", "page.example:8100"),
                ("127.0.0.1", "127.0.0.1", "localhost:8100"),
                ("::1", "::1", "[::1]:8100"),
            ):
                sent = []

                async def send(message: Any, sent: list[Any] = sent) -> None:
                    sent.append(message)

                scope = {
                    "type": "http", "path": "/nodes", "method": "GET",
                    "headers": [(b"host", host.encode())],
                    "query_string": b"", "client": (client, 1), "server": (server, 1),
                }  # fmt: skip
                await it.router(scope, cast("Any", None), send)
                is_near = host in ("localhost:8100", "[::1]:8100")
                assert sent[0]["status"] == (200 if is_near else 403), host

    asyncio.run(run())


def test_figures_name_every_leg_and_outcome() -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=2) as it:
            await it.complete()
            text = (await it.request("GET", "/metrics")).body.decode()
            for role, count in (("prefill", 1), ("decode", 2)):
                assert f'stratakv_router_nodes_up{{role="{role}"}} {count}.0' in text
                assert f'stratakv_router_in_flight{{role="{role}"}} 0.0' in text
                assert f'stratakv_router_retries_total{{leg="{role}"}} 0.0' in text
                assert f'stratakv_router_leg_seconds_count{{leg="{role}"}} 1.0' in text
            for leg, outcomes in OUTCOMES.items():
                for outcome in outcomes:
                    await it.metric(leg, outcome)
            assert it.decode[0].url not in text

    asyncio.run(run())


def test_nodes_that_speak_tls(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    path = tmp_path / "ca.pem"

    async def run() -> None:
        authority.cert_pem.write_to_path(path)
        async with rig(prefill=1, decode=1, tls=context, node_ca_file=path) as it:
            for stream in (True, False):
                assert check(await it.complete(stream=stream))
            assert await it.metric("prefill", "ok") == 2
            it.decode[0].script.append(Fault("die in an event", after=3))
            assert not check(await it.complete(stream=True))
            it.decode[0].script.append(Fault("hang", after=2))
            gone = await it.open("POST", "/v1/completions", {"prompt": SHORT, "stream": True})
            assert await gone.read_some()
            await gone.leave()
            await until(lambda: it.decode[0].num_lost == 1, "the node is told")
        other.cert_pem.write_to_path(path)
        async with rig(decode=1, tls=context, node_ca_file=path) as it:
            assert (await it.complete()).status == 503
            [node] = it.router.nodes
            assert not node.is_up and "certificate" in node.last_error
            assert not it.decode[0].seen, "the request is not shown to whom nobody vouches for"

    asyncio.run(run())
