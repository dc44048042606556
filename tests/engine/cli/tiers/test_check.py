# SPDX-License-Identifier: Apache-2.0
"""`stratakv check`: what it prints, its exit codes, and that the documentation lists its flags."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stratakv.engine.cli.args import Parser
from stratakv.engine.cli.main import main
from stratakv.engine.cli.tiers import check
from stratakv.tiers.cache_server.layout_note import store_folder, write_layout_note
from stratakv.tiers.mac_key import MacKey
from stratakv.tiers.ssd import SsdStore

from ....pages import read_command_pages
from ....tiers.blocks import SMALL, make_keys
from ....tiers.store_contract import SECONDS, put

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
    section = read_command_pages().split("## stratakv check\n")[1].split("\n## ")[0]
    rows = {line.split("`")[1] for line in section.splitlines() if line.startswith("| `--")}
    assert rows == flags - {"-h"}


# What tenants of a cache server leave


TENANT = '[[tenant]]\nname = "{}"\ncpu_bytes = "1MiB"\ntoken_sha256 = "{}"\n'


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """The folder of a server, with stores of ann and bob."""
    for name in ("ann", "bob"):
        folder = store_folder(tmp_path / "ssd", f"tenant:{name}")
        store = SsdStore(folder, SMALL, CAPACITY)
        assert all(put(store, make_keys(3)))
        store.close(SECONDS)
        write_layout_note(tmp_path / "ssd", f"tenant:{name}", SMALL)
    (tmp_path / "ssd" / "server.secret").write_text("kept")
    (tmp_path / "tenants.toml").write_text(TENANT.format("ann", "0" * 64))
    return tmp_path / "ssd"


def test_stores_of_tenants_who_are_gone(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["check", str(served), "--tenants", str(served.parent / "tenants.toml")]
    folders = {name: store_folder(served, f"tenant:{name}") for name in ("ann", "bob")}
    assert main(flags) == check.EXIT_PROBLEMS
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folders['bob']}: left of a tenant who is not in the file, ")
    assert lines[1:] == ["1 stores of tenants who are gone"]
    in_use = SsdStore(folders["bob"], SMALL, CAPACITY)
    assert main([*flags, "--fix"]) == 2
    assert "is in use by process" in capsys.readouterr().err
    in_use.close(SECONDS)
    assert main([*flags, "--fix"]) == check.EXIT_PROBLEMS
    assert "removed, " in capsys.readouterr().out
    assert not folders["bob"].exists() and not folders["bob"].with_suffix(".layout").exists()
    assert folders["ann"].with_suffix(".layout").exists() and (served / "server.secret").exists()
    assert main(flags) == 0
    assert main(["check", str(folders["ann"])]) == 0, "the others' blocks are as they were"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tenants", "/no/such"], "--tenants names /no/such, which cannot be read"),
        (["--tenants", "FILE", "--mac-key-file", "x"], "--mac-key-file is for checking blocks"),
        (["--tenants", "BROKEN"], "is no TOML"),
    ],
)
def test_tenants_that_cannot_be_read(
    served: Path, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = served.parent / "broken.toml"
    broken.write_text("[[tenant]\n")
    places = {"FILE": str(served.parent / "tenants.toml"), "BROKEN": str(broken)}
    assert main(["check", str(served), *(places.get(word, word) for word in given)]) == 2
    assert message in capsys.readouterr().err
    assert len(list(served.iterdir())) == 5, "nothing was removed"
