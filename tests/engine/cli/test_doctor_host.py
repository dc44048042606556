# SPDX-License-Identifier: Apache-2.0
"""`stratakv doctor`: what it finds on this machine, with files and limits that are made for it."""

from __future__ import annotations

import datetime
import json
import resource
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from stratakv.engine.cli.checks import host
from stratakv.engine.cli.checks.base import Finding, Level, run_checks
from stratakv.engine.cli.main import main
from stratakv.tiers.cache_server.access.tls import TlsFiles
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.tier_settings import SsdSettings

from ...tiers.blocks import SMALL
from ...tiers.store_contract import SECONDS

MIB = 2**20
CASE = host.HostCase(cpu_bytes=MIB, device="cpu", release="6.8.0-45-generic", machine="x86_64")


def bad(case: host.HostCase, *checks: object) -> list[Finding]:
    """What is not well."""
    chosen = tuple(checks) or host.CHECKS
    return [each for each in run_checks(chosen, case) if each.level is not Level.OK]  # type: ignore[arg-type]


@pytest.fixture
def _no_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_CORE: (0, 0)}
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which) or real(which))


@pytest.mark.usefixtures("_no_dumps")
def test_a_machine_that_is_well(tmp_path: Path) -> None:
    ssd = SsdSettings(path=tmp_path / "ssd", capacity_bytes=MIB)
    [*found] = run_checks(host.CHECKS, replace(CASE, ssd=ssd))
    assert [each for each in found if each.level is not Level.OK] == []
    assert {"kernel", "memory", "ssd room", "gpu", "locked memory"} <= {e.what for e in found}
    assert not (tmp_path / "ssd").exists(), "nothing was made"


@pytest.mark.parametrize(
    ("changes", "what", "cure"),
    [
        ({"machine": "riscv64"}, "processor", "make test"),
        ({"release": "5.4.0-150-generic"}, "kernel", "update the kernel"),
        ({"release": "5.15.0"}, "kernel", "--kv-offload-cpu-huge-pages"),
        ({"cpu_bytes": 2**60}, "memory", "make --cpu-bytes smaller"),
    ],
)
def test_machine_and_memory(changes: dict[str, object], what: str, cure: str) -> None:
    [found] = bad(replace(CASE, **changes), host.check_kernel, host.check_tier_memory)  # type: ignore[arg-type]
    assert found.what == what and cure in found.cure


def test_huge_pages(tmp_path: Path) -> None:
    meminfo, setting = tmp_path / "meminfo", tmp_path / "shmem_enabled"
    meminfo.write_text("MemAvailable: 9000000 kB\nHugePages_Free: 3\n")
    setting.write_text("always within_size advise never [deny] force\n")
    case = replace(CASE, cpu_bytes=20 * MIB, meminfo=meminfo, shared_huge_pages=setting)
    [found] = bad(replace(case, huge_pages=True), host.check_tier_memory)
    assert found.cure == "sysctl -w vm.nr_hugepages=10"
    [found] = bad(case, host.check_tier_memory)
    assert found.cure.startswith(f"echo never > {setting}")
    assert bad(replace(case, shared_huge_pages=tmp_path / "none"), host.check_tier_memory) == []


def test_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = {
        resource.RLIMIT_MEMLOCK: (65536, 65536),
        resource.RLIMIT_NOFILE: (256, 1024),
        resource.RLIMIT_CORE: (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    }
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    found = {each.what: each.cure for each in bad(CASE, host.check_limits)}
    assert found.keys() == {"open files", "core dumps"}, "without a GPU nothing is locked"
    with_gpu = replace(CASE, device="", gpu_file=tmp_path)
    found = {each.what: each.cure for each in bad(with_gpu, host.check_limits)}
    assert found["locked memory"].startswith("ulimit -l unlimited")
    assert found["core dumps"].startswith("ulimit -c 0")


def test_a_disk_in_use_and_one_without_room(tmp_path: Path) -> None:
    store = SsdStore(tmp_path / "ssd", SMALL, 2 * MIB)
    try:
        settings = SsdSettings(path=tmp_path / "ssd", capacity_bytes=2**60)
        found = {each.what: each.fact for each in bad(replace(CASE, ssd=settings), host.check_disk)}
    finally:
        store.close(SECONDS)
    assert "in use by process" in found["ssd tier"] and "free" in found["ssd room"]


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [found] = bad(replace(CASE, ports=(port,)), host.check_ports)
    assert found.level is Level.PROBLEM and found.cure.startswith(f"ss -ltnp 'sport = :{port}'")


@pytest.mark.parametrize(
    ("days", "level", "fact"),
    [(-2, Level.PROBLEM, "ended on"), (5, Level.WARNING, "ends on"), (90, Level.OK, "lasts until")],
)
def test_certificates(tmp_path: Path, days: int, level: Level, fact: str) -> None:
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    now = datetime.datetime.now(datetime.UTC)
    issued = trustme.CA().issue_cert(
        "localhost",
        not_before=now - datetime.timedelta(days=100),
        not_after=now + datetime.timedelta(days=days),
    )
    issued.cert_chain_pems[0].write_to_path(files.cert)
    issued.private_key_pem.write_to_path(files.key)
    files.key.chmod(0o640)
    [found] = run_checks((host.check_certificates,), replace(CASE, tls=files))
    assert found.level is level and fact in found.fact
    files.key.chmod(0o644)
    found = run_checks((host.check_certificates,), replace(CASE, tls=files))[-1]
    assert found.level is Level.PROBLEM and found.cure == f"chmod 600 {files.key}"
    files.key.write_text("junk")
    [found] = run_checks((host.check_certificates,), replace(CASE, tls=files))
    assert found.level is Level.PROBLEM and "no certificate and its key" in found.fact


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cpu-bytes", "1MiB", "--ssd-path", str(tmp_path), "--ssd-bytes", "1MiB", "--json"]
    assert main(["doctor", "--device", "cpu", *flags]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["host"] == "this machine" and shown["problems"] == 0
    assert {"level", "what", "fact", "cure"} == set(shown["findings"][0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cpu-bytes", "many"], "--cpu-bytes takes a number of bytes"),
        (["--ssd-bytes", "1GiB"], "give --ssd-path too"),
        (["--tls-cert", "x"], "go together"),
        (["--device", "gpu"], "--device takes cpu, cuda or one GPU"),
        (["--port", "70000"], "--port"),
        (["--cpu-bytez", "1"], "did you mean --cpu-bytes"),
    ],
)
def test_wrong_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err
