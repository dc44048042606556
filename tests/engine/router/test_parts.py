# SPDX-License-Identifier: Apache-2.0
"""Settings, the bodies of the two legs, the choice of a node, and the cutting of events."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.engine.router import legs
from stratakv.engine.router.nodes import Facts, LeastLoaded, Node, Nodes, Role
from stratakv.engine.router.relay import HELD_BYTES, WholeEvents
from stratakv.engine.router.router_settings import NodeAddress, RouterConfig, read_node
from stratakv.engine.router.upstream import NodeLost
from stratakv.tiers.settings.values import ConfigError

A, B, C = (NodeAddress("10.0.0.1", port) for port in (1, 2, 3))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.5:8000", NodeAddress("10.0.0.5", 8000)),
        ("http://node/", NodeAddress("node", 80)),
        ("https://Node:8443", NodeAddress("node", 8443, is_tls=True)),
        ("http://[::1]:8000", NodeAddress("::1", 8000)),
    ],
)
def test_urls_of_nodes(url: str, address: NodeAddress) -> None:
    assert read_node("--decode", url) == address
    assert read_node("--decode", address.url) == address


@pytest.mark.parametrize(
    "url",
    ["", "10.0.0.5:8000", "http://", "ftp://node:1", "http://node:0", "http://node:99999",
     "http://node:x", "http://node:1/v1", "http://node:1?x=1", "http://a@node:1", "http://[::1",
     "http://no de:1", "http://nöde:1", "grpc://cache:9400"],
)  # fmt: skip
def test_what_is_no_url_of_a_node(url: str) -> None:
    with pytest.raises(ConfigError, match="--decode"):
        read_node("--decode", url)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"decode": ()}, "there is no decode node"),
        ({"decode": (A, A)}, "10.0.0.1:1 was given before"),
        ({"decode": (A,), "prefill": (B, A)}, "--decode http://10.0.0.1:1 was given before"),
        ({"decode": (A,), "host": "10.0.0.1", "port": 1}, "is this router's own address"),
        ({"decode": (A,), "max_body_bytes": 0}, "max_body_bytes must be above 0"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RouterConfig(**settings)


def _nodes(*addresses: NodeAddress) -> list[Node]:
    return [Node(address, Role.DECODE) for address in addresses]


def test_the_least_loaded_node_is_chosen_and_equal_ones_in_turn() -> None:
    nodes = Nodes((), (A, B, C), LeastLoaded(), health_seconds=1)
    for node in nodes:
        node.mark_up()
    first, second, third = nodes.of_role[Role.DECODE]
    facts = Facts("/v1/completions")
    assert [nodes.pick(Role.DECODE, facts) for _ in range(4)] == [first, second, third, first]
    with second.busy(), second.busy(), third.busy():
        assert [nodes.pick(Role.DECODE, facts) for _ in range(2)] == [first, first]
        with first.busy(), first.busy():
            assert nodes.pick(Role.DECODE, facts) is third
            assert nodes.pick(Role.DECODE, facts, [third]) is second
    assert nodes.pick(Role.PREFILL, facts) is None
    assert [node.in_flight for node in nodes] == [0, 0, 0]


def test_nodes_that_are_down_or_drained_are_left_out() -> None:
    nodes = Nodes((A,), (B, C), LeastLoaded(), health_seconds=1)
    [prefill], [first, second] = nodes.of_role[Role.PREFILL], nodes.of_role[Role.DECODE]
    facts = Facts("/v1/completions")
    assert nodes.pick(Role.PREFILL, facts) is None
    assert nodes.candidates(Role.DECODE) == [first, second], "all are believed down"
    second.mark_up()
    prefill.mark_up()
    assert nodes.candidates(Role.DECODE) == [second]
    assert nodes.candidates(Role.DECODE, [second]) == []
    first.is_draining = prefill.is_draining = True
    second.mark_down("test")
    assert nodes.candidates(Role.DECODE) == [second]
    assert nodes.candidates(Role.PREFILL) == []


def _facts(path: str, **body: Any) -> Facts:
    return legs.read_facts(path, legs.read_fields(json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("prompt", "tokens", "is_exact"),
    [
        ("x" * 41, 10, False),
        ("äöü€" * 4, 9, False),
        ([7] * 33, 33, True),
        ([[7] * 3, [7] * 33, [7] * 5], 33, True),
        (["x" * 400, "y"], 100, False),
        ([], 0, False),
        (None, 0, False),
        ({"a": 1}, 0, False),
        ([None, {"a": 1}], 0, False),
    ],
)
def test_how_long_a_prompt_is(prompt: Any, tokens: int, is_exact: bool) -> None:
    facts = _facts(legs.COMPLETIONS, prompt=prompt)
    assert (facts.prompt_tokens, facts.is_exact) == (tokens, is_exact)


PICTURES = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "input_image"}]


@pytest.mark.parametrize(
    ("messages", "tokens"),
    [
        ([{"role": "user", "content": "x" * 40}, {"role": "user", "content": "y" * 4}], 11),
        ([{"content": [{"type": "text", "text": "x" * 40}, {"type": "video"}, 3]}], 10),
        ([{"content": [{"type": "text", "text": "what?"}, *PICTURES]}], 2049),
        ([{"content": [{"type": ["image_url"]}]}, {"content": {"type": "image_url"}}], 0),
        ([{"role": "user"}, {"content": None}, 7], 0),
        ("hello", 0),
        (None, 0),
    ],
)
def test_how_long_a_conversation_is(messages: Any, tokens: int) -> None:
    assert _facts(legs.CHAT, messages=messages).prompt_tokens == tokens


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from([*legs._NOT_FOR_PREFILL, "n", "max_tokens", "prompt", "messages", "stream"])


@given(
    st.dictionaries(names | st.text(), json_values, max_size=8), st.sampled_from(legs.GENERATING)
)
def test_every_body_becomes_two_legs(body: dict[str, Any], path: str) -> None:
    fields = legs.read_fields(json.dumps(body).encode())
    facts = legs.read_facts(path, fields)
    assert facts.prompt_tokens >= 0
    legs.wants_prefill(facts, 0)
    prefill = json.loads(legs.prefill_body(fields, with_kv_params=True))
    assert prefill["max_tokens"] == 1 and prefill["stream"] is False
    dropped = set(legs._NOT_FOR_PREFILL)
    assert not dropped & json.loads(legs.prefill_body(fields, with_kv_params=False)).keys()
    assert not prefill.keys() & (dropped - {*legs._OF_FIRST_TOKEN, "min_tokens"})
    made = {
        "max_tokens", "stream", "n", "max_completion_tokens", "min_tokens", "kv_transfer_params",
    }  # fmt: skip
    if "min_tokens" in prefill:
        assert body["min_tokens"] > 0 and prefill["min_tokens"] == 1
    for name in prefill.keys() - made:
        assert prefill[name] == body[name]
    params = {"remote_host": "x", "big": 2**80}
    decode = json.loads(legs.decode_body(fields, msgspec.Raw(json.dumps(params).encode())))
    assert decode == {**body, "kv_transfer_params": params}


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"a":1}x', b"[" * 100_000])
def test_what_is_no_object_has_no_fields(body: bytes) -> None:
    assert legs.read_fields(body) == {}
    assert legs.handed_over(body) is None


def test_what_is_handed_over() -> None:
    assert legs.handed_over(b'{"kv_transfer_params": null}') is None
    assert legs.handed_over(b'{"choices": []}') is None
    found = legs.handed_over(b'{"kv_transfer_params": {"a": [1]}, "choices": []}')
    assert found is not None and json.loads(bytes(found)) == {"a": [1]}


@given(
    st.lists(st.sampled_from(["data: x", ": hint", "data: [DONE]", 'data: "\\n\\n"']), max_size=6),
    st.sampled_from(["\n\n", "\r\n\r\n"]),
    st.text("da: \r\n", max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
)
def test_events_are_cut_where_they_end(
    events: list[str], end: str, rest: str, sizes: list[int]
) -> None:
    stream = "".join(event + end for event in events).encode() + rest.strip("\r\n").encode()
    cutter = WholeEvents()
    whole, at, number = b"", 0, 0
    while at < len(stream):
        size = sizes[number % len(sizes)]
        part = cutter.add(stream[at : at + size])
        assert not part or part.endswith(end.encode())
        whole, at, number = whole + part, at + size, number + 1
    assert whole + cutter.rest == stream
    assert whole == "".join(event + end for event in events).encode()
    assert cutter.is_done == (bool(events) and events[-1] == "data: [DONE]")


def test_an_event_without_an_end_is_given_up() -> None:
    cutter = WholeEvents()
    cutter.add(b"x" * HELD_BYTES)
    with pytest.raises(NodeLost, match="an event of more than"):
        cutter.add(b"x")


def test_a_config_can_be_changed() -> None:
    config = RouterConfig(decode=(A,), prefill=(B,))
    assert replace(config, port=1).port == 1
