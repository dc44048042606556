# SPDX-License-Identifier: Apache-2.0
"""What an audit found at the cache server: who gets in, what is told, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from stratakv.engine.cli.main import main
from stratakv.engine.config.resolve import read_environment
from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.cache_server.access.tls import TlsFiles
from stratakv.tiers.cache_server.transports.memory_server import MemoryServer
from stratakv.tiers.contract import make_keys, put
from stratakv.tiers.errors import TierConfigError, TierError
from stratakv.tiers.remote.credentials import Credentials
from stratakv.tiers.remote.membership import ServerAddress
from stratakv.tiers.remote.remote_settings import RemoteSettings
from stratakv.tiers.remote.remote_store import open_remote
from stratakv.tiers.wire.frames import encode_greeting
from stratakv.tiers.wire.own_token import find_token, leave_token, take_away_token
from stratakv.tiers.wire.sockets import ConnectionLost

from ..tiers.cache_server.data_plane import TICKET, Plane
from ..tiers.cache_server.rig import (
    LAYOUT,
    WAIT_SECONDS,
    ServerProcess,
    running_server,
    server_process,
    tenant,
    token_of,
)

pytestmark = pytest.mark.regression

COMMAND = [sys.executable, "-m", "stratakv.engine.cli.main", "cache-server"]
NOBODY = 65534
REPOSITORY = Path(__file__).resolve().parents[2]
ONE_BLOCK = str(LAYOUT.slot_bytes)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are left in folders of the test's own."""
    for name in [name for name in os.environ if name.startswith("STRATAKV_")]:
        monkeypatch.delenv(name)
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))


@contextlib.contextmanager
def private_server(*flags: str) -> Iterator[ServerProcess]:
    """One that has credentials of no other kind."""
    server = ServerProcess("--cpu-bytes", str(64 * LAYOUT.slot_bytes), *flags, own_token=True)
    try:
        server.start()
        yield server
    finally:
        server.close()


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def tenants_file(folder: Path, **fields: str) -> Path:
    """With the tenants ann and eve."""
    rest = "".join(f'{name} = "{value}"\n' for name, value in fields.items())
    path = folder / "tenants.toml"
    path.write_text(
        "".join(
            f'[[tenant]]\nname = "{name}"\ncpu_bytes = {64 * LAYOUT.slot_bytes}\n'
            f'token_sha256 = "{tenant(name).token_digests[0].hex()}"\n{rest}'
            for name in ("ann", "eve")
        )
    )
    return path


def code_of(call: Callable[[], object]) -> Any:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code()


# T4: tenants under one user


def unix_path(server: ServerProcess, token: str | None = None) -> str:
    stub = server.stub(token)
    server.attach(stub)
    path: str = stub.open_data(messages.OpenDataRequest(), timeout=WAIT_SECONDS).unix_path
    return path


def test_t04_tenants_share_no_memory_unless_told_to(tmp_path: Path) -> None:
    """Every tenant's slab could be had through /proc by any process of the server's user."""
    flags = ("--tenants", str(tenants_file(tmp_path)), "--cpu-bytes", "1MiB")
    with server_process(*flags) as server:
        assert unix_path(server, token_of("ann")) == ""
    with server_process(*flags, "--shared-memory") as server:
        assert unix_path(server, token_of("ann")) != ""
    with server_process() as server:  # a single tenant has nobody to hide from
        assert unix_path(server) != ""


# What is started after it is held to the rules that hold for ordinary users, root's processes too.
WITHOUT_CAPABILITIES = """
import ctypes, os, sys
if os.geteuid() == 0:
    for capability in range(64):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
AS_ORDINARY_USER = [sys.executable, "-c", WITHOUT_CAPABILITIES]
LOOK_IN = """
import os, sys
for name in ("fd/1", "mem", "environ"):
    path = f"/proc/{sys.argv[1]}/{name}"
    try:
        os.close(os.open(path, os.O_RDONLY))
    except PermissionError:
        continue
    sys.exit(f"{path} is open to this user")
