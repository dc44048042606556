# SPDX-License-Identifier: Apache-2.0
"""A file of options: both forms read alike, and everything that is no flat list is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stratakv.engine.config.resolve import read_config_settings
from stratakv.tiers.settings.file import MAX_BYTES, read_file
from stratakv.tiers.settings.values import ConfigError

YAML = """
# a comment
block-size: 32
kv_offload: [cpu, ssd]
kv_offload_cpu_bytes: 512MiB
enable_prefix_caching: yes
admit-below: 0.5
revision: "1.10"
"""
TOML = """
# a comment
block-size = 32
kv_offload = ["cpu", "ssd"]
kv_offload_cpu_bytes = "512MiB"
enable_prefix_caching = true
admit-below = 0.5
revision = "1.10"
"""


def write(tmp_path: Path, name: str, text: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", YAML), ("a.YML", YAML), ("a.toml", TOML), ("b.yml", "\ufeff" + YAML)],
)
def test_both_forms(tmp_path: Path, name: str, text: str) -> None:
    settings = read_config_settings(write(tmp_path, name, text))
    assert {name: each.value for name, each in settings.given.items()} == {
        "block_size": 32,
        "kv_offload": ("cpu", "ssd"),
        "kv_offload_cpu_bytes": 512 * 1024**2,
        "enable_prefix_caching": True,
        "admit_below": 0.5,
        "revision": "1.10",
    }


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "# nothing\n"), ("a.toml", "# nothing\n"), ("a.yaml", "---\n")]
)
def test_an_empty_file_gives_nothing(tmp_path: Path, name: str, text: str) -> None:
    assert read_file(write(tmp_path, name, text)) == {}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{}", ["read by its ending", ".yaml, .yml, .toml", "rename it"]),
        ("a.yaml", "blok_size: 16", ["blok_size of ", "a.yaml is no option",
                                     "did you mean block_size"]),
        ("a.toml", "xyzzy = 1", ["xyzzy of ", "is no option", "config show"]),
        ("a.yaml", "config: b.yaml", ["config of ", "is no option"]),
        ("a.yaml", "block_size: 16\nblock-size: 16", ["block-size of ", "stands there twice"]),
        ("a.yaml", "port: 1\nport: 2", ["port of ", "stands there twice"]),
        ("a.toml", "block_size = 16\nblock-size = 16", ["stands there twice"]),
        ("a.toml", "port = 1\nport = 2", ["is no TOML: Cannot overwrite"]),
        ("a.yaml", "cache:\n  block_size: 16", ["cache of ", "a table", "the file is flat"]),
        ("a.toml", "[cache]\nblock_size = 16", ["cache of ", "a table", "the file is flat"]),
        ("a.yaml", "kv_offload: [[cpu]]", ["kv_offload of ", "nested lists"]),
        ("a.toml", "kv_offload = [['cpu']]", ["kv_offload of ", "nested lists"]),
        ("a.yaml", "? [a, b]\n: 1", ["a table or nested lists"]),
        ("a.yaml", "base: &x {port: 1}\n<<: *x", ["base of ", "the file is flat"]),
        ("a.yaml", "- port", ["is no list of options"]),
        ("a.yaml", "just words", ["is no list of options"]),
        ("a.yaml", "a: 1\n---\nb: 2", ["is no YAML", "line 2"]),
        ("a.yaml", "port: 'open", ["is no YAML", "line "]),
        ("a.yaml", "port: \x07", ["is no YAML", "a character that may not be"]),
        ("a.yaml", "revision: !!python/object/apply:os.getcwd []", ["is no plain value"]),
        ("a.yaml", "revision: 2026-13-45", ["revision of ", "line 1", "put a text in quotes"]),
        ("a.yaml", "revision: 1.10", ["takes a text that is not empty, not 1.1; put it in quotes"]),
        ("a.yaml", "revision: no", ["not False; put it in quotes"]),
        ("a.yaml", "port:", ["port of ", "has no value"]),
        ("a.yaml", "port: ~", ["port of ", "has no value"]),
        ("a.yaml", "block_size: 16.5", ["block_size of ", "takes a whole number, not 16.5"]),
        ("a.yaml", "block_size: true", ["takes a whole number, not True"]),
        ("a.yaml", "block_size: [16]", ["takes a whole number, not [16]"]),
        ("a.yaml", "admit_below: true", ["takes a number, not True"]),
        ("a.yaml", "log_json: 2", ["takes true or false", "not 2"]),
        ("a.toml", "port = 1979-05-27", ["takes a whole number from 0 to 65535"]),
        ("a.yaml", "api_key: 12345678", ["api_key of ", "not a value of type int", "in quotes"]),
        ("a.yaml", "tenant_secret: [hunter2]", ["takes a text, not a value of type list"]),
        ("a.yaml", "port: !!bool x", ["port of ", "line 1", "is no plain value"]),
        ("a.yaml", "port: !!int ''", ["is no plain value"]),
        ("a.yaml", "port: !!timestamp x", ["is no plain value"]),
        ("a.yaml", f"port: 0x{'f' * 6000}", ["takes a whole number", "not a value of type int"]),
        ("a.yaml", f"log_json: 0x{'f' * 6000}", ["takes true or false", "a value of type int"]),
        ("a.yaml", f"swap_space: 0x{'f' * 6000}", ["swap_space of ", "is not taken"]),
        ("a.toml", f"port = 0x{'f' * 6000}", ["takes a whole number", "not a value of type int"]),
        ("a.toml", f"port = {'9' * 6000}", ["holds a number too long to read"]),
        ("a.yaml", "'': 1", ["'' of "]),
        ("a.yaml", 'revision: "a\\nb"', ["takes one line of UTF-8", r"'a\nb'"]),
        ("a.toml", 'host = "a\\u0000b"', ["takes one line of UTF-8", r"'a\x00b'"]),
        ("a.yaml", "[" * 30000, ["nested too deep"]),
        ("a.toml", "a = " + "[" * 30000, ["nested too deep"]),
        ("a.yaml", b"port: \xff", ["is no UTF-8 text (byte 6)"]),
        ("a.yaml", "#" * (MAX_BYTES + 1), ["has more than 256 KiB"]),
        ("a.yaml", '"two\\nlines": 1', ["'two\\nlines' of "]),
        ("a.yaml", f"{'k' * 500}: 1", [f"{'k' * 64} of "]),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, name: str, text: str | bytes, words: list[str]) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(ConfigError) as refusal:
        read_config_settings(path)
    message = str(refusal.value)
    assert "\n" not in message, "one sentence"
    assert str(path) in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "text",
    [
        "api_key: 'hunter2\n", "api_key: hunter2: x", "hunter2", "api_key: *hunter2",
        "api_key: !hunter2!x y", "api_key: !hunter2 y", "{api_key:hunter2}", "? [hunter2]\n: 1",
        "? {hunter2: x}\n: 1",
    ],
)  # fmt: skip
def test_a_broken_file_is_not_quoted(tmp_path: Path, text: str) -> None:
    """There may be a secret in the line that cannot be read."""
    with pytest.raises(ConfigError) as refusal:
        read_config_settings(write(tmp_path, "a.yaml", text))
    assert "hunter2" not in str(refusal.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml cannot be read \(No such file"):
        read_file(tmp_path / "gone.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="is no ordinary file"):
        read_file(tmp_path / "pipe.yaml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="is no ordinary file"):
        read_file(tmp_path / "folder.toml")
