# SPDX-License-Identifier: Apache-2.0
"""What every test may rely on: the scale of a run, fixed seeds, markers that skip with a reason.

Imports neither torch nor numpy, because the tests of the tiers must run without them. Folders add
fixtures of their own in their own conftest.py.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import re
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from .nursery_site import scan_client
from .nursery_site.nursery_client import VARIABLE, Nursery, OwnNursery
from .threads import check_threads

if TYPE_CHECKING:
    from .peft_adapters import AdapterFolders

# The processes that share the tests have more threads than there are processors. Those of OpenMP
# spin for milliseconds after each parallel loop unless they are told otherwise before it is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# A long run repeats what CI does once, often a thousand times.
LONG_TIMEOUT_SECONDS = 7200
DEFAULT_SEED = 20260
# New objects, less those that went, until the young ones are looked through, in place of 700.
YOUNG_OBJECTS = 10_000

TESTS = Path(__file__).resolve().parent
NURSERY_SITE = TESTS / "nursery_site"
# Whole folders and modules that `make check` leaves out: rehearsals of benchmarks, those that try
# everything at every place, and the one that starts every command.
SLOW_PLACES = (
    "benchmarks/cluster/",
    "benchmarks/gpu/",
    "benchmarks/harness/test_workloads.py",
    "benchmarks/sampling/",
    "benchmarks/service/",
    "benchmarks/speculation/",
    "benchmarks/tiers/",
    "benchmarks/trace/",
    "benchmarks/transfer/",
    "connector/device/test_contract.py",
    "connector/device/test_cuda.py",
    "connector/lmcache/",
    "connector/sglang/",
    "connector/test_groups.py",
    "connector/test_offload_model.py",
    "connector/test_order.py",
    "connector/test_two_processes.py",
    "connector/vllm/",
    "engine/api/outputs/test_tools.py",
    "engine/api/test_parts_fields.py",
    "engine/api/test_parts_socket.py",
    "engine/api/test_stream_equals_whole.py",
    "engine/cli/tiers/test_cache_client.py",
    "engine/client/test_process.py",
    "engine/core/test_beams.py",
    "engine/core/test_concurrent_prefill.py",
    "engine/core/test_draft_model.py",
    "engine/core/test_eagle.py",
    "engine/core/test_grammars.py",
    "engine/core/test_handover.py",
    "engine/core/test_state_handover.py",
    "engine/core/test_windowed_handover.py",
    "engine/models/states/",
    "engine/models/test_hub.py",
    "engine/router/test_asked_at_once.py",
    "engine/router/test_faults.py",
    "engine/router/test_identity.py",
    "engine/router/test_other_routers.py",
    "engine/router/test_parts.py",
    "engine/router/test_real_faults.py",
    "engine/router/test_real_identity.py",
    "engine/router/test_real_nodes.py",
    "engine/scheduler/test_model_machine.py",
    "engine/scheduler/test_random_lives.py",
    "engine/scheduler/test_step_trace.py",
    "engine/scheduler/test_steps_in_flight.py",
    "engine/structured/test_grammar_processes.py",
    "engine/worker/test_kernel_layers.py",
    "engine/worker/test_one_wait.py",
    "engine/worker/test_split_plans.py",
    "kernels/test_cpu_kernels.py",
    "kernels/test_cpu_network.py",
    "kernels/test_layer_kernels.py",
    "kernels/test_write_kv.py",
    "regressions/",
    "simulation/",
    "tiers/cache_server/test_cache_server_command.py",
    "tiers/cache_server/slab_serving/",
    "tiers/cache_server/test_connections.py",
    "tiers/cache_server/test_fuzz.py",
    "tiers/cache_server/test_hostile.py",
    "tiers/cache_server/test_namespaces.py",
    "tiers/cache_server/test_tenant_store.py",
    "tiers/cache_server/test_timing.py",
    "tiers/hierarchy/test_hung_writes.py",
    "tiers/hierarchy/test_stateful.py",
    "tiers/policies/",
    "tiers/remote/test_faults.py",
    "tiers/remote/test_remote_store.py",
    "tiers/remote/test_wire_damage.py",
    "tiers/ssd/test_check.py",
    "tiers/ssd/test_codecs.py",
    "tiers/ssd/test_crash.py",
    "tiers/ssd/test_disk_full.py",
    "tiers/ssd/test_every_call_fails.py",
    "tiers/ssd/test_index_damage.py",
    "tiers/ssd/test_policies.py",
    "tiers/ssd/test_reopen.py",
    "tiers/wire/test_sockets.py",
    "test_cache_groups.py",
    "test_cluster_script.py",
    "test_deploy_manifests.py",
    "test_docs_rows.py",
    "test_engine_peers.py",
    "test_exactness.py",
    "test_families.py",
    "test_fault_sweep.py",
    "test_kernel_backend.py",
    "test_load_or_recompute.py",
    "test_lora_models.py",
    "test_package.py",
    "test_random_lives.py",
    "test_readme.py",
    "test_state_models.py",
    "test_two_engines",
    "test_windowed_models.py",
    "test_windowed_offload.py",
)

# Tests that measure time, by path and name: they run after all others, with nothing beside them.
ALONE_PLACES = (
    "engine/api/test_completions.py::test_long_prompts_of_ids_cost_little",
    "engine/router/test_asked_at_once.py",
    "tiers/cache_server/test_service.py::test_a_whole_prompt_in_one_look_up",
    "tiers/cache_server/test_timing.py",
    "tiers/ssd/test_reopen.py::test_a_large_index_is_small_and_quick",
)

# The id of a finding in the name of a test, as in tests/regressions/README.md.
_FINDING = re.compile(r"test_([a-z]\d\d|gpu_review_\d)_")

# Triton looks at it when it is imported, and some test modules import what imports triton; so it is
# set before any of them is read. With an NVIDIA device the kernels run there unless told otherwise.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile(
    "long",
    deadline=None,
    max_examples=10_000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stratakv")
    group.addoption(
        "--scale",
        choices=("ci", "long"),
        default="ci",
        help="ci: as many trials as fit into minutes; long: as many as fit into an hour",
    )
    group.addoption(
        "--seed", type=int, default=DEFAULT_SEED, help=f"default: {DEFAULT_SEED}, always the same"
    )
    group.addoption(
        "--net", action="store_true", help="run the tests that need a network beyond this host"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    scale = config.getoption("--scale")
    settings.load_profile(scale)
    if scale == "long" and config.getoption("timeout", None) is None:
        config.option.timeout = LONG_TIMEOUT_SECONDS
    # The order of collection below is the one to keep, and not that of how many tests a file has.
    config.option.loadscopereorder = False
    _open_nursery(config)


def _open_nursery(config: pytest.Config) -> None:
    """One for this process and all that it starts, and one of scans beside it."""
    if VARIABLE not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="stratakv-nursery-", dir="/tmp")
        config.add_cleanup(folder.cleanup)
        nursery = OwnNursery(Path(folder.name, "nursery"))
        scans = OwnNursery(Path(folder.name, scan_client.NAME), "tests.scan_nursery")
        config.add_cleanup(nursery.close)
        config.add_cleanup(scans.close)
        os.environ[VARIABLE] = nursery.path
        places = [str(NURSERY_SITE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        importlib.import_module("tests.nursery_site.sitecustomize")


@pytest.hookimpl(optionalhook=True)  # there may be no xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays in one process, and what measures time runs alone at the end. With `--dist
    worksteal` tests go one by one to whatever process is free."""
    if config.getoption("dist") == "worksteal":
        return None
    from .alone_at_the_end import AloneAtTheEnd

    return AloneAtTheEnd(config, log, _runs_alone)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Everything that the test modules import stays: no collection of garbage looks at it again,
    neither while the rest is imported nor in a test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The slow files are not even imported where their tests are left out."""
    if config.option.markexpr != "not slow" or not collection_path.is_relative_to(TESTS):
        return None
    place = collection_path.relative_to(TESTS).as_posix() + "/" * collection_path.is_dir()
    is_named = any(collection_path.name in argument for argument in config.args)
    return (place.startswith(SLOW_PLACES) and not is_named) or None


def pytest_report_header(config: pytest.Config) -> str:
    return f"stratakv: --scale {config.getoption('--scale')} --seed {config.getoption('--seed')}"


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _place(item.nodeid).startswith(SLOW_PLACES):
            item.add_marker(pytest.mark.slow)
        if _FINDING.match(item.name):
            item.add_marker(pytest.mark.regression)
    # The files with slow tests come first, so that all processes end at about the same time.
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (_runs_alone(item.nodeid), item.path not in slow_files))
    if not config.getoption("--net"):
        _skip(items, "net", "needs a network beyond this host; run with --net")
    if any(item.get_closest_marker("gpu") for item in items) and not _has_cuda():
        _skip(items, "gpu", "needs a CUDA device and there is none")


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that computes a token in a moment: two layers of 32 numbers, and heads
    that the compiled kernels take."""
    from .tiny_models import make_llama  # torch, which most tests do without

    return make_llama(
        tmp_path_factory.mktemp("small_llama"),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )


