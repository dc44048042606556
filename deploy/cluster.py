#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A demo cluster on one machine: a prefill node, a decode node, a cache server and the proxy.

    deploy/cluster.sh                            prints how to start each part on its own host
    deploy/cluster.sh --demo                     starts all parts, prints a table, and ends

Each prompt is sent twice: to one node that computes everything, and to the proxy. The first request
has its own cache_salt, so that its blocks are not found by the second request.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from local_programs import (
    ANSWER_SECONDS,
    HOST,
    STORY,
    STRAIGHT,
    Failed,
    free_ports,
    get,
    programs,
    run,
)

# The numbers of sentences of the prompts, and the tokens of each answer, within the embedded
# model's 4,096 tokens.
SENTENCES, OUTPUT_TOKENS = (15, 30, 45), 16
CACHE_BYTES = "512MiB"
COMPUTED = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{[^}]*source="local_compute"[^}]*\} (\S+)$', re.MULTILINE
)
# In float64, a prompt's blocks do not depend on the steps in which they are computed. In float32, a
# last digit may differ, which may change a token if two tokens are nearly as likely.
NODE_FLAGS = ("--dtype", "float64", "--kv-offload-load", "always")
TITLE = """\
prompt | computed on  | loaded by   | computed on | first token, | first token,
tokens | prefill node | decode node | decode node | one node     | cluster"""
HOSTS = """\
deploy/README.md says how to make the token and the certificate of the cache server. Each of these
runs on a host of its own; MODEL is the same directory on all nodes:

stratakv cache-server --host 0.0.0.0 --cpu-bytes 64GiB \\
    --token-file token --tls-cert cache.crt --tls-key cache.key
stratakv serve MODEL --role prefill --host 0.0.0.0 --kv-offload cpu,grpcs://CACHE:9400 \\
    --kv-offload-remote-token-file token --kv-offload-remote-ca-file ca.crt
stratakv serve MODEL --role decode --host 0.0.0.0 --kv-offload cpu,grpcs://CACHE:9400 \\
    --kv-offload-remote-token-file token --kv-offload-remote-ca-file ca.crt
stratakv route --host 0.0.0.0 --prefill http://PREFILL:8000 --decode http://DECODE:8000

For more nodes repeat the second and the third, and --prefill and --decode of the last. Clients use
port 8100 of the proxy. Let only the proxy reach port 8000 of the nodes, and only the nodes ports
9400 and 9401 of the cache server.

All four on this machine, for a try: deploy/cluster.sh --demo"""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, its cached and loaded prompt tokens, and the time to its first token."""

    text: str
    first_token_seconds: float
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of the nodes and the proxy."""

    prefill: int
    decode: int
    proxy: int


def main() -> int:
    options = parse()
    if not options.demo:
        print(HOSTS)
        return 0
    return run(lambda: demo(options.model))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A prefill node, a decode node, a cache server and a proxy."
    )
    parser.add_argument(
        "--demo", action="store_true", help="start all four here, ask them, print a table, and end"
    )
    parser.add_argument("--model", help="a model directory (the embedded model)")
    return parser.parse_args()


def demo(model: str | None) -> None:
    """Start all four parts, send the prompts, and print the table."""
    with programs() as started:
        cache_port, data_port, *rest = free_ports(5)
        ports = Ports(*rest)
        started.start_cache_server(cache_port, data_port, CACHE_BYTES)
        roles, node_ports = ("prefill", "decode"), (ports.prefill, ports.decode)
        nodes = [
            started.start_engine(
                f"{role} node", port, model, cache_port, "--role", role, *NODE_FLAGS
            )
            for role, port in zip(roles, node_ports, strict=True)
        ]
        for node, port in zip(nodes, node_ports, strict=True):
            node.wait_for_health(port)
        words = ["--prefill", f"http://{HOST}:{ports.prefill}"]
        words += ["--decode", f"http://{HOST}:{ports.decode}", "--port", str(ports.proxy)]
        started.start("proxy", ["route", *words]).wait_for_health(ports.proxy)
        for role, port in zip(roles, node_ports, strict=True):  # warms each node up
            ask(f"{role} node", port, STORY, salt="first")
        print(TITLE, flush=True)
        differ = [number for number in SENTENCES if not compare(ports, number)]
    if differ:
        raise Failed(f"{len(differ)} of {len(SENTENCES)} answers through the cluster differ")
    print(f"All {len(SENTENCES)} answers through the cluster are those of one node.", flush=True)


def compare(ports: Ports, sentences: int) -> bool:
    """Send one prompt to a node and to the proxy, print a row; return whether the answers are
    equal."""
    prompt = f"The log of {sentences} days. " + STORY * sentences
    alone = ask("decode node", ports.decode, prompt, salt="alone")
    before = computed_tokens(ports.prefill)
    split = ask("proxy", ports.proxy, prompt)
    print(
        f"{split.prompt_tokens:6} | {computed_tokens(ports.prefill) - before:12} "
        f"| {split.loaded_tokens:11} | {split.prompt_tokens - split.cached_tokens:11} "
        f"| {1e3 * alone.first_token_seconds:9.0f} ms | {1e3 * split.first_token_seconds:9.0f} ms",
        flush=True,
    )
    return split.text == alone.text


def ask(name: str, port: int, prompt: str, salt: str | None = None) -> Answer:
    """Request a streamed completion."""
    body = {
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({} if salt is None else {"cache_salt": salt}),
    }
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    text, first, usage = "", 0.0, None
    began = time.monotonic()
    try:
        with STRAIGHT.open(request, timeout=ANSWER_SECONDS) as response:
            for event in events_of(response):
                if "error" in event:
                    raise Failed(f"the {name}: {event['error']}")
                first = first or time.monotonic() - began
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event.get("usage") or usage
    except urllib.error.HTTPError as error:
        raise Failed(f"the {name}: HTTP {error.code} {error.read(500)!r}") from error
    except OSError as error:
        raise Failed(f"the {name} did not answer: {error}") from error
    if usage is None:
        raise Failed(f"the {name} ended its answer in the middle")
    details = usage["prompt_tokens_details"]
    tiers = details.get("cached_tokens_by_tier") or {}
    # Blocks from the cache server count under any tier below the pool: some blocks arrive while the
    # prompt is computed, and are then in the cpu tier.
    loaded = sum(tokens for tier, tokens in tiers.items() if tier != "pool")
    return Answer(text, first, usage["prompt_tokens"], details["cached_tokens"], loaded)


def events_of(response: Any) -> Iterator[Any]:
    """Yield the events of a stream up to its end."""
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


def computed_tokens(port: int) -> int:
    """Return the number of prompt tokens that the node at this port has computed and not loaded."""
    return sum(int(float(count)) for count in COMPUTED.findall(get(port, "/metrics", 5.0)))


if __name__ == "__main__":
    sys.exit(main())
