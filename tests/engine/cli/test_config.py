# SPDX-License-Identifier: Apache-2.0
"""`stratakv config`: what holds, where it comes from, and no secret in any of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.cli.main import main
from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.config.resolve import read_config_settings
from stratakv.engine.config.schema import SCHEMA
from stratakv.tiers.settings.values import MIB

KEY, SECRET = "key-that-nobody-sees", "secret-that-nobody-sees"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "stratakv.yaml"
    path.write_text(
        "block-size: 32\n"
        "served-model-name: 'on'\n"
        "kv_offload: cpu,ssd\n"
        f"kv_offload_ssd_path: '{tmp_path}/with space'\n"
        "kv_offload_ssd_bytes: 16MiB\n"
        "kv-offloading-size: 0.5\n"
        "disable_log_requests: true\n"
        f"tenant_secret: {SECRET}\n"
        "enable_chunked_prefill: no\n"
    )
    return path


def show(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["config", "show", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert KEY not in out and SECRET not in out
    return out


def test_every_option_with_its_origin(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAKV_API_KEY", KEY)
    monkeypatch.setenv("STRATAKV_PORT", "0")
    words = ("--config", str(config_file), "--num-threads", "1", "--no-log-stats")
    shown: dict[str, Any] = json.loads(show(capsys, *words, "--origin", "--json"))
    assert list(shown) == list(SCHEMA)
    assert shown["block_size"] == {
        "value": 32, "kind": "file", "origin": f"block_size of {config_file}",
    }  # fmt: skip
    assert shown["kv_offload_cpu_bytes"] == {
        "value": "512MiB", "kind": "file", "origin": f"kv_offloading_size of {config_file}",
    }  # fmt: skip
    assert shown["port"] == {"value": 0, "kind": "variable", "origin": "STRATAKV_PORT"}
    assert shown["num_threads"] == {"value": 1, "kind": "flag", "origin": "--num-threads"}
    assert shown["log_stats"] == {"value": False, "kind": "flag", "origin": "--log-stats"}
    assert shown["host"] == {"value": "127.0.0.1", "kind": "default", "origin": "default"}
    assert shown["api_key"]["value"] == shown["tenant_secret"]["value"] == "***"
    assert shown["max_model_len"]["value"] is None
    plain = json.loads(show(capsys, *words, "--json"))
    assert plain == {name: each["value"] for name, each in shown.items()}


def test_the_lines_say_the_same(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAKV_API_KEY", KEY)
    lines = show(capsys, "--config", str(config_file), "--origin").splitlines()
    [size] = [line for line in lines if line.startswith("block_size:")]
    assert size.split("  # ")[1] == f"block_size of {config_file}"
    assert size.split() == ["block_size:", "32", "#", "block_size", "of", str(config_file)]
    assert any(line.split() == ["#", "api_key:", "***", "#", "STRATAKV_API_KEY"] for line in lines)
    assert any(
        line.startswith("# disable_log_requests of ") and "has no effect" in line for line in lines
    )


@pytest.mark.parametrize("words", [[], ["--num-blocks", "99"], ["--kv-offload", "cpu"]])
@pytest.mark.parametrize("extra", [[], ["--origin"]])
def test_what_is_shown_is_a_file_that_says_the_same(
    config_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    extra: list[str],
) -> None:
    shown = show(capsys, "--config", str(config_file), *words, *extra)
    copy = tmp_path / "copy.yml"
    copy.write_text(shown + f"tenant_secret: {SECRET}\n")
    again = read_config_settings(copy)
    config = engine_config(again.model, again.engine_options)
    assert config.model.served_name == "on", "quoted where YAML has another word for it"
    assert config.offload.cpu.capacity_bytes == 512 * MIB
    first = show(capsys, "--config", str(config_file), *words)
    assert show(capsys, "--config", str(copy)) == first.partition("# disable_log")[0]


def test_the_model_and_what_follows_from_it(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = json.loads(show(capsys, str(tiny_model), "--json"))
    assert (shown["model"], shown["served_model_name"]) == (str(tiny_model), tiny_model.name)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("config", ["takes show, check, vllm, lmcache or sglang"]),
        ("config shw", ["vllm, lmcache or sglang, not 'shw'", "did you mean show"]),
        ("config show --block-siz 3", ["no option --block-siz", "did you mean --block-size"]),
        ("config show --num-blocks 1", ["--num-blocks must be at least 2, not 1"]),
        ("config show --config /nowhere.yaml", ["/nowhere.yaml cannot be read"]),
        ("config show --config x.ini", ["x.ini is read by its ending"]),
        ("config show --config", ["--config takes a value"]),
        ("config check", ["the following arguments are required: FILE"]),
        ("config check /nowhere.toml", ["/nowhere.toml cannot be read"]),
        ("serve --num-gpu-blocks-override 1",
         ["--num-blocks must be at least 2, not 1",
          "(--num-blocks comes from --num-gpu-blocks-override)"]),
        ("serve --trust-remote-code", ["--trust-remote-code is not taken", "no code of model"]),
        ("serve --api-key two\u00a0words", ["--api-key holds a space"]),
        ("serve --generation-config /a/b", ["--generation-config takes auto or none, not '/a/b'"]),
        ("serve --tenant-secret short", ["--tenant-secret has 5 bytes", "openssl"]),
        ("generate --prompt x --max-logprobs 20", ["no option --max-logprobs"]),
    ],
)  # fmt: skip
def test_refusals(words: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split(" ")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stratakv: ")
    assert err.count("\n") == 1, "one sentence"
    for part in parts:
        assert part in err


def test_check(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(config_file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{config_file} is fine: 8 options\n")
    assert "has no effect" in out
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("num_blocks = 1")
    assert main(["config", "check", str(wrong)]) == 2
    assert f"(--num-blocks comes from num_blocks of {wrong})" in capsys.readouterr().err


def test_generate_takes_the_same_layers(
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And leaves the server's options alone."""
    path = tmp_path / "a.yaml"
    path.write_text(
        "num_blocks: 16\nmax_model_len: 256\ndtype: float64\nport: 8001\nseed: 0\nlog-level: error"
    )
    monkeypatch.setenv("STRATAKV_MODEL", str(tiny_model))
    words = ["generate", "--config", str(path), "--prompt", "x", "--max-tokens", "2"]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "which takes 17 blocks" in err and "give --num-blocks 17" in err
    assert f"--num-blocks comes from num_blocks of {path}" in err.splitlines()[-1]
    assert main([*words, "--num-blocks", "60", "--num-threads", "1"]) == 0
    assert "[2 tokens in " in capsys.readouterr().err


