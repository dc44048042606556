# SPDX-License-Identifier: Apache-2.0
"""Sends mixed traffic to one server for a long time; checks its memory and every answer.

    .venv/bin/python tools/soak.py --seconds 3600

First a server without tiers and without prefix caching answers 200 prompts; all later answers are
compared with these answers. Then the tool starts a cache server and `stratakv serve` with all tiers
on the embedded model, in float64. Clients read streams, abort streams, request schemas and chats,
and send invalid requests; meanwhile the cache server is restarted several times. At the end the
server is killed and restarted with its SSD store, and answers all 200 prompts twice. The tool
prints JSON; its exit status is 1 if an answer was wrong, memory, threads or descriptors grew, or a
tier provided no blocks.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

HOST, MODEL = "127.0.0.1", "embedded"
NUM_CLIENTS = 4
NUM_DOCUMENTS, NUM_PROMPTS, OUTPUT_TOKENS = 20, 200, 16
START_SECONDS, ANSWER_SECONDS, END_SECONDS = 300.0, 120.0, 60.0
SAMPLE_SECONDS = 5.0
SETTLE_SECONDS = 600.0  # or a third of the test, if that is shorter
CACHE_SERVER_SECONDS = 300.0  # between two restarts, or a fifth of the test
MOST_GROWTH = 1.05
# Name in the tool's JSON → name in /proc/PID/smaps_rollup.
OF_BYTES = {"anonymous_bytes": "Pss_Anon", "file_bytes": "Pss_File", "shared_bytes": "Pss_Shmem"}
# Growth that is allowed besides MOST_GROWTH: two idle processes with threads and descriptors.
MOST_IDLE = {"bytes": 0, "processes": 2, "threads": 2, "descriptors": 4}
FREE = ["--no-enable-prefix-caching"]
TIERS = ["--kv-offload-cpu-bytes", "64MiB", "--kv-offload-ssd-bytes", "1GiB", "--num-blocks", "500"]
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
WORDS = (
    "tier", "block", "cache", "prefix", "engine", "token", "memory", "disk", "server", "stream",
    "request", "layer", "page",
)  # fmt: skip


def make_prompts(seed: int) -> list[str]:
    """Return prompts that have the first words of one of a few documents, and other last words."""
    rng = random.Random(seed)
    documents = [rng.choices(WORDS, k=400) for _ in range(NUM_DOCUMENTS)]
    prompts = []
    for number in range(NUM_PROMPTS):
        document = documents[number % NUM_DOCUMENTS]
        own = rng.choices(WORDS, k=rng.randint(1, 30))
        prompts.append(" ".join([*document[: rng.randint(50, 400)], *own]))
    return prompts


class Program:
    """A process of a stratakv command, in its own session, with its output in a log file."""

    def __init__(self, stack: ExitStack, folder: Path, *words: str) -> None:
        """Start the command; the end of `stack` kills the process if it still runs."""
        self.log = folder / f"{words[0]}-{time.monotonic_ns()}.log"
        command = [sys.executable, "-P", "-m", "stratakv.engine.cli.main", *words]
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, stdout=sink, stderr=sink, start_new_session=True
            )
        stack.callback(self._kill)

    def wait_for(self, pattern: str) -> str:
        """Wait until `pattern` is in the log; return the pattern's first group."""
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(pattern, self.log.read_text(errors="replace"))):
            if time.monotonic() > deadline or self.process.poll() is not None:
                words = self.log.read_text(errors="replace")[-2000:]
                raise SystemExit(f"it did not start: {words}")
            time.sleep(0.1)
        return found[1]

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal and wait for the end; SIGKILL is sent to all processes of the session."""
        if number == signal.SIGKILL:
            self._kill()
        else:
            self.process.send_signal(number)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"it did not end within {END_SECONDS:g} s; see {self.log}") from None

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Served(Program):
    """A `stratakv serve` process, and requests to its HTTP server."""

    def __init__(self, stack: ExitStack, folder: Path, *words: str) -> None:
        super().__init__(
            stack, folder, "serve", "--host", HOST, "--port", "0", "--dtype", "float64",
            "--served-model-name", MODEL, "--max-model-len", "2048", *words,
        )  # fmt: skip
        self.port = int(self.wait_for(rf"http://{HOST}:(\d+)"))

    def ask(self, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Send a request; return the HTTP status and the decoded answer."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            self._send(connection, path, fields)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def complete(self, prompt: str) -> dict[str, Any]:
        """Return the text and the usage of a greedy completion."""
        status, answer = self.ask("/v1/completions", greedy(prompt))
        if status != 200:
            raise RuntimeError(f"{status}: {answer}")
        return {"text": answer["choices"][0]["text"], "usage": answer["usage"]}

    def stream(self, prompt: str, most_events: int | None = None) -> str:
        """Return the text of a stream; the client disconnects after `most_events` events."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            self._send(connection, "/v1/completions", {**greedy(prompt), "stream": True})
            texts: list[str] = []
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:]).get("choices") or [{}]
                    texts.append(choices[0].get("text") or "")
                if most_events is not None and len(texts) >= most_events:
                    break
            return "".join(texts)
        finally:
            connection.close()

    def sizes(self) -> dict[str, int]:
        """Return resource totals of the server and its descendants: bytes of memory, also by kind
        (each process counts its share of a shared page), and descriptors, threads and processes."""
        found = Counter[str]()
        left = [self.process.pid]
        while left:
            place = Path(f"/proc/{left.pop()}")
            try:
                rollup = (place / "smaps_rollup").read_text()
                found["descriptors"] += len(list((place / "fd").iterdir()))
                tasks = list((place / "task").iterdir())
                for task in tasks:
                    left += map(int, (task / "children").read_text().split())
            except OSError:  # the process has ended
                continue
            for name in ("bytes", *OF_BYTES):
                kibibytes = re.findall(rf"^{OF_BYTES.get(name, 'Pss')}:\s+(\d+)", rollup, re.M)
                found[name] += 1024 * int(kibibytes[0])
            found["threads"] += len(tasks)
            found["processes"] += 1
        return dict(found)

    @staticmethod
    def _send(connection: http.client.HTTPConnection, path: str, fields: dict[str, Any]) -> None:
        body = json.dumps({"model": MODEL, **fields})
        connection.request("POST", path, body, {"content-type": "application/json"})


