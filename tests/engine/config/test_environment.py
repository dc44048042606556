# SPDX-License-Identifier: Apache-2.0
"""STRATAKV_* variables: what they are read as, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratakv.engine.config.resolve import OTHER_VARIABLES, read_environment, resolve
from stratakv.tiers.settings.values import ConfigError


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("STRATAKV_BLOCK_SIZ", "16", ["STRATAKV_BLOCK_SIZ is set and names no option",
                                      "did you mean STRATAKV_BLOCK_SIZE"]),
        ("STRATAKV_XYZZY", "1", ["STRATAKV_XYZZY is set", "`stratakv config show` lists them"]),
        ("STRATAKV_NUM_GPU_BLOCKS_OVERRIDE", "9", ["as flags and in files only", "own name"]),
        ("STRATAKV_BLOCK_SIZE", "many", ["STRATAKV_BLOCK_SIZE takes a whole number, not 'many'"]),
        ("STRATAKV_BLOCK_SIZE", "", ["STRATAKV_BLOCK_SIZE takes a whole number, not ''"]),
        ("STRATAKV_PORT", "70000", ["STRATAKV_PORT takes a whole number from 0 to 65535"]),
        ("STRATAKV_LOG_JSON", "maybe", ["STRATAKV_LOG_JSON takes true or false", "'maybe'"]),
        ("STRATAKV_KV_OFFLOAD", "", ["STRATAKV_KV_OFFLOAD takes cpu or cpu,ssd, not ''"]),
        ("STRATAKV_ADMIT_BELOW", "most", ["STRATAKV_ADMIT_BELOW takes a number, not 'most'"]),
        ("STRATAKV_API_KEY", "", ["STRATAKV_API_KEY is empty", "leave the option out"]),
        ("STRATAKV_API_KEY", "two words", ["STRATAKV_API_KEY holds a space"]),
        ("STRATAKV_API_KEY", "line\n", ["STRATAKV_API_KEY holds a space, a line break"]),
        ("STRATAKV_TENANT_SECRET", "short", ["has 5 bytes and 16 are the least", "openssl"]),
    ],
)  # fmt: skip
def test_refusals(variable: str, value: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_environment({"PATH": "/bin", variable: value})
    for word in words:
        assert word in str(refusal.value)
    if "KEY" in variable or "SECRET" in variable:
        assert not value or value not in str(refusal.value), "a secret is in no message"


def test_what_is_no_option_is_left_alone() -> None:
    assert read_environment({"PATH": "/bin", "STRATA": "1"}) == {}
    assert read_environment(dict.fromkeys(OTHER_VARIABLES, "x")) == {}


def test_what_kubernetes_adds_for_a_service_named_stratakv_is_no_option() -> None:
    """Its containers would not start otherwise."""
    links = {
        "STRATAKV_PORT": "tcp://10.0.0.7:8000",
        "STRATAKV_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "STRATAKV_PORT_8000_TCP_ADDR": "10.0.0.7",
        "STRATAKV_PORT_8000_TCP_PORT": "8000",
        "STRATAKV_PORT_8000_TCP_PROTO": "tcp",
        "STRATAKV_SERVICE_HOST": "10.0.0.7",
        "STRATAKV_SERVICE_PORT": "8000",
        "STRATAKV_SERVICE_PORT_HTTP": "8000",
        "STRATAKV_CACHE_PORT": "tcp://10.0.0.8:9000",
        "STRATAKV_CACHE_SERVICE_HOST": "10.0.0.8",
    }
    assert read_environment(links) == {}
    assert read_environment({"STRATAKV_PORT": "8001"})["port"].value == 8001


def test_the_file_may_be_named_by_a_variable_and_a_flag_comes_before_it(tmp_path: Path) -> None:
    for name, size in (("a.yaml", 32), ("b.yaml", 64)):
        (tmp_path / name).write_text(f"block-size: {size}")
    environ = {"STRATAKV_CONFIG": str(tmp_path / "a.yaml")}
    assert resolve({}, environ).given["block_size"].value == 32
    assert resolve({}, environ, str(tmp_path / "b.yaml")).given["block_size"].value == 64
    with pytest.raises(ConfigError, match="STRATAKV_CONFIG takes a text that is not empty"):
        resolve({}, {"STRATAKV_CONFIG": ""})
