# SPDX-License-Identifier: Apache-2.0
"""The command line's refusals: exit code 2 and one sentence that names the cause and the cure."""

from __future__ import annotations

import argparse
import builtins
import re
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratakv
from stratakv.engine.cli.args import Parser, add_engine_arguments, engine_config_of
from stratakv.engine.cli.main import main
from stratakv.engine.config.engine_config import EngineConfig
from stratakv.engine.config.engine_options import (
    EMBEDDED_MODEL,
    OPTIONS,
    engine_config,
)
from stratakv.tiers.settings.format import format_value
from stratakv.tiers.settings.option import flag_of
from stratakv.tiers.settings.values import MIB, ConfigError


def config_of(*words: str) -> EngineConfig:
    parser = Parser(prog="stratakv serve")
    add_engine_arguments(parser)
    return engine_config_of(parser.parse_all(words))


# The words of a call and parts of the one sentence it is answered with.
REFUSED: list[tuple[str, list[str]]] = [
    ("serv", ["no command 'serv'", "did you mean serve"]),
    ("frobnicate", ["no command 'frobnicate'", "serve, cache-server, "]),
    ("--verison", ["no option '--verison'", "did you mean --version"]),
    ("serve --kv-ofload cpu", ["no option --kv-ofload", "did you mean --kv-offload"]),
    ("serve --kv-ofload=cpu", ["no option --kv-ofload", "did you mean --kv-offload"]),
    ("serve --no-enable-prefix-cachin", ["did you mean --no-enable-prefix-caching"]),
    ("serve --max-num-seq 4", ["did you mean --max-num-seqs"]),
    ("serve --xyzzy", ["no option --xyzzy", "stratakv serve --help"]),
    ("serve . other", ["'other' is one argument too many"]),
    ("serve /nowhere/at/all", ["/nowhere/at/all is not a directory", "Hugging Face"]),
    ("serve --port", ["--port takes a value", "--port=VALUE"]),
    ("serve --api-key --x", ["--api-key takes a value; write one that begins with -"]),
    ("serve --log-json=yes", ["--log-json/--no-log-json is a switch and takes no value"]),
    (f"serve --port {'9' * 6000}", ["--port takes a whole number", "99..."]),
    (f"serve --block-size {'9' * 6000}", ["--block-size takes a whole number", "99..."]),
    (f"serve {'x' * 5000}", ["MODEL takes up to 4096 characters, not 5000"]),
    (f"serve {'x' * 300}", ["cannot be looked at (File name too long)"]),
    ("serve /", ["--served-model-name takes a text that is not empty"]),
    ("serve --revision \udcff", ["--revision takes one line of UTF-8", r"'\udcff'"]),
    (f"serve --api-key {'k' * 5000}", ["--api-key takes up to 4096 characters, not 5000"]),
    ("serve --port http", ["--port takes a whole number from 0 to 65535", "'http'"]),
    ("serve --port 70000", ["--port", "from 0 to 65535", "'70000'"]),
    ("serve --host 203.0.113.1", ["--host 203.0.113.1 is no address of this machine"]),
    ("serve --log-level loud", ["--log-level takes debug or info or warning or error"]),
    ("serve --log-level inf", ["did you mean info"]),
    ("serve --dtype flaot16", ["--dtype takes", "'flaot16'", "did you mean float16"]),
    # Refused by the core, with or without a GPU, once the port is held.
    ("serve --port 0 --device cuda:99", ["stratakv: --device cuda"]),
    ("serve --device tpu", ["--device takes cpu or cuda", "'tpu'"]),
    ("serve --device cuda:x", ["--device takes cpu or cuda (or cuda:1, …), not 'cuda:x'"]),
    ("serve --device cuda:0,cuda:1", ["names several GPUs", "computes on one", "for each"]),
    ("serve --device=", ["--device takes a text that is not empty"]),
    ("serve --gpu-memory-utilization 0", ["--gpu-memory-utilization takes a share", "not 0.0"]),
    ("serve --gpu-memory-utilization nan", ["--gpu-memory-utilization takes a share", "nan"]),
    ("serve --kv-cache-dtype int8", ["--kv-cache-dtype takes auto or fp8_e4m3, not 'int8'"]),
    (
        "serve --attention-backend flash",
        ["--attention-backend takes auto or gather or kernels or triton or sdpa or fa3"],
    ),
    (
        "serve --attention-backend gather --device cuda",
        ["--attention-backend gather computes on the CPU", "--device is cuda"],
    ),
    (
        "serve --attention-backend fa3",
        ["--attention-backend fa3 computes on a GPU", "--device is cpu", "give --device cuda"],
    ),
    (
        "serve --attention-backend sdpa --kv-cache-dtype fp8 --device cuda",
        ["sdpa cannot read --kv-cache-dtype fp8_e4m3", "use kernels"],
    ),
    (
        "serve --attention-backend gather --kv-cache-dtype fp8",
        ["gather cannot read --kv-cache-dtype fp8_e4m3", "use kernels"],
    ),
    (
        "serve --kv-offload cpu,ssd --kv-offload-ssd-codec fp8 --kv-cache-dtype fp8",
        ["--kv-offload-ssd-codec fp8 halves", "drop one"],
    ),
    ("serve --load-format pt", ["--load-format takes auto or safetensors or dummy, not 'pt'"]),
    ("serve --compilation everything", ["--compilation takes none or elementwise"]),
    ("serve --block-size 24", ["--block-size takes a power of two from 1 to 256, not 24"]),
    ("serve --block-size many", ["--block-size takes a whole number, not 'many'"]),
    ("serve --num-blocks 1", ["--num-blocks must be at least 2, not 1"]),
    ("serve --num-threads 0", ["--num-threads must be at least 1"]),
    ("serve --num-threads 100000", ["--num-threads must be at most 1024"]),
    ("serve --num-blocks 99999999999999999999999", ["--num-blocks must be at most 16777216"]),
    ("serve --max-model-len 1", ["--max-model-len must be at least 2, not 1"]),
    ("serve --max-num-seqs 99999999999", ["--max-num-seqs must be at most 65536"]),
    ("serve --max-num-batched-tokens 99999999999", ["--max-num-batched-tokens must be at most"]),
    ("serve --block 16", ["no option --block", "did you mean --block-size or --block-hash"]),
    ("serve --host=", ["--host takes a text that is not empty"]),
    ("serve ~nobody-of-this-name/m", ["MODEL takes a path", "~nobody-of-this-name"]),
    ("serve ./meta-llama/Llama-3.1-8B", ["is not a directory", "on the Hub as org/model"]),
    ("serve --max-num-seqs 0", ["--max-num-seqs must be at least 1"]),
    ("serve --max-num-seqs -3", ["--max-num-seqs must be at least 1, not -3"]),
    (
        "serve --max-num-batched-tokens 8",
        ["--max-num-batched-tokens 8", "--max-num-seqs 256", "raise the first or lower the second"],
    ),
    ("serve --kv-cache-memory-bytes 5XB", ["--kv-cache-memory-bytes", "512MiB", "'5XB'"]),
    ("serve --kv-cache-memory-bytes -5", ["--kv-cache-memory-bytes", "not '-5'"]),
    (
        "serve --num-blocks 9 --kv-cache-memory-bytes 1GiB",
        ["--num-blocks and --kv-cache-memory-bytes", "give one"],
    ),
    ("serve --kv-offload gpu", ["takes cpu or cpu,ssd", "grpc://host:9400, not 'gpu'"]),
    ("serve --kv-offload=", ["--kv-offload takes cpu or cpu,ssd, not ''"]),
    ("serve --kv-offload cpu,", ["takes cpu or cpu,ssd", "grpc://host:9400, not 'cpu,'"]),
    ("serve --kv-offload cpu,sdd", ["not 'cpu,sdd'", "did you mean ssd"]),
    ("serve --kv-offload cpu,cpu", ["names a tier twice", "name each once"]),
    ("serve --kv-offload ssd,cpu", ["from the pool down", "use cpu,ssd"]),
    ("serve --kv-offload-load-failure fial", ["takes recompute or fail", "did you mean"]),
    (
        "serve --kv-offload cpu --kv-offload-faults load:error=1",
        ["--kv-offload-faults", "add one or drop them"],
    ),
    ("serve --kv-offload cpu,ssd --kv-offload-faults load", ["CALL:KIND=VALUE", "'load'"]),
    ("serve --kv-offload cpu,ssd --kv-offload-faults net:load:hang=1", ["'net'", "are ssd"]),
    ("serve --kv-offload cpu,grpc://", ["looks like grpc://host:9400", "'grpc://'"]),
    ("serve --kv-offload grpc://a", ["needs the CPU tier", "use cpu,grpc://a"]),
    ("serve --kv-offload cpu,grpc://a,ssd", ["from the pool down", "use cpu,ssd,grpc://a"]),
    ("serve --kv-offload cpu,grpc://a,grpc://a", ["names a tier twice", "name each once"]),
    ("serve --kv-offload cpu,grpc://a,grpcs://b", ["with and without TLS", "use grpcs://"]),
    (
        "serve --kv-offload cpu --kv-serve [::1]:9500 --kv-peers grpc://b,grpc://[::1]:9500",
        ["--kv-peers names [::1]:9500", "this engine itself"],
    ),
    (
        "serve --kv-offload cpu,grpc://a:9500 --kv-serve a:9500",
        ["--kv-offload names a:9500", "this engine itself"],
    ),
    ("serve --kv-offload cpu --kv-serve :9500", ["--kv-serve takes HOST:PORT"]),
    ("serve --kv-serve a:9500", ["--kv-serve is for the cpu tier"]),
    ("serve --kv-peers grpc://a", ["--kv-peers is for the cpu tier"]),
    ("serve --kv-offload cpu --kv-peers grpc://a,grpc://a", ["names an engine twice"]),
    (
        "serve --kv-offload cpu,ssd --kv-offload-remote-token-file /t",
        ["no cache server is in --kv-offload", "cpu,grpc://host:9400"],
    ),
    ("serve --kv-offload ssd", ["--kv-offload ssd needs the CPU tier", "use cpu,ssd"]),
    (
        "serve --kv-offload cpu --kv-offload-ssd-bytes 1GiB",
        ["--kv-offload-ssd-bytes is given but ssd is not in --kv-offload", "cpu,ssd"],
    ),
    (
        "serve --kv-offload-ssd-path /tmp",
        ["--kv-offload-ssd-path is given but ssd is not in --kv-offload"],
    ),
    (
        "serve --kv-offload-cpu-bytes 1GiB",
        ["--kv-offload-cpu-bytes is given but cpu is not in --kv-offload"],
    ),
    (
        "serve --kv-offload cpu --kv-offload-cpu-bytes 5",
        ["--kv-offload-cpu-bytes must be at least 1MiB, not 5 bytes"],
    ),
    (
        f"serve --kv-offload cpu --kv-offload-cpu-bytes {'9' * 400}TiB",
        ["--kv-offload-cpu-bytes must be at most 1048576TiB, not 9999"],
    ),
    (
        "serve --kv-offload cpu --kv-offload-cpu-bytes 1e30",
        ["--kv-offload-cpu-bytes takes a number of bytes", "512MiB", "'1e30'"],
    ),
    (
        "serve --kv-offload cpu,ssd --kv-offload-ssd-bytes 5",
        ["--kv-offload-ssd-bytes must be at least"],
    ),
    (
        "serve --kv-offload cpu --no-enable-prefix-caching",
        ["--kv-offload", "--no-enable-prefix-caching", "drop one of them"],
    ),
    (
        "serve --no-enable-chunked-prefill --long-prefill-token-threshold 8",
        ["--long-prefill-token-threshold", "--no-enable-chunked-prefill", "drop one of them"],
    ),
    ("serve --block-hash md5", ["--block-hash takes sha256 or sha256_cbor, not 'md5'"]),
    ("serve --served-model-name=", ["--served-model-name takes a text that is not empty"]),
    ("serve --api-key=", ["--api-key is empty"]),
    ("generate", ["needs --prompt TEXT"]),
    ("generate --promt x", ["did you mean --prompt"]),
    ("generate --prompt x --max-tokens few", ["--max-tokens takes a whole number, not 'few'"]),
    ("generate --prompt x --max-tokens 0", ["--max-tokens must be at least 1, got 0"]),
    ("generate --prompt x --temperature hot", ["--temperature takes a number, not 'hot'"]),
    ("generate --prompt x --top-p 2", ["--top-p must be above 0 and at most 1"]),
    ("bench", ["takes the name of a benchmark", "offload"]),
    ("bench ofload", ["no benchmark 'ofload'", "did you mean offload"]),
    ("bench offload --out /dev/null/x", ["--out /dev/null/x cannot be made a directory"]),
]