"""


def test_t04_other_processes_of_its_user_cannot_look_in(tmp_path: Path) -> None:
    """Its descriptors, the memory of all tenants among them, were there for the taking."""
    process = subprocess.Popen(
        [*AS_ORDINARY_USER, *COMMAND[1:], "--port", "0", "--data-port", "0", "--cpu-bytes", "1MiB"],
        cwd="/", env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        wait_for_line(process, "StrataKV cache server at")
        done = subprocess.run(
            [*AS_ORDINARY_USER, "-c", LOOK_IN, str(process.pid)],
            cwd="/", capture_output=True, text=True, timeout=WAIT_SECONDS, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for_line(process: subprocess.Popen[str], start: str) -> str:
    assert process.stdout is not None
    said = ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(WAIT_SECONDS):
            line = process.stdout.readline()
            said += line
            if start in line:
                return line
            assert line, f"it ended: {said}"
    raise AssertionError(f"it does not say {start}: {said}")


# T6: who is let in by default


def test_t06_only_clients_of_its_user_are_let_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever could open a port of this machine could list, read and delete every block."""
    with private_server() as server:
        path = tmp_path / "XDG_RUNTIME_DIR" / "stratakv" / f"cache-server-{server.port}.token"
        assert path.stat().st_mode & 0o777 == 0o600
        stranger = server.stub()
        for call, request in (
            (stranger.lookup, messages.LookupRequest()),
            (stranger.delete, messages.DeleteRequest(all=True)),
            (stranger.open_data, messages.OpenDataRequest()),
            (stranger.describe, messages.DescribeRequest()),
        ):
            code = code_of(lambda call=call, request=request: call(request, timeout=WAIT_SECONDS))
            assert code is grpc.StatusCode.UNAUTHENTICATED
        for host in ("127.0.0.1", "localhost"):
            for words in (["ping", "--count", "1"], ["describe"]):
                assert main([words[0], f"grpc://{host}:{server.port}", *words[1:]]) == 0
        store = open_remote([ServerAddress("localhost", server.port)], LAYOUT, RemoteSettings())
        try:
            assert store.wait_up(WAIT_SECONDS)
            assert put(store, make_keys(4)) == [True] * 4
            # A killed server leaves its token; the next one's is another, and clients find it.
            before = path.read_text()
            server.kill()
            assert path.exists()
            server.start()
            assert path.read_text() != before

            def is_served_again() -> bool:
                with contextlib.suppress(TierError):
                    return store.wait_up(0.1) and put(store, make_keys(2, "n")) == [True] * 2
                return False

            wait_for(is_served_again)
        finally:
            store.close(WAIT_SECONDS)
        assert server.terminate() == 0
        assert not path.exists()
        assert f"by the token in {path}" in server.output
        assert before.strip() not in server.output
    capsys.readouterr()


def test_t06_another_user_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with private_server() as server:
        for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
            monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
        assert main(["ping", f"grpc://127.0.0.1:{server.port}"]) == 1
    said = capsys.readouterr().err
    assert "unauthenticated" in said and "name a token with --token-file" in said


def test_t06_insecure_lets_anybody_in(tmp_path: Path) -> None:
    with private_server("--insecure") as server:
        server.attach(server.stub())
        assert not list(tmp_path.rglob("*.token"))
        server.terminate()
        assert "for any client that reaches it" in server.output


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_t06_a_token_that_others_can_use_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int
) -> None:
    path = leave_token(9400, "a token of some length")
    path.chmod(mode)
    with pytest.raises(TierConfigError, match="others can read or write"):
        find_token(9400)
    assert main(["ping", "grpc://127.0.0.1:9400"]) == 2
    assert "remove it and restart the cache server" in capsys.readouterr().err
    if mode != 0o640:  # of a group, as secrets of Kubernetes are
        assert main(["cache-server", "--port", "0", "--token-file", str(path)]) == 2
        assert f"run: chmod 600 {path}" in capsys.readouterr().err


def test_t06_where_tokens_are_left_and_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = leave_token(1234, "the first token")
    assert first.is_relative_to(tmp_path / "XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/none")
    second = leave_token(1234, "the second token")
    assert second.is_relative_to(tmp_path / "XDG_CACHE_HOME")
    assert (find_token(1234), find_token(1235)) == ("the second token", None)
    take_away_token(second, "the token of another")
    assert second.exists()
    take_away_token(second, "the second token")
    assert not second.exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(TierConfigError, match="--token-file"):
        leave_token(1234, "no place for it")
    assert find_token(1234) is None


