# SPDX-License-Identifier: Apache-2.0
"""A host that is built from recorded signatures of vLLM (`tools/record_vllm.py`), for tests where
vLLM is not installed.

Its classes take the parameters, have the fields and want the methods that the recorded version has,
and nothing else; what they do is the least that a tier, a spec and a worker can be tried with. One
engine after the other: `FakeHost.engine(...)` is a scheduler's side with a region in memory.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SIGNATURES = Path(__file__).with_name("signatures")
VERSIONS = tuple(sorted(path.stem for path in SIGNATURES.glob("*.json")))
OURS = "stratakv.connector.vllm."

_RECORDS = (
    "CanonicalKVCaches", "CanonicalKVCacheTensor", "CanonicalKVCacheRef", "TransferResult",
    "TransferJob", "JobResult", "RequestOffloadingContext", "ScheduleEndContext",
)  # fmt: skip
_KINDS = {
    "positional": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword": inspect.Parameter.KEYWORD_ONLY,
    "rest": inspect.Parameter.VAR_POSITIONAL,
    "keywords": inspect.Parameter.VAR_KEYWORD,
}


def read_record(version: str) -> dict[str, Any]:
    """What was recorded of a version."""
    record: dict[str, Any] = json.loads((SIGNATURES / f"{version}.json").read_text())
    return record


def signature_of(parameters: list[list[Any]]) -> inspect.Signature:
    """Of a method, without the first parameter."""
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                _KINDS[kind],
                default=None
                if has_default and kind in ("positional", "keyword")
                else inspect.Parameter.empty,
            )
            for name, kind, has_default in parameters
        ]
    )


class FakeHost:
    """The modules of one version."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.record = read_record(version)
        self.classes: dict[str, type] = {}
        for name in ("LookupResult", "Medium"):
            members = {member: member for member in self._fields(name)}
            self.classes[name] = enum.Enum(name, members)
        for name in self.record["classes"]:
            is_config = name.startswith("Offloading") and name.endswith(("Config", "Metadata"))
            if is_config or name in _RECORDS:
                self.classes[name] = self._dataclass(name)
        self.classes["ReqContext"] = self._request_context()
        self.classes["SecondaryTierManager"] = self._base("SecondaryTierManager", _tier_init)
        self.classes["OffloadingWorker"] = self._base("OffloadingWorker")
        self.classes["GPULoadStoreSpec"] = self._base("GPULoadStoreSpec", _blocks_init)
        self.classes["SharedOffloadRegion"] = self._base(
            "SharedOffloadRegion", _region_init, body=_REGION_BODY
        )
        self.classes["OffloadingConnectorStats"] = self._stats()
        self.classes["TieringOffloadingSpec"] = self._tiering_spec()

    def new(self, name: str, /, **fields: Any) -> Any:
        """An object of a class of the host."""
        return self.classes[name](**fields)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """As if this version was there. Modules of ours that know it are gone afterwards."""
        saved = dict(sys.modules)
        ours = [name for name in saved if name.startswith(OURS)]
        for name in [*ours, *[name for name in saved if name.partition(".")[0] == "vllm"]]:
            del sys.modules[name]
        self._install()
        try:
            yield
        finally:
            for name in [
                name
                for name in sys.modules
                if name.partition(".")[0] == "vllm" or name.startswith(OURS)
            ]:
                del sys.modules[name]
            sys.modules.update({name: module for name, module in saved.items() if name in ours})

    def config(self, extra: dict[str, Any], **changes: Any) -> Any:
        """OffloadingConfig of a small model: three layers, 32 tokens a block, float32."""
        world = changes.pop("world_size", 1)
        values: dict[str, Any] = {
            "groups": (
                self._some(
                    "OffloadingGroupConfig",
                    tokens_per_block=32,
                    layer_names=("a", "b", "c"),
                    group_id=0,
                ),
            ),
            "worker_kv_bytes_per_block": 8192,
            "enable_kv_cache_events": False,
            "extra_config": extra,
            "engine_id": "engine-1",
            "model": self._some("OffloadingModelConfig", name="some/model", dtype="float32"),
            "cache": self._some("OffloadingCacheConfig", tokens_per_hash=32, blocks_per_chunk=1),
            "parallel": self._some(
                "OffloadingParallelConfig",
                rank=0,
                world_size=world,
                tp_size=world,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=False,
            ),
            "replicated_layout": False,
            "canonical_layout": False,
            "kv_cache_layout": "LBHNC",
        }
        return self._some("OffloadingConfig", **(values | changes))

    def _some(self, name: str, /, **fields: Any) -> Any:
        known = self._fields(name)
        assert fields.keys() >= {each for each, has_default in known.items() if not has_default}
        return self.classes[name](**fields)

    def _fields(self, name: str) -> dict[str, bool]:
        fields: dict[str, bool] = self.record["classes"][name]["fields"]
        return fields

    def _methods(self, name: str) -> dict[str, Any]:
        methods: dict[str, Any] = self.record["classes"][name]["methods"]
        return methods

    def _dataclass(self, name: str) -> type:
        fields = self._fields(name)
        for base in self.record["classes"][name]["bases"]:
            fields = self._fields(base) | fields if base in self.record["classes"] else fields
        required = [(each, Any) for each, has_default in fields.items() if not has_default]
        optional = [
            (each, Any, dataclasses.field(default=None)) for each, has in fields.items() if has
        ]
        return dataclasses.make_dataclass(name, [*required, *optional])

    def _request_context(self) -> type:
        fields, methods = self._fields("ReqContext"), self._methods("ReqContext")

        class ReqContext:
            def __init__(self, req_id: str) -> None:
                self.req_id = req_id
                self._state: dict[type, Any] = {}
                if "_offload_key_positions" in fields:
                    self._offload_key_positions: dict[bytes, int] = {}

            def set_state(self, value: Any) -> None:
                self._state[type(value)] = value

            def get_state(self, kind: type) -> Any:
                return self._state.get(kind)

        assert {"set_state", "get_state"} <= methods.keys()
        return ReqContext

    def _base(
        self,
        name: str,
        init: Callable[..., None] | None = None,
        body: dict[str, Any] | None = None,
    ) -> type:
        """An abstract class with the recorded methods; its constructor takes what the recorded one
        does."""
        methods = self._methods(name)
        made: dict[str, Any] = dict(body or {})
        assert set(made) <= methods.keys(), f"{self.version} has no {set(made) - methods.keys()}"
        for method, each in methods.items():
            if method == "__init__" and init is not None:
                made[method] = _checked(signature_of(each["parameters"]), init)
            elif each["is_abstract"]:
                made[method] = abc.abstractmethod(lambda self, *args, **more: None)
            elif method not in made and method != "__init_subclass__":
                made[method] = lambda self, *args, **more: None
        return abc.ABCMeta(name, (), made)

    def _stats(self) -> type:
        methods = self._methods("OffloadingConnectorStats")
        assert {"set_gauge", "increase_counter"} <= methods.keys()

        class OffloadingConnectorStats:
            def __init__(self) -> None:
                self.data: dict[tuple[str, tuple[str, ...]], float] = {}

            def set_gauge(self, name: str, value: float, labelvalues: tuple[str, ...] = ()) -> None:
                self.data[name, labelvalues] = value

            def increase_counter(
                self, name: str, value: float = 1, labelvalues: tuple[str, ...] = ()
            ) -> None:
                assert value > 0
                self.data[name, labelvalues] = value

        return OffloadingConnectorStats

    def _tiering_spec(self) -> type:
        attributes = {
            attribute
            for name in ("TieringOffloadingSpec", "CPUOffloadingSpec", "OffloadingSpec")
            for attribute in self.record["classes"][name]["attributes"]
        }
        host = self

        class TieringOffloadingSpec:
            def __init__(self, config: Any) -> None:
                self.config = config
                self.extra_config = config.extra_config
                self.replicated_layout = config.replicated_layout
                self.blocks_per_chunk = config.cache.blocks_per_chunk
                self.secondary_tier_configs = self.extra_config.get("secondary_tiers", [])
                self.cpu_page_size_per_worker = (
                    config.worker_kv_bytes_per_block * self.blocks_per_chunk
                )
                self.kv_bytes_per_chunk = self.cpu_page_size_per_worker * config.parallel.world_size
                self.num_chunks = self.extra_config["cpu_bytes_to_use"] // self.kv_bytes_per_chunk
                self._engine_id = config.engine_id
                self._manager: Any = None
                self._worker: Any = None
                assert vars(self).keys() <= attributes, vars(self).keys() - attributes

            @classmethod
            def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
                return {"vllm:its_own": None}

            def get_manager(self) -> Any:
                if self._manager is None:
                    self._manager = FakeManager(host, self)
                return self._manager

            def get_worker(self, kv_caches: Any) -> Any:
                raise AssertionError("this is a CPU build")

        return TieringOffloadingSpec

    def _install(self) -> None:
        def module(name: str, **content: Any) -> None:
            made = types.ModuleType(name)
            vars(made).update(content)
            sys.modules[name] = made

        platform = types.SimpleNamespace(is_cpu=lambda: True, device_type="cpu")
        module("vllm", __version__=self.version)
        module("vllm.platforms", current_platform=platform)
        names: dict[str, dict[str, Any]] = {}
        for name, made in self.classes.items():
            names.setdefault(self.record["classes"][name]["module"], {})[name] = made
        for path, variables in self.record["names"].items():
            names.setdefault(path, {}).update(dict.fromkeys(variables, "seed"))
        for path, content in names.items():
            parts = path.split(".")
            for end in range(1, len(parts)):
                parent = ".".join(parts[:end])
                if parent not in sys.modules:
                    module(parent)
            module(path, **content)
            setattr(sys.modules[".".join(parts[:-1])], parts[-1], sys.modules[path])


