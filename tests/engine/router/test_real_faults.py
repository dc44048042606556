# SPDX-License-Identifier: Apache-2.0
"""Real faults in a cluster of processes: router, prefill node, decode nodes, cache server.

At a random moment of a streamed request one of them is killed or stopped, or a connection is cut,
stalled or slowed down. Every answer is that of a single engine, in float64, or says honestly that
the node that was answering is lost. Nobody waits for long.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from stratakv.engine import LLM, SamplingParams

from ...free_ports import free_ports
from ...nursery_site.nursery_client import Nursery
from ...stepping import noted
from ...tiers.cache_server.rig import ServerProcess, server_process
from .test_real_nodes import NODE_FLAGS, ask, figure, prompt_of, started, wait_for
from .wire import Wire

pytestmark = pytest.mark.timeout(300)

MAX_TOKENS = 24
# Each once in CI, and again in a long run.
KILLS = [("prefill", "kill"), ("decode", "kill")]
CACHE_FAULTS = [
    *[("cache", kind) for kind in ("kill", "stop")],
    *[("cache wire", kind) for kind in ("cut", "stall", "slow")],
]
NODE_FAULTS = ["stop", "cut", "stall", "slow"]  # for each role
# What the router waits for a prefill, beside what a machine under load takes.
PREFILL_SECONDS = 3.0
MOST_SECONDS = 20.0
NODES_UP = "stratakv_router_nodes_up"


class Node:
    """An engine's process behind a wire, at a port that stays the same."""

    def __init__(self, nursery: Nursery, scratch: str, role: str, cache_port: int) -> None:
        self._nursery = nursery
        (self.port,) = free_ports(1)
        self.wire = Wire(self.port)
        self.url = f"http://127.0.0.1:{self.wire.port}"
        flags = ["--port", str(self.port), *NODE_FLAGS[2:], "--role", role]
        flags += ["--kv-offload", f"cpu,grpc://127.0.0.1:{cache_port}"]
        self._words = [sys.executable, "-m", "stratakv.engine.cli.main", "serve", *flags]
        self._environment = {**os.environ, "TMPDIR": scratch}
        self.start()

    def start(self) -> None:
        self.process = self._nursery.popen(
            self._words, cwd="/", env=self._environment, stdout=subprocess.DEVNULL
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.returncode is None:
            self.kill()
        self.wire.__exit__()


@dataclass
class Cluster:
    """All of it."""

    router: str
    prefill: Node
    decode: list[Node]
    cache: ServerProcess
    cache_wire: Wire

    def wait_until_up(self, *roles: str) -> None:
        """The nodes of these roles are, as the router knows, and the cache serves."""
        self.cache.wait_until_serving()
        for role in roles:
            count = len(self.decode) if role == "decode" else 1
            wait_for(lambda: figure(self.router, NODES_UP, role) == count, f"{role} is up")  # noqa: B023


@pytest.fixture(scope="module")
def cluster(worker_nursery: Nursery) -> Iterator[Cluster]:
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="stratakv-test-"))
        cache = stack.enter_context(server_process("--cpu-bytes", "96MiB"))
        cache_wire = stack.enter_context(Wire(cache.port))
        roles = ("prefill", "decode", "decode")
        nodes = [Node(worker_nursery, scratch, role, cache_wire.port) for role in roles]
        for node in nodes:
            stack.callback(node.close)
        prefill, *decode = nodes
        flags = ["--port", "0", "--health-seconds", "0.25", "--log-level", "error"]
        flags += ["--disaggregate-above", "256"]
        flags += ["--prefill-seconds", str(PREFILL_SECONDS), "--prefill", prefill.url]
        for node in decode:
            flags += ["--decode", node.url]
        _, router = stack.enter_context(started(worker_nursery, scratch, "route", *flags))
        cluster = Cluster(router, prefill, decode, cache, cache_wire)
        cluster.wait_until_up("prefill", "decode")
        yield cluster


@dataclass
class Told:
    """What a client was told."""

    tokens: list[int] = field(default_factory=list)
    error: str = ""
    is_whole: bool = False
    seconds: float = 0.0