@pytest.mark.parametrize(("words", "parts"), REFUSED, ids=[words for words, _ in REFUSED])
def test_refusals(words: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stratakv: ")
    assert err.count("\n") == 1, "one sentence"
    for part in parts:
        assert part in err


def test_a_port_in_use_is_known_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err


def test_spaces_between_tiers_are_no_fault() -> None:
    assert config_of("--kv-offload", "cpu, ssd").offload.tiers == ("cpu", "ssd")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("kv_offload", None, "--kv-offload takes cpu or cpu,ssd, not None"),
        ("kv_offload", {"cpu": 1}, "--kv-offload takes cpu or cpu,ssd, not {'cpu': 1}"),
        ("kv_offload", ["cpu", 5], "--kv-offload takes cpu or cpu,ssd"),
        ("kv_offload_ssd_path", 5, "--kv-offload-ssd-path takes a text that is not empty, not 5"),
        ("kv_offload_ssd_path", "a\0b", "without control characters, not 'a\\x00b'"),
        ("block_size", 10**5000, "--block-size takes a power of two from 1 to 256, not a value of"),
        ("num_threads", 10**5000, "--num-threads must be at most 1024, not a value of type int"),
        ("num_blocks", -(10**5000), "--num-blocks must be at least 2, not a value of type int"),
        ("admit_below", 10**5000, "--admit-below takes a number, not a value of type int"),
        ("kv_cache_memory_bytes", -(10**5000), "must be at least 1 bytes, not a value of type"),
        ("kv_cache_memory_bytes", 10**5000, "must be at most 1048576TiB, not a value of type"),
        ("enable_prefix_caching", 10**5000, "takes true or false"),
        ("dtype", [10**5000], "--dtype takes auto"),
        ("dtype", np.array(["auto", "float32"]), "--dtype takes auto"),
        ("tenant_secret", b"x" * 5000, "--tenant-secret takes up to 4096 characters, not 5000"),
        ("x" * 5000, 1, "there is no option 'xxx"),
        ("served_model_name", "a\nb", "takes one line of UTF-8 without control characters"),
        ("kv_offload_cpu_bytes", True, "takes a number of bytes"),
        ("kv_offload_cpu_bytes", 2**70, "must be at most 1048576TiB"),
        ("block_size", 16.0, "--block-size takes a whole number, not 16.0"),
        ("block_size", None, "--block-size takes a whole number, not None"),
        ("block", 16, "no option 'block'; did you mean block_size or block_hash"),
    ],
    ids=format_value,
)
def test_options_of_another_type(name: str, value: object, words: str) -> None:
    """As the Python API gives them."""
    with pytest.raises(ConfigError) as refusal:
        engine_config(None, {"kv_offload": "cpu,ssd", name: value})
    assert words in str(refusal.value)


