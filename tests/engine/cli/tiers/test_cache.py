# SPDX-License-Identifier: Apache-2.0
"""`stratakv cache`: what it lists, adds up and removes: real stores, sound, damaged, in use."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratakv.engine.cli.args import Parser
from stratakv.engine.cli.main import main
from stratakv.engine.cli.tiers import cache
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.folder import inventory
from stratakv.tiers.ssd.folder.directory import StoreDirectory
from stratakv.tiers.ssd.folder.inventory import find_stores, look_at, remove

from ....open_files import open_paths
from ....pages import read_command_pages
from ....tiers.blocks import ODD, SMALL, make_keys
from ....tiers.store_contract import SECONDS, put

CAPACITY = 2 * 1024**2


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default cache folder, with two stores; one more lies elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = tmp_path / "cache" / "stratakv"
    for path, layout, count in (
        (home / "ssd", SMALL, 10),
        (home / "server" / "0123", ODD, 3),
        (tmp_path / "elsewhere" / "kv", SMALL, 0),
    ):
        store = SsdStore(path, layout, CAPACITY)
        assert all(put(store, make_keys(count)))
        store.close(SECONDS)
    return home


@pytest.fixture
def in_use(home: Path) -> Iterator[Path]:
    """The first of them, open in this process."""
    store = SsdStore(home / "ssd", SMALL, CAPACITY)
    yield home / "ssd"
    store.close(SECONDS)


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["cache", *words, "--json"]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def allocated(path: Path) -> int:
    return sum(each.lstat().st_blocks * 512 for each in path.rglob("*"))


def test_what_is_listed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, ssd = asked(capsys, "ls")["stores"]
    assert (server["path"], ssd["path"]) == (str(home / "server" / "0123"), str(home / "ssd"))
    assert (server["blocks"], ssd["blocks"]) == (3, 10)
    # Z12: it showed what is reserved, and not what of that is used.
    assert (server["used_bytes"], ssd["used_bytes"]) == (3 * ODD.page_bytes, 10 * SMALL.page_bytes)
    assert "KV heads of 48" in server["made_for"] and "KV heads of 32" in ssd["made_for"]
    assert ssd["allocated_bytes"] == allocated(home / "ssd") <= CAPACITY
    newest = max(each.stat().st_mtime for each in (home / "ssd").rglob("*") if each.is_file())
    assert ssd["last_used_unix_seconds"] >= newest
    assert not ssd["in_use"] and ssd["owner"] is None
    assert main(["cache", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[4] == str(home / "ssd")
    assert re.fullmatch(
        r"  size       \d\.\d MiB reserved, \d+\.\d KiB used by 10 blocks", lines[6]
    )
    assert re.fullmatch(r"  last used  \d{4}-\d\d-\d\d \d\d:\d\d \S+", lines[7])


def test_paths_are_looked_into_as_well(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = home.parents[1] / "elsewhere"
    for path in (elsewhere, elsewhere / "kv"):
        found = asked(capsys, "ls", str(path), str(home))["stores"]
        assert [each["blocks"] for each in found] == [3, 10, 0]
    assert main(["cache", "ls", str(home / "nowhere")]) == 2
    assert "is no folder that can be looked into" in capsys.readouterr().err


def test_nothing_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert asked(capsys, "ls") == {"stores": []}
    assert asked(capsys, "du") == {"stores": {}, "total_bytes": 0}
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out == (
        "no SSD tiers found; give the directory of one outside the default cache folder\n"
    )
    assert main(["cache", "rm", "--all", "--yes"]) == 0
    assert capsys.readouterr().out == "no SSD tiers to remove\n"


def test_sizes_are_added_up(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "du")
    assert found["total_bytes"] == sum(found["stores"].values()) == allocated_of_stores(home)
    assert main(["cache", "du"]) == 0
    assert re.search(r"^ +\d\.\d MiB  in 2 SSD tiers\n", capsys.readouterr().out, re.MULTILINE)


def allocated_of_stores(home: Path) -> int:
    return allocated(home / "ssd") + allocated(home / "server" / "0123")


def test_one_in_use_is_told_and_not_removed(
    in_use: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [_, ssd] = asked(capsys, "ls")["stores"]
    assert (ssd["in_use"], ssd["owner"]) == (True, str(os.getpid()))
    assert main(["cache", "ls"]) == 0
    assert f", in use by process {os.getpid()}\n" in capsys.readouterr().out
    for words in ([str(in_use)], ["--all"], [str(home / "server" / "0123"), str(in_use)]):
        assert main(["cache", "rm", *words, "--yes"]) == 2
        assert f"is in use by process {os.getpid()}; stop that" in capsys.readouterr().err
    with pytest.raises(TierConfigError, match="is in use by process"):
        remove(in_use)
    assert len(asked(capsys, "ls")["stores"]) == 2, "nothing was removed"
    assert main(["cache", "rm", "--unused", "--yes"]) == 0
    [left] = asked(capsys, "ls")["stores"] if capsys.readouterr() else []
    assert left["path"] == str(in_use)


def test_removed_with_its_directory_but_for_what_is_not_ours(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "ssd" / "notes").write_text("of somebody else")
    assert main(["cache", "rm", str(home / "ssd"), "--yes"]) == 0
    assert [each.name for each in (home / "ssd").iterdir()] == ["notes"]
    assert main(["cache", "rm", "--all", "--yes"]) == 0
    assert not (home / "server" / "0123").exists()
    assert str(home) not in " ".join(open_paths())
    store = SsdStore(home / "ssd", SMALL, CAPACITY)
    assert store.stats().blocks == 0
    store.close(SECONDS)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "identity").unlink(),
        lambda path: (path / "identity").write_bytes(b"{"),
        lambda path: (path / "index" / "data.mdb").write_bytes(b"not an index"),
        lambda path: (path / "index" / "data.mdb").write_bytes(os.urandom(2**17)),
        lambda path: os.truncate(path / "index" / "data.mdb", 8192),
        lambda path: shutil.rmtree(path / "index"),
        lambda path: (path / "blocks").unlink(),
        lambda path: (path / "lock").write_bytes(b"\xff\n\x1b[31m"),
        lambda path: shutil.copytree(path / "index", path / "index.bad-1"),
    ],
)
def test_damaged_ones_are_listed_and_removed(
    home: Path, damage: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(home / "ssd")
    assert [each["path"] for each in asked(capsys, "ls")["stores"]][1] == str(home / "ssd")
    assert main(["cache", "ls"]) == 0 and main(["cache", "du"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main(["cache", "rm", str(home / "ssd"), "--yes"]) == 0
    assert not (home / "ssd").exists()


def test_no_link_is_followed(home: Path, tmp_path: Path) -> None:
    (home / "link").symlink_to(tmp_path / "elsewhere")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("precious")
    shutil.rmtree(home / "ssd" / "index")
    (home / "ssd" / "index").symlink_to(precious)
    assert len(find_stores(home)) == 2
    remove(home / "ssd")
    assert (precious / "file").exists() and not (home / "ssd").exists()


def test_what_is_no_store_is_not_removed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (home, home / "nowhere", home / "ssd" / "index"):
        assert main(["cache", "rm", str(path), "--yes"]) == 2
        assert f"{path} holds no SSD tier" in capsys.readouterr().err
        with pytest.raises(TierConfigError, match="holds no SSD tier"):
            remove(path)
    (home / "lock").write_text("")
    assert main(["cache", "rm", str(home), "--yes"]) == 2


def test_it_asks(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / "ssd"
    assert main(["cache", "rm", str(path)]) == 2
    assert re.search(r"takes --yes without a terminal to ask at", capsys.readouterr().err)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    questions: list[str] = []

    def answer(word: str) -> None:
        monkeypatch.setattr("builtins.input", lambda text: questions.append(text) or word)

    for word in ("", "n", "no", "?"):
        answer(word)
        assert main(["cache", "rm", str(path)]) == 0
        assert path.exists()
    answer("y")
    assert main(["cache", "rm", "--all"]) == 0
    assert not path.exists()
    assert re.fullmatch(r"remove /\S+/ssd, \d\.\d MiB\? \[y/N\] ", questions[0])
    assert re.fullmatch(r"remove 2 SSD tiers, \d\.\d MiB\? \[y/N\] ", questions[-1])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "takes ls, du, rm"),
        (["lss"], "not 'lss'"),
        (["rm"], "takes the paths of SSD tiers, or --all, or --unused"),
        (["rm", "--all", "--unused"], "or --unused"),
        (["rm", "/x", "--all"], "or --unused"),
        (["ls", "--al"], "there is no option --al"),
    ],
)
def test_refusals(
    words: list[str], says: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", *words]) == 2
    assert says in capsys.readouterr().err
    assert len(find_stores(home)) == 2


def test_the_number_of_blocks_of_a_store_with_many(tmp_path: Path) -> None:
    store = SsdStore(tmp_path / "ssd", SMALL, 16 * 1024**2)
    keys = make_keys(900)
    for start in range(0, 900, 100):
        assert all(put(store, keys[start : start + 100]))
    store.drop(keys[:150])
    assert store.wait_forgotten(SECONDS)
    assert look_at(tmp_path / "ssd").blocks == 750, "while it is open"
    store.close(SECONDS)
    assert look_at(tmp_path / "ssd").blocks == 750


def test_who_opens_a_store_waits_for_who_looks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking takes the lock for a moment."""
    real, opened = inventory.os.close, []

    def close(descriptor: int) -> None:
        monkeypatch.setattr(inventory.os, "close", real)
        opened.append(descriptor)

    monkeypatch.setattr(inventory.os, "close", close)
    assert inventory._owner(home / "ssd") is None
    timer = threading.Timer(0.02, lambda: real(opened[0]))
    timer.start()
    StoreDirectory(home / "ssd").close()
    timer.join()


def test_the_documentation_lists_the_flags() -> None:
    section = read_command_pages().split("## stratakv cache\n")[1].split("\n# ")[0]
    flags: set[str] = set()
    for add in (cache.add_look_arguments, cache.add_rm_arguments):
        parser = Parser(prog="probe")
        add(parser)
        flags |= {option for action in parser._actions for option in action.option_strings}
    told = set(re.findall(r"`(--[a-z]+)`", section))  # not the engine's, which have two words
    assert told == flags - {"-h", "--help"}
