# SPDX-License-Identifier: Apache-2.0
"""`stratakv plan`: a worked example from nothing but a config.json, rates and their origins,
refusals, and the tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.cli import plan as command
from stratakv.engine.cli.args import Parser
from stratakv.engine.cli.main import main
from stratakv.engine.plan.table import show_bytes, show_rate, show_seconds
from stratakv.tiers.settings.sizes import rough_size

from ...pages import read_command_pages

LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
WEIGHTS = 141_107_412_992  # bytes in bfloat16


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A directory with the config.json of a model of 70B parameters, and nothing else."""
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(LARGE))
    return tmp_path / "large"


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command with --json; its answer."""

    def run(*words: object) -> Any:
        assert main(["plan", *map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command, which must refuse; the sentence."""

    def run(*words: object) -> str:
        assert main(["plan", *map(str, words)]) == 2
        shown = capsys.readouterr()
        assert not shown.out
        return " ".join(shown.err.split())

    return run


def test_the_worked_example_of_a_70b_model(large: Path, planned: Any) -> None:
    """Blocks of 5.24 MB, 8,206 of them in 43.0 GB, and 256 of them in 46.8 ms at 28 GB/s (of
    1,024 MB each)."""
    kv_bytes = 8206 * 5_242_880
    assert f"{kv_bytes / 1e9:.1f}" == "43.0"
    made = planned(
        large, "--dtype", "bfloat16", "--memory", WEIGHTS + 10**9 + kv_bytes,
        "--reserve", "1GB", "--max-model-len", "4096", "--cpu-bandwidth", "28672MB/s",
        "--prefill-tokens-per-second", "4000", "--no-probe",
    )  # fmt: skip
    assert made["model"]["parameters"] == 70_553_706_496
    assert made["model"]["weight_files"] is None
    assert made["memory"] == {
        "total_bytes": WEIGHTS + 10**9 + kv_bytes,
        "weight_bytes": WEIGHTS,
        "reserve_bytes": 10**9,
        "state_bytes": 0,
        "kv_bytes": kv_bytes,
    }
    assert made["block"] == {
        "tokens": 16,
        "kv_dtype": "bfloat16",
        "bytes_per_token": 327_680,
        "bytes": 5_242_880,
    }
    assert made["tiers"] == {
        "pool": {
            "size_bytes": kv_bytes,
            "blocks": 8206,
            "tokens": 8205 * 16,
            "requests_of_max_model_len": 8205 // 256,
            "requests_of_typical_length": 8205 // 128,
        }
    }
    load = made["loads"][-1]
    assert (load["tokens"], load["blocks"]) == (4096, 256)
    assert load["load_seconds"]["cpu"] == pytest.approx(46.8e-3, abs=5e-5)
    assert load["prefill_seconds"] == pytest.approx(1.024)
    assert made["break_even_tokens"]["cpu"] == 16


def test_every_tier_and_several_devices(large: Path, planned: Any) -> None:
    sizes = ("--cpu", "256GiB", "--ssd", "2TiB")
    common = (large, "--dtype", "bfloat16", "--memory", "160GiB", "--no-probe", *sizes)
    one, four = planned(*common), planned(*common, "--tensor-parallel-size", "4")
    assert list(one["tiers"]) == ["pool", "cpu", "ssd"]
    assert one["tiers"]["cpu"]["blocks"] == 256 * 2**30 // 5_242_880
    # Beside its payload a record on the disk has a header page, and there is an index.
    at_most = 2**41 // (5_242_880 + 4096)
    assert 0.99 * at_most < one["tiers"]["ssd"]["blocks"] <= at_most
    assert four["block"]["bytes"] * 4 == one["block"]["bytes"]
    assert four["tiers"]["cpu"]["blocks"] == one["tiers"]["cpu"]["blocks"]
    assert four["memory"]["weight_bytes"] < one["memory"]["weight_bytes"] / 3.9
    assert any("on one" in note for note in four["notes"])
    for single, shared in zip(one["loads"], four["loads"], strict=True):
        assert shared["size_bytes"] == single["size_bytes"]
        assert shared["prefill_seconds"] == pytest.approx(single["prefill_seconds"] / 4)
        assert shared["load_seconds"]["cpu"] == pytest.approx(single["load_seconds"]["cpu"] / 4)


