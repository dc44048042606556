# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench service`: the cache service over loopback, against raw TCP and memcpy.

Blocks of 256 KiB and 2 MiB move between a real cache server and 1 or 4 clients. Each client is a
process with an engine's tier. Transports are shared memory, the data connection (also with TLS) and
gRPC streams. Look-ups of whole prompts are measured too, and Redis and Mooncake if they are
installed. A figure and its limit are measured alternately. All memory is warm and larger than the
caches, and received blocks are checked. A ratio is the median of the ratios within a round."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ...tiers.errors import TierError
from ...tiers.remote.membership import ServerAddress
from ...tiers.settings.values import ConfigError
from ..harness import served
from ..harness.comparison import (
    COMPARISON_COLUMNS,
    Comparison,
    WrongWork,
    comparison_row,
    quartiles,
    take_rounds,
)
from ..harness.gate import Gate
from ..harness.plots import GATE, MISSED, caption, draw_bars, mark_gates, new_figure, save_figure
from ..harness.report import Report, chosen, median, print_table, run_and_tell
from ..tiers.scale import MIB, layout_of
from ..tiers.slab_case import footprint_bytes
from . import transports
from .clients import Clients, Round, cpu_seconds, far_ends
from .transports import Plan

SIZES: Mapping[str, int] = {"256KiB": 256 * 1024, "2MiB": 2 * MIB}
LOOK_UP_KEYS = (1024, 4096)  # numbers of keys per call
FOUR = 4  # the number of clients with separate gates


class Case(NamedTuple):
    """A row: `transport` moves blocks in the direction `verb`; `limit` has no service."""

    name: str
    transport: str
    verb: str
    limit: str
    least: float | None = None  # the gate of the ratio with one client
    least_of_four: float | None = None  # the gate with four clients


