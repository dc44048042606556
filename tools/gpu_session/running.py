# SPDX-License-Identifier: Apache-2.0
"""Runs a step's commands, with process groups, time limits and logs, and archives the results.

A rename replaces the archive after every command, so the results of ended commands are kept if the
step is interrupted."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .steps import Command, Group

GRACE_SECONDS = 10.0  # from the first signal to a process group until SIGKILL
MARGIN_SECONDS = 25.0  # a benchmark starts no new case in the last MARGIN_SECONDS
MARGIN_SHARE = 0.25  # or the last MARGIN_SHARE of its limit, whichever is shorter
LOOK_SECONDS = 0.05
# Limits of a log, because a failed assertion on a GPU is printed by every thread.
MOST_LOG_BYTES, KEPT_LOG_BYTES = 8 << 20, 2 << 20
MOST_FILE_BYTES = 8 << 20  # larger result files are not archived
OK, FAILED, TIMED_OUT, LEFT_OUT, CUT_OFF = "ok", "failed", "timed out", "left out", "cut off"


@dataclass
class Outcome:
    """The end of a command: `ok`, `failed`, `timed out`, `left out`, or `cut off` with the step."""

    name: str
    command: str
    result: str
    exit_status: int | None = None
    seconds: float = 0.0
    last_line: str = ""


@dataclass
class Step:
    """The contents of `on-gpu.json`."""

    step: str
    is_rehearsal: bool
    machine: dict[str, Any]
    wheels: list[str]
    seconds_lent: float = 0.0
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


class Running:
    """A running command, with a process group of its own and a folder for its log and results."""

    def __init__(
        self, command: Command, limit: float, results: Path, environment: Mapping[str, str]
    ) -> None:
        self.command = command
        # After SIGINT, pytest writes its results so far; after SIGTERM, nothing.
        self.gentle = signal.SIGINT if "pytest" in command.words else signal.SIGTERM
        self.out = results / command.name
        self.out.mkdir()
        told = str(max(1, int(limit - min(MARGIN_SECONDS, MARGIN_SHARE * limit))))
        words = [
            word.replace("{out}", str(self.out)).replace("{seconds}", told)
            for word in command.words
        ]
        self._log = self.out / "log.txt"
        self._began = time.monotonic()
        self._ends = self._began + limit
        with self._log.open("wb") as file, hearing_interrupts():
            self.process = subprocess.Popen(
                [sys.executable, "-P", *words], env=dict(environment), cwd=self.out,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        # No core files, because the core of a process with torch has hundreds of megabytes.
        resource.prlimit(self.process.pid, resource.RLIMIT_CORE, (0, 0))

    def look(self) -> str | None:
        """Return the command's result; None while the command runs within its limit."""
        status = self.process.poll()
        if status is not None:
            return FAILED if status else OK
        return TIMED_OUT if time.monotonic() > self._ends else None

    def signal(self, number: int) -> bool:
        """Send a signal to the command's process group; return False if no process is left."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def end(self, result: str) -> Outcome:
        """End the command's process group and return the command's outcome."""
        for number in (self.gentle, signal.SIGTERM, signal.SIGKILL):
            if not self.signal(number):
                break
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_SECONDS / (2 if number is self.gentle else 4))
        seconds = round(time.monotonic() - self._began, 1)
        last = last_line_of(self._log)
        shorten(self._log)
        shown = " ".join(self.command.words)
        status = self.process.returncode
        return Outcome(self.command.name, shown, result, status, seconds, last)


def run_step(
    groups: Sequence[Group], step: Step, results: Path, archive: Path,
    environment: Mapping[str, str], deadline: float,
) -> None:  # fmt: skip
    """Run the groups one after the other until `deadline`; record later groups as left out."""
    for group in groups:
        left = deadline - time.monotonic()
        if left < GRACE_SECONDS:
            why = "the step's time was spent"
            step.outcomes += [
                Outcome(each.name, " ".join(each.words), LEFT_OUT, last_line=why) for each in group
            ]
            pack(step, results, archive)
        else:
            run_group(group, step, results, archive, environment, left - GRACE_SECONDS / 2)


def run_group(
    group: Group, step: Step, results: Path, archive: Path, environment: Mapping[str, str],
    seconds: float,
) -> None:  # fmt: skip
    """Run commands at the same time. A failed command, or one that reaches its limit, does not end
    other commands; an interrupt ends all."""
    running: list[Running] = []

    def note(each: Running, result: str) -> None:
        running.remove(each)
        step.outcomes.append(each.end(result))
        pack(step, results, archive)
        print(f"  {each.command.name}, {result}: {step.outcomes[-1].last_line}", flush=True)

    print(f"{', '.join(each.name for each in group)} …", flush=True)
    try:
        for command in group:
            limit = min(command.seconds, seconds)
            # Processes start one by one, so that earlier ones are ended if a later start fails.
            running.append(Running(command, limit, results, environment))
        while running:
            ended = [(each, result) for each in running if (result := each.look()) is not None]
            for each, result in ended:
                note(each, result)
            if not ended:
                time.sleep(LOOK_SECONDS)
    finally:
        for each in running:
            each.signal(each.gentle)  # all are signalled first, so that all end at the same time
        while running:
            note(running[0], CUT_OFF)


@contextmanager
def hearing_interrupts() -> Iterator[None]:
    """Let processes that start inside the context receive SIGINT, which a shell's background
    commands and their children ignore. For the main thread only."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def last_line_of(log: Path) -> str:
    """The last line of a log, for the terminal."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:200] if lines else ""


def shorten(log: Path) -> None:
    """Remove the middle of a log that is too large for the archive."""
    size = log.stat().st_size
    if size <= MOST_LOG_BYTES:
        return
    with log.open("rb") as file:
        head = file.read(KEPT_LOG_BYTES)
        file.seek(size - KEPT_LOG_BYTES)
        tail = file.read()
    left_out = f"\n… {size - len(head) - len(tail)} bytes were left out here …\n".encode()
    log.write_bytes(head + left_out + tail)


def pack(step: Step, results: Path, archive: Path) -> None:
    """Replace the archive by one with the folders of all ended commands. Files larger than
    MOST_FILE_BYTES are left out and named in the step's notes."""
    large = sorted(
        f"{path.relative_to(results)} has {path.stat().st_size} bytes and was left out"
        for path in results.rglob("*")
        if path.is_file() and path.stat().st_size > MOST_FILE_BYTES
    )
    step.notes += [note for note in large if note not in step.notes]
    (results / "on-gpu.json").write_text(json.dumps(asdict(step), indent=2) + "\n")
    partial = archive.with_name(archive.name + ".partial")
    names = ["on-gpu.json", *(each.name for each in step.outcomes if each.result != LEFT_OUT)]
    with tarfile.open(partial, "w:gz") as tar:
        for name in names:
            tar.add(results / name, arcname=f"on-gpu-{step.step}/{name}", filter=_small)
    partial.replace(archive)


def _small(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.isfile() and member.size > MOST_FILE_BYTES else member
