# SPDX-License-Identifier: Apache-2.0
"""Findings about benchmarks, eviction policies and tests that raced the machine, mended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratakv.benchmarks.harness.comparison import Comparison, take_rounds
from stratakv.benchmarks.harness.report import environment, median
from stratakv.benchmarks.tiers import disk_limit
from stratakv.benchmarks.tiers.scale import MIB, QUICK, layout_of
from stratakv.benchmarks.tiers.store_case import StoreCase
from stratakv.engine.config.engine_options import EMBEDDED_MODEL, engine_config
from stratakv.tiers.admission import make_filter
from stratakv.tiers.admission.base import AdmissionFilter
from stratakv.tiers.admission.contract import check_filter_contract
from stratakv.tiers.admission.filters import FILTERS
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.cache_server.access.tenants import Quota
from stratakv.tiers.cache_server.tenant_store import TenantStore
from stratakv.tiers.cache_server.tenant_stores import StoreSettings, TenantStores
from stratakv.tiers.contract import ContractBroken
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.policies.adaptive import AdaptivePolicy
from stratakv.tiers.policies.base import EvictionPolicy
from stratakv.tiers.policies.contract import check_policy_contract
from stratakv.tiers.policies.known_policies import POLICIES, policy_factory
from stratakv.tiers.policies.lru import LruPolicy
from stratakv.tiers.settings.values import ConfigError
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.ssd.disk.slot_file import SlotFile
from stratakv.tiers.ssd.store import SsdStore
from stratakv.tiers.wire.status import NotReady

from .. import test_fault_sweep
from ..benchmarks.core.test_core import LITTLE
from ..nursery_site import nursery_client

pytestmark = pytest.mark.regression

ROOT = Path(__file__).parents[2]
LAYOUT = BlockLayout(16, 2, 2, 8, "float32")


# A report's version (U2) and tables without pictures (U4).


def test_u02_a_report_knows_its_version() -> None:
    assert re.fullmatch(r"\d+\.\d+.*", environment()["version"])


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["trace", "{trace}", "--policy", "lru"], "worst points below lru"),
        (["core", "--quick", "--repeats", "1"], "One thread, blocks of 16 tokens"),
    ],
)
def test_u04_without_matplotlib_there_is_a_table(
    words: list[str], last: str, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": n, "input_length": 1024, "output_length": 1, "hash_ids": [n % 3, 10 + n % 3]}
        for n in range(9)
    ]
    trace.write_text("".join(json.dumps(each) + "\n" for each in lines))
    arguments = ["bench", *(w.format(trace=trace) for w in words), "--out", str(tmp_path / "out")]
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from stratakv.benchmarks.core import command as core\n"
        f"vars(core).update({LITTLE!r})\n"
        "from stratakv.engine.cli.main import main\n"
        f"sys.exit(main({arguments!r}))"
    )
    done = nursery_client.run([sys.executable, "-c", code], timeout=100)
    assert done.returncode == 0, done.stderr
    assert last in done.stdout.replace("_", " ")
    assert "no picture: that takes matplotlib" in done.stdout
    assert "pip install '.[bench]'" in done.stdout
    assert list((tmp_path / "out").glob("*.json"))


# Policies and filters of other packages (U10).

MODULE = """
from stratakv.tiers.admission import AdmissionFilter
from stratakv.tiers.policies.lru import LruPolicy

class First(LruPolicy):
    def __init__(self, capacity):
        super().__init__()

    def touch(self, keys):
        pass

class Forgets(First):
    def victims(self, count, may_evict):
        return super().victims(count, may_evict)[1:]

class OddOnes(AdmissionFilter):
    def __init__(self, blocks_below):
        self.blocks_below = blocks_below

    def admit(self, keys, now):
        return [key[-1] % 2 == 1 for key in keys]

def nonsense(capacity):
    return {}
