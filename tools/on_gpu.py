# SPDX-License-Identifier: Apache-2.0
"""The first half hour on a machine with a GPU: one command a step, each within its time.

    python tools/on_gpu.py probe|tests|bench|full|sanitize [--wheels DIR] [--out DIR]

A step is a few commands, each in a process group of its own with a limit; what is left of the
budget bounds the last one. Their logs, JSON, pictures and `on-gpu.json`, which says what ran and
how it ended, go into one archive, written again after every command: a step that is cut off keeps
what it had. Nothing has to be installed: StrataKV is put on the path from this checkout, and wheels
of what the machine lacks are unpacked beside it. Needs only the standard library.

`--rehearse` runs the same steps without a GPU, at tiny sizes and without the packages that such a
machine lacks. It shows that the steps work and measures nothing; whatever it writes says so.
docs/gpu.md has the order and what each figure decides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Such a machine cuts a command off after ten minutes, the unpacking and packing included.
BUDGET_SECONDS = 570.0
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
MARGIN_SECONDS = 25.0  # a benchmark is told to start nothing this long before its limit
# Packages of ours that a plain machine with torch and a GPU has not got, as modules. The first have
# to be carried; the tests and benchmarks of the GPU do without the others.
CARRIED = ("cbor2", "lmdb", "msgspec", "zmq")
NOT_THERE = (
    "check_jsonschema", "fastapi", "grpc_health", "grpc_reflection", "grpc_tools",
    "kubernetes_validate", "llguidance", "openai", "pydantic", "starlette", "trustme", "uvicorn",
    "xgrammar", "zstandard",
)  # fmt: skip
GPU_TESTS = ("kernels", "connector/device", "engine/worker", "benchmarks/gpu")
# Streams, events and graphs: what decides there is which comes first, so nothing runs beside them.
ALONE_TESTS = (
    "kernels/test_stream_order.py",
    "kernels/test_graph_capture.py",
    "connector/device/test_cuda_gpu.py",
    "engine/worker/test_on_gpu.py",
)
SANITIZER_TESTS = "kernels/test_sanitizer.py"


class WrongUse(Exception):
    """The step cannot begin; says what to do."""


@dataclass(frozen=True)
class Command:
    """One process of a step. In its words `{out}` is the folder of its results, and `{seconds}` the
    time that it may take."""

    name: str
    words: tuple[str, ...]
    seconds: float


@dataclass
class Outcome:
    """How a command ended: `ok`, `failed`, `timed out` or `left out`."""

    name: str
    command: str
    result: str
    exit_status: int | None = None
    seconds: float = 0.0
    last_line: str = ""


@dataclass
class Step:
    """What `on-gpu.json` holds."""

    step: str
    is_rehearsal: bool
    machine: dict[str, Any]
    wheels: list[str]
    outcomes: list[Outcome] = field(default_factory=list)


def bench(sections: str, seconds: float, *options: str) -> Command:
    """Sections of `stratakv bench gpu`."""
    words = ("-m", "stratakv.engine.cli.main", "bench", "gpu", "--sections", sections)
    return Command(
        "bench-" + sections.split(",")[0],
        (*words, "--time-limit", "{seconds}", "--out", "{out}", *options),
        seconds,
    )


def pytest_of(name: str, places: Sequence[str], seconds: float, *options: str) -> Command:
    """The GPU's tests of some files or folders. A module that cannot be imported does not keep the
    others from running."""
    words = ("-m", "pytest", "-m", "gpu", "-c", str(ROOT / "pyproject.toml"), "-q", "-ra")
    report = (
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        "--junitxml={out}/junit.xml",
    )
    paths = [str(ROOT / "tests" / place) for place in places]
    return Command(name, (*words, *report, *options, *paths), seconds)


def commands_of(step: str, *, is_rehearsal: bool, peers: str | None = None) -> list[Command]:
    """What a step runs, in this order."""
    tiny = ("--rehearse",) if is_rehearsal else ()
    quick = ("--quick", *tiny)
    # Kernels take a second or two each to compile, and there are hundreds.
    many = () if is_rehearsal else ("-n", "8", "--maxfail", "60")
    wide_out = [f"--ignore={ROOT / 'tests' / place}" for place in (*ALONE_TESTS, SANITIZER_TESTS)]
    probe = (str(ROOT / "tools" / "gpu_probe.py"), "--json", "{out}/probe.json", *tiny)
    theirs = ("--peers", peers) if peers else ()
    steps = {
        "probe": [
            Command("probe", probe, 180),
            bench("ceilings,copies,copy device", 380, *quick),
        ],
        "tests": [
            pytest_of("tests-wide", GPU_TESTS, 400, *many, *wide_out),
            pytest_of("tests-alone", ALONE_TESTS, 300),
        ],
        "bench": [
            bench("writes,decode,prefill,interference", 330, *quick),
            bench("engine-step,engine-phases", 240, *quick),
        ],
        "full": [
            bench("launch-sweep", 200, *tiny),
            bench("decode,writes,prefill,engine-step", 370, *tiny),
            *([bench("peers", 200, *quick, *theirs)] if peers else []),
        ],
        "sanitize": [pytest_of("sanitize", [SANITIZER_TESTS], 560)],
    }
    return steps[step]


STEPS = ("probe", "tests", "bench", "full", "sanitize")


# What the machine lacks


def unpack_wheels(folder: Path, target: Path) -> list[str]:
    """Unpack every wheel of `folder` into `target`; their names. Raises WrongUse for one of another
    Python or processor, two of one package, or something that is no wheel."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.whl")):
        name, _, rest = path.name.partition("-")
        if name in found:
            raise WrongUse(f"{folder} has {found[name]} and {path.name}; keep one of them")
        if not fits(rest):
            raise WrongUse(
                f"{path.name} is not for this machine, which has Python "
                f"{platform.python_version()} on {platform.machine()}; docs/gpu.md has the command "
                "that downloads the right one"
            )
        try:
            with zipfile.ZipFile(path) as wheel:
                check_names(path, wheel.namelist())
                for member in wheel.infolist():
                    wheel.extract(member, target)
        except (zipfile.BadZipFile, OSError) as error:
            raise WrongUse(f"{path} cannot be unpacked ({error}); carry it again") from error
        found[name] = path.name
    if not found:
        raise WrongUse(f"--wheels {folder} has no file that ends in .whl")
    return list(found.values())


