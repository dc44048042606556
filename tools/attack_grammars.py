# SPDX-License-Identifier: Apache-2.0
"""Measures the latency of a server's honest clients while four other clients send hostile grammars.

    .venv/bin/python tools/attack_grammars.py --seconds 600 [--backend xgrammar] [--one-tenant]

The tool starts `stratakv serve` on the embedded model. One honest client reads streams: alone,
together with clients without grammars, and during the attack. A second honest client requests an
answer to a new schema every two seconds. The tool prints JSON. The exit status is 1 unless every
honest schema is answered within 5 s, the 99th percentile of the seconds between tokens is at most
1.3 times its value with clients without grammars, the server ends with all its descendants, and at
most three threads more than before the attack are left.

The test `tests/engine/structured/test_attack.py` also uses `hostile_grammars`."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

NUM_CLIENTS = 4
MOST_HONEST_SECONDS = 5.0
MOST_P99 = 1.3
START_SECONDS, ANSWER_SECONDS, END_SECONDS = 300.0, 300.0, 60.0
SETTLE_SECONDS = 30.0
ALONE_SECONDS = 30.0
PAUSE_SECONDS = 2.0  # seconds between two requests with honest schemas
HOST = "127.0.0.1"
TENANT, MODEL = "x-tenant", "embedded"
Grammar = dict[str, Any]


def hostile_grammars(number: int) -> dict[str, Grammar]:
    """Return sixty hostile grammars by name; each `number` gives new grammars for all caches."""
    made: dict[str, Grammar] = {}
    for kind in (_regexes, _schemas, _rules, _choices):
        for name, grammar in kind(number):
            made[f"{name} {number}"] = grammar
    return made


def _regexes(number: int) -> Iterator[tuple[str, Grammar]]:
    for length in (60, 110, 150, 300, 600, 1300, 5000):
        size = length + number % 50
        yield f"optional ones, {length}", {"regex": "a?" * size + "a" * size}
    for size in (50, 200, 1000):
        yield f"a group of optional ones, {size}", {"regex": f"(a?){{{size + number}}}a{{{size}}}"}
    for most in (10, 30, 100, 250):
        counts = f"((a{{1,{most}}}){{1,{most}}}){{1,{most}}}b{number}"
        yield f"counts in counts, {most}", {"regex": counts}
    for size in (8, 14, 20, 30):
        yield f"a letter {size} from the end", {"regex": f"(.*a.{{{size}}}){{3}}{number}"}
    for text in ("((a+)+)+b", "(a|a)*b", "(a|aa)+$", "([a-z]+)*[0-9]", "(.*)*x", "(.*.*.*)*y"):
        yield f"ambiguous {text}", {"regex": text + str(number)}
    yield "all letters", {"regex": rf"[\p{{L}}\p{{N}}]{{1,2000}}{number}"}


def _schemas(number: int) -> Iterator[tuple[str, Grammar]]:
    for levels in (10, 40, 90, 98):
        deep: Any = {"type": "integer", "minimum": number}
        for _ in range(levels // 2):
            deep = {"type": "array", "items": deep, "maxItems": 1000}
        yield f"{levels} levels", {"json": {"type": "object", "properties": {"a": deep}}}
    for size in (40, 64, 200, 2000):
        properties = {f"p{number}-{each}": {"type": "string"} for each in range(size)}
        yield f"{size} properties", {"json": {"type": "object", "properties": properties}}
    for size in (3, 10, 30, 60):
        node = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}}] * size}
        schema = {"$defs": {"n": node}, "$ref": "#/$defs/n", "title": str(number)}
        yield f"{size} equal choices", {"json": schema}
    options = [{"properties": {f"a{each}": {"const": number}}} for each in range(12)]
    yield "all of any of", {"json": {"type": "object", "allOf": [{"anyOf": options}] * 6}}
    for size in (20, 50, 100, 300):
        keys = {f"^(a?){{{each}}}b{number}$": {"type": "string"} for each in range(1, size)}
        yield f"{size} patterns of keys", {"json": {"type": "object", "patternProperties": keys}}
    for size in (100, 3000):
        values = [f"{number} is the value {each}" for each in range(size)]
        yield f"{size} values", {"json": {"enum": values}}
    yield "only itself", {"json": {"$ref": "#", "title": str(number)}}
    multiple = {"type": "integer", "multipleOf": 104729 * 7919 + number}
    yield "a large multiple", {"json": multiple}
    ping = {"$ref": "#/$defs/b"}
    defs = {"a": ping, "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": number}]}}
    yield "to and fro", {"json": {"$defs": defs, "$ref": "#/$defs/a"}}
    pattern = f"^((a|b?)*c{{0,200}}){{0,200}}{number}$"
    yield "a pattern", {"json": {"type": "string", "pattern": pattern}}
    closed = {"type": "object", "additionalProperties": False, "required": ["s"]}
    both = {"properties": {"s": {"const": number}}, "patternProperties": {"^s$": {}}}
    yield "a contradiction", {"json": closed | both}


def _rules(number: int) -> Iterator[tuple[str, Grammar]]:
    texts = {
        "both sides": f'root ::= "{number}" root "a" | root root | ""',
        "left for ever": f'root ::= root "a{number}"',
        "counted": f'root ::= x{{1,500}} "{number}"\nx ::= ("a" | x){{1,500}}',
        "nothing": f'root ::= e e "{number}"\ne ::= "" | e e e',
        "palindromes": 'root ::= "a" root "a" | "b" root "b" | ' + f'"{number}"',
    }
    for name, text in texts.items():
        yield name, {"grammar": text}
    for size in (500, 5000):
        words = " | ".join(f'"{number}-{each}"' for each in range(size))
        yield f"{size} alternatives", {"grammar": f"root ::= {words}"}


def _choices(number: int) -> Iterator[tuple[str, Grammar]]:
    for size, letters in ((500, 10), (3000, 40), (4096, 50)):
        texts = [f"{number}-{each}".ljust(letters, "x") for each in range(size)]
        yield f"{size} choices", {"choice": texts}
    texts = ["x" * 50 + f"{number}-{each}" for each in range(2000)]
    yield "choices that begin alike", {"choice": texts}


def honest_schema(number: int) -> Grammar:
    """Return a schema of the kind that programs send; each `number` gives another schema."""
    names = {f"field_{number}": {"type": "integer"}, "kind": {"enum": ["a", "b"]}}
    schema = {"type": "object", "properties": names, "required": list(names)}
    return {"json": schema | {"additionalProperties": False}}


class Served:
    """A `stratakv serve` process, and requests to its HTTP server."""

    def __init__(self, words: list[str], log: Path) -> None:
        command = [sys.executable, "-P", "-m", "stratakv.engine.cli.main", "serve", "--port", "0"]
        command += ["--host", HOST, "--max-model-len", "2048", "--tenant-header", TENANT]
        command += ["--served-model-name", MODEL, *words]
        self.port = 0
        self._log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(command, stdout=sink, stderr=sink)
        deadline = time.monotonic() + START_SECONDS
        while not self.port or self.ask({"max_tokens": 1}, "first")[0] != 200:
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.process.kill()
                raise SystemExit(log.read_text(errors="replace")[-2000:])
            time.sleep(PAUSE_SECONDS / 4)
            if found := re.search(rf"http://{HOST}:(\d+)", log.read_text()):
                self.port = int(found[1])

    def ask(self, fields: dict[str, Any], tenant: str) -> tuple[int, dict[str, Any]]:
        """Send a completion request; return the HTTP status and the decoded answer."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            body = json.dumps({"model": MODEL, "prompt": "As JSON: ", **fields})
            connection.request("POST", "/v1/completions", body, self._headers(tenant))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except OSError as error:
            return 0, {"error": {"message": str(error)}}
        finally:
            connection.close()

    def waits(self, is_over: Callable[[], bool]) -> Iterator[float]:
        """Yield the seconds between the tokens of streams, which are read one after the other."""
        while not is_over():
            connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
            fields = {"prompt": "On and on", "stream": True, "max_tokens": 1500}
            body = json.dumps({"model": MODEL, "ignore_eos": True, **fields})
            connection.request("POST", "/v1/completions", body, self._headers("reader"))
            answer, before = connection.getresponse(), 0.0
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                if before:
                    yield now - before
                before = now
                if is_over():
                    break
            connection.close()

    def threads_and_processes(self) -> tuple[int, list[int]]:
        """The number of threads of the server and its descendants, and their process ids."""
        found, left = [], [self.process.pid]
        while left:
            pid = left.pop()
            found.append(pid)
            for task in _files(f"/proc/{pid}/task"):
                path = Path(f"/proc/{pid}/task/{task}/children")
                left += map(int, path.read_text().split()) if path.exists() else ()
        return sum(len(_files(f"/proc/{pid}/task")) for pid in found), sorted(found)

    def stop(self) -> bool:
        """Stop the server by SIGTERM; return whether it and all its descendants ended in time."""
        _, pids = self.threads_and_processes()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return False
        deadline = time.monotonic() + PAUSE_SECONDS
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_SECONDS / 40)
        return True

    def log_lines(self, word: str) -> list[str]:
        return [line for line in self._log.read_text().splitlines() if word in line]

    def _headers(self, tenant: str) -> dict[str, str]:
        return {"content-type": "application/json", TENANT: tenant}


