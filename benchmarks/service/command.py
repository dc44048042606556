# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench service`: the cache service over loopback, against raw TCP and memcpy.

Blocks of 256 KiB and 2 MiB between a real cache server and 1 or 4 clients, each in a process of its
own with the tier that an engine has: through shared memory, the data connection (also with TLS) and
gRPC streams; beside them Redis and Mooncake where they are installed, and look-ups of whole
prompts. Every figure and its limit are taken in turn, all memory is warm and more than caches hold,
what arrived is compared, and a ratio is the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...tiers.errors import TierError
from ...tiers.remote.address import ServerAddress
from ...tiers.settings.values import ConfigError
from ..harness.command import run_and_tell
from ..harness.comparison import Comparison, WrongWork, quartiles, take_rounds
from ..harness.report import Report, median
from ..harness.served import (
    OPENSSL,
    ServerFailed,
    cache_server,
    certificate,
    find_redis,
    redis_server,
)
from ..tiers.scale import layout_of
from ..tiers.slab_case import footprint_bytes
from . import raw_transport
from .clients import Clients, Round, cpu_seconds, far_ends
from .report import (
    CASES,
    FULL,
    LIMITS,
    LOOK_UP_KEYS,
    QUICK,
    SIZES,
    Case,
    Scale,
    look_up_name,
    plot_service,
    print_service,
    row_name,
)
from .transports import Plan