"""
POINTS = """[stratakv.policies]
first = shelf_policy:First
forgets = shelf_policy:Forgets
nonsense = shelf_policy:nonsense
missing = no_such_module_of_ours:Policy
lru = shelf_policy:Forgets
twice = shelf_policy:First
[stratakv.admission]
odd = shelf_policy:OddOnes
nonsense = shelf_policy:nonsense
"""


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two installed packages, as pip leaves them on the path."""
    (tmp_path / "shelf_policy.py").write_text(MODULE)
    other = "[stratakv.policies]\ntwice = other:Policy\n"
    for name, points in (("shelf", POINTS), ("other", other)):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("shelf_policy", None)


@pytest.mark.usefixtures("shelf")
def test_u10_a_policy_and_a_filter_of_another_package() -> None:
    given = {
        "kv_offload": "cpu,ssd",
        "kv_offload_policy": "first",
        "kv_offload_ssd_admission": "odd",
    }
    offload = engine_config(EMBEDDED_MODEL, given).offload
    assert (offload.cpu.policy, offload.ssd.admission) == ("first", "odd")
    assert "shelf_policy" not in sys.modules, "nothing is imported before it is used"
    policy = policy_factory(offload.cpu.policy)(10)
    policy.insert([b"a", b"b"])
    policy.touch([b"a"])
    assert policy.victims(1, lambda _key: True) == [b"a"]
    assert make_filter(offload.ssd.admission, 10).admit([b"1", b"2"], 0.0) == [True, False]
    assert policy_factory("lru") is POLICIES["lru"], "a name of ours stays ours"


@pytest.mark.usefixtures("shelf")
def test_u10_a_policy_of_another_package_for_the_ssd_tier(tmp_path: Path) -> None:
    given = {"kv_offload": "cpu,ssd", "kv_offload_ssd_policy": "first"}
    settings = engine_config(EMBEDDED_MODEL, given).offload
    assert settings.has_ssd and settings.ssd.policy == "first"
    store = SsdStore(tmp_path / "ssd", LAYOUT, 16 * 1024**2, policy=settings.ssd.policy)
    try:
        assert type(store._state.index._policy).__name__ == "First"
    finally:
        store.close(5.0)


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("forgets", r"forgets \(shelf_policy:Forgets\) cannot be used: ContractBroken: expected"),
        ("nonsense", "expected an EvictionPolicy, got dict"),
        ("missing", "cannot be used: ModuleNotFoundError"),
        ("twice", "several packages bring the eviction policy 'twice'"),
        ("no_such_module_of_ours:Policy", "cannot be used: ModuleNotFoundError"),
        ("shelf_policy:Absent", "cannot be used: AttributeError"),
    ],
)
def test_u10_what_is_wrong_with_a_policy_is_said(name: str, message: str) -> None:
    with pytest.raises(TierConfigError, match=message):
        policy_factory(name)


@pytest.mark.usefixtures("shelf")
def test_u10_what_is_wrong_with_a_name_is_said() -> None:
    with pytest.raises(TierConfigError, match="expected an AdmissionFilter, got dict"):
        make_filter("nonsense", 10)
    with pytest.raises(TierConfigError, match=r"no admission filter 'od'; there are: .*odd"):
        make_filter("od", 10)
    with pytest.raises(ConfigError, match="did you mean first"):
        engine_config(EMBEDDED_MODEL, {"kv_offload": "cpu", "kv_offload_policy": "firs"})
    with pytest.raises(ConfigError, match="--kv-offload-policy takes lru or"):
        engine_config(EMBEDDED_MODEL, {"kv_offload_policy": "shelf_policy:First"})
    with pytest.raises(ConfigError, match=r"--kv-offload-ssd-policy takes .*did you mean first"):
        engine_config(EMBEDDED_MODEL, {"kv_offload": "cpu,ssd", "kv_offload_ssd_policy": "firs"})


@pytest.mark.parametrize("name", POLICIES)
def test_u10_our_policies_pass_the_contract(name: str) -> None:
    check_policy_contract(POLICIES[name])