def greedy(prompt: str) -> dict[str, Any]:
    return {
        "prompt": prompt, "temperature": 0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True,
    }  # fmt: skip


class Traffic:
    """Clients that send requests until `end`, and the counts and faults of the answers."""

    def __init__(self, served: Served, prompts: list[str], answers: list[str], end: float) -> None:
        self.served, self.prompts, self.answers, self.end = served, prompts, answers, end
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(2 * ANSWER_SECONDS)
            if thread.is_alive():
                self.faults.append("a client waits for ever")

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        kinds = ["whole"] * 9 + ["stream"] * 5 + ["abort"] * 3 + ["schema", "chat", "refused"]
        while time.monotonic() < self.end:
            kind, place = rng.choice(kinds), min(int(rng.paretovariate(0.5)), NUM_PROMPTS) - 1
            try:
                fault = self._ask(kind, place, rng)
            except Exception as error:  # noqa: BLE001 - each is told
                fault = f"{type(error).__name__}: {error}"
            self.counts[kind] += 1
            if fault:
                self.faults.append(f"{kind}, prompt {place}: {fault}"[:500])

    def _ask(self, kind: str, place: int, rng: random.Random) -> str:
        """Send a request of one kind; return the fault of the answer, or "" for a right answer."""
        served, prompt, right = self.served, self.prompts[place], self.answers[place]
        if kind in ("whole", "stream"):
            text = served.complete(prompt)["text"] if kind == "whole" else served.stream(prompt)
            return "" if text == right else f"{text!r} and not {right!r}"
        if kind == "abort":
            begun = served.stream(prompt, rng.randint(1, OUTPUT_TOKENS - 1))
            return "" if right.startswith(begun) else f"{begun!r} begins no {right!r}"
        if kind == "refused":
            status, _ = served.ask("/v1/completions", {**greedy(prompt), "temperature": -1})
            return "" if status == 400 else f"status {status}"
        messages = [{"role": "user", "content": prompt}]
        fields: dict[str, Any] = {"messages": messages, "max_tokens": OUTPUT_TOKENS}
        if kind == "schema":
            schema = {**SCHEMA, "title": f"{rng.randrange(100)}"}
            fields |= {"response_format": {
                "type": "json_schema", "json_schema": {"name": "a", "schema": schema}
            }}  # fmt: skip
        status, answer = served.ask("/v1/chat/completions", fields)
        return "" if status == 200 else f"status {status}: {answer}"


