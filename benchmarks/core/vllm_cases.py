# SPDX-License-Identifier: Apache-2.0
"""The parent's side of `vllm_peer.py`: runs the cases of vLLM's core in another interpreter, in
turn with StrataKV's cases, and compares the two."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...tiers.settings.format import format_value
from ...tiers.settings.values import ConfigError
from ..harness.comparison import quartiles
from ..harness.gate import Gate
from ..harness.peer import Child, PeerFailed
from ..harness.report import Report, median, print_table, ratios
from . import vllm_peer

FLAG = "--peer-python"
# The time limits of the start, mostly imports of vLLM, and of a case.
START_SECONDS, CASE_SECONDS = 600.0, 300.0


class Pair(NamedTuple):
    """StrataKV's case, the title of the peer's case, and the aim of the ratio of the two."""

    ours: str
    title: str
    aim: Gate | None = None


# Name of the peer's ratio and rate → the pair.
PEERS: Mapping[str, Pair] = {
    "peer_hash": Pair("hash", "  vLLM's, its default"),
    "peer_cycles": Pair("cycles_half_cached", "  vLLM's", Gate(least=3.5)),
    "peer_steps": Pair("steps", "  vLLM's", Gate(least=6.5)),
}


class Seconds(NamedTuple):
    """The seconds of some work: wall-clock time, and the thread's processor time."""

    wall: float
    busy: float


def interpreter(given: str, flag: str = FLAG) -> str:
    """Return the path of the interpreter that the flag names. Raises ConfigError."""
    found = shutil.which(Path(given).expanduser())
    if found is None:
        wanted = "the path of a Python interpreter that has vLLM"
        raise ConfigError(f"{flag} takes {wanted}, not {format_value(given)}")
    return str(found)


class VllmPeer(Child):
    """Runs vLLM's cases; a context manager. Raises ConfigError if `python` cannot be run."""

    def __init__(self, python: str, plan: Mapping[str, Any]) -> None:
        self._python, self._plan = python, plan
        self._folder = tempfile.TemporaryDirectory()
        words, log = ["-P", vllm_peer.__file__], Path(self._folder.name, "log")
        try:
            super().__init__(words, log, "vLLM's side", python)
        except OSError as error:
            self._folder.cleanup()
            raise ConfigError(f"{FLAG} {python} cannot be run: {error.strerror}") from error

    def close(self) -> None:
        """End the child by closing its input, and remove the folder."""
        super().close()
        self._folder.cleanup()

    def start(self) -> dict[str, Any]:
        """Start the child, once; return vLLM's version and hash algorithm. Raises PeerFailed."""
        self.send(dict(self._plan))
        try:
            answer = self.read(START_SECONDS)
            if "version" in answer:
                return answer
            raise PeerFailed("vLLM's side answered without a version")
        except PeerFailed as error:
            advice = f"install vLLM {vllm_peer.TRIED} for {self._python}, or name with {FLAG}"
            raise PeerFailed(f"{error}: {advice} a Python interpreter that has it") from error

    def take(self, case: str, count: int) -> Seconds:
        """Let the child run `count` units of a case; return the seconds. Raises PeerFailed."""
        self.send({"case": case, "count": count})
        return Seconds(**self.read(CASE_SECONDS))

    def _last_words(self) -> str:
        lines = super()._last_words().rstrip().split("\n")
        return f" ({lines[-1]})" if lines[-1] else ""


def add_peers(report: Report, rates: Mapping[str, Sequence[float]]) -> None:
    """Add the ratios of StrataKV's rates to the peer's rates, with quartiles."""
    for name, pair in PEERS.items():
        if name in rates:
            taken = ratios(rates[pair.ours], rates[name])
            report.ratios[name] = median(taken)
            spreads = report.figures.setdefault("spreads", {})
            spreads[name] = quartiles(taken)


def print_peers(report: Report) -> None:
    """Print the ratios to the peer, their quartiles and aims."""
    rows = []
    for name, (low, high) in report.figures.get("spreads", {}).items():
        ratio, aim = report.ratios[name], PEERS[name].aim
        verdict = f"{aim.wanted} {aim.verdict(ratio)}" if aim else ""
        rows.append([name.replace("_", " "), f"{ratio:.2f}", f"{low:.2f}..{high:.2f}", verdict])
    if rows:
        version = report.figures["peer"]["version"]
        columns = ["what", "ratio", "quartiles", "aim"]
        print_table(f"Ours over vLLM {version}, in turn", columns, rows)
