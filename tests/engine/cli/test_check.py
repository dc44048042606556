# SPDX-License-Identifier: Apache-2.0
"""`stratakv check`: what it prints, its exit codes, and that the documentation lists its flags."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stratakv.engine.cli import check
from stratakv.engine.cli.args import Parser
from stratakv.engine.cli.main import main
from stratakv.tiers.mac_key import MacKey
from stratakv.tiers.ssd import SsdStore

from ...tiers.blocks import SMALL, make_keys
from ...tiers.store_contract import SECONDS, put

DOCS = Path(__file__).resolve().parents[3] / "docs" / "commands.md"
CAPACITY = 2 * 1024**2
RECORD = 8192


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store with ten blocks."""
    store = SsdStore(tmp_path / "ssd", SMALL, CAPACITY)
    assert all(put(store, make_keys(10)))
    store.close(SECONDS)
    return tmp_path / "ssd"


def damage(path: Path, records: int) -> None:
    with (path / "blocks").open("r+b") as file:
        file.write(bytes(records * RECORD))


def test_a_sound_store(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith(f"{path}: ") and " 10 blocks, 10 of them whole, 0 orphans" in lines[0]
    )
    assert lines[1:] == ["clean"]


def test_problems_are_shown_and_mended(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(path, 3)
    assert main(["check", str(path)]) == check.EXIT_PROBLEMS
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == [
        f"problem (magic): slot {slot}: its record is not the row's (magic)" for slot in range(3)
    ]
    assert lines[4:] == ["3 problems: magic 3"]
    assert main(["check", str(path), "--fix"]) == check.EXIT_PROBLEMS
    assert "mended: 3 rows removed" in capsys.readouterr().out
    assert main(["check", str(path)]) == 0


def test_many_problems_are_counted(path: Path, capsys: pytest.CaptureFixture[str],
                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(check, "_MOST_SHOWN", 2)
    damage(path, 5)
    assert main(["check", str(path)]) == check.EXIT_PROBLEMS
    assert "... and 3 more" in capsys.readouterr().out.splitlines()


def test_a_lost_index_is_made_again(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(path / "index")
    assert main(["check", str(path), "--fix"]) == check.EXIT_PROBLEMS
    assert "an index of 10 blocks was made from the records" in capsys.readouterr().out
    assert main(["check", str(path)]) == 0


def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(path, 1)
    assert main(["check", str(path), "--json"]) == check.EXIT_PROBLEMS
    shown = json.loads(capsys.readouterr().out)
    assert shown["is_clean"] is False and shown["counts"] == {"magic": 1}
    assert shown["rows"] == 10 and shown["whole"] == 9
    assert shown["problems"][0]["slot"] == 0


def test_a_sealed_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, path = tmp_path / "mac.key", str(tmp_path / "sealed")
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    store = SsdStore(path, SMALL, CAPACITY, mac_key=MacKey(key.read_bytes()))
    assert all(put(store, make_keys(10)))
    store.close(SECONDS)
    assert main(["check", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("note: payloads were not verified: the records are sealed with")
    assert lines[2:] == ["clean, as far as that goes without the key"]
    assert main(["check", path, "--mac-key-file", str(key), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["payloads_verified"] is True and shown["whole"] == 10
    key.write_bytes(bytes(32))
    for flags in (["--mac-key-file", str(key)], ["--mac-key-file", str(tmp_path / "none")]):
        assert main(["check", path, *flags]) == 2
    error = capsys.readouterr().err
    assert "give the file of that key" in error and "--mac-key-file names" in error


def test_what_is_no_store_or_in_use_is_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert "holds no SSD tier" in capsys.readouterr().err
    store = SsdStore(path, SMALL, CAPACITY)
    assert main(["check", str(path)]) == 2
    assert "is in use by process" in capsys.readouterr().err
    store.close(SECONDS)
    assert main(["check"]) == 2
    assert "PATH" in capsys.readouterr().err


def test_the_documentation_lists_its_flags() -> None:
    parser = Parser(prog="probe")
    check.add_arguments(parser)
    flags = {action.option_strings[0] for action in parser._actions if action.option_strings}
    section = DOCS.read_text().split("## stratakv check\n")[1].split("\n## ")[0]
    rows = {line.split("`")[1] for line in section.splitlines() if line.startswith("| `--")}
    assert rows == flags - {"-h"}