def two_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind((HOST, 0))
        other.bind((HOST, 0))
        return one.getsockname()[1], other.getsockname()[1]


def medians(samples: list[dict[str, int]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in samples) for name in samples[0]}


def soak(stack: ExitStack, folder: Path, seconds: float) -> dict[str, Any]:
    """Run the whole test; return its figures."""
    prompts = make_prompts(7)
    plain = Served(stack, folder, *FREE)
    answers = [plain.complete(prompt)["text"] for prompt in prompts]
    plain.end()

    port, data_port = two_ports()
    cache_words = ["cache-server", "--port", str(port), "--data-port", str(data_port)]
    cache_words += ["--cpu-bytes", "1GiB"]
    cache_server = Program(stack, folder, *cache_words)
    cache_server.wait_for("(cache server at)")
    words = ["--kv-offload", f"cpu,ssd,grpc://{HOST}:{port}", *TIERS]
    words += ["--kv-offload-ssd-path", str(folder / "ssd")]
    served = Served(stack, folder, *words)

    began = time.monotonic()
    settled = began + min(SETTLE_SECONDS, seconds / 3)
    pause = min(CACHE_SERVER_SECONDS, seconds / 5)
    traffic = Traffic(served, prompts, answers, began + seconds)
    samples: list[dict[str, int]] = []
    num_restarts, restart_at = 0, began + pause
    while time.monotonic() < began + seconds:
        time.sleep(SAMPLE_SECONDS)
        if time.monotonic() > settled:
            samples.append(served.sizes())
        # The cache server is not restarted at the end of the test, so that it has blocks to load.
        if restart_at < time.monotonic() < began + seconds - 2 * pause:
            cache_server.end()
            cache_server = Program(stack, folder, *cache_words)
            cache_server.wait_for("(cache server at)")
            num_restarts, restart_at = num_restarts + 1, restart_at + pause
    traffic.join()

    served.end(signal.SIGKILL)
    again = Served(stack, folder, *words)
    tiers: Counter[str] = Counter()
    wrong = []
    for _ in range(2):  # the second round loads from faster tiers
        for place, prompt in enumerate(prompts):
            answer = again.complete(prompt)
            if answer["text"] != answers[place]:
                wrong.append(f"prompt {place}: {answer['text']!r} and not {answers[place]!r}")
            details = answer["usage"].get("prompt_tokens_details") or {}
            tiers.update(details.get("cached_tokens_by_tier") or {})
    again.end()
    cache_server.end()
    return {
        "seconds": seconds,
        "load": os.getloadavg(),
        "requests": dict(traffic.counts),
        "faults": traffic.faults[:20],
        "num_faults": len(traffic.faults),
        "cache_server_restarts": num_restarts,
        "first_quarter": medians(samples[: len(samples) // 4]),
        "last_quarter": medians(samples[-(len(samples) // 4) :]),
        "after_a_kill": {
            "wrong": wrong[:20],
            "num_wrong": len(wrong),
            "tokens_by_tier": dict(tiers),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--folder", type=Path, help="of the SSD's store and logs (a new one)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stratakv-soak-") as made, ExitStack() as stack:
        folder = given.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        figures = soak(stack, folder, given.seconds)
    print(json.dumps(figures, indent=2))
    after = figures["after_a_kill"]
    kept = {
        "every answer right": not figures["num_faults"] and not after["num_wrong"],
        "every tier gave blocks": all(after["tokens_by_tier"].values()),
        **{
            f"{name} level": figures["last_quarter"][name] <= MOST_GROWTH * before + MOST_IDLE[name]
            for name, before in figures["first_quarter"].items()
            if name not in OF_BYTES
        },
    }
    for name, is_kept in kept.items():
        print(f"{'kept' if is_kept else 'MISSED':6}  {name}", file=sys.stderr)
    return int(not all(kept.values()))


if __name__ == "__main__":
    sys.exit(main())
