# SPDX-License-Identifier: Apache-2.0
"""Steps of `tools/on_gpu.py`: each step's commands, in groups, and the time limit of each command.

A loan is the time for which the GPU machine is lent. The commands of a group run at the same time,
and the groups one after the other. All seconds in this file are for a loan of `LENT_SECONDS`;
`groups_of` scales the seconds for another length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LENT_SECONDS = 900.0
# The steps `first` and `figures` fill a loan, of which the machine's start takes 60 to 90 s.
STEP_SECONDS = {"first": 280.0, "figures": 440.0}
# The machine ends a command after ten minutes, including the transfer of files.
LATER_SECONDS = 570.0
STEPS = ("first", "figures", "probe", "tests", "bench", "full", "sanitize")

GPU_TESTS = ("kernels", "connector/device", "engine/worker", "benchmarks/gpu")
# Tests of streams, events and graphs, which depend on the order of work on the GPU. In the step
# `tests`, ALONE_TESTS run alone.
ALONE_TESTS = (
    "kernels/test_stream_order.py",
    "kernels/test_graph_capture.py",
    "connector/device/test_cuda_gpu.py",
    "engine/worker/test_on_gpu.py",
)
SANITIZER_TESTS = "kernels/test_sanitizer.py"
# Tests of copies and their order, for `first`, in which three processes share the GPU's memory.
ORDER_TESTS = (
    "connector/device/test_cuda_gpu.py",
    "kernels/test_copy_engine.py",
    "kernels/test_stream_order.py",
    "engine/worker/test_on_gpu.py",
)
# Tests of kernels at the sizes of real models, of CUDA graphs, and of kernels that move bytes.
KERNEL_TESTS = (
    "kernels/test_large_batches.py",
    "kernels/test_graph_capture.py",
    "kernels/test_layer_kernels.py",
    "kernels/test_write_kv.py",
    "kernels/test_copy_blocks.py",
)
TOKENS, ORDER, KERNELS = "tokens", "tests-order", "tests-kernels"
SANITIZE_FIRST = "sanitize-decode-write"


@dataclass(frozen=True)
class Command:
    """A process of a step. In `words`, `{out}` stands for the folder of results, and `{seconds}`
    for the time after which the process should start no new work."""

    name: str
    words: tuple[str, ...]
    seconds: float


Group = tuple[Command, ...]


def seconds_of(step: str, lent: float) -> float:
    """Return the time limit of a whole step in seconds, for a loan of `lent` seconds."""
    return STEP_SECONDS.get(step, LATER_SECONDS) * lent / LENT_SECONDS


def groups_of(
    step: str, *, is_rehearsal: bool, lent: float = LENT_SECONDS, peers: str | None = None
) -> list[Group]:
    """Return the commands of a step, in groups, with time limits for a loan of `lent` seconds."""
    share = lent / LENT_SECONDS
    return [
        tuple(replace(each, seconds=each.seconds * share) for each in group)
        for group in _GROUPS[step](is_rehearsal, peers)
    ]


def sections_of(command: Command) -> list[str]:
    """Return the sections of `bench gpu` that a command runs; empty for any other command."""
    words = command.words
    return words[words.index("--sections") + 1].split(",") if "--sections" in words else []


def bench(sections: str, seconds: float, *options: str) -> Command:
    """Return a command that runs `sections` of `stratakv bench gpu`."""
    words = ("-m", "stratakv.engine.cli.main", "bench", "gpu", "--sections", sections)
    return Command(
        "bench-" + sections.split(",")[0].replace(" ", "-"),
        (*words, "--time-limit", "{seconds}", "--out", "{out}", *options),
        seconds,
    )


def pytest_of(name: str, places: Sequence[str], seconds: float, *options: str) -> Command:
    """Return a command that runs the GPU tests in files or folders. If a module cannot be imported,
    the tests of other modules still run."""
    words = ("-m", "pytest", "-m", "gpu", "-c", str(ROOT / "pyproject.toml"), "-q", "-ra")
    report = (
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        "--junitxml={out}/junit.xml",
    )
    paths = [str(ROOT / "tests" / place) for place in places]
    return Command(name, (*words, *report, *options, *paths), seconds)


def _tool(name: str, script: str, seconds: float, *options: str) -> Command:
    return Command(name, (str(ROOT / "tools" / script), *options), seconds)


def _probe(seconds: float, *options: str) -> Command:
    return _tool("probe", "gpu_probe.py", seconds, "--json", "{out}/probe.json", *options)


def _tiny(is_rehearsal: bool) -> tuple[str, ...]:
    return ("--rehearse",) if is_rehearsal else ()


def _many(is_rehearsal: bool, processes: int, most_failures: int) -> tuple[str, ...]:
    """Return pytest-xdist options that distribute single tests over processes, because compiling a
    kernel takes seconds and one file of tests has most of the hundreds of kernels."""
    options = ("-n", str(processes), "--dist", "worksteal", "--maxfail", str(most_failures))
    return () if is_rehearsal else options


def _first(is_rehearsal: bool, _peers: str | None) -> Iterator[Group]:
    yield (_probe(75, *_tiny(is_rehearsal)),)
    device = "cpu" if is_rehearsal else "cuda"
    yield (
        _tool(TOKENS, "gpu_tokens.py", 190, "--device", device, "--out", "{out}/tokens.json"),
        pytest_of(ORDER, ORDER_TESTS, 190),
        pytest_of(KERNELS, KERNEL_TESTS, 190, *_many(is_rehearsal, 9, 30)),
    )


def _figures(is_rehearsal: bool, _peers: str | None) -> Iterator[Group]:
    """Yield the commands that measure, the most important first."""
    quick = ("--quick", *_tiny(is_rehearsal))
    yield (bench("copy device,engine-phases", 130, *quick),)
    yield (bench("decode,prefill", 95, *quick),)
    yield (bench("prefill-library", 40, *quick),)
    yield (bench("engine-step", 100, *quick),)
    yield (bench("writes,interference", 60, *quick),)


def _probe_step(is_rehearsal: bool, _peers: str | None) -> Iterator[Group]:
    tiny = _tiny(is_rehearsal)
    yield (_probe(180, "--lock-gib", "16", *tiny),)
    yield (bench("ceilings,copies,copy device", 380, "--quick", *tiny),)


def _tests(is_rehearsal: bool, _peers: str | None) -> Iterator[Group]:
    wide_out = [f"--ignore={ROOT / 'tests' / place}" for place in (*ALONE_TESTS, SANITIZER_TESTS)]
    many = _many(is_rehearsal, 8, 60)
    yield (pytest_of("tests-wide", GPU_TESTS, 400, *many, *wide_out),)
    yield (pytest_of("tests-alone", ALONE_TESTS, 300),)


def _bench(is_rehearsal: bool, _peers: str | None) -> Iterator[Group]:
    quick = ("--quick", *_tiny(is_rehearsal))
    yield (bench("writes,decode,prefill,interference", 330, *quick),)
    yield (bench("engine-step,engine-phases", 240, *quick),)


def _full(is_rehearsal: bool, peers: str | None) -> Iterator[Group]:
    tiny = _tiny(is_rehearsal)
    yield (bench("launch-sweep", 200, *tiny),)
    yield (bench("decode,writes,prefill,engine-step", 370, *tiny),)
    if peers:
        yield (bench("peers", 200, "--quick", *tiny, "--peers", peers),)


def _sanitize(_is_rehearsal: bool, _peers: str | None) -> Iterator[Group]:
    """Yield the sanitizer's commands, first the tests of decode and write kernels, which fit into
    the rest of a loan after `first`."""
    chosen = "decode or write"
    yield (pytest_of(SANITIZE_FIRST, [SANITIZER_TESTS], 200, "-k", chosen),)
    yield (pytest_of("sanitize-rest", [SANITIZER_TESTS], 360, "-k", f"not ({chosen})"),)


_GROUPS = {
    "first": _first,
    "figures": _figures,
    "probe": _probe_step,
    "tests": _tests,
    "bench": _bench,
    "full": _full,
    "sanitize": _sanitize,
}
