# SPDX-License-Identifier: Apache-2.0
"""Limits on how the repository reads: small modules, full folders, private words, lines.

`tools/house.py` counts; `python tools/house.py --list` names what a failure here is about.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .nursery_site import nursery_client

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
RUN_FILE = [sys.executable, "-m", nursery_client.PROGRAM]

MOST_SMALL_MODULES = 25  # under 100 lines, with exactly one importer
MOST_STAMPS = 40  # the same sentence about what a module does not know
MOST_BENCHMARK_LINES = 12_000
# What came later: cycles and steps of several groups, whole steps beside a device, the core of
# another engine beside ours, and that engine with a model.
LATER_BENCHMARKS = (
    "core/cases.py", "core/device.py", "core/vllm_cases.py", "core/vllm_peer.py",
    "serve/peer_engines.py", "serve/phases_process.py",
)  # fmt: skip
MOST_LATER_LINES = 1_300
LIMITS = ("serve/limits.py", "serve/limits_process.py")  # of one request; they came last
MOST_LIMITS_LINES = 505
MOST_SAMPLING_LINES = 680  # the sampler; steps with a grammar; what others wait beside hostile ones
MOST_CLUSTER_LINES = 840  # of prompts computed here and answered there, which came later too
MOST_AGENTS_LINES = 570  # of agents' jobs in virtual time
MOST_VLLM_LINES = 760  # of a real vLLM with our tiers below it, which came last


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))  # it imports its table of words
        spec = importlib.util.spec_from_file_location("house", TOOLS / "house.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "house", module)  # dataclasses look there
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def house(tool: ModuleType) -> Any:
    gc.disable()  # nothing of the many trees is garbage
    try:
        return tool.count(ROOT)
    finally:
        gc.enable()


def said(findings: list[str]) -> str:
    return "\n" + "\n".join(findings)


def test_few_small_modules_have_one_importer(house: Any) -> None:
    assert len(house.small) <= MOST_SMALL_MODULES, said(house.small)


def test_no_folder_is_full(house: Any) -> None:
    assert not house.full, said(house.full)


def test_names_use_the_words_of_the_field(house: Any) -> None:
    assert not house.words, said(house.words)


def test_few_modules_say_what_they_do_not_know(house: Any) -> None:
    assert len(house.stamps) <= MOST_STAMPS, said(house.stamps)


def test_benchmarks_do_not_grow(house: Any) -> None:
    later = [ROOT / "benchmarks" / name for name in LATER_BENCHMARKS]
    later_lines = sum(len(path.read_text().splitlines()) for path in later)
    apart = {
        name: sum(
            len(path.read_text().splitlines()) for path in (ROOT / "benchmarks" / name).glob("*.py")
        )
        for name in ("agents", "cluster", "sampling", "vllm")
    }
    limits_lines = sum(
        len((ROOT / "benchmarks" / name).read_text().splitlines()) for name in LIMITS
    )
    rest = house.benchmark_lines - later_lines - limits_lines - sum(apart.values())
    assert 0 < rest <= MOST_BENCHMARK_LINES
    assert later_lines <= MOST_LATER_LINES
    assert limits_lines <= MOST_LIMITS_LINES
    assert apart["agents"] <= MOST_AGENTS_LINES
    assert apart["cluster"] <= MOST_CLUSTER_LINES
    assert apart["sampling"] <= MOST_SAMPLING_LINES
    assert apart["vllm"] <= MOST_VLLM_LINES


# The counters themselves, on small packages


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


@pytest.mark.parametrize(
    "statement",
    [
        "from .small import work",
        "from . import small",
        "from ..tiers import small",
        "from ..tiers.small import work",
        "from stratakv.tiers import small",
        "from stratakv.tiers.small import work",
        "import stratakv.tiers.small",
        "def later():\n    from .small import work",
    ],
)
def test_every_kind_of_import_counts(tool: ModuleType, tmp_path: Path, statement: str) -> None:
    write(
        tmp_path,
        {
            "tiers/__init__.py": "",
            "tiers/small.py": "from . import long_one\n",
            "tiers/long_one.py": "x = 1\n" * 100,
            "tiers/user.py": statement + "\n",
        },
    )
    [found] = tool.count(tmp_path).small
    assert found == "tiers/small.py (1 lines) is imported by tiers.user alone"


def test_modules_with_two_importers_or_none_are_not_small(tool: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "engine/__init__.py": "from .models import load\n",  # a package is no module
            "engine/models/__init__.py": "",
            "engine/popular.py": "import os\n",
            "engine/one.py": "from .popular import os\n",
            "engine/two.py": "from ..engine import popular\n",
            "tests/test_one.py": "from stratakv.engine import one\n",  # and a test is no importer
        },
    )
    assert tool.count(tmp_path).small == []


def test_full_folders_are_those_past_twenty(tool: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, {f"kernels/k{number}.py": "" for number in range(20)})
    write(tmp_path, {f"tests/engine/test_{number}.py": "" for number in range(22)})
    write(tmp_path, {"kernels/__init__.py": "", "kernels/below/k.py": ""})
    house = tool.count(tmp_path)
    assert house.full == [] and house.full_tests == ["tests/engine/: 22 modules"]
    write(tmp_path, {"kernels/k20.py": ""})
    assert tool.count(tmp_path).full == ["kernels/: 21 modules"]


FORBIDDEN = [
    ("engine/core/ledger.py", "", "ledger"),
    ("engine/worker/placement.py", "", "placement"),
    ("tests/tiers/test_drill.py", "", "drill"),
    ("tiers/loan/__init__.py", "", "loan"),
    ("engine/core/a.py", "class Figures: ...", "Figures"),
    ("engine/core/a.py", "class Room: ...", "Room"),
    ("tiers/a.py", "def f(): return HeldRooms()", "HeldRooms"),
    ("tiers/cache_server/a.py", "open_rooms = 1", "open_rooms"),
    ("tests/tiers/remote/test_a.py", "def f(room): ...", "room"),
    ("engine/core/a.py", "from b import Intake as Builder", "Intake"),
    ("tests/engine/test_a.py", "x.intake", "intake"),
    ("tiers/remote/a.py", "self._lane", "_lane"),
    ("tiers/a.py", "IS_MAKESHIFT = 1", "IS_MAKESHIFT"),
    ("tiers/a.py", "store.ask(1)", "ask"),
    ("tests/tiers/test_a.py", "class AskingStore: ...", "AskingStore"),
    ("connector/a.py", "class StartTrial: ...", "StartTrial"),
    ("tiers/a.py", "def _read_up(): ...", "_read_up"),
    ("tiers/a.py", "f(num_read_up=1)", "num_read_up"),
    ("engine/a.py", "from .b import shown", "shown"),
    ("engine/a.py", "def nearest(): ...", "nearest"),
    ("connector/a.py", "x.patience_seconds", "patience_seconds"),
    ("benchmarks/service/a.py", "class RawWay: ...", "RawWay"),
    ("benchmarks/service/a.py", "for way in ways: ...", "way"),
    ("benchmarks/a.py", "try: ...\nexcept OSError as contest: ...", "contest"),
    ("tiers/a.py", "class SecondSight: ...", "SecondSight"),
    ("engine/sampling/a.py", "LOGITS_AT_ONCE_THERE = 1", "LOGITS_AT_ONCE_THERE"),
    ("engine/models/decoder.py", "self._do", "_do"),
]

ALLOWED = [
    ("tests/tiers/ssd/ledger.py", "class Ledger: ..."),  # what a store has confirmed
    ("tools/corpus.py", "CREDIT = ''"),
    ("benchmarks/a.py", "figures: Figures = {}"),
    ("engine/worker/a.py", "class Placement: ...\nplacement = 1"),
    ("tiers/fault_injection/drill.py", "class Drill: ..."),
    ("tests/tiers/fault_injection/test_faulty.py", "class FaultyStore: ..."),
    ("tiers/a.py", "room = size - used\nif not self._has_room: return NO_ROOM"),
    ("tiers/remote/a.py", "x.make_room(State.NO_ROOM)"),
    ("tiers/ssd/io_lane.py", "class IoLane: ..."),
    ("connector/device/a.py", "def f(lane): return data_plane"),
    ("benchmarks/a.py", "def ask(server): ...\nasking = 1"),
    ("tests/tiers/test_a.py", "def ask(): ..."),
    ("tiers/policies/trial.py", "class Trial: ..."),
    ("connector/a.py", "store.trial_read(1)"),
    ("tests/connector/test_a.py", "for trial in range(3): ..."),
    ("engine/a.py", "shown = 1\nnearest = 2"),
    ("benchmarks/a.py", "def copy_one_way(both_ways): always = ONE_WAY"),
    ("benchmarks/gpu/a.py", "class Way: ..."),
    ("connector/device/a.py", "class Way: ..."),
    ("tiers/a.py", "self._do()"),
    ("tiers/a.py", "def write_back(): ..."),
    ("tiers/a.py", "'a ledger of loans'  # a room, its patience"),
    ("tests/tiers/test_a.py", "def test_a_loan_ends(): ..."),
]


@pytest.mark.parametrize(("path", "text", "name"), FORBIDDEN)
def test_a_private_word_is_found(
    tool: ModuleType, tmp_path: Path, path: str, text: str, name: str
) -> None:
    write(tmp_path, {path: f"# one line\n{text}\n"})
    words = tool.count(tmp_path).words
    line = 1 if not text else 1 + len(text.splitlines())
    assert any(found.startswith(f"{path}:{line} {name}: say ") for found in words), words


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_ordinary_english_is_left_alone(
    tool: ModuleType, tmp_path: Path, path: str, text: str
) -> None:
    if "return" in text and not text.startswith("def"):
        text = "def f():\n    " + text.replace("\n", "\n    ")
    write(tmp_path, {path: text + "\n"})
    assert tool.count(tmp_path).words == []


def test_words_of_one_kind_of_load_are_asked_for_in_its_folders(
    tool: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path, {"engine/scheduler/parking.py": "class CarPark: ...\nMatchKind.BOTH\n"})
    write(tmp_path, {"connector/a.py": "front = loaded_from = x.back_loads\n"})
    write(tmp_path, {"engine/api/a.py": "front: Front = 1\n"})  # the HTTP front end
    house = tool.count(tmp_path)
    assert sorted(found.split()[1].rstrip(":") for found in house.words) == [
        "BOTH", "CarPark", "back_loads", "front", "loaded_from", "parking",
    ]  # fmt: skip


def test_stamps_are_found_in_text_across_lines(tool: ModuleType, tmp_path: Path) -> None:
    know = "nows nothing"
    write(tmp_path, {"tiers/a.py": f'"""K{know} of sockets.\n\nIt k{know}\nof threads."""\n'})
    write(tmp_path, {"tests/test_a.py": f"x = 1  # K{know}\n# of time\ny = 2  # k{know} yet\n"})
    assert tool.count(tmp_path).stamps == ["tiers/a.py:1", "tiers/a.py:3", "tests/test_a.py:1"]


def test_lines_are_counted_by_part(tool: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, {"tiers/a.py": "\n" * 3, "proto/v1/__init__.py": "x = 1", "deploy/a.py": "\n"})
    write(tmp_path, {"benchmarks/a.py": "\n" * 5, "benchmarks/gpu/b.py": "\n", "tests/a.py": "\n"})
    house = tool.count(tmp_path)
    assert (house.product_lines, house.benchmark_lines) == (4, 6)


def test_the_command_line_names_findings(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"tiers/a.py": "loan = 1\n"})
    tool.main(["--root", str(tmp_path)])
    short = capsys.readouterr().out
    tool.main(["--root", str(tmp_path), "--list"])
    long = capsys.readouterr().out
    assert "1  identifiers that the table of words replaces" in short
    assert "loan: say" in long and "loan: say" not in short


# The other tools


@pytest.mark.slow
def test_a_block_is_followed_to_the_ssd_and_back() -> None:
    words = [str(TOOLS / "follow_block.py"), "--json", "--pause", "0.5"]
    done = nursery_client.run([*RUN_FILE, *words], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["cached_tokens"]["ssd"] > 0
    modules = answer["modules"]
    assert len(modules) > 10 and all(lines > 0 for lines in modules.values())
    assert {path.split("/")[0] for path in modules} >= {"connector", "engine", "tiers"}


@pytest.mark.slow
def test_a_request_is_followed_through_admission() -> None:
    done = nursery_client.run([*RUN_FILE, str(TOOLS / "walk_admission.py")], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    counts, files = done.stdout.splitlines()[-2:]
    stays, returns, _ = (int(word) for word in counts.split() if word.isdigit())
    assert files.split(" > ")[0] == "admission" and len(files.split(" > ")) == stays
    assert stays <= 18 and returns <= 12, "the way through admission has become longer"