def test_rates_say_where_they_come_from(large: Path, planned: Any) -> None:
    common = (large, "--memory", "400GB", "--cpu-bandwidth", "10GB")
    measured = planned(*common)
    origins = {name: rate["origin"] for name, rate in measured["rates"].items()}
    assert origins == {"cpu": "given", "ssd": "measured", "operations": "measured"}
    assert measured["rates"]["cpu"]["per_second"] == 1e10
    assert measured["break_even_tokens"].keys() == {"cpu", "ssd"}
    reference = planned(*common, "--prefill-tokens-per-second", "1e3", "--no-probe")
    origins = {name: rate["origin"] for name, rate in reference["rates"].items()}
    assert origins == {
        "cpu": "given", "ssd": "reference", "network": "reference", "prefill_tokens": "given",
    }  # fmt: skip


def test_a_device_so_fast_that_short_prefixes_are_computed(large: Path, planned: Any) -> None:
    made = planned(
        large, "--memory", "400GB", "--no-probe", "--cpu-bandwidth", "46GB", "--flops", "1e16"
    )
    tokens = made["break_even_tokens"]["cpu"]
    assert 1024 < tokens < 8192
    loads = {load["tokens"]: load for load in made["loads"]}
    for length, load in loads.items():
        assert (load["load_seconds"]["cpu"] < load["prefill_seconds"]) == (length >= tokens)


def test_a_pool_too_small_for_the_longest_request(large: Path, planned: Any) -> None:
    made = planned(
        large, "--dtype", "bfloat16", "--reserve", "0", "--no-probe",
        "--memory", WEIGHTS + 101 * 5_242_880,
    )  # fmt: skip
    assert made["tiers"]["pool"]["tokens"] == 1600
    assert any("serve would take requests of up to 1,600" in note for note in made["notes"])


def test_windows_cap_what_a_request_takes(tmp_path: Path, planned: Any, capsys: Any) -> None:
    """Gemma 3 of 1 billion: 26 layers, of which every sixth sees all and the others 512 tokens."""
    gemma = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144,
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 32768,
        "rope_theta": 1000000, "rope_local_base_freq": 10000, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    given = ("--memory", "8GB", "--reserve", "1GB", "--no-probe")
    made = planned(tmp_path, *given)
    assert made["model"]["parameters"] == 999_885_952
    groups = made["groups"]
    page = 4 * 2 * 16 * 256 * 2  # layers of a page, K and V, tokens, head_dim, bytes
    assert {group["page_bytes"] for group in groups} == {page}
    assert groups[0]["attention"] == "full attention" and groups[0]["layers"] == [5, 11, 17, 23]
    assert groups[0]["pages"] == 32768 // 16
    for group in groups[1:]:
        assert group["attention"] == "sliding window of 512"
        assert group["size_bytes"] == page * group["pages"]
        assert group["pages"] == (512 + 2048 - 3) // 16 + 2, "the window and a step"
    assert sum(len(group["layers"]) for group in groups) == 26
    pages = made["tiers"]["pool"]["blocks"] * 26 // 4 - 1
    held = sum(group["pages"] for group in groups)
    assert made["tiers"]["pool"]["requests_of_max_model_len"] == pages // held
    assert any("layers with windows hold" in note for note in made["notes"])
    assert main(["plan", str(tmp_path), *given]) == 0
    table = capsys.readouterr().out
    assert "Cache groups" in table and "sliding window of 512" in table