@pytest.mark.parametrize("name", FILTERS)
def test_u10_our_filters_pass_the_contract(name: str) -> None:
    check_filter_contract(FILTERS[name])


class _Refreshes(LruPolicy):
    """Asked for victims, it changes its order."""

    def victims(self, count: int, may_evict: Any) -> list[bytes]:
        chosen = super().victims(count, may_evict)
        self.touch(chosen)
        return chosen


class _Ignores(LruPolicy):
    """Names what may not go."""

    def victims(self, count: int, may_evict: Any) -> list[bytes]:
        return super().victims(count, lambda _key: True)


class _Keeps(LruPolicy):
    """Holds what was removed."""

    def remove(self, keys: Any) -> None:
        pass


class _TooFew(AdmissionFilter):
    def admit(self, keys: Any, now: float) -> list[bool]:
        return [True] * (len(keys) - 1)


class _Numbers(AdmissionFilter):
    def admit(self, keys: Any, now: float) -> list[bool]:
        return [1 for _ in keys]  # type: ignore[misc]


@pytest.mark.parametrize("kind", [_Refreshes, _Ignores, _Keeps])
def test_u10_a_policy_that_breaks_the_contract_is_caught(kind: type[EvictionPolicy]) -> None:
    with pytest.raises(ContractBroken):
        check_policy_contract(lambda _blocks: kind())


@pytest.mark.parametrize("kind", [_TooFew, _Numbers])
def test_u10_a_filter_that_breaks_the_contract_is_caught(kind: type[AdmissionFilter]) -> None:
    with pytest.raises(ContractBroken):
        check_filter_contract(lambda _blocks: kind())