_LOOK_UP_BLOCK_BYTES = 4096
_SPARE = 1.25  # of the server's memory: what is being stored has a place beside what is there
_STREAMS_ONLY = ("--no-data-connections", "--no-shared-memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; `--quick` and `--out` are the dispatcher's."""
    parser.add_argument(
        "--clients", metavar="N,...",
        help="numbers of client processes, by commas (default: 1,4; quick 1)",
    )  # fmt: skip
    parser.add_argument(
        "--cases", metavar="NAME,...", help="only these rows and their limits (default: all)"
    )
    parser.add_argument(
        "--redis-server", metavar="FILE", help="the binary (default: that in PATH, if there is one)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Take all figures; 0, or 1 with the reason on the terminal. Raises ConfigError."""
    scale = QUICK if arguments.quick else FULL
    clients = _clients(arguments.clients) or scale.clients
    cases = _cases(arguments.cases)
    report = Report("service", "stratakv bench service" + " --quick" * arguments.quick)
    measurement = Measurement(report, scale, cases, arguments.redis_server)
    work = partial(measurement.take, clients)
    failures = (WrongWork, TierError, ServerFailed)
    return run_and_tell(report, arguments.out, work, print_service, plot_service, *failures)


def _clients(given: str | None) -> list[int]:
    try:
        numbers = [int(word) for word in (given or "").split(",") if word]
    except ValueError:
        numbers = [0]
    if any(not 0 < number <= 64 for number in numbers):
        raise ConfigError(f"--clients takes numbers from 1 to 64 by commas, not {given}")
    return numbers


def _cases(given: str | None) -> list[Case]:
    names = [case.name for case in CASES]
    wanted = given.split(",") if given else names
    for name in wanted:
        if name not in names:
            raise ConfigError(f"--cases takes names by commas, of {', '.join(names)}; not {name}")
    return [case for case in CASES if case.name in wanted]


class Measurement:
    """One run, on its way into the report."""

    def __init__(
        self, report: Report, scale: Scale, cases: Sequence[Case], redis: str | None
    ) -> None:
        self._report = report
        self._scale = scale
        self._cases = cases
        self._footprint = footprint_bytes(scale.footprint_bytes)
        self._redis, no_redis = find_redis(redis)
        self._skipped: dict[str, str] = {}
        if no_redis:
            self._skipped["redis"] = no_redis
        if no_mooncake := raw_transport.why_no_mooncake():
            self._skipped["mooncake"] = no_mooncake
        figures = report.figures
        figures["plan"] = {
            "footprint_bytes": self._footprint,
            "rounds": scale.rounds,
            "rates_are_timed_by": "the wall clock, from the first client's start to the last's end",
            "load_average_before": os.getloadavg(),
        }
        figures |= {"contests": {}, "spreads": {}, "skipped": self._skipped}

    def take(self, counts: Sequence[int]) -> None:
        """Fill the report. Raises WrongWork where something did not do what it should."""
        self._report.figures["plan"]["clients"] = list(counts)
        for number in counts:
            for size, block_bytes in SIZES.items():
                clients = Clients(number, block_bytes, self._footprint // block_bytes)
                try:
                    self._take_cases(clients, size)
                finally:
                    clients.close()
        self._take_look_ups()
        self._report.figures["plan"]["load_average_after"] = os.getloadavg()

    def _take_cases(self, clients: Clients, size: str) -> None:
        with self._limits(clients, "copy", "raw") as limits:
            if self._is_wanted("shm", "tier", "data"):
                self._take_server(clients, size, limits)
            if self._is_wanted("grpc"):
                with (
                    self._server(clients, *_STREAMS_ONLY) as (pid, address),
                    clients.transport("grpc", [_plan(address, "streams")] * len(clients)),
                ):
                    self._comparisons(clients, size, "grpc", [pid], limits)
            for transport, peer in (("redis", self._with_redis), ("mooncake", self._with_mooncake)):
                if transport not in self._skipped and self._is_wanted(transport):
                    with peer(clients) as pids:
                        self._comparisons(clients, size, transport, pids, limits)
        if self._is_wanted("tls"):
            self._take_tls(clients, size)

    def _take_server(self, clients: Clients, size: str, limits: dict[str, list[int]]) -> None:
        with self._server(clients) as (pid, address):
            plans = {
                "shm": _plan(address, "memory"),
                "tier": Plan("tier", {"address": address}),
                "data": _plan(address, "socket"),
            }
            for transport, plan in plans.items():
                if self._is_wanted(transport):
                    with clients.transport(transport, [plan] * len(clients)):
                        self._comparisons(clients, size, transport, [pid], limits)

    def _take_tls(self, clients: Clients, size: str) -> None:
        if shutil.which(OPENSSL) is None:
            self._skipped["tls"] = f"{OPENSSL}, which makes the certificate, is not installed"
            return
        with certificate() as files:
            flags = ("--tls-cert", str(files[0]), "--tls-key", str(files[1]))
            with (
                self._limits(clients, "raw_tls", files=files) as limits,
                self._server(clients, *flags) as (pid, address),
                clients.transport("tls", [_plan(address, "socket", files[0])] * len(clients)),
            ):
                self._comparisons(clients, size, "tls", [pid], limits)

    @contextlib.contextmanager
    def _limits(
        self, clients: Clients, *names: str, files: tuple[Path, Path] | None = None
    ) -> Iterator[dict[str, list[int]]]:
        """Those limits of the wanted cases that are named; each with the processes beside it."""
        wanted = {case.limit for case in self._cases} & set(names)
        ca_file = files[0] if files else None
        pids: dict[str, list[int]] = {}
        with contextlib.ExitStack() as stack:
            if "copy" in wanted:
                stack.enter_context(clients.transport("copy", [Plan("copy")] * len(clients)))
                pids["copy"] = []
            for name in wanted - {"copy"}:
                sizes = clients.block_bytes, clients.count
                far = far_ends(raw_transport.serve, *sizes, files, clients=len(clients))
                ends = stack.enter_context(far)
                plans = [Plan("raw", {"port": port, "ca_file": ca_file}) for _, port in ends]
                stack.enter_context(clients.transport(name, plans))
                pids[name] = [child.process.pid for child, _ in ends]
            yield pids

    @contextlib.contextmanager
    def _server(self, clients: Clients, *flags: str) -> Iterator[tuple[int, ServerAddress]]:
        slot_bytes = layout_of(clients.block_bytes).slot_bytes
        cpu_bytes = int(len(clients) * clients.count * slot_bytes * _SPARE)
        with cache_server(cpu_bytes, *flags) as server:
            yield server.pid, ServerAddress("127.0.0.1", server.port)

    @contextlib.contextmanager
    def _with_redis(self, clients: Clients) -> Iterator[list[int]]:
        with redis_server(self._redis) as server:
            plans = [
                Plan("redis", {"port": server.port, "prefix": f"client{number}"})
                for number in range(len(clients))
            ]
            with clients.transport("redis", plans):
                yield [server.pid]

    @contextlib.contextmanager
    def _with_mooncake(self, clients: Clients) -> Iterator[list[int]]:
        """One process holds the memory of all clients, as a server would."""
        count = len(clients) * clients.count
        serve = raw_transport.serve_mooncake
        with far_ends(serve, clients.block_bytes, count, clients=1) as [(child, told)]:
            target, addresses = told
            starts = range(0, count, clients.count)
            parts = [addresses[start : start + clients.count] for start in starts]
            plans = [Plan("mooncake", {"target": target, "addresses": part}) for part in parts]
            with clients.transport("mooncake", plans):
                yield [child.process.pid]

    def _is_wanted(self, *transports: str) -> bool:
        return any(case.transport in transports for case in self._cases)

    def _comparisons(
        self,
        clients: Clients,
        size: str,
        transport: str,
        pids: Sequence[int],
        limits: dict[str, list[int]],
    ) -> None:
        for case in self._cases:
            if case.transport != transport:
                continue
            passes = self._passes(clients, case)
            ours = _Meter(clients, transport, case.verb, pids, passes)
            limit = _Meter(clients, case.limit, case.verb, limits[case.limit], passes)
            name = row_name(case.name, size, len(clients))
            comparison = Comparison(name, "B/s", LIMITS[case.limit], ours, limit)
            outcome = take_rounds(comparison, self._scale.rounds)
            outcome.add_to(
                self._report, cpu_seconds_per_gb=ours.cost, limit_cpu_seconds_per_gb=limit.cost
            )

    def _passes(self, clients: Clients, case: Case) -> int:
        wanted = self._scale.copied_bytes if case.limit == "copy" else self._scale.sent_bytes
        return max(1, round(wanted / (len(clients) * self._footprint)))

    def _take_look_ups(self) -> None:
        most = max(LOOK_UP_KEYS)
        clients = Clients(1, _LOOK_UP_BLOCK_BYTES, most)
        try:
            with (
                self._server(clients) as (_, address),
                clients.transport("shm", [_plan(address, "memory")]),
            ):
                for keys in LOOK_UP_KEYS:
                    clients.look_up("shm", self._scale.look_ups, keys)  # to warm up
                    seconds = clients.look_up("shm", self._scale.look_ups, keys)
                    rates = [keys / each for each in seconds]
                    self._report.ratios[look_up_name(keys)] = median(rates)
                    self._report.figures["spreads"][look_up_name(keys)] = quartiles(rates)
        finally:
            clients.close()


def _plan(address: ServerAddress, kind: str, ca_file: Path | None = None) -> Plan:
    """A connection that must be of this kind; with a CA's file it has TLS."""
    address = replace(address, tls=ca_file is not None)
    return Plan("connection", {"address": address, "kind": kind, "ca_file": ca_file})


class _Meter:
    """One side of a comparison: the rate of a round, and what rounds took of the processor."""

    def __init__(
        self, clients: Clients, transport: str, verb: str, pids: Sequence[int], passes: int
    ) -> None:
        self._move: Callable[[], Round] = lambda: clients.move(transport, verb, passes)
        self._pids = pids
        self._costs: list[float] = []

    def __call__(self) -> float:
        before = sum(map(cpu_seconds, self._pids))
        done = self._move()
        cpu = sum(map(cpu_seconds, self._pids)) - before + done.cpu_seconds
        self._costs.append(cpu / done.num_bytes * 1e9)
        return done.bytes_per_second

    @property
    def cost(self) -> float:
        """Seconds of the processor for 10⁹ bytes, of both ends together."""
        return median(self._costs[1:])  # the first was to warm up
