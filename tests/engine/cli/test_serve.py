# SPDX-License-Identifier: Apache-2.0
"""`stratakv serve` as a process: its ready line, its answers, and every way it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.cli.serve import _tell_start, bind
from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.config.server_options import ServerConfig
from stratakv.engine.request.core_messages import Ready
from stratakv.tiers.settings.values import ConfigError

from ...notify_socket import NotifySocket

FLAGS = ["--port", "0", "--num-blocks", "60", "--num-threads", "1", "--log-level", "warning"]
READY = re.compile(r"StrataKV serves tiny at (http://127\.0\.0\.1:\d+) ")


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    # One that is killed leaves the folder of its sockets behind.
    with tempfile.TemporaryDirectory(prefix="stratakv-test-") as scratch:
        process = subprocess.Popen(
            [sys.executable, "-m", "stratakv.engine.cli.main", "serve", str(model),
             "--served-model-name", "tiny", *FLAGS, *flags],
            cwd="/",
            env={**os.environ, "TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


def wait_ready(process: subprocess.Popen[str]) -> str:
    """The URL of the ready line."""
    assert process.stdout is not None
    found = READY.match(process.stdout.readline())
    assert found, process.communicate()
    return found[1]


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return json.load(answer)


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def as_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NotifySocket]:
    """What starts in the test is started by a systemd that hears it here."""
    with NotifySocket(str(tmp_path / "notify")) as listening:
        monkeypatch.setenv("NOTIFY_SOCKET", listening.path)
        yield listening


@pytest.mark.slow
def test_a_life(tiny_model: Path, small_tiers: dict[str, str], as_service: NotifySocket) -> None:
    """Ready, an answer, Ctrl-C: exit code 0, and the blocks are there in the next life."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in small_tiers.items()]
    body = {"prompt": [7] * 100, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    answers = []
    for number in (signal.SIGINT, signal.SIGTERM):
        with serving(tiny_model, *flags) as process:
            assert as_service.next() == {"READY": "1"}
            url = wait_ready(process)
            assert ask(url, "/v1/models")["data"][0]["id"] == "tiny"
            assert as_service.is_quiet()
            answers.append(ask(url, "/v1/completions", body))
            process.send_signal(number)
            assert process.wait(20) == 0
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()
            assert as_service.next() == {"STOPPING": "1"} and as_service.is_quiet()
    first, second = answers
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
    assert details[0]["cached_tokens"] == 0
    assert details[1]["cached_tokens_by_tier"]["ssd"] == 96


@pytest.mark.slow
@pytest.mark.usefixtures("no_nursery")
def test_the_end_of_the_core_is_the_end_of_the_server(tiny_model: Path) -> None:
    with serving(tiny_model) as process:
        wait_ready(process)
        [core] = children(process.pid)
        os.kill(core, signal.SIGKILL)
        assert process.wait(15) == 1
        assert process.stderr is not None
        assert "the engine core was ended by SIGKILL" in process.stderr.read()


@pytest.mark.usefixtures("no_nursery")
def test_a_signal_ends_a_start(tiny_model: Path) -> None:
    with serving(tiny_model) as process:
        deadline = time.monotonic() + 20
        while not (cores := children(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        assert not Path(f"/proc/{cores[0]}").exists()


def test_what_a_socket_can_be_bound_to() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert sock.getsockname()[1] > 0
        with pytest.raises(ConfigError, match="is in use"):
            bind("127.0.0.1", sock.getsockname()[1])
    with bind("localhost", 0) as sock:
        assert sock.family in (socket.AF_INET, socket.AF_INET6)
    with pytest.raises(ConfigError, match=r"--host 203\.0\.113\.1 is no address of this machine"):
        bind("203.0.113.1", 0)


@pytest.mark.slow
def test_flags_environment_and_a_file_make_one_server(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In JSON, to the last line of every process, and with no secret in any line."""
    key, secret = "key-that-nobody-sees", "secret-that-nobody-sees"
    path = tmp_path / "stratakv.yaml"
    path.write_text(
        "served-model-name: of-the-file\nmax-model-len: 99\nblock-size: 32\nlog-json: true\n"
        f"kv-offloading-size: 0.002\ntenant-secret: {secret}\nlog-level: debug\n"
    )
    monkeypatch.setenv("STRATAKV_CONFIG", str(path))
    monkeypatch.setenv("STRATAKV_BLOCK_SIZE", "8")
    monkeypatch.setenv("STRATAKV_API_KEY", key)
    with serving(tiny_model, "--log-level", "info") as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())["message"]
        found = re.match(
            r"StrataKV serves tiny at (\S+) \(context 99, 60 blocks of 8 tokens", ready
        )
        assert found, "the flag, the file, the flag and the variable"
        with pytest.raises(urllib.error.HTTPError) as refusal:
            ask(found[1], "/v1/models")
        assert refusal.value.code == 401
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    records = [json.loads(line) for line in err.splitlines()]
    assert key not in ready + out + err
    assert secret not in ready + out + err
    messages = {record["logger"]: record["message"] for record in records}
    assert {"cli.serve", "core.engine_core"} <= messages.keys()
    assert "uvicorn" not in messages, "our lines say when it starts and ends"
    assert {record["level"] for record in records} == {"info"}
    told = " | ".join(record["message"] for record in records)
    for word in (
        f"options given: 6 by the command line, 2 by the environment, 5 by {path}",
        "tiers below the pool: cpu 2.048MiB", "KV pool of 480 tokens",
    ):  # fmt: skip
        assert word in told


@pytest.mark.slow
def test_a_refusal_by_the_core_is_a_log_line_too_and_names_its_origin(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAKV_MAX_MODEL_LEN", "100000")
    with serving(tiny_model, "--log-json") as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    record = json.loads(err.splitlines()[-1])
    assert (record["level"], record["logger"]) == ("error", "cli.main")
    assert record["message"].endswith("(--max-model-len comes from STRATAKV_MAX_MODEL_LEN)")


@pytest.mark.parametrize(
    ("host", "api_key", "is_warned"),
    [("0.0.0.0", None, True), ("0.0.0.0", "key", False), ("127.0.0.1", None, False)],
)
def test_what_a_start_tells(
    host: str,
    api_key: str | None,
    is_warned: bool,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that others can reach without a key is worth a warning."""
    caplog.set_level("INFO")
    config = engine_config(None, {"kv_offload": "cpu,ssd", "kv_offload_ssd_bytes": "16MiB"})
    ready = Ready(1, 256, 257, 60, 16, [256])
    with bind(host, 0) as sock:
        _tell_start(config, ServerConfig(api_key=api_key), ready, sock)
    assert "KV pool of 960 tokens, for requests of up to 256" in caplog.messages
    assert "tiers below the pool: cpu 4GiB, ssd 16MiB" in caplog.messages
    assert capsys.readouterr().out.startswith(
        f"StrataKV serves stratakv-embedded at http://{host}:"
    )
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert bool(warnings) == is_warned
    assert all("--api-key" in warning for warning in warnings)


@pytest.mark.slow
@pytest.mark.parametrize(("word", "longest"), [("auto", 3), ("none", 16)])
def test_whether_the_models_recommendations_count(
    tiny_model: Path, tmp_path: Path, word: str, longest: int
) -> None:
    """`max_new_tokens` of generation_config.json, where a request says nothing."""
    for path in tiny_model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 3, "temperature": 0.0}')
    with serving(tmp_path, "--generation-config", word) as process:
        body = {"prompt": [7] * 5, "ignore_eos": True}
        usage = ask(wait_ready(process), "/v1/completions", body)["usage"]
    assert usage["completion_tokens"] == longest