def _files(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _beside_free_requests(served: Served, seconds: float) -> list[float]:
    """Return a stream's seconds between tokens while NUM_CLIENTS clients without grammars run."""
    end = time.monotonic() + seconds

    def ask(client: int) -> None:
        while time.monotonic() < end:
            served.ask({"max_tokens": 24}, f"free-{client}")
            time.sleep(PAUSE_SECONDS / 2)

    threads = [threading.Thread(target=partial(ask, each)) for each in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    waits = list(served.waits(lambda: time.monotonic() > end))
    for thread in threads:
        thread.join(ANSWER_SECONDS)
    return waits


def attack(served: Served, seconds: float, one_tenant: bool) -> dict[str, Any]:
    """Attack the server for `seconds`; return the measured figures."""
    alone_until = time.monotonic() + min(ALONE_SECONDS, seconds)
    served.ask({"structured_outputs": honest_schema(10**6), "max_tokens": 64}, "honest")
    alone = list(served.waits(lambda: time.monotonic() > alone_until))
    free = _beside_free_requests(served, min(ALONE_SECONDS, seconds))
    threads_before, processes_before = served.threads_and_processes()
    load_before = os.getloadavg()[0]
    end = time.monotonic() + seconds
    statuses: Counter[str] = Counter()
    longest: dict[str, float] = {}
    numbers = count()

    def hostile(client: int) -> None:
        tenant = "honest" if one_tenant else f"hostile-{client}"
        for turn in count():
            grammars = list(hostile_grammars(1000 * turn + client).items())
            for name, grammar in grammars[client::NUM_CLIENTS]:
                if time.monotonic() > end:
                    return
                began = time.monotonic()
                fields = {"structured_outputs": grammar, "max_tokens": 24}
                status, answer = served.ask(fields, tenant)
                longest[name] = time.monotonic() - began
                reason = str((answer.get("error") or {}).get("code") or "")
                statuses[f"{status} {reason}".strip()] += 1

    honest: list[tuple[int, float, str]] = []

    def ask_honestly() -> None:
        began = time.monotonic()
        fields = {"structured_outputs": honest_schema(next(numbers)), "max_tokens": 64}
        status, answer = served.ask(fields, "honest")
        told = str((answer.get("error") or {}).get("message") or "")
        honest.append((status, time.monotonic() - began, told))

    def honestly() -> None:
        while time.monotonic() < end:
            ask_honestly()
            time.sleep(PAUSE_SECONDS)

    works = [*(partial(hostile, client) for client in range(NUM_CLIENTS)), honestly]
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    beside = list(served.waits(lambda: time.monotonic() > end))
    for thread in threads:
        thread.join(ANSWER_SECONDS)
    load = os.getloadavg()[0]
    during = len(honest)
    for _ in range(5):
        ask_honestly()
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := served.threads_and_processes())[0] > threads_before + 3:
        if time.monotonic() > deadline:  # the server may keep one or two idle processes
            break
        time.sleep(PAUSE_SECONDS)
    return {
        "seconds": seconds,
        "load": {"before": load_before, "at the end": load},
        "hostile": dict(statuses),
        "hostile_kinds": len(longest),
        "slowest_hostile": max(longest.items(), key=lambda item: item[1], default=("", 0.0)),
        "honest": {
            "asked": during,
            "failed": [told for status, _, told in honest[:during] if status != 200],
            "seconds_median": percentile([each for _, each, _ in honest[:during]], 50),
            "seconds_longest": max(each for _, each, _ in honest[:during]),
            "failed_afterwards": [told for status, _, told in honest[during:] if status != 200],
            "longest_afterwards": max(each for _, each, _ in honest[during:]),
        },
        "p99_alone": percentile(alone, 99),
        "p99_beside_free_requests": percentile(free, 99),
        "p99_beside": percentile(beside, 99),
        "tokens": {"alone": len(alone), "beside": len(beside)},
        "threads": {"before": threads_before, "after": left[0]},
        "processes": {"before": len(processes_before), "after": len(left[1])},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--one-tenant", action="store_true", help="all clients are one tenant")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        served = Served(["--structured-outputs-backend", given.backend], log)
        try:
            figures = attack(served, given.seconds, given.one_tenant)
        finally:
            has_ended = served.stop()
        for name in ("alone", "beside_free_requests"):
            figures[f"p99_over_{name}"] = figures["p99_beside"] / figures[f"p99_{name}"]
        figures["hangs"] = served.log_lines("hangs")
        figures["ended_with_everything"] = has_ended
    print(json.dumps(figures, indent=2))
    honest = figures["honest"]
    kept = {
        "honest schemas in time": honest["seconds_longest"] <= MOST_HONEST_SECONDS,
        "none refused": not honest["failed"] and not honest["failed_afterwards"],
        "no thread or process left": has_ended
        and not figures["hangs"]
        and figures["threads"]["after"] <= figures["threads"]["before"] + 3,
        "between tokens": figures["p99_over_beside_free_requests"] <= MOST_P99,
    }
    for name, is_kept in kept.items():
        print(f"{'kept' if is_kept else 'MISSED':6}  {name}", file=sys.stderr)
    return int(not all(kept.values()))


if __name__ == "__main__":
    sys.exit(main())