class FakeManager:
    """The least of TieringOffloadingManager: a region, one tier, and requests that look up, load
    and store. Raises where the real one asserts."""

    def __init__(self, host: FakeHost, spec: Any) -> None:
        from stratakv.connector import vllm as ours

        self.host = host
        self.region = np.zeros((spec.num_chunks, spec.kv_bytes_per_chunk), np.int8)
        config = dict(spec.secondary_tier_configs[-1])
        tier_class = getattr(ours, config.pop("type"))
        assert config.pop("module_path") == ours.__name__
        keywords = host.record["calls"]["tier_cls"][0]
        given = {
            "offloading_spec": spec,
            "primary_kv_view": memoryview(self.region),
            "tier_type": "StrataTier",
            "backpressure_detector": None,
        }
        self.tier = tier_class(**{name: given[name] for name in keywords if name != "**"}, **config)
        self._jobs: dict[int, Any] = {}
        self._next_job = 0

    def begin(self, request_id: str, keys: list[bytes], chunk_tokens: int = 32) -> Any:
        """A request with these chunks has come."""
        context = self.host.classes["ReqContext"](request_id)
        if hasattr(context, "_offload_key_positions"):
            ends = range(chunk_tokens, (len(keys) + 1) * chunk_tokens, chunk_tokens)
            context._offload_key_positions.update(zip(keys, ends, strict=True))
        policy = self.tier.on_new_request(context)
        assert type(policy) is self.host.classes["RequestOffloadingContext"]
        return context

    def find(self, keys: list[bytes], context: Any, steps: Callable[[], bool]) -> int:
        """The length of the leading run that the tier has, asked again until it is known."""
        while True:
            for found, key in enumerate(keys):
                answer = self.tier.lookup(key, context).name
                if answer == "MISS":
                    return found
                if answer == "RETRY":
                    break
            else:
                return len(keys)
            assert steps()

    def submit(self, keys: list[bytes], rows: list[int], context: Any, *, is_load: bool) -> int:
        """Begin a job; its number."""
        self._next_job += 1
        job = self.host.new(
            "TransferJob",
            job_id=self._next_job,
            keys=keys,
            chunk_ids=np.array(rows, np.int32),
            is_promotion=is_load,
            req_context=context,
        )
        self._jobs[job.job_id] = job
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        return job.job_id

    def ended(self) -> list[Any]:
        """The results since the last call, each of a job that is under way."""
        results = list(self.tier.get_finished_jobs())
        for result in results:
            assert type(result) is self.host.classes["JobResult"]
            job = self._jobs.pop(result.job_id)
            if result.successful_keys:
                assert set(result.successful_keys) < set(job.keys)
        return results

    def end_step(self, new_requests: tuple[str, ...] = ()) -> None:
        """The end of a step's scheduling."""
        context = self.host.new(
            "ScheduleEndContext", new_req_ids=new_requests, preempted_req_ids=()
        )
        self.tier.on_schedule_end(context)


