# SPDX-License-Identifier: Apache-2.0
"""Limits on how the repository reads, in `house_limits.json`: no count rises.

`tools/house.py` counts; with `--list` it names what a failure here is about, with `--lower` it
lowers the limits after a count has fallen. `tools/follow_block.py` counts doors,
`tools/follow_walks.py` the stays of a reader.
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

LIMITS: dict[str, int] = json.loads((ROOT / "tests" / "house_limits.json").read_text())
DOORS = "doors"
STAYS = "stays of "  # and the name of a walk
WALKS = [name.removeprefix(STAYS) for name in LIMITS if name.startswith(STAYS)]
RUNS = 3  # what ran in one of them alone depends on the moment


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


@pytest.mark.parametrize(
    "name", [name for name in LIMITS if name != DOORS and not name.startswith(STAYS)]
)
def test_no_count_rises(house: Any, name: str) -> None:
    found = house.findings | {"words": house.words, "stamps": house.stamps}
    assert house.numbers()[name] <= LIMITS[name], said(found.get(name, []))


def test_every_count_has_a_limit(house: Any) -> None:
    walked = {STAYS + walk for walk in ("admission", "chat", "settings")}
    limited = {*house.numbers()} - {"product lines"}
    assert limited | {DOORS} | walked == set(LIMITS)


# The counters themselves, on small packages


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def found_in(tool: ModuleType, root: Path, name: str, text: str, path: str = "tiers/a.py") -> Any:
    """The findings of one count in one file."""
    write(root, {path: text})
    return tool.count(root).findings[name]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("A = 1\ndef f(): ...\n", []),
        ("def f(): ...\nA_B = 1\n_CD: int = 2\nlog = 3\n", ["2 A_B", "3 _CD", "4 log"]),
        ("class F: ...\nA = F()\nB = [F]\nsmall = 1\n", []),
        ("def f():\n    A = 1\n", []),
    ],
)
def test_constants_below_a_definition(
    tool: ModuleType, tmp_path: Path, text: str, names: list[str]
) -> None:
    found = found_in(tool, tmp_path, "glued constants", text)
    assert found == [f"tiers/a.py:{name}" for name in names]


def test_comments_that_float(tool: ModuleType, tmp_path: Path) -> None:
    text = "# SPDX\n\nimport os\nx = 1\n# of nothing\n# below\n\n# of y\ny = 2\n"
    found = found_in(tool, tmp_path, "floating comments", text)
    assert found == ["tiers/a.py:5 # of nothing"]


@pytest.mark.parametrize(
    ("docstring", "counts"),
    [("Of a block.", 1), ("What it is.", 1), ("`Of` it.", 1), ("The block.", 0), ("Whether.", 0)],
)
def test_docstrings_that_open_with_a_clause(
    tool: ModuleType, tmp_path: Path, docstring: str, counts: int
) -> None:
    text = f'class A:\n    """{docstring}"""\n'
    assert len(found_in(tool, tmp_path, "clause openings", text)) == counts


def test_short_docstrings_stand_over_short_bodies(tool: ModuleType, tmp_path: Path) -> None:
    short, long = (
        '    """One two three."""\n',
        '    """One two three four five six seven 8 9 10."""\n',
    )
    body = "    x = 1\n"
    texts = {
        f"def a():\n{short}{body}": 1,
        f"def a():\n{long}{body}": 0,
        f"def a():\n{short}{4 * body}": 0,
        f"def a():\n{short}": 0,
        f"class A:\n{short}{body}": 0,
    }
    for text, counts in texts.items():
        assert len(found_in(tool, tmp_path, "short docstrings", text)) == counts, text


def test_people_are_found_everywhere(tool: ModuleType, tmp_path: Path) -> None:
    who = "no" + "body"
    found = found_in(tool, tmp_path, "people", f"x = '{who} and {who.title()}'  # {who}s\n")
    assert len(found) == 2


def test_methods_of_unrelated_classes(tool: ModuleType, tmp_path: Path) -> None:
    def classes(names: str, base: str = "", method: str = "take") -> str:
        return "".join(f"class {n}({base}):\n    def {method}(self): ...\n" for n in names)

    count = "one-word methods"
    assert found_in(tool, tmp_path, count, classes("ABC")) == []
    assert found_in(tool, tmp_path, count, classes("ABCD")) == ["take: A, B, C, D"]
    assert found_in(tool, tmp_path, count, classes("ABCD", method="take_it")) == []
    # D, E and F are of A's family.
    related = classes("ABC") + classes("DEF", "A")
    assert found_in(tool, tmp_path, count, related) == []
    assert found_in(tool, tmp_path, count, classes("A", "B") + classes("B", "A")) == []  # a circle


def test_names_and_folders_of_files(tool: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, {f"kernels/k{number}.py": "" for number in range(15)})
    write(tmp_path, {"kernels/__init__.py": "", "tiers/__init__.py": "", "kernels/below/k.py": ""})
    write(tmp_path, {"tiers/k1.py": "", "benchmarks/k2.py": "", "kernels/a_pb2.py": ""})
    findings = tool.count(tmp_path).findings
    assert findings["full folders"] == []
    assert findings["repeated file names"] == ["k1.py: 2 times"]
    write(tmp_path, {"kernels/k15.py": ""})
    assert tool.count(tmp_path).findings["full folders"] == ["kernels/: 16 modules"]


def test_what_is_counted_on_the_floors_alone(tool: ModuleType, tmp_path: Path) -> None:
    text = """class KVConnectorScheduler:
    def __init__(self, a, *, b):
        self.c: dict[str, int] = {}
        self.d: dict[bytes, int] = {}
    def begin(self): ...
    def _begin(self): ...