@pytest.mark.parametrize("model", [5, [], "", "a\0b"])
def test_a_model_that_is_no_path(model: Any) -> None:
    with pytest.raises(ConfigError, match="MODEL takes"):
        engine_config(model, {})


def test_nothing_given_is_the_embedded_model() -> None:
    config = config_of()
    assert config.model.path == EMBEDDED_MODEL
    assert config.model.served_name == "stratakv-embedded"
    assert config == EngineConfig(model=config.model)


def test_every_flag_arrives(tmp_path: Path) -> None:
    config = config_of(
        str(tmp_path), "--served-model-name", "m", "--revision", "r", "--dtype", "float64",
        "--max-model-len", "99", "--block-size", "32", "--num-blocks", "77", "--block-hash",
        "sha256_cbor", "--max-num-batched-tokens", "128", "--max-num-seqs", "16",
        "--long-prefill-token-threshold", "64", "--kv-offload", "cpu,ssd",
        "--kv-offload-cpu-bytes", "512MiB", "--kv-offload-ssd-path", str(tmp_path / "s"),
        "--kv-offload-ssd-bytes", "1.5GiB", "--num-threads", "3",
    )  # fmt: skip
    assert (config.model.path, config.model.served_name) == (tmp_path, "m")
    assert (config.model.revision, config.model.dtype, config.model.max_model_len) == (
        "r", "float64", 99,
    )  # fmt: skip
    assert (config.cache.block_size, config.cache.num_blocks) == (32, 77)
    assert config.cache.block_hash == "sha256_cbor"
    assert config.scheduler.max_num_batched_tokens == 128
    assert config.scheduler.max_num_seqs == 16
    assert config.scheduler.long_prefill_token_threshold == 64
    assert config.offload.tiers == ("cpu", "ssd")
    assert (config.offload.cpu.capacity_bytes, config.offload.ssd.capacity_bytes) == (
        512 * MIB,
        1536 * MIB,
    )
    assert config.offload.ssd.path == tmp_path / "s"
    assert config.num_threads == 3