@pytest.fixture(scope="session")
def peft_folders(tmp_path_factory: pytest.TempPathFactory) -> AdapterFolders:
    """Small models and adapters that PEFT has saved, made when a test asks for them."""
    from .peft_adapters import AdapterFolders  # torch and PEFT, which most tests do without

    return AdapterFolders(tmp_path_factory.mktemp("peft"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch computes on one thread, as these small models are computed best."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def worker_nursery() -> Nursery:
    """Starts processes of engines; the engines of tests start theirs through it anyhow."""
    return Nursery(os.environ[VARIABLE])


@pytest.fixture
def no_nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start as they do elsewhere."""
    monkeypatch.delenv(VARIABLE)


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> str:
    """`ci` or `long`: how many trials a test makes."""
    return str(request.config.getoption("--scale"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own: the same in every run, another one under another `--seed`."""
    name = request.node.nodeid.encode()
    return int(request.config.getoption("--seed")) ^ zlib.crc32(name)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A generator seeded for this test alone."""
    return random.Random(seed)


@pytest.fixture(autouse=True)
def _fixed_seeds(seed: int) -> None:
    """Seed the global generators, of numpy and torch only where something has imported them."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        # Without CUDA `torch.manual_seed` notes its caller for later, which takes a millisecond.
        torch = sys.modules["torch"]
        seeded = torch.default_generator if torch.version.cuda is None else torch
        seeded.manual_seed(seed)


@pytest.fixture(autouse=True, scope="module")
def _no_thread_stays() -> Iterator[None]:
    """Strict for a whole module, since its fixtures may keep threads between two of its tests."""
    before = frozenset(threading.enumerate())
    yield
    check_threads(before)


def _runs_alone(nodeid: str) -> bool:
    return _place(nodeid).startswith(ALONE_PLACES)


def _place(nodeid: str) -> str:
    """A node is named by its path below the root; this is its name below this folder."""
    return nodeid.removeprefix(f"{TESTS.name}/")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