def test_t06_a_token_is_shown_to_this_machine_only(tmp_path: Path) -> None:
    leave_token(9400, "a token of some length")
    here = ServerAddress("127.0.0.1", 9400)
    shown = (("authorization", "Bearer a token of some length"),)
    assert Credentials().metadata(here) == shown
    for other in (ServerAddress("192.0.2.1", 9400), ServerAddress("cache", 9400)):
        assert Credentials().metadata(other) == ()
    assert Credentials().metadata(ServerAddress("::1", 9401)) == ()
    certificate = Credentials(cert_file=tmp_path / "cert", key_file=tmp_path / "key")
    assert certificate.metadata(here) == ()


# T12: the kernel is asked who calls


@needs_root
def test_t12_another_user_at_the_socket_for_memory() -> None:
    """Without the check all passed: only the folder kept others out."""
    plane = Plane()
    folder = os.path.dirname(plane.path)
    os.chmod(folder, 0o755)
    os.chmod(plane.path, 0o666)
    code = (
        "import array, os, socket, sys; s = socket.socket(socket.AF_UNIX); "
        "os.setuid(int(sys.argv[3])); s.connect(sys.argv[1]); "
        "s.sendall(bytes.fromhex(sys.argv[2])); sys.exit(len(socket.recv_fds(s, 4096, 1)[0]))"
    )
    words = [sys.executable, "-c", code, plane.path, encode_greeting(TICKET).hex()]
    for user, is_served in ((NOBODY, False), (0, True)):
        done = subprocess.run([*words, str(user)], cwd="/", timeout=WAIT_SECONDS, check=False)
        assert (done.returncode > 1) == is_served, "it is sent a welcome, or nothing"
    plane.close()


def test_t12_a_peer_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = Plane()
    one, two = socket.socketpair()
    with one, two:
        assert isinstance(plane.memory, MemoryServer)
        with monkeypatch.context() as patched:
            patched.setattr(os, "geteuid", lambda: NOBODY + 1)
            with pytest.raises(ConnectionLost, match="may not map the memory"):
                plane.memory._wrap(one)
        plane.memory._wrap(one)
    plane.close()


# T13: metrics that others can reach; what a killed server leaves


def test_t13_metrics_are_not_shown_to_other_machines_unasked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--metrics-host 0.0.0.0 escaped the check of what others can reach."""
    flags = ["--port", "0", "--data-port", "0", "--metrics-port", "0", "--metrics-host", "0.0.0.0"]
    assert main(["cache-server", *flags]) == 2
    assert "--metrics-exposed" in capsys.readouterr().err
    with running_server(metrics_port=0, metrics_host="0.0.0.0", metrics_exposed=True) as server:
        assert server.server.metrics_port


def test_t13_the_folder_of_a_killed_server_is_removed() -> None:
    """Each left one behind, for ever."""
    with server_process() as server:
        first = os.path.dirname(unix_path(server))
        server.kill()
        assert os.path.exists(first)
        with tempfile.TemporaryDirectory(
            prefix="stratakv-memory-", dir=os.path.dirname(first)
        ) as made:  # by a server that has not come far yet
            server.start()
            second = os.path.dirname(unix_path(server))
            assert not os.path.exists(first) and os.path.exists(made)
        other = ServerProcess(*server.flags)
        try:
            other._scratch.cleanup()
            other._scratch = server._scratch
            other.start()
            assert os.path.exists(second), "its server lives"
            other.kill()
        finally:
            if other.process is not None and other.process.returncode is None:
                other.kill()
        server.terminate()
        assert not os.path.exists(second)


# U6: what is told


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and server, good and foreign as certificates with keys."""
    folder = tmp_path_factory.mktemp("pki")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    for name, signer in (("server", authority), ("good", authority), ("foreign", trustme.CA())):
        issued = signer.issue_cert("localhost" if name == "server" else name)
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
        (folder / f"{name}.key").chmod(0o600)
    return folder