def test_switches(tmp_path: Path) -> None:
    config = config_of("--no-enable-prefix-caching", "--no-enable-chunked-prefill")
    assert not config.cache.enable_prefix_caching
    assert not config.scheduler.enable_chunked_prefill
    assert config_of("--enable-prefix-caching").cache.enable_prefix_caching
    assert config_of("--kv-cache-memory-bytes", "2MB").cache.memory_bytes == 2_000_000


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("/somewhere", "/somewhere/stratakv/ssd"), ("", "/home/me/.cache/stratakv/ssd")],
)
def test_where_the_ssd_tier_lies(
    monkeypatch: pytest.MonkeyPatch, variable: str, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert config_of("--kv-offload", "cpu,ssd").offload.ssd.path == Path(expected)
    assert config_of("--kv-offload", "cpu").offload.ssd.path is None


def test_the_name_is_the_directorys(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert config_of(f"{tmp_path}/my-model/").model.served_name == "my-model"


def test_flags_are_never_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--num-block", "9"]) == 2
    assert "did you mean --num-blocks" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"stratakv {stratakv.__version__}\n"
    assert main(["--help"]) == 0
    help_text = capsys.readouterr().out
    assert all(word in help_text for word in ("serve", "generate", "bench"))
    assert main([]) == 2
    for command in ("serve", "generate"):
        with pytest.raises(SystemExit) as left:
            main([command, "--help"])
        assert left.value.code == 0
        shown = capsys.readouterr().out
        assert all(flag_of(name) in shown for name in OPTIONS)


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if only the base installation were there."""
    real = builtins.__import__
    missing = re.compile(r"(torch|zmq|uvicorn|fastapi|tokenizers|numpy)(\.|$)")

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if missing.match(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **more)

    for name in list(sys.modules):
        if name.startswith(("stratakv.engine.llm", "stratakv.engine.text.tokenizer")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.usefixtures("without_engine")
def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "x"]) == 2
    err = capsys.readouterr().err
    assert "is not installed" in err
    assert "pip install '.[engine]'" in err


@pytest.mark.usefixtures("without_engine")
def test_a_missing_extra_is_named_by_the_python_api_too() -> None:
    import stratakv.engine

    with pytest.raises(ModuleNotFoundError, match=r"pip install '.\[engine\]'"):
        stratakv.engine.LLM  # noqa: B018


def test_a_failure_of_the_engine_is_another_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stratakv.engine.cli import generate
    from stratakv.engine.client.base import EngineDead

    def fail(error: BaseException) -> Any:
        def run(args: argparse.Namespace) -> int:
            raise error

        return run

    for error, code in ((EngineDead("it is gone"), 1), (KeyboardInterrupt(), 130)):
        monkeypatch.setattr(generate, "run", fail(error))
        assert main(["generate", "--prompt", "x"]) == code
    assert capsys.readouterr().err == "stratakv: it is gone\n"