def check_names(path: Path, names: Sequence[str]) -> None:
    """Nothing is written beside the folder. Raises WrongUse."""
    for name in names:
        if name.startswith("/") or ".." in Path(name).parts:
            raise WrongUse(f"{path} has a file {name!r}, which no wheel has; it is not unpacked")


def fits(rest: str) -> bool:
    """Whether `VERSION-PYTHON-ABI-PLATFORM.whl` runs here."""
    words = rest.removesuffix(".whl").split("-")[-3:]
    if len(words) != 3:
        return False
    pythons, abi, platforms = words
    if abi == "none" and platforms == "any":
        return "py3" in pythons.split(".")
    minor = sys.version_info.minor
    built_for = {int(n) for n in re.findall(r"cp3(\d+)", pythons)}
    is_python = minor in built_for or (abi == "abi3" and any(n <= minor for n in built_for))
    is_python = is_python or "py3" in pythons.split(".")
    return is_python and platform.machine() in platforms


# Everything but the path and what is hidden is what the first command on the machine would meet.
# The finder for files is replaced: one that raises would also fail a question whether there is such
# a module.
HIDING = '''\
"""Written by tools/on_gpu.py: hides packages that a machine with a GPU has not got."""
import sys
from importlib.machinery import PathFinder
HIDDEN = frozenset({names!r})
class Hiding:
    find_distributions = PathFinder.find_distributions
    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        return None if top in HIDDEN else PathFinder.find_spec(name, path, target)
sys.meta_path = [Hiding if each is PathFinder else each for each in sys.meta_path]
'''


