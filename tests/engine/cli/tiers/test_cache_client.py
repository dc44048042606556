# SPDX-License-Identifier: Apache-2.0
"""`stratakv ping` and `stratakv describe` against real servers, and what they say of bad ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from stratakv.engine.cli.args import Parser
from stratakv.engine.cli.main import main
from stratakv.engine.cli.tiers import describe, ping
from stratakv.tiers.cache_server.access.tls import TlsFiles
from stratakv.tiers.contract import make_keys
from stratakv.tiers.wire.rpc import Stub

from ....free_ports import free_ports
from ....pages import read_command_pages
from ....tiers.cache_server.rig import LAYOUT, RunningServer, running_server, store_blocks

COMMANDS = ("ping", "describe")
TOKEN = "a-token-of-its-own"
FAST = ("--count", "3", "--interval", "0")

each_command = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """With the blocks of three keys."""
    with running_server() as server:
        stub = server.stub()
        server.attach(stub)
        store_blocks(stub, make_keys(3))
        yield server


def address(server: RunningServer, scheme: str = "grpc") -> str:
    return f"{scheme}://{server.address}"


def refusal(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    """What a command that fails with `code` says, in one line."""
    assert main(words) == code
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1
    return printed.err


def test_ping(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ping", address(server), *FAST]) == 0
    first, head, *rows, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{address(server)}: SERVING, version ") and "tenant default" in first
    assert head.split() == ["round", "trip", "min", "median", "max", "ms"]
    assert [row.split()[0] for row in rows] == ["health", "describe", "lookup", "blocks"]
    for row in rows:
        low, middle, high = map(float, row.split()[1:])
        assert 0 < low <= middle <= high
    assert last == "blocks move through shared memory"


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"shares_memory": False}, "socket"),
        ({"shares_memory": False, "data_port": None}, "streams"),
    ],
)
def test_how_blocks_would_move(
    settings: dict[str, Any], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_server(**settings) as server:
        server.attach(server.stub())
        assert main(["ping", address(server), *FAST, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["blocks"], found["note"]) == ("SERVING", kind, "")
    assert found["boot_id"] == server.server.boot_id.hex()
    assert found["round_trips_ms"].keys() == {"health", "describe", "lookup", "blocks"}


def test_ping_leaves_nothing_behind(server: RunningServer) -> None:
    before = server.tenant_store().stats()["cpu"]
    assert main(["ping", address(server), *FAST]) == 0
    after = server.tenant_store().stats()["cpu"]
    assert (after.blocks, after.stored_blocks) == (before.blocks, before.stored_blocks)


def test_a_server_without_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    with running_server() as server:
        assert main(["ping", address(server), *FAST]) == 0
        assert "no engine has attached yet" in capsys.readouterr().out
        assert main(["describe", address(server)]) == 0
        assert "layout     none" in capsys.readouterr().out


def test_a_server_that_drains(capsys: pytest.CaptureFixture[str]) -> None:
    with running_server() as server:
        server.server._guard.refuse_new_calls()
        assert "draining" in refusal(capsys, "ping", address(server))


def test_describe(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", address(server), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["boot_id"] == server.server.boot_id.hex()
    assert (found["tenant"], found["leases"], found["corrupt_blocks"]) == ("default", 0, 0)
    assert found["limits"]["max_keys"] == 4096
    assert found["layout"]["block_size_tokens"] == LAYOUT.block_size
    assert found["layout"]["kv_dtype"] == LAYOUT.kv_dtype
    [cpu] = found["tiers"]
    assert (cpu["name"], cpu["blocks"], cpu["stored_blocks"]) == ("cpu", 3, 3)
    assert found["capacity_bytes"] == cpu["capacity_bytes"] == 64 * LAYOUT.slot_bytes
    assert main(["describe", address(server)]) == 0
    text = capsys.readouterr().out
    for line in ("tenant     default", "max_keys 4096", "num_layers 1", "tier cpu", "blocks 3"):
        assert line in text


@each_command
def test_nobody_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    said = refusal(capsys, command, f"grpc://127.0.0.1:{port}")
    assert f"grpc://127.0.0.1:{port}: no server can be reached (Connection refused)" in said


@each_command
def test_what_is_no_address(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, command, "http://127.0.0.1", code=2)
    assert "an address looks like" not in said and "address looks like grpc://host:9400" in said
    assert "ADDRESS" in refusal(capsys, command, code=2)


@each_command
def test_tokens(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    for path, text in ((token, TOKEN), (wrong, "another-of-16-letters")):
        path.write_text(text)
        path.chmod(0o600)
    with running_server(token=TOKEN) as server:
        where = address(server)
        assert main([command, where, "--token-file", str(token)]) == 0
        capsys.readouterr()
        assert "unauthenticated" in refusal(capsys, command, where)
        assert "unauthenticated" in refusal(capsys, command, where, "--token-file", str(wrong))
    missing = str(tmp_path / "missing")
    assert "cannot be read" in refusal(capsys, command, where, "--token-file", missing, code=2)


class Pki:
    """A server's certificate, and who signed it."""

    def __init__(self, folder: Path) -> None:
        authority, stranger = trustme.CA(), trustme.CA()
        self.ca, self.stranger = folder / "ca.pem", folder / "stranger.pem"
        authority.cert_pem.write_to_path(self.ca)
        stranger.cert_pem.write_to_path(self.stranger)
        issued = authority.issue_cert("localhost", "cache.example")
        cert, key = folder / "cert.pem", folder / "key.pem"
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        self.files = TlsFiles(cert, key)

    def grpc(self) -> Any:
        """As a channel takes it."""
        return grpc.ssl_channel_credentials(self.ca.read_bytes())