def test_u06_ping_without_the_clients_certificate(
    pki: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said "Socket closed"."""
    files = TlsFiles(pki / "server.pem", pki / "server.key", pki / "ca.pem")

    def ping(*flags: str) -> tuple[int, str]:
        where = f"grpcs://localhost:{server.port}"
        code = main(["ping", where, "--count", "1", "--ca-file", str(pki / "ca.pem"), *flags])
        return code, capsys.readouterr().err

    def certificate(name: str) -> tuple[str, ...]:
        return "--cert-file", str(pki / f"{name}.pem"), "--key-file", str(pki / f"{name}.key")

    with running_server(tls=files) as server:
        code, said = ping()
        assert code == 1 and "name one with --cert-file and --key-file" in said
        code, said = ping(*certificate("foreign"))
        assert code == 1 and "does not trust the certificate" in said
        assert ping(*certificate("good")) == (0, "")


def test_u06_the_log_has_lines_of_ours_only(pki: Path) -> None:
    """The core of gRPC wrote its own between them."""
    flags = ("--tls-cert", str(pki / "server.pem"), "--tls-key", str(pki / "server.key"))
    with server_process(*flags, "--tls-client-ca", str(pki / "ca.pem"), start=False) as server:
        server.host, server.tls = "localhost", good_credentials(pki)
        server.start()
        bad = grpc.ssl_channel_credentials((pki / "ca.pem").read_bytes())
        with contextlib.suppress(grpc.RpcError):
            server.stub(tls=bad).lookup(messages.LookupRequest(), timeout=WAIT_SECONDS)
        with socket.create_connection(("127.0.0.1", server.port), WAIT_SECONDS) as sock:
            sock.sendall(b"no hello of TLS" * 100)
            sock.recv(100)
        server.attach(server.stub())
        assert server.terminate() == 0
        assert "StrataKV cache server at" in server.output
        assert not re.search(r"\.cc:\d+|absl", server.output), server.output


def good_credentials(pki: Path) -> Any:
    names = ("ca.pem", "good.key", "good.pem")
    return grpc.ssl_channel_credentials(*((pki / name).read_bytes() for name in names))


def test_u06_a_disk_that_no_tenant_would_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--ssd-path was unused without a word."""
    words = ["cache-server", "--port", "0", "--tenants", str(tenants_file(tmp_path))]
    disk = ["--ssd-path", str(tmp_path / "ssd"), "--ssd-bytes", "4MiB"]
    assert main([*words, *disk]) == 2
    assert "no tenant in" in capsys.readouterr().err


def test_u06_options_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only command whose options could not be set so."""
    config = tmp_path / "config.toml"
    config.write_text('cpu_bytes = "1MiB"\ndrain_seconds = 1\ncall_seconds = 7\n')
    monkeypatch.setenv("STRATAKV_CACHE_SERVER_CONFIG", str(config))
    monkeypatch.setenv("STRATAKV_CACHE_SERVER_CPU_BYTES", "512KiB")
    monkeypatch.setenv("STRATAKV_CACHE_SERVER_DRAIN_SECONDS", "2")
    # As Kubernetes does, for a service of that name.
    monkeypatch.setenv("STRATAKV_CACHE_SERVER_PORT", "tcp://10.0.0.1:9400")
    monkeypatch.setenv("STRATAKV_CACHE_SERVER_SERVICE_HOST", "10.0.0.1")
    assert not read_environment(os.environ), "the engine leaves them alone"
    server = ServerProcess("--drain-seconds", "3")
    try:
        server.start()
        assert server.attach(server.stub()).capacity_bytes == 512 * 1024
        assert server.terminate() == 0
        assert "ending within about 3 s" in server.output
    finally:
        server.close()
    for name, said in (
        ("STRATAKV_CACHE_SERVER_CPU_BYTE", "names no option of the cache server; did you mean"),
        ("STRATAKV_CACHE_SERVER_MAX_CALLS", "STRATAKV_CACHE_SERVER_MAX_CALLS takes"),
    ):
        with monkeypatch.context() as patched:
            patched.setenv(name, "many")
            assert main(["cache-server", "--port", "0"]) == 2
            assert said in capsys.readouterr().err