def prepare(
    work: Path, wheels: Path | None, *, is_rehearsal: bool
) -> tuple[dict[str, str], list[str]]:
    """The environment of a command, and the wheels that are on its path."""
    names = work / "names"
    names.mkdir()
    (names / "stratakv").symlink_to(ROOT, target_is_directory=True)
    path = [str(names)]
    carried: list[str] = []
    if wheels is not None:
        (work / "site").mkdir()
        carried = unpack_wheels(wheels, work / "site")
        path.append(str(work / "site"))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "140"}
    if is_rehearsal:
        hide = work / "hide"
        hide.mkdir()
        (hide / "sitecustomize.py").write_text(HIDING.format(names=sorted(NOT_THERE)))
        path.insert(0, str(hide))
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    else:
        environment["TRITON_INTERPRET"] = "0"
    before = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    environment["PYTHONPATH"] = os.pathsep.join([*path, *before])
    return environment, carried


def check_modules(environment: dict[str, str]) -> None:
    """Raises WrongUse where what has to be carried is not there."""
    looks = f"import importlib.util as u; print([n for n in {CARRIED!r} if not u.find_spec(n)])"
    missing = json.loads(ask_python(looks, environment).replace("'", '"'))
    if missing:
        raise WrongUse(
            f"this Python has no {', '.join(missing)}; carry the wheels (docs/gpu.md has the "
            "command that downloads them) and name their folder with --wheels"
        )


def check_gpu(environment: dict[str, str]) -> str:
    """The GPU's name. Raises WrongUse where torch sees none."""
    looks = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    name = ask_python(looks, environment)
    if not name:
        raise WrongUse(
            "torch sees no CUDA device here; look at nvidia-smi and at torch.version.cuda, or try "
            "the steps themselves with --rehearse"
        )
    return name