@each_command
def test_tls(
    command: str, server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pki = Pki(tmp_path)
    with running_server(tls=pki.files) as secure:
        secure.attach(Stub(secure.channel(tls=pki.grpc(), ssl_target_name_override="localhost")))
        named = f"grpcs://localhost:{secure.port}"
        ca = ("--ca-file", str(pki.ca))
        assert main([command, named, *ca]) == 0
        other = address(secure, "grpcs")  # 127.0.0.1, which the certificate does not say
        assert main([command, other, *ca, "--server-name", "cache.example"]) == 0
        capsys.readouterr()
        assert "not trusted" in refusal(capsys, command, other, *ca)
        assert "--ca-file" in refusal(capsys, command, named, "--ca-file", str(pki.stranger))
        said = refusal(capsys, command, address(secure))
        assert f"it speaks TLS; try grpcs://{secure.address}" in said
    said = refusal(capsys, command, address(server, "grpcs"), *ca)
    assert "does not speak TLS" in said and f"try grpc://{server.address}" in said


def test_numbers_out_of_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--count" in refusal(capsys, "ping", "grpc://x", "--count", "0", code=2)
    assert "--interval" in refusal(capsys, "ping", "grpc://x", "--interval", "-1", code=2)
    said = refusal(capsys, "ping", "grpc://127.0.0.1:1", "--cert-file", "cert.pem", code=2)
    assert "two files" in said


@each_command
def test_what_it_imports(command: str, server: RunningServer) -> None:
    code = (
        "import sys; from stratakv.engine.cli.main import main;"
        f"code = main([{command!r}, {address(server)!r}]);"
        "heavy = ('torch', 'numpy', 'zmq', 'stratakv.engine.core');"
        "print([name for name in heavy if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", [ping, describe])
def test_the_documentation_lists_its_flags(module: Any) -> None:
    parser = Parser(prog="probe")
    module.add_arguments(parser)
    flags = {action.option_strings[0] for action in parser._actions if action.option_strings}
    name = module.__name__.rpartition(".")[2]
    section = read_command_pages().split(f"## stratakv {name}\n")[1].split("\n## ")[0]
    rows = {line.split("`")[1] for line in section.splitlines() if line.startswith("| `--")}
    assert rows == flags - {"-h"}
