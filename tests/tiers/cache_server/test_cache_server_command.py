# SPDX-License-Identifier: Apache-2.0
"""`stratakv cache-server` as a process: its life, what it refuses, what it does not load."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from stratakv.engine.cli.main import main
from stratakv.tiers.contract import make_keys, payload_of
from stratakv.tiers.mac_key import MacKey
from stratakv.tiers.ssd.store_check import check_store
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.raw_messages import Piece

from ...nursery_site.nursery_client import run
from .rig import LAYOUT, WAIT_SECONDS, load_blocks, pieces_of, server_process, store_blocks

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
COMMAND = [sys.executable, "-m", "stratakv.engine.cli.main", "cache-server"]


def test_a_process_from_its_start_to_its_end(tmp_path: Path) -> None:
    secret = tmp_path / "ssd" / "server.secret"
    flags = ("--ssd-path", str(tmp_path / "ssd"), "--ssd-bytes", "4MiB")
    keys = make_keys(5)
    with server_process(*flags) as server:
        stub = server.stub()
        first = server.attach(stub).boot_id
        assert store_blocks(stub, keys) == [State.KEPT] * 5
        assert secret.stat().st_mode & 0o777 == 0o600
        assert server.terminate() == 0
        assert f"StrataKV cache server at 127.0.0.1:{server.port} (no TLS)" in server.output
        assert "tenants default (cpu 256KiB, ssd 4MiB)" in server.output

        server.start()
        stub = server.stub()
        assert server.attach(stub).boot_id != first
        assert load_blocks(stub, keys) == [payload_of(key, LAYOUT) for key in keys]
        server.kill()
        server.start()
        stub = server.stub()
        server.attach(stub)
        found = load_blocks(stub, keys)
        for key, block in zip(keys, found, strict=True):
            assert block in (None, payload_of(key, LAYOUT))


def test_a_process_says_what_is_wrong() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run([*COMMAND, "--port", str(port)], cwd="/", timeout=WAIT_SECONDS)
    assert done.returncode == 2
    assert re.fullmatch(f"stratakv: port {port} of 127.0.0.1 is in use; .* --port\n", done.stderr)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ssd-bytes", "1GiB"], "--ssd-path and --ssd-bytes go together"),
        (["--ssd-mac-key-file", "x"], "is for blocks on a disk; give --ssd-path too"),
        (
            ["--ssd-path", "FOLDER", "--ssd-bytes", "1GiB", "--ssd-mac-key-file", "/dev/null"],
            "--ssd-mac-key-file names /dev/null, which is no regular file",
        ),
        (
            ["--ssd-path", "FOLDER", "--ssd-bytes", "1GiB", "--ssd-mac-key-file", "FOLDER/key"],
            "--ssd-mac-key-file names FOLDER/key, which lies in FOLDER, .* keep it elsewhere",
        ),
        (["--require-tiers"], "--require-tiers is for blocks on a disk; give --ssd-path too"),
        (
            ["--ssd-path", "FOLDER/a,FOLDER/b/../a", "--ssd-bytes", "1GiB"],
            "the ssd tier is given FOLDER/a twice; name each disk once",
        ),
        (
            ["--ssd-path", "FOLDER,/dev/null", "--ssd-bytes", "1GiB", "--require-tiers"],
            "--ssd-path /dev/null cannot be used",
        ),
        (["--tls-cert", "x"], "--tls-cert and --tls-key go together"),
        (["--tenants", "FOLDER/tenants.toml"], "is no TOML"),
        (["--tenants", "FOLDER/tenants.toml", "--token-file", "x"], "give one of the two"),
        (["--tenants", "/no/such"], "cannot be read"),
        (["--tenants", "FOLDER/large.toml"], "cpu_bytes are 2147483648 .* raise --cpu-bytes"),
        (["--token-file", "FOLDER/config.toml"], "holds a space"),
        # Which once let anybody in.
        (["--token-file", "FOLDER/empty"], "FOLDER/empty, which is empty; write a token there"),
        (["--token-file", "FOLDER/pipe"], "FOLDER/pipe, which cannot be .*no ordinary file"),
        (["--tenants", "FOLDER/pipe"], "FOLDER/pipe, which cannot be .*no ordinary file"),
        (["--tenants", "FOLDER"], "FOLDER, which cannot be read .*no ordinary file"),
        (["--tls-cert", "FOLDER/pipe", "--tls-key", "x"], "FOLDER/pipe, .*no ordinary file"),
        (["--config", "FOLDER/config.toml"], "cpu_byte of .* is no option; did you mean cpu_bytes"),
        (["--cpu-bytes", "many"], "--cpu-bytes takes a number of bytes"),
        (["--call-seconds", "0"], "call_seconds must be a number above 0"),
        (["--drain-seconds", "nan"], "--drain-seconds takes seconds from 0 to 3600"),
        (["--secret-file", "FOLDER"], "name another one with --secret-file"),
    ],
)
def test_settings_that_cannot_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    """In this process: all of it is found before anything is started."""
    entry = f'[[tenant]]\nname = "ann"\ncpu_bytes = "2GiB"\ntoken_sha256 = "{"0" * 64}'
    (tmp_path / "tenants.toml").write_text(entry)
    (tmp_path / "large.toml").write_text(f'{entry}"\n')
    (tmp_path / "config.toml").write_text("cpu_byte = 5\n")
    (tmp_path / "config.toml").chmod(0o600)
    (tmp_path / "empty").write_text("\n")
    os.mkfifo(tmp_path / "pipe")
    words = [flag.replace("FOLDER", str(tmp_path)) for flag in flags]
    assert main(["cache-server", "--port", "0", *words]) == 2
    error = capsys.readouterr().err
    assert (
        re.search(message.replace("FOLDER", str(tmp_path)), error) and "Traceback" not in error
    ), error


def test_a_key_for_blocks_on_the_disk(tmp_path: Path) -> None:
    key = tmp_path / "mac.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    folder, keys = tmp_path / "ssd", make_keys(5)
    flags = ("--ssd-path", str(folder), "--ssd-bytes", "4MiB")
    with server_process(*flags, "--ssd-mac-key-file", str(key)) as server:
        stub = server.stub()
        server.attach(stub)
        assert store_blocks(stub, keys) == [State.KEPT] * 5
        assert server.terminate() == 0
        server.start()
        stub = server.stub()
        server.attach(stub)
        assert load_blocks(stub, keys) == [payload_of(each, LAYOUT) for each in keys]
        assert server.terminate() == 0
    (store,) = (each for each in folder.iterdir() if each.is_dir())
    assert check_store(store, mac_key=MacKey(key.read_bytes())).whole == 5


def test_a_second_signal_ends_it_at_once() -> None:
    with server_process("--drain-seconds", "60") as server:
        stub = server.stub()
        server.attach(stub)
        hold = threading.Event()

        def endless() -> Iterator[Piece]:
            yield next(pieces_of(make_keys(1)))
            hold.wait(WAIT_SECONDS)

        call = stub.store.future(endless(), timeout=WAIT_SECONDS)
        try:
            assert server.process is not None
            time.sleep(0.1)
            server.process.terminate()
            deadline = time.monotonic() + WAIT_SECONDS
            while server.health() != NOT_SERVING:
                assert time.monotonic() < deadline
            began = time.monotonic()
            assert server.terminate() == -signal.SIGTERM
            assert time.monotonic() - began < WAIT_SECONDS / 2
        finally:
            hold.set()
            call.cancel()


def test_flags_come_before_the_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token of the only tenant\n".replace(" ", "-"))
    token.chmod(0o600)
    config = tmp_path / "config.toml"
    config.write_text(f'cpu-bytes = "1MiB"\ntoken_file = "{token}"\nlog-level = "warning"\n')
    with server_process("--config", str(config), "--cpu-bytes", "512KiB") as server:
        with pytest.raises(grpc.RpcError) as raised:
            server.attach(server.stub())
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        response = server.attach(server.stub(token.read_text().strip()))
        assert response.capacity_bytes == 512 * 1024


def test_a_new_token_fits_the_tenants_file(tmp_path: Path) -> None:
    made = run([*COMMAND, "--new-token", "ann"], cwd="/", timeout=WAIT_SECONDS).stdout
    token = made.splitlines()[0].removeprefix("token: ")
    path = tmp_path / "tenants.toml"
    path.write_text(made[made.index("[[tenant]]") :].replace("1GiB", "256KiB"))
    with server_process("--tenants", str(path)) as server:
        assert server.attach(server.stub(token)).capacity_bytes == 256 * 1024


def test_the_process_loads_neither_torch_nor_the_engine() -> None:
    code = """
import sys
from stratakv.engine.cli.main import main
import stratakv.engine.cli.cache_server as command
command._serve = lambda *settings: sys.exit(0)
import stratakv.tiers.cache_server.server
try:
    main(["cache-server", "--port", "0"])
finally:
    print("\\n".join(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/", capture_output=True, text=True, timeout=WAIT_SECONDS, check=True,
    )  # fmt: skip
    loaded = set(done.stdout.split())
    assert "stratakv.tiers.cache_server.server" in loaded
    for name in ("torch", "numpy", "zmq", "fastapi", "uvicorn", "tokenizers", "cupy"):
        assert name not in loaded
    for name in ("core", "worker", "scheduler", "cache", "api", "llm"):
        assert f"stratakv.engine.{name}" not in loaded


def test_the_package_alone_loads_no_grpc() -> None:
    code = (
        "import sys, stratakv; print([m for m in sys.modules if m in ('grpc', 'google.protobuf')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/", capture_output=True, text=True, timeout=WAIT_SECONDS, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