def complete(router: str, prompt: list[int], told: Told) -> None:
    """Stream an answer."""
    began = time.monotonic()
    body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS}
    body |= {"stream": True, "return_token_ids": True, "ignore_eos": True}
    try:
        answer = ask(router, "/v1/completions", body).decode()
    except urllib.error.HTTPError as error:
        told.error = json.loads(error.read())["error"]["code"]
        answer = ""
    for event in answer.split("\n\n"):
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            told.is_whole = not told.error
        elif data:
            fields = json.loads(data)
            told.error = told.error or fields.get("error", {}).get("code", "")
            for choice in fields.get("choices", ()):
                told.tokens += choice["token_ids"]
    told.seconds = time.monotonic() - began


def inject(cluster: Cluster, target: str, kind: str, rng: random.Random) -> None:
    """A fault that is over after a while; what was killed is started again."""
    node = cluster.prefill if target == "prefill" else rng.choice(cluster.decode)
    pause = rng.uniform(0.1, 0.6)
    if kind in ("cut", "stall", "slow"):
        wire = cluster.cache_wire if target == "cache wire" else node.wire
        if kind == "cut":
            wire.cut()
        else:
            wire.state = "stalled" if kind == "stall" else "slow"
            time.sleep(pause)
            wire.state = "up"
    elif target == "cache":
        cluster.cache.kill() if kind == "kill" else cluster.cache.stop()
        time.sleep(pause)
        cluster.cache.start(wait=False) if kind == "kill" else cluster.cache.go_on()
    elif kind == "kill":
        node.kill()
        node.start()
    else:
        node.process.send_signal(signal.SIGSTOP)
        time.sleep(pause)
        node.process.send_signal(signal.SIGCONT)


def in_order(rng: random.Random, times: int) -> list[tuple[str, str]]:
    """At random; but while a node starts again others have their faults, which saves time."""
    kills, cache = shuffled(KILLS * times, rng), shuffled(CACHE_FAULTS * times, rng)
    kinds = {role: shuffled(NODE_FAULTS * times, rng) for role in ("prefill", "decode")}
    order = []
    for role, kind in kills:
        other = "prefill" if role == "decode" else "decode"
        order += [(role, kind), cache.pop(), cache.pop()]
        order += [(other, kinds[other].pop()) for _ in range(4)]
    return [*order, *cache]


def shuffled(faults: list[Any], rng: random.Random) -> list[Any]:
    return rng.sample(faults, len(faults))


def test_one_fault_after_the_other(cluster: Cluster, seed: int, scale: str) -> None:
    rng = random.Random(seed)
    times = 1 if scale == "ci" else 4
    faults = in_order(rng, times)
    assert len(faults) == 15 * times
    shared = prompt_of(seed, 200)
    prompts = [
        shared[: rng.choice([0, 200])] + prompt_of(seed + 1 + number, 400)
        for number in range(len(faults) + 1)
    ]
    with LLM(dtype="float64", num_blocks=300, num_threads=1) as llm:
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        right = [each.token_ids for each in llm.generate(prompts, params)]
    told = Told()
    complete(cluster.router, prompts[-1], told)
    usual = told.seconds
    assert told.is_whole and told.tokens == right[-1]
    num_lost = 0
    for number, (target, kind) in enumerate(faults):
        if target in ("prefill", "decode"):
            # A prompt goes through a prefill node, if it can.
            cluster.wait_until_up(*{"prefill", target})
        told = Told()
        client = threading.Thread(target=complete, args=(cluster.router, prompts[number], told))
        client.start()
        # The second half is the decode node's.
        time.sleep(rng.uniform(0.5 if target == "decode" else 0.0, 1.0) * usual)
        inject(cluster, target, kind, rng)
        client.join(MOST_SECONDS)
        with noted(f"fault {number}: {target} {kind}: {told}"):
            assert not client.is_alive(), "no answer in time"
            assert told.tokens == right[number][: len(told.tokens)]
            if told.is_whole:
                assert told.tokens == right[number] and not told.error
            else:
                assert (target, kind) in (("decode", "kill"), ("decode", "cut"))
                assert told.error == "node_lost"
                num_lost += 1
    assert num_lost <= 2 * times
    cluster.wait_until_up("prefill", "decode")
    for place in rng.sample(range(len(prompts)), 5):  # all is well again
        told = Told()
        complete(cluster.router, prompts[place], told)
        assert told.is_whole and told.tokens == right[place]