CASES = (
    Case("shm_batch", "shm", "load", "copy", 0.7, 0.8),
    Case("shm_store", "shm", "store", "copy"),
    Case("tier_load", "tier", "load", "copy"),
    Case("tier_store", "tier", "store", "copy"),
    Case("data_load", "data", "load", "raw", 0.8, 0.8),
    Case("data_store", "data", "store", "raw", 0.7, 0.8),
    Case("grpc_stream", "grpc", "load", "raw", 0.25),
    Case("grpc_stream_store", "grpc", "store", "raw"),
    Case("data_load_tls", "tls", "load", "raw_tls", 0.5),
    Case("redis_get", "redis", "load", "raw"),
    Case("redis_set", "redis", "store", "raw"),
    Case("mooncake_read", "mooncake", "load", "raw"),
    Case("mooncake_write", "mooncake", "store", "raw"),
)
LIMITS: Mapping[str, str] = {"copy": "memcpy", "raw": "TCP", "raw_tls": "TLS"}


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes in bytes, and numbers of rounds and calls."""

    footprint_bytes: int  # least memory of each client, and of its far end
    copied_bytes: int  # bytes of all clients in one round of memory copies
    sent_bytes: int  # bytes of all clients in one round of any other transport
    rounds: int  # even, so that each side runs first equally often
    clients: Sequence[int]
    look_ups: int  # number of look-up calls


FULL = Scale(
    footprint_bytes=64 * MIB,
    copied_bytes=1024 * MIB,
    sent_bytes=384 * MIB,
    rounds=12,
    clients=(1, 4),
    look_ups=200,
)
QUICK = Scale(
    footprint_bytes=32 * MIB,
    copied_bytes=64 * MIB,
    sent_bytes=32 * MIB,
    rounds=2,
    clients=(1,),
    look_ups=20,
)


def row_name(case: str, size: str, clients: int) -> str:
    return f"{case}_{size}" + (f"_{clients}" if clients > 1 else "")


def look_up_name(keys: int) -> str:
    return f"lookup_{keys}_keys_per_second"


def _gates() -> dict[str, Gate]:
    gates = {look_up_name(LOOK_UP_KEYS[0]): Gate(least=500_000)}
    for case in CASES:
        for clients, least in ((1, case.least), (FOUR, case.least_of_four)):
            if least is not None:
                gates |= {row_name(case.name, size, clients): Gate(least=least) for size in SIZES}
    return gates


GATES: Mapping[str, Gate] = _gates()


# The colours for one client, and for several clients.
_OURS, _THEIRS = ("#2b6cb0", "#90bce4"), ("#6b7078", "#c3c7cd")
_OTHERS = ("redis", "mooncake")
_COSTS = ("cpu_seconds_per_gb", "limit_cpu_seconds_per_gb")
_COST_COLUMN = COMPARISON_COLUMNS.index("A/A")


def print_service(report: Report) -> None:
    """Print the figure, limit, ratio and gate of each row."""
    rows = []
    for name in report.ratios:
        row = comparison_row(report, name, GATES.get(name))
        taken = report.figures["contests"].get(name, {})
        costs = [taken[key] for key in _COSTS if key in taken]
        row.insert(_COST_COLUMN, " / ".join(f"{cost:.2f}" for cost in costs))
        rows.append(row)
    columns = list(COMPARISON_COLUMNS)
    columns.insert(_COST_COLUMN, "cpu s/GB")
    title = (
        "The cache service against this machine's loopback and memory, measured in turn. cpu s/GB: "
        "of both ends, ours / limit. A/A: the limit against itself, quartiles"
    )
    print_table(title, columns, rows)
    for what, why in report.figures["skipped"].items():
        print(f"skipped: {what}: {why}")


def plot_service(report: Report, path: Path) -> Path:
    """Draw a panel for each block size: bars by case and number of clients, and gates."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure, panels = new_figure(len(SIZES), 1, 3.1 * len(SIZES), sharex=True)
    ratios, counts = report.ratios, report.figures["plan"]["clients"]
    cases = [
        case
        for case in CASES
        if any(row_name(case.name, s, n) in ratios for s in SIZES for n in counts)
    ]
    words = [f"{count} client{'s' * (count > 1)}" for count in counts]
    shades = [min(number, 1) for number in range(len(counts))]
    colours = [[(_THEIRS if c.transport in _OTHERS else _OURS)[s] for c in cases] for s in shades]
    labels = [
        f"{case.name.replace('_', ' ', 1).replace('_', chr(10))}\nof {LIMITS[case.limit]}"
        for case in cases
    ]
    width = 0.84 / len(counts)
    for (axes,), size in zip(panels, SIZES, strict=True):
        series = {
            word: [ratios.get(row_name(case.name, size, count)) for case in cases]
            for word, count in zip(words, counts, strict=True)
        }
        draw_bars(axes, labels, series, colours, fmt="%.2f", size=6.5)
        for number, count in enumerate(counts):
            for place, name in enumerate(row_name(case.name, size, count) for case in cases):
                if name in GATES and name in ratios:
                    at = place - 0.42 + width * (number + 0.5)
                    colour = GATE if GATES[name].is_met(ratios[name]) else MISSED
                    mark_gates(axes, {at: GATES[name].least}, width, colour)
        axes.axhline(1.0, color="#bbbbbb", linewidth=0.8, zorder=0)
        caption(axes, f"Blocks of {size}", y="share of the limit")
    handles: list[Any] = [
        Patch(color=colour[shade], label=f"{whose}, {word}")
        for whose, colour in (("StrataKV", _OURS), ("another server", _THEIRS))
        for shade, word in zip(shades, words, strict=True)
    ]
    handles.append(Line2D([], [], color=GATE, lw=2, label="promised (red: missed)"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return save_figure(figure, report.environment, path)


_LOOK_UP_BLOCK_BYTES = 4096
_SPARE = 1.25  # server memory per block, for a new and an old copy at the same time
_STREAMS_ONLY = ("--no-data-connections", "--no-shared-memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; `stratakv bench` itself adds `--quick` and `--out`."""
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
    """Measure all figures; return 0, or 1 after printing an error. Raises ConfigError."""
    scale = QUICK if arguments.quick else FULL
    clients = _clients(arguments.clients) or scale.clients
    wanted = chosen("--cases", arguments.cases or None, [case.name for case in CASES])
    cases = [case for case in CASES if case.name in wanted]
    report = Report("service", "stratakv bench service" + " --quick" * arguments.quick)
    measurement = Measurement(report, scale, cases, arguments.redis_server)
    work = partial(measurement.take, clients)
    failures = (WrongWork, TierError, served.ServerFailed)
    return run_and_tell(report, arguments.out, work, print_service, plot_service, *failures)


def _clients(given: str | None) -> list[int]:
    try:
        numbers = [int(word) for word in (given or "").split(",") if word]
    except ValueError:
        numbers = [0]
    if any(not 0 < number <= 64 for number in numbers):
        raise ConfigError(f"--clients takes numbers from 1 to 64 by commas, not {given}")
    return numbers


class Measurement:
    """Runs the measurements and fills the report."""

    def __init__(
        self, report: Report, scale: Scale, cases: Sequence[Case], redis: str | None
    ) -> None:
        self._report = report
        self._scale = scale
        self._cases = cases
        self._footprint = footprint_bytes(scale.footprint_bytes)
        self._redis, no_redis = served.find_redis(redis)
        self._skipped: dict[str, str] = {}
        if no_redis:
            self._skipped["redis"] = no_redis
        if no_mooncake := transports.why_no_mooncake():
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
        """Measure all figures and fill the report. Raises WrongWork for wrong results."""
        self._report.figures["plan"]["clients"] = list(counts)
        for number in counts:
            for size, block_bytes in SIZES.items():
                count = self._footprint // block_bytes
                with contextlib.closing(Clients(number, block_bytes, count)) as clients:
                    self._take_cases(clients, size)
        self._take_look_ups()
        self._report.figures["plan"]["load_average_after"] = os.getloadavg()

    def _take_cases(self, clients: Clients, size: str) -> None:
        with (
            self._limits(clients, "copy", "raw") as limits,
            contextlib.closing(self._transports(clients)) as opened,
        ):
            for transport, plans, pids in opened:
                self._comparisons(clients, size, transport, plans, pids, limits)
        if self._is_wanted("tls"):
            self._take_tls(clients, size)

    def _transports(
        self, clients: Clients
    ) -> Generator[tuple[str, list[Plan], list[int]], None, None]:
        """Start the servers one after the other; yield a transport's name, a plan for each client,
        and the processes of the server."""
        every = len(clients)
        if self._is_wanted("shm", "tier", "data"):
            with self._server(clients) as (pid, address):
                yield "shm", [_plan(address, "memory")] * every, [pid]
                yield "tier", [Plan("tier", {"address": address})] * every, [pid]
                yield "data", [_plan(address, "socket")] * every, [pid]
        if self._is_wanted("grpc"):
            with self._server(clients, *_STREAMS_ONLY) as (pid, address):
                yield "grpc", [_plan(address, "streams")] * every, [pid]
        if self._is_wanted("redis"):
            with served.redis_server(self._redis) as server:
                keys = [{"port": server.port, "prefix": f"client{n}"} for n in range(every)]
                yield "redis", [Plan("redis", each) for each in keys], [server.pid]
        if self._is_wanted("mooncake"):
            # Like a server, one process has the memory of all clients.
            count, serve = every * clients.count, transports.serve_mooncake
            with far_ends(serve, clients.block_bytes, count, clients=1) as [(child, told)]:
                target, addresses = told
                starts = range(0, count, clients.count)
                parts = [addresses[start : start + clients.count] for start in starts]
                plans = [Plan("mooncake", {"target": target, "addresses": part}) for part in parts]
                yield "mooncake", plans, [child.process.pid]

    def _take_tls(self, clients: Clients, size: str) -> None:
        if shutil.which(served.OPENSSL) is None:
            self._skipped["tls"] = (
                f"{served.OPENSSL}, which makes the certificate, is not installed"
            )
            return
        with served.certificate() as files:
            flags = ("--tls-cert", str(files[0]), "--tls-key", str(files[1]))
            with (
                self._limits(clients, "raw_tls", files=files) as limits,
                self._server(clients, *flags) as (pid, address),
            ):
                plans = [_plan(address, "socket", files[0])] * len(clients)
                self._comparisons(clients, size, "tls", plans, [pid], limits)

    @contextlib.contextmanager
    def _limits(
        self, clients: Clients, *names: str, files: tuple[Path, Path] | None = None
    ) -> Iterator[dict[str, list[int]]]:
        """Open the limits of `names` that the cases need; yield the far ends' process ids."""
        wanted = {case.limit for case in self._cases} & set(names)
        ca_file = files[0] if files else None
        pids: dict[str, list[int]] = {}
        with contextlib.ExitStack() as stack:
            if "copy" in wanted:
                stack.enter_context(clients.transport("copy", [Plan("copy")] * len(clients)))
                pids["copy"] = []
            for name in wanted - {"copy"}:
                sizes = clients.block_bytes, clients.count
                far = far_ends(transports.serve_raw, *sizes, files, clients=len(clients))
                ends = stack.enter_context(far)
                plans = [Plan("raw", {"port": port, "ca_file": ca_file}) for _, port in ends]
                stack.enter_context(clients.transport(name, plans))
                pids[name] = [child.process.pid for child, _ in ends]
            yield pids

    @contextlib.contextmanager
    def _server(self, clients: Clients, *flags: str) -> Iterator[tuple[int, ServerAddress]]:
        slot_bytes = layout_of(clients.block_bytes).slot_bytes
        cpu_bytes = int(len(clients) * clients.count * slot_bytes * _SPARE)
        with served.cache_server(cpu_bytes, *flags) as server:
            yield server.pid, ServerAddress("127.0.0.1", server.port)

    def _is_wanted(self, *transports: str) -> bool:
        there = set(transports) - self._skipped.keys()
        return any(case.transport in there for case in self._cases)

    def _comparisons(
        self,
        clients: Clients,
        size: str,
        transport: str,
        plans: Sequence[Plan],
        pids: Sequence[int],
        limits: dict[str, list[int]],
    ) -> None:
        if not self._is_wanted(transport):
            return
        with clients.transport(transport, plans):
            for case in (case for case in self._cases if case.transport == transport):
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
        with (
            contextlib.closing(Clients(1, _LOOK_UP_BLOCK_BYTES, max(LOOK_UP_KEYS))) as clients,
            self._server(clients) as (_, address),
            clients.transport("shm", [_plan(address, "memory")]),
        ):
            for keys in LOOK_UP_KEYS:
                clients.look_up("shm", self._scale.look_ups, keys)  # the first call is a warm-up
                seconds = clients.look_up("shm", self._scale.look_ups, keys)
                rates = [keys / each for each in seconds]
                self._report.ratios[look_up_name(keys)] = median(rates)
                self._report.figures["spreads"][look_up_name(keys)] = quartiles(rates)


def _plan(address: ServerAddress, kind: str, ca_file: Path | None = None) -> Plan:
    """Return the plan for a connection of this kind, which uses TLS if `ca_file` is given."""
    address = replace(address, tls=ca_file is not None)
    return Plan("connection", {"address": address, "kind": kind, "ca_file": ca_file})


class _Meter:
    """A meter for one side of a comparison: a call returns the rate of a round and records its
    processor seconds."""

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
        """The median processor seconds per 10⁹ bytes of the two ends together."""
        return median(self._costs[1:])  # the first round is a warm-up
