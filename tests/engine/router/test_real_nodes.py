# SPDX-License-Identifier: Apache-2.0
"""The router in front of real nodes: a prefill node, a decode node, and the cache that they share.

All four are processes. The embedded model computes in float64, so that tokens are the same however
the work is split.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from ...nursery_site.nursery_client import Child, Nursery
from ...tiers.cache_server.rig import server_process

pytestmark = pytest.mark.timeout(300)

WAIT_SECONDS = 60.0
BLOCK_TOKENS = 16
NODE_FLAGS = (
    "--port", "0", "--dtype", "float64", "--num-blocks", "300", "--num-threads", "1",
    "--log-level", "warning", "--kv-offload-cpu-bytes", "64MiB", "--kv-offload-load", "always",
)  # fmt: skip


@dataclass
class Cluster:
    """The URLs of the router and its nodes, and the nodes' processes."""

    router: str
    prefill: str
    decode: list[str]
    processes: dict[str, Child]


@contextmanager
def started(nursery: Nursery, scratch: str, *words: str) -> Iterator[tuple[Child, str]]:
    """A process of ours, and the URL in its ready line."""
    process = nursery.popen(
        [sys.executable, "-m", "stratakv.engine.cli.main", *words],
        cwd="/",
        env={**os.environ, "TMPDIR": scratch},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found, words
        yield process, found[0]
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.communicate(timeout=WAIT_SECONDS)


@pytest.fixture(scope="module")
def cluster(worker_nursery: Nursery) -> Iterator[Cluster]:
    with ExitStack() as stack:
        # Processes that are killed leave the folders of their sockets behind.
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="stratakv-test-"))
        cache = stack.enter_context(server_process("--cpu-bytes", "96MiB"))
        nodes = [
            stack.enter_context(
                started(
                    worker_nursery, scratch, "serve", *NODE_FLAGS,
                    "--kv-offload", f"cpu,grpc://{cache.address}",
                )
            )
            for _ in range(3)
        ]  # fmt: skip
        prefill, *decode = [url for _, url in nodes]
        flags = ["--port", "0", "--health-seconds", "0.5", "--log-level", "error"]
        for url in decode:
            flags += ["--decode", url]
        flags += ["--prefill", prefill]
        _, router = stack.enter_context(started(worker_nursery, scratch, "route", *flags))
        yield Cluster(router, prefill, decode, {url: process for process, url in nodes})


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
        whole: bytes = answer.read()
        return whole


def complete(url: str, body: dict[str, Any], path: str = "/v1/completions") -> Any:
    return json.loads(ask(url, path, body))


def figure(url: str, name: str, *labels: str) -> float:
    lines = ask(url, "/metrics").decode().splitlines()
    found = [
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(name + "{") and all(label in line for label in labels)
    ]
    return sum(found)


def wait_for(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def prompt_of(seed: int, length: int = 600) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 4000) for _ in range(length)]


