# SPDX-License-Identifier: Apache-2.0
"""Runs tests and benchmarks on a lent GPU machine, in steps with a time limit each.

    python tools/on_gpu.py first   [--wheels DIR] [--out DIR] [--commit ID] [--seconds N]
    python tools/on_gpu.py figures [...]

The step `first` tests that tokens, bytes and order are right. The step `figures` takes the
measurements, the most important first. The steps `probe`, `tests`, `bench`, `full` and `sanitize`
are for later loans of a machine. A step is a few commands, some of which run at the same time. Each
command has a process group and a time limit, which is a share of the loan's seconds. Logs, JSON,
pictures and `on-gpu.json`, which lists the commands and their outcomes, are in one archive. The
archive is written again after every command, so the results of an interrupted step are kept. The
tool needs only the standard library.

`--rehearse` runs the same steps without a GPU, at tiny sizes and without the packages that a GPU
machine lacks. A rehearsal tests the steps and measures nothing, and the output reports the
rehearsal. docs/gpu.md describes the order of the steps and what each figure decides."""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_session.environment import (
    WrongUse,
    bench_sections,
    check_modules,
    find_commit,
    machine,
    prepare,
)
from gpu_session.findings import advice, find_unproven, find_wrong
from gpu_session.running import GRACE_SECONDS, OK, Step, pack, run_step
from gpu_session.steps import (
    LENT_SECONDS,
    ROOT,
    SANITIZE_FIRST,
    STEPS,
    Group,
    groups_of,
    seconds_of,
    sections_of,
)

LEAST_SECONDS = 240.0  # shortest loan; the machine's start takes up to a third of it
NO_COMMIT = "NO COMMIT is known, and figures without one belong to nothing; give --commit ID"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one step; return 0, 1 if a command failed or ran out of time, or 2 for wrong use."""
    began = time.monotonic()
    args = read_arguments(arguments)
    work = Path(tempfile.mkdtemp(prefix="on-gpu-"))
    # The owner ends the loan by SIGTERM: end all commands and remove the temporary folder.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        check_arguments(args)
        budget = args.budget or seconds_of(args.step, args.seconds)
        commit = find_commit(args.commit)
        if not commit:
            print(f"on_gpu.py: {NO_COMMIT}", file=sys.stderr, flush=True)
        environment, wheels = prepare(work, args.wheels, is_rehearsal=args.rehearse, commit=commit)
        check_modules(environment)
        groups, notes = choose_groups(args, bench_sections(environment))
        notes += [] if commit else [NO_COMMIT]
        facts = machine(environment, is_rehearsal=args.rehearse)
        step = Step(args.step, args.rehearse, facts, wheels, args.seconds, notes)
        results = work / "results"
        results.mkdir()
        args.out.mkdir(parents=True, exist_ok=True)
        archive = args.out / f"on-gpu-{args.step}.tar.gz"
        run_step(groups, step, results, archive, environment, began + budget)
        step.wrong = find_wrong(results, step.outcomes)
        unproven = find_unproven(results, step.outcomes)
        pack(step, results, archive)
    except (WrongUse, OSError) as error:
        print(f"on_gpu.py: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(work, ignore_errors=True)
    tell(step, archive)
    if args.step == "first" and (step.wrong or not args.rehearse):
        print("\n".join(advice(step.wrong, unproven, sanitize_command(args))))
    return 0 if all(each.result == OK for each in step.outcomes) else 1


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, without checking values."""
    parser = argparse.ArgumentParser(
        prog="on_gpu.py", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of what is not here")
    parser.add_argument("--out", type=Path, metavar="DIR", default=ROOT / "build" / "on-gpu")
    parser.add_argument(
        "--commit", metavar="ID", help="of this checkout, where no .git has come with it"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="N", default=LENT_SECONDS,
        help="that the machine is lent for in all, its start included; every limit is a share of "
        f"it (default: {LENT_SECONDS:g})",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="of this step, instead of its share"
    )
    parser.add_argument(
        "--peers", metavar="DIR", help="full: kernels of others, as `bench gpu` has it"
    )
    parser.add_argument("--only", metavar="NAME", help="one command of the step, by its name")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU; measures nothing")
    return parser.parse_args(arguments)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise WrongUse for an invalid value of an argument."""
    if args.wheels is not None and not args.wheels.is_dir():
        raise WrongUse(f"--wheels takes a folder, and {args.wheels} is none")
    if not args.seconds >= LEAST_SECONDS:
        raise WrongUse(
            f"--seconds takes {LEAST_SECONDS:g} or more, not {args.seconds:g}; a shorter loan is "
            "over before anything is shown"
        )
    if args.budget is not None and not args.budget >= 2 * GRACE_SECONDS:
        raise WrongUse(f"--budget takes {2 * GRACE_SECONDS:g} seconds or more, not {args.budget:g}")


def choose_groups(
    args: argparse.Namespace, sections: Sequence[str]
) -> tuple[list[Group], list[str]]:
    """Return the commands to run, and a note for each group that is left out because `bench gpu`
    lacks a section of the group. Raises WrongUse."""
    groups, notes = [], []
    every = groups_of(args.step, is_rehearsal=args.rehearse, lent=args.seconds, peers=args.peers)
    for group in every:
        missing = [name for each in group for name in sections_of(each) if name not in sections]
        if missing:
            notes.append(f"`bench gpu` has no section {', '.join(missing)}, which is left out")
        else:
            groups.append(group)
    names = [each.name for group in groups for each in group]
    if args.only is not None and args.only not in names:
        raise WrongUse(f"--only takes one of {', '.join(names)}, not {args.only}")
    chosen = [tuple(each for each in group if args.only in (None, each.name)) for group in groups]
    return [group for group in chosen if group], notes


def sanitize_command(args: argparse.Namespace) -> str:
    """Return the `sanitize` command to run instead of `figures`, with the options of this run."""
    words = ["python", "tools/on_gpu.py", "sanitize", "--only", SANITIZE_FIRST]
    for name in ("wheels", "out", "commit"):
        value = getattr(args, name)
        words += [f"--{name}", str(value)] if value is not None else []
    if args.seconds != LENT_SECONDS:
        words += ["--seconds", f"{args.seconds:g}"]
    return shlex.join(words)


def tell(step: Step, archive: Path) -> None:
    """Print the table of outcomes, the path of the archive and the notes."""
    for each in step.outcomes:
        print(f"{each.result:10} {each.seconds:7.1f} s  {each.name:22} {each.last_line}")
    print(f"written: {archive} ({archive.stat().st_size / 2**20:.1f} MB)")
    for note in step.notes:
        print(f"note: {note}")
    if step.is_rehearsal:
        print("a rehearsal without a GPU: nothing of it says anything about one")


if __name__ == "__main__":
    sys.exit(main())