def test_another_type_for_the_cache(large: Path, planned: Any) -> None:
    made = planned(
        large, "--dtype", "bfloat16", "--kv-dtype", "fp8_e4m3", "--memory", "160GiB", "--no-probe"
    )
    assert made["block"]["bytes"] == 5_242_880 // 2
    assert any("type of the weights, bfloat16" in note for note in made["notes"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--memory", "80GiB"], f"cannot hold the weights ({rough_size(WEIGHTS)})"),
        (["--memory", "0"], "--memory must be at least 1 byte"),
        (["--memory", "9999999TiB"], "--memory must be at most"),
        (["--memory", "much"], "--memory takes a number of bytes"),
        (["--cpu", "5MB"], "--cpu 4.77 MiB holds no block; give at least 5MiB"),
        (["--ssd", "5MB"], "--ssd 4.77 MiB on 1 device(s): the SSD tier needs at least"),
        (["--cpu-bandwidth", "0"], "--cpu-bandwidth must be at least 1 byte"),
        (["--flops", "0"], "--flops takes a number from 0.001 to 1e+24"),
        (["--flops", "1e-320"], "--flops takes a number from 0.001 to 1e+24, not '1e-320'"),
        (["--flops", "nan"], "--flops takes a number from 0.001"),
        (["--flops", "1e25"], "--flops takes a number from 0.001 to 1e+24"),
        (["--prefill-tokens-per-second", "-1"], "takes a number from 0.001"),
        (["--flops", "1", "--prefill-tokens-per-second", "1"], "give one"),
        (["--block-size", "7"], "--block-size takes a power of two"),
        (["--dtype", "int4"], "--dtype takes auto or float64"),
        (["--kv-dtype", "int4"], "--kv-dtype takes auto or float64"),
        (["--max-model-len", "8193"], "--max-model-len 8193 is too long"),
        (["--max-model-len", "1"], "--max-model-len must be at least 2"),
        (["--request-tokens", "0"], "--request-tokens takes a number from 1 to the 8192"),
        (["--request-tokens", "8193"], "--request-tokens takes a number from 1 to the 8192"),
        (["--tensor-parallel-size", "3"], "does not divide the model's 64 attention heads"),
        (["--tensor-parallel-size", "16"], "does not divide the model's 8 key-value heads"),
        (["--tensor-parallel-size", "0"], "a whole number from 1 to 1024"),
        (["--reserve", "-1"], "--reserve takes a number of bytes"),
        (["--memry", "1"], "--memory"),
    ],
)
def test_what_cannot_be_planned(words: list[str], sentence: str, large: Path, refused: Any) -> None:
    common = ["--dtype", "bfloat16", "--memory", "160GiB", "--no-probe"]
    assert sentence in refused(large, *common, *words)


def test_models_that_cannot_be_planned(tmp_path: Path, large: Path, refused: Any) -> None:
    assert "is not a directory" in refused(tmp_path / "nowhere")
    assert "config.json is missing" in refused(tmp_path)
    assert "MODEL takes a text that is not empty" in refused("")
    (large / "config.json").write_text(json.dumps(LARGE | {"architectures": ["MambaForCausalLM"]}))
    assert "this version serves LlamaForCausalLM" in refused(large)


def test_a_machine_that_does_not_say_its_memory(
    large: Path, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "available_memory_bytes", lambda: None)
    assert "give --memory" in refused(large, "--no-probe")


def test_a_disk_that_cannot_be_measured(
    large: Path, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path) -> float:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stratakv.engine.config.machine_probes.disk_read_bytes_per_second", full)
    assert "No space left on device); give --ssd-bandwidth" in refused(large, "--memory", "400GB")


def test_the_tables(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dtype", "bfloat16", "--memory", "400GB", "--cpu", "256GiB", "--no-probe"]
    assert main(["plan", str(large), *words, "--cpu-bandwidth", "28GB"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "70,553,706,496 parameters, 141 GB in bfloat16",
        "no whole set of safetensors files is there",
        "5,242,880 bytes (5.24 MB) a block of 16 tokens, in one piece",
        "requests of 8,192",
        "cpu 256 GiB 52,428 838,848",
        "28.0 GB/s given",
        "7.00 GB/s reference one NVMe drive",
        "quicker than computing it: from cpu always",
        "half-filled last blocks: 7.5 tokens",
    ):
        assert part in shown


def test_the_embedded_model_needs_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--no-probe"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"5,475,584 parameters, 21\.9 MB in float32 .* are there\)", shown)


def test_figures_are_shown_with_three_digits() -> None:
    assert [show_bytes(n) for n in (0, 999, 5_242_880, 43.02e9, 2**41)] == [
        "0 B", "999 B", "5.24 MB", "43.0 GB", "2.20 TB",
    ]  # fmt: skip
    assert [show_seconds(s) for s in (12.34, 0.0468, 4.2e-6)] == ["12.3 s", "46.8 ms", "4.20 µs"]
    assert show_rate(4e14, "operations, somehow") == "400 T operations/s"
    assert show_rate(4000, "tokens") == "4.00 k tokens/s"
    assert show_rate(0.5, "tokens") == "0.50 tokens/s"


def test_every_flag_is_documented() -> None:
    parser = Parser(prog="probe")
    command.add_arguments(parser)
    flags = [a.option_strings[0] for a in parser._actions if a.option_strings and a.dest != "help"]
    section = read_command_pages().split("## stratakv plan\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(--[a-z-]+)` ", section, re.MULTILINE) == flags