def events_of(data: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def at_the_cache_server(cluster: Cluster) -> float:
    return figure(cluster.prefill, "stratakv:tier_stored_blocks_total", 'tier="remote"')


def assert_same(routed: list[Any], alone: list[Any]) -> None:
    """The same answers; log-probabilities to the last bits, which depend on what one step computed
    together."""
    told = [choice.pop("logprobs", None) for choice in (*routed, *alone)]
    assert routed == alone
    for first, second in zip(told[: len(routed)], told[len(routed) :], strict=True):
        if first is None or second is None:
            assert first is second
            continue
        assert first["tokens"] == second["tokens"]
        numbers = [each["token_logprobs"] for each in (first, second)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)


def test_tokens_are_those_of_one_node(cluster: Cluster) -> None:
    before = figure(cluster.router, "stratakv_router_requests_total", '"prefill"', '"ok"')
    shared = prompt_of(1)
    bodies = [
        {"prompt": prompt_of(2)},
        {"prompt": shared + prompt_of(3, 50)},
        {"prompt": shared + prompt_of(4, 50), "temperature": 0.9, "seed": 7, "n": 2},
        {"prompt": prompt_of(5), "logprobs": 2, "max_tokens": 20},
        {"prompt": [prompt_of(6), prompt_of(7)]},
    ]
    for body in bodies:
        body = {"temperature": 0, "max_tokens": 6, "return_token_ids": True, **body}
        routed, alone = complete(cluster.router, body), complete(cluster.prefill, body)
        assert_same(routed["choices"], alone["choices"])
        streamed = events_of(ask(cluster.router, "/v1/completions", {**body, "stream": True}))
        for choice in alone["choices"]:
            ids = [
                token
                for event in streamed
                for part in event["choices"]
                if part["index"] == choice["index"]
                for token in part["token_ids"]
            ]
            assert ids == choice["token_ids"]
    after = figure(cluster.router, "stratakv_router_requests_total", '"prefill"', '"ok"')
    assert after - before == 2 * len(bodies), "each went through both legs"


def test_a_decode_node_finds_the_blocks_in_the_cache_server(cluster: Cluster) -> None:
    prompt = prompt_of(11)
    blocks = (len(prompt) - 1) // BLOCK_TOKENS
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 6, "return_token_ids": True}
    had = at_the_cache_server(cluster)
    complete(cluster.prefill, {**body, "max_tokens": 1})
    wait_for(lambda: at_the_cache_server(cluster) >= had + blocks, "its blocks are shared")
    routed = complete(cluster.router, body)
    details = routed["usage"]["prompt_tokens_details"]
    by_tier = details["cached_tokens_by_tier"]
    # Some of it was read into the cpu tier before the request came; the end of it too is there.
    assert details["cached_tokens"] == by_tier["cpu"] + by_tier["remote"] == len(prompt)
    assert routed["choices"] == complete(cluster.prefill, body)["choices"]


def test_a_conversation_and_the_other_routes(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "Once upon a time there was a fox. " * 80}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 5}
    before = figure(cluster.router, "stratakv_router_requests_total", '"prefill"', '"ok"')
    path = "/v1/chat/completions"
    routed = complete(cluster.router, body, path)
    assert routed["choices"] == complete(cluster.prefill, body, path)["choices"]
    after = figure(cluster.router, "stratakv_router_requests_total", '"prefill"', '"ok"')
    assert after == before + 1
    models = json.loads(ask(cluster.router, "/v1/models"))
    assert models["data"][0]["id"] == "stratakv-embedded"
    tokens = complete(cluster.router, {"prompt": "a fox"}, "/tokenize")["tokens"]
    assert tokens == complete(cluster.decode[0], {"prompt": "a fox"}, "/tokenize")["tokens"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(cluster.router, {"prompt": prompt_of(1), "no_such_field": 1})
    assert refused.value.code == 400
    assert b"no_such_field" in refused.value.read()


def test_a_prefill_node_that_hangs_and_a_decode_node_that_is_killed(cluster: Cluster) -> None:
    """Last, for it leaves one decode node dead."""
    body = {"prompt": prompt_of(21), "temperature": 0, "max_tokens": 6, "return_token_ids": True}
    right = complete(cluster.decode[1], body)["choices"]
    cluster.processes[cluster.prefill].send_signal(signal.SIGSTOP)
    up = "stratakv_router_nodes_up"
    wait_for(lambda: figure(cluster.router, up, "prefill") == 0, "the hang is seen")
    assert complete(cluster.router, body)["choices"] == right
    cluster.processes[cluster.prefill].send_signal(signal.SIGCONT)
    wait_for(lambda: figure(cluster.router, up, "prefill") == 1, "it is back")

    cluster.processes[cluster.decode[0]].kill()
    for _ in range(3):
        assert complete(cluster.router, body)["choices"] == right
    wait_for(lambda: figure(cluster.router, up, "decode") == 1, "the death is seen")
    assert complete(cluster.router, body)["choices"] == right