def test_u10_the_example_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    """The policy, its own test, and the replay, as a reader would do it."""
    page = (ROOT / "docs" / "tutorials" / "write-an-eviction-policy.md").read_text()
    policy, own_test = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "__init__.py").touch()
    (tmp_path / "mypackage" / "policy.py").write_text(policy)
    (tmp_path / "own_test.py").write_text(own_test)
    trace = tmp_path / "my-trace.jsonl"
    lines = [
        {"timestamp": n, "input_length": 512, "output_length": 1, "hash_ids": [n % 7]}
        for n in range(40)
    ]
    trace.write_text("".join(json.dumps(each) + "\n" for each in lines))
    (command,) = re.findall(r"PYTHONPATH=\. (stratakv bench trace .*)\n", page)
    replay = [Path(sys.executable).parent / "stratakv", *command.split()[1:], "--out", "out"]
    for words in ([sys.executable, "own_test.py"], replay):
        done = subprocess.run(
            words,
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert "mypackage.policy:LeastUsed" in written["figures"]["one_tier"]["my_trace"]
    assert written["figures"]["plan"]["policy"] == "mypackage.policy:LeastUsed"


def test_u10_nobody_is_told_to_install_what_is_not_published() -> None:
    advised = []
    for folder in ("engine", "tiers", "connector", "kernels", "benchmarks", "docs", "deploy"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md"):
                advised += [path.name] * ("stratakv[" in path.read_text())
    assert advised == []
    assert "Nothing reads it" not in (ROOT / "pyproject.toml").read_text()


# The adaptive policy is the default everywhere.


def test_u10_the_default_policy_learns_in_engine_and_cache_server() -> None:
    assert engine_config(EMBEDDED_MODEL, {"kv_offload": "cpu"}).offload.cpu.policy == "adaptive"
    quota = Quota(64 * LAYOUT.slot_bytes, 0)
    tenant_stores = TenantStores({"room": quota}, StoreSettings(secret=b"s" * 32))
    try:
        assert isinstance(_ready_tenant_store(tenant_stores)._slab._policy, AdaptivePolicy)
    finally:
        tenant_stores.close(5.0)


def _ready_tenant_store(tenant_stores: TenantStores) -> TenantStore:
    deadline = time.monotonic() + 30.0
    while True:
        try:
            return tenant_stores.attach("room", LAYOUT)
        except NotReady:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_u10_a_policy_that_is_told_of_no_prompts_is_lru() -> None:
    """Blocks that went and came back too."""
    ours, lru = AdaptivePolicy(8), LruPolicy()
    for policy in (ours, lru):
        for number in (*range(8), 2, 3, 11, 2, 0, 12, 3, 1, 2, 7):
            key = b"%d" % number
            held = policy.victims(9, lambda _key: True)
            if key in held:
                policy.touch([key])
                continue
            policy.remove(policy.victims(len(held) - 7, lambda _key: True))
            policy.insert([key])
    assert ours.victims(9, lambda _key: True) == lru.victims(9, lambda _key: True)


# The limit of cold reads (T14).


def test_t14_the_strictest_of_several_limits_decides() -> None:
    deep, few, ours = [2.0, 2.0, 2.0], [3.0, 4.0, 4.0], [3.0, 2.0, 2.0]
    comparison = Comparison(
        "read", "bytes/s", "deep",
        ours.pop, deep.pop,
        rivals={"few": few.pop},
    )  # fmt: skip
    outcome = take_rounds(comparison, 2)
    figures = outcome.figures()
    assert outcome.ratio == figures["by_limit"]["few"]["ratio"] == median([2 / 4, 3 / 4])
    assert figures["by_limit"]["deep"]["ratio"] == median([2 / 2, 3 / 2])
    assert (figures["limit"], figures["limit_median"]) == ("few", 4.0)


@pytest.mark.parametrize("requests", [8, 16, 32])
def test_t14_the_same_buffers_with_few_requests_at_a_time(
    requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests are under way, all memory of the slab is used in turn."""
    slab = CpuSlab(layout_of(2**18), 10 * MIB)
    limit = disk_limit.make_limit("loop", tmp_path / "limit", 2**18, 16 * MIB, slab)
    slab.memory()[:] = bytes(10 * MIB)
    under_way, most, lock = 0, 0, threading.Lock()
    all_there = threading.Barrier(requests)
    plain = os.preadv

    def preadv(*arguments: Any) -> int:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        with contextlib.suppress(threading.BrokenBarrierError):
            all_there.wait(30.0 if most < requests else 0.0)
        try:
            return plain(*arguments)
        finally:
            with lock:
                under_way -= 1

    monkeypatch.setattr(os, "preadv", preadv)
    assert limit.read_in_turn(40 * MIB, requests) > 0
    limit.close()
    assert most == requests
    assert all(any(slab.memory()[at : at + 4096]) for at in range(0, 10 * MIB, 2**18))
    slab.close()


def test_t14_cold_reads_meet_each_depth(tmp_path: Path) -> None:
    case = StoreCase(tmp_path / "case", 2 * MIB, QUICK, "loop")
    try:
        _, reads = case.comparisons("2MiB")
        assert set(reads.rivals) == {f"loop x{depth}" for depth in (16, 32)}, "it is of 8 itself"
        figures = take_rounds(reads, 2).figures()
    finally:
        case.close()
    assert set(figures["by_limit"]) == {"loop", *reads.rivals}
    least = min(cell["ratio"] for cell in figures["by_limit"].values())
    assert figures["by_limit"][figures["limit"]]["ratio"] == least


# Tests that raced the machine (U12).


@pytest.mark.parametrize(("fault", "number"), [("load:error=1", 9), ("lookup:error=1", 33)])
def test_u12_the_sweep_reaches_its_call_over_a_slow_disk(
    fault: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The breaker opened first: reads were late that the sweep had not chosen."""
    plain = SlotFile.start_read

    def start_read(self: SlotFile, *arguments: Any) -> None:
        time.sleep(2 * test_fault_sweep.READ_SECONDS)
        plain(self, *arguments)

    monkeypatch.setattr(SlotFile, "start_read", start_read)
    test_fault_sweep.sweep_ssd(fault, number, 1, tmp_path / "store")
