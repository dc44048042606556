# SPDX-License-Identifier: Apache-2.0
"""Files of a model directory are looked up without waiting, and what is no file is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stratakv.engine.models.checkpoint.files import check_directory, is_there
from stratakv.engine.models.checkpoint.generation_config import load_default_sampling
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.text.tokenizer import Tokenizer
from stratakv.tiers.settings.values import ConfigError


def pipe(path: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.symlink_to("blob")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


WRONG = {
    pipe: "is no ordinary file",
    Path.mkdir: "is no ordinary file",
    dangling: "is a link to a file that is gone",
    loop: "cannot be looked at",
    device: "is no ordinary file",
}


@pytest.mark.parametrize(("make", "words"), WRONG.items())
def test_what_is_no_file(make: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert not is_there(path)
    make(path)
    with pytest.raises(ConfigError, match=f"x.json {words}"):
        is_there(path)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    (tmp_path / "link").symlink_to("x")
    assert is_there(tmp_path / "x") and is_there(tmp_path / "link")
    assert not is_there(tmp_path / "x" / "below")


@pytest.mark.parametrize("make", [pipe, dangling])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", load_model_spec),
        ("generation_config.json", load_default_sampling),
        ("tokenizer.json", Tokenizer.load_if_present),
    ],
)
def test_every_reader_asks_first(
    name: str, read: Callable[[Path], object], make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=name):
        read(tmp_path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nowhere", "/nowhere is not a directory; give a model directory"),
        ("/dev/null", "/dev/null is not a directory"),
        ("/dev/null/x", "/dev/null/x is not a directory"),
        ("/" + "x" * 300, r"cannot be looked at \(File name too long\)"),
        ("/a\0b", r"/a.x00b can be no path \(embedded null byte\)"),
        ("/\ud800", "can be no path"),
    ],
)
def test_what_is_no_directory(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        check_directory(Path(path))
    assert len(str(refusal.value)) < 450


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0)
    with pytest.raises(ConfigError, match="may not be read by this user"):
        check_directory(tmp_path)
    with pytest.raises(ConfigError, match="cannot be looked at"):
        is_there(tmp_path / "config.json")
