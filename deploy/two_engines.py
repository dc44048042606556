#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two engines that share a cache server, on this machine, without containers.

    deploy/two-engines.sh                        runs until Ctrl-C; prints commands to try it
    deploy/two-engines.sh --demo                 sends a request to each engine, and ends

The script needs only an installed StrataKV. On several machines, start the same three commands with
TLS and a token: docs/commands.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.error
import urllib.request

from local_programs import (
    ANSWER_SECONDS,
    HOST,
    PAUSE_SECONDS,
    STORY,
    STRAIGHT,
    Failed,
    free_ports,
    get,
    programs,
    run,
)

SHARE_SECONDS = 10.0
WRITTEN = re.compile(
    r'^vllm:kv_offload_tiering_write_bytes_total\{[^}]*tier="1:remote"\} (\S+)$', re.MULTILINE
)


def main() -> int:
    options = parse()
    return run(lambda: serve(options))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Two engines that share a cache server.")
    parser.add_argument("--model", help="a model directory (the embedded model)")
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="of the first engine; the second has the next; 0: free ones (8000)",
    )
    parser.add_argument(
        "--cache-port",
        type=int,
        default=9400,
        help="of the cache server; blocks go through the next; 0: free ones (9400)",
    )
    parser.add_argument(
        "--cache-bytes", default="512MiB", help="memory of the cache server (512MiB)"
    )
    parser.add_argument("--demo", action="store_true", help="ask both engines once, and end")
    return parser.parse_args()


def serve(options: argparse.Namespace) -> None:
    """Run both engines and the cache server until a signal, or run the demo."""
    with programs() as started:
        cache_port, data_port = two_ports(options.cache_port)
        ports = two_ports(options.port)
        started.start_cache_server(cache_port, data_port, options.cache_bytes)
        engines = [
            started.start_engine(name, port, options.model, cache_port)
            for name, port in zip(("first engine", "second engine"), ports, strict=True)
        ]
        for engine, port in zip(engines, ports, strict=True):
            engine.wait_for_health(port)
        if options.demo:
            demo(ports)
            return
        print(how_to_try(ports, cache_port), flush=True)
        while True:
            for program in started:
                program.check()
            time.sleep(PAUSE_SECONDS)


def two_ports(first: int) -> tuple[int, int]:
    """Return `first` and the next port, or two free ports if `first` is 0."""
    if first:
        return first, first + 1
    one, two = free_ports(2)
    return one, two


def how_to_try(ports: tuple[int, int], cache_port: int) -> str:
    """Return shell commands that try the engines."""
    text = f"TEXT=\"$(yes '{STORY.strip()}' | head -40 | tr '\\n' ' ')\""
    body = """'{"prompt": "'"$TEXT"'", "max_tokens": 32}'"""
    asks = [
        f"curl -s http://{HOST}:{port}/v1/completions "
        f"-H 'Content-Type: application/json' \\\n    -d {body}"
        for port in ports
    ]
    return "\n".join(
        [
            f"Two engines share the cache server at grpc://{HOST}:{cache_port}. Try:",
            "",
            text,
            *asks,
            "",
            "In the second answer usage.prompt_tokens_details.cached_tokens_by_tier says how many",
            "tokens came from the cache server. Ctrl-C ends all three.",
        ]
    )


def demo(ports: tuple[int, int]) -> None:
    """Send a prompt to one engine, and prompt, answer and more text to the other engine."""
    text = STORY * 40
    answer = complete("first", ports[0], text)
    wait_shared(ports[0])
    complete("second", ports[1], text + answer + " The next morning")


def complete(name: str, port: int, prompt: str) -> str:
    """Request a completion, print the numbers of cached tokens by tier, and return the text."""
    began = time.monotonic()
    body = json.dumps({"prompt": prompt, "max_tokens": 24, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with STRAIGHT.open(request, timeout=ANSWER_SECONDS) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise Failed(f"the {name} engine: HTTP {error.code} {error.read(500)!r}") from error
    except OSError as error:
        raise Failed(f"the {name} engine did not answer: {error}") from error
    took = time.monotonic() - began
    usage = answer["usage"]
    details = usage["prompt_tokens_details"]
    tiers = {k: v for k, v in (details.get("cached_tokens_by_tier") or {}).items() if v}
    print(
        f"{name} engine: {usage['prompt_tokens']} prompt tokens, {details['cached_tokens']} cached "
        f"{json.dumps(tiers)}, {1e3 * took:.0f} ms",
        flush=True,
    )
    text: str = answer["choices"][0]["text"]
    return text


def wait_shared(port: int) -> None:
    """Wait until the engine has written all its blocks to the cache server."""
    deadline = time.monotonic() + SHARE_SECONDS
    before = 0.0
    while time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
        found = WRITTEN.search(get(port, "/metrics", 5.0))
        written = float(found[1]) if found else 0.0
        if written and written == before:
            return
        before = written
    raise Failed(f"the first engine brought nothing to the cache server in {SHARE_SECONDS:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