"""
    paths = ("connector/a.py", "connector/vllm/a.py", "tiers/hierarchy/a.py", "tiers/ssd/a.py")
    write(tmp_path, dict.fromkeys(paths, text))
    findings = tool.count(tmp_path).findings
    assert len(findings["constructor parameters"]) == 4
    assert findings["containers by request"] == ["connector/a.py c"]
    assert findings["connector methods"][0] == "connector/a.py begin"


def test_sizes(tool: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, {"tiers/a.py": "def f():\n    x = 1\n\n    return x\n\ndef g(): ...\n"})
    write(tmp_path, {"tiers/__init__.py": "x = 1\n", "proto/a.py": "\n", "tests/a.py": "\n"})
    sizes = tool.count(tmp_path).sizes
    assert list(sizes.values()) == [6, 1200, 2, 4, 4]


def test_a_limit_falls_and_never_rises(tool: ModuleType) -> None:
    assert tool.lower({"a": 5, "doors": 9}, {"a": 3}) == {"a": 3, "doors": 9}
    with pytest.raises(ValueError, match="above their limits: a;"):
        tool.lower({"a": 5}, {"a": 6})


FORBIDDEN = [
    ("engine/core/ledger.py", "", "ledger"),
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
    ("tiers/testing/drill.py", "class Drill: ..."),
    ("tests/tiers/testing/test_faulty.py", "class FaultyStore: ..."),
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


def test_the_command_line_names_findings_and_lowers_limits(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = tmp_path / tool.LIMITS
    write(tmp_path, {"tiers/a.py": "loan = 1\n", tool.LIMITS: '{"words": 4, "people": 0}'})
    tool.main(["--root", str(tmp_path)])
    short = capsys.readouterr().out
    tool.main(["--root", str(tmp_path), "--list", "--lower"])
    long = capsys.readouterr().out
    assert "1  words" in short
    assert "loan: say" in long and "loan: say" not in short
    assert json.loads(limits.read_text()) == {"words": 1, "people": 0}


# The other tools


@pytest.mark.slow
def test_a_block_is_followed_to_the_ssd_and_back() -> None:
    words = [str(TOOLS / "follow_block.py"), "--json", "--pause", "0.5"]
    doors: set[str] = set()
    for _ in range(RUNS):
        done = nursery_client.run([*RUN_FILE, *words], timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        assert answer["cached_tokens"]["ssd"] > 0
        modules = answer["modules"]
        assert len(modules) > 10 and all(lines > 0 for lines in modules.values())
        assert {path.split("/")[0] for path in modules} >= {"connector", "engine", "tiers"}
        doors.update(answer["doors"])
    assert 100 < len(doors) <= LIMITS[DOORS], said(sorted(doors))


@pytest.mark.slow
@pytest.mark.parametrize("walk", WALKS)
def test_a_reader_changes_files_no_more_often(walk: str) -> None:
    words = [str(TOOLS / "follow_walks.py"), walk]
    done = nursery_client.run([*RUN_FILE, *words], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    counts, files = done.stdout.splitlines()[-2:]
    num_stays, returns, num_files = (int(word) for word in counts.split() if word.isdigit())
    assert len(files.split(" > ")) == num_stays == returns + num_files
    assert num_files > 5, "the walk ends too soon"
    assert num_stays <= LIMITS[STAYS + walk], f"the way is longer now: {files}"