def _checked(signature: inspect.Signature, function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **more: Any) -> Any:
        bound = signature.bind(*args, **more)
        bound.apply_defaults()
        return function(self, **bound.arguments)

    return method


def _tier_init(self: Any, **given: Any) -> None:
    self.tier_type = given["tier_type"]
    self._primary_kv_view = given["primary_kv_view"]


def _blocks_init(self: Any, block_ids: list[int], group_sizes: Any, block_indices: Any) -> None:
    self.block_ids = np.array(block_ids, np.int32)
    self.group_sizes, self.block_indices = group_sizes, block_indices


def _region_init(self: Any, **given: Any) -> None:
    import torch

    self.given = given
    size = given["num_chunks"] * given["kv_bytes_per_chunk"]
    self.base = torch.zeros(size, dtype=torch.int8)
    self.place = given["rank"] * given["cpu_page_size"]
    self.is_cleaned = False


def _next_view(self: Any, tensor_page_size: int) -> Any:
    chunks, stride = self.given["num_chunks"], self.given["kv_bytes_per_chunk"]
    view = self.base.as_strided((chunks, tensor_page_size), (stride, 1), self.place)
    self.place += tensor_page_size
    return view


def _cleanup(self: Any) -> None:
    self.is_cleaned = True


_REGION_BODY = {"create_next_worker_view": _next_view, "cleanup": _cleanup}


@pytest.fixture(params=VERSIONS)
def host(request: pytest.FixtureRequest) -> Iterator[FakeHost]:
    """Each recorded version, installed."""
    made = FakeHost(request.param)
    with made.installed():
        yield made