def ask_python(code: str, environment: dict[str, str]) -> str:
    """What a line of Python prints. Raises WrongUse."""
    words = [sys.executable, "-P", "-c", code]
    try:
        done = subprocess.run(
            words,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd="/",
        )
    except subprocess.TimeoutExpired as error:
        raise WrongUse(f"{sys.executable} did not answer in 120 s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise WrongUse(f"{sys.executable} cannot do what every step needs: {last}")
    return done.stdout.strip()


def machine(environment: dict[str, str], *, is_rehearsal: bool) -> dict[str, Any]:
    """What the results belong to. Holds no host or user name."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=20, check=False)
        commit = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return {
        "device": "none: a rehearsal" if is_rehearsal else check_gpu(environment),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit,
    }


# Running


def run_step(
    commands: Sequence[Command], step: Step, results: Path, archive: Path,
    environment: dict[str, str], deadline: float,
) -> None:  # fmt: skip
    """Run one after the other until the deadline; the archive is whole after each."""
    for command in commands:
        left = deadline - time.monotonic()
        shown = " ".join(command.words)
        if left < GRACE_SECONDS:
            step.outcomes.append(
                Outcome(command.name, shown, "left out", last_line="the step's time was spent")
            )
        else:
            print(f"{command.name} …", flush=True)
            limit = min(command.seconds, left - GRACE_SECONDS / 2)
            step.outcomes.append(run_command(command, limit, results, environment))
            print(f"  {step.outcomes[-1].result}: {step.outcomes[-1].last_line}", flush=True)
        pack(step, results, archive)


def run_command(
    command: Command, limit: float, results: Path, environment: dict[str, str]
) -> Outcome:
    """Run it in a folder of its own, with its log there."""
    out = results / command.name
    out.mkdir()
    told = str(max(1, int(limit - MARGIN_SECONDS)))
    words = [word.replace("{out}", str(out)).replace("{seconds}", told) for word in command.words]
    log = out / "log.txt"
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", *words], env=environment, cwd=out, stdin=subprocess.DEVNULL,
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        result = "ok"
        try:
            with ending(process):
                process.wait(limit)
        except subprocess.TimeoutExpired:
            result = "timed out"
    if result == "ok" and process.returncode != 0:
        result = "failed"
    return Outcome(
        command.name,
        " ".join(command.words),
        result,
        process.returncode,
        round(time.monotonic() - began, 1),
        last_line_of(log),
    )


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever happens, the process and those that it started are gone afterwards."""
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            try:
                process.wait(GRACE_SECONDS / 2)
            except subprocess.TimeoutExpired:
                continue


def last_line_of(log: Path) -> str:
    """The last thing that was said, to be shown on the terminal."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:200] if lines else ""


def pack(step: Step, results: Path, archive: Path) -> None:
    """Write the archive again, whole or not at all."""
    (results / "on-gpu.json").write_text(json.dumps(asdict(step), indent=2) + "\n")
    partial = archive.with_name(archive.name + ".partial")
    with tarfile.open(partial, "w:gz") as tar:
        tar.add(results, arcname=f"on-gpu-{step.step}")
    partial.replace(archive)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one step; 0, 1 where a command of it failed or ran out of time, 2 for wrong use."""
    parser = argparse.ArgumentParser(prog="on_gpu.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of what is not here")
    parser.add_argument("--out", type=Path, metavar="DIR", default=ROOT / "build" / "on-gpu")
    parser.add_argument(
        "--peers", metavar="DIR", help="full: kernels of others, as `bench gpu` has it"
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", default=BUDGET_SECONDS,
        help=f"of the whole step (default: {BUDGET_SECONDS:g})",
    )  # fmt: skip
    parser.add_argument("--only", metavar="NAME", help="one command of the step, by its name")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU; measures nothing")
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + args.budget
    work = Path(tempfile.mkdtemp(prefix="on-gpu-"))
    # A machine that is taken back says SIGTERM: end what runs, and leave no folder behind.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if args.wheels is not None and not args.wheels.is_dir():
            raise WrongUse(f"--wheels takes a folder, and {args.wheels} is none")
        if not args.budget >= 2 * GRACE_SECONDS:
            raise WrongUse(
                f"--budget takes {2 * GRACE_SECONDS:g} seconds or more, not {args.budget:g}"
            )
        commands = commands_of(args.step, is_rehearsal=args.rehearse, peers=args.peers)
        names = [each.name for each in commands]
        if args.only is not None and args.only not in names:
            raise WrongUse(f"--only takes one of {', '.join(names)}, not {args.only}")
        commands = [each for each in commands if args.only in (None, each.name)]
        environment, wheels = prepare(work, args.wheels, is_rehearsal=args.rehearse)
        check_modules(environment)
        facts = machine(environment, is_rehearsal=args.rehearse)
        step = Step(args.step, args.rehearse, facts, wheels)
        results = work / "results"
        results.mkdir()
        args.out.mkdir(parents=True, exist_ok=True)
        archive = args.out / f"on-gpu-{args.step}.tar.gz"
        run_step(commands, step, results, archive, environment, deadline)
    except (WrongUse, OSError) as error:
        print(f"on_gpu.py: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(work, ignore_errors=True)
    return tell(step, archive)


def tell(step: Step, archive: Path) -> int:
    """The short table, and the exit status."""
    for each in step.outcomes:
        print(f"{each.result:10} {each.seconds:7.1f} s  {each.name:20} {each.last_line}")
    print(f"written: {archive} ({archive.stat().st_size / 2**20:.1f} MB)")
    if step.is_rehearsal:
        print("a rehearsal without a GPU: nothing of it says anything about one")
    return 0 if all(each.result == "ok" for each in step.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