def test_configuration_of_other_hosts_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--ssd-path", "/nvme/kv", "--ssd-bytes", "200GiB", "--servers", "grpc://cache:9400"]
    tiers = {"ssd_path": "/nvme/kv", "ssd_bytes": "200GiB", "servers": "grpc://cache:9400"}
    assert main(["config", "lmcache", *given, "--layouts", "2", "--chunk-bytes", "8MiB"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "type": "plugin",
        "module_path": "stratakv.connector.lmcache",
        "class_name": "StrataL2Adapter",
        "adapter_params": tiers | {"layouts": 2, "chunk_bytes": 8 * MIB},
    }
    assert main(["config", "sglang", *given]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "backend_name": "stratakv",
        "interface_v1": 1,
        "module_path": "stratakv.connector.sglang",
        "class_name": "StrataHiCacheStorage",
        **tiers,
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lmcache"], "needs a place for chunks"),
        (["lmcache", "--ssd-path", "/nvme", "--layouts", "17"], "--layouts takes 1 to 16, not 17"),
        (["sglang", "--ssd-path", "/nvme", "--ssd-codec", "fp8"], "SGLang decides"),
        (["sglang", "--ssd-path", "/nvme", "--ssd-bytes", "much"], "much"),
    ],
)
def test_what_another_host_would_be_refused_for_is_not_printed(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["config", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and said in err
