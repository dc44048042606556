#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two engines that share a cache server, on this machine, without containers.

    deploy/two-engines.sh                        until Ctrl-C; prints how to try it
    deploy/two-engines.sh --demo                 asks one engine, then the other, and ends

Needs nothing but an installed StrataKV. For several machines start the same three commands there,
with TLS and a token: docs/commands.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
COMMAND = [sys.executable, "-P", "-m", "stratakv.engine.cli.main"]
START_SECONDS, END_SECONDS, ANSWER_SECONDS = 180.0, 30.0, 120.0
SHARE_SECONDS, PAUSE_SECONDS = 10.0, 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WRITTEN = re.compile(
    r'^vllm:kv_offload_tiering_write_bytes_total\{[^}]*tier="1:remote"\} (\S+)$', re.MULTILINE
)
STORY = (
    "The lighthouse keeper wrote down every ship that passed, its flag, its course and the "
    "weather, and in the evening he read the day aloud to nobody. "
)


class Failed(Exception):
    """Something did not start, or did not answer; in words."""


class Told(Exception):
    """Somebody wants it to end."""


class Program:
    """One of the three, with its output in a file."""

    def __init__(self, name: str, words: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as sink:
            # A group of its own, so that Ctrl-C ends them one after the other and not all at once.
            self._process = subprocess.Popen(
                [*COMMAND, *words],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def check(self) -> None:
        """Raises Failed if it has ended."""
        code = self._process.poll()
        if code is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-5:]
            raise Failed("\n".join([f"the {self.name} ended with code {code}:", *lines]))

    def wait_for_port(self, port: int) -> None:
        """Until something listens there."""
        self._wait(lambda: socket.create_connection((HOST, port), 1.0).close())

    def wait_for_health(self, port: int) -> None:
        """Until it says that it is well."""
        self._wait(lambda: get(port, "/health", 2.0))

    def end(self) -> None:
        """Ask it to end, and see to it."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self, attempt: Any) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            try:
                attempt()
                return
            except OSError:
                time.sleep(PAUSE_SECONDS)
        raise Failed(f"the {self.name} was not ready in {START_SECONDS:.0f} s; see {self.log}")


def main() -> int:
    options = parse()

    def tell(*_: object) -> None:
        raise Told

    for number in SIGNALS:
        signal.signal(number, tell)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="stratakv-two-") as folder,
            running(options, Path(folder)) as (programs, ports, cache_port),
        ):
            if options.demo:
                demo(ports)
                return 0
            print(how_to_try(ports, cache_port), flush=True)
            while True:
                for program in programs:
                    program.check()
                time.sleep(PAUSE_SECONDS)
    except Told:
        return 0
    except Failed as error:
        print(error, file=sys.stderr)
        return 1


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


@contextlib.contextmanager
def running(
    options: argparse.Namespace, folder: Path
) -> Iterator[tuple[list[Program], tuple[int, int], int]]:
    """All three, healthy; the ports of the engines and of the cache server."""
    cache_port, data_port = two_ports(options.cache_port)
    ports = two_ports(options.port)
    programs: list[Program] = []

    def start(name: str, words: list[str]) -> Program:
        programs.append(Program(name, words, folder / f"{name.replace(' ', '-')}.log"))
        return programs[-1]

    try:
        server = start(
            "cache server",
            ["cache-server", "--port", str(cache_port), "--data-port", str(data_port),
             "--cpu-bytes", options.cache_bytes],
        )  # fmt: skip
        server.wait_for_port(cache_port)
        model = [] if options.model is None else [options.model]
        tiers = ["--kv-offload", f"cpu,grpc://{HOST}:{cache_port}"]
        tiers += ["--kv-offload-cpu-bytes", "128MiB"]
        for name, port in zip(("first engine", "second engine"), ports, strict=True):
            start(name, ["serve", *model, "--host", HOST, "--port", str(port), *tiers])
        for engine, port in zip(programs[1:], ports, strict=True):
            engine.wait_for_health(port)
        yield programs, ports, cache_port
    finally:
        for number in SIGNALS:  # it is ending, and a second signal should leave nothing behind
            signal.signal(number, signal.SIG_IGN)
        for program in reversed(programs):  # the engines hand over what they have
            program.end()


def two_ports(first: int) -> tuple[int, int]:
    """A port and the next one, or two free ones for 0."""
    if first:
        return first, first + 1
    with socket.socket() as one, socket.socket() as two:
        one.bind((HOST, 0))
        two.bind((HOST, 0))
        return one.getsockname()[1], two.getsockname()[1]


def how_to_try(ports: tuple[int, int], cache_port: int) -> str:
    """Lines for a shell."""
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
    """One prompt, and its continuation by the other engine."""
    text = STORY * 40
    answer = complete("first", ports[0], text)
    wait_shared(ports[0])
    complete("second", ports[1], text + answer + " The next morning")


def complete(name: str, port: int, prompt: str) -> str:
    """One completion; says what was found in a cache."""
    began = time.monotonic()
    body = json.dumps({"prompt": prompt, "max_tokens": 24, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
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
    """Until the engine has nothing left to hand to the server."""
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


def get(port: int, path: str, seconds: float) -> str:
    """The body of a GET."""
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=seconds) as response:
        body: bytes = response.read()
        return body.decode()


if __name__ == "__main__":
    sys.exit(main())
