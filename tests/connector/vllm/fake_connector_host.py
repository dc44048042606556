# SPDX-License-Identifier: Apache-2.0
"""What a KV connector is given by vLLM at its start, made of recorded signatures: modules, classes,
and the configuration of a small model."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from .fake_host import VERSIONS, FakeHost
from .fake_pool import BLOCK, FullAttentionSpec

LAYERS, TOKEN_BYTES = 3, 4096  # so that the least slab, 1 MiB, has 21 slots
PAGE_BYTES = BLOCK * TOKEN_BYTES
BASE = "KVConnectorBase_V1"


class ConnectorHost(FakeHost):
    """The modules that a KV connector needs, of one version."""

    def __init__(self, version: str) -> None:
        super().__init__(version)
        recorded = self.record["connector_classes"]
        self.record["classes"] |= recorded
        for name in ("KVConnectorMetadata", "KVConnectorWorkerMetadata", "SupportsHMA"):
            self.classes[name] = self._base(name)
        for name in {"KVConnectorRole", "CacheHitSource"} & recorded.keys():
            members = {member: member for member in self._fields(name)}
            self.classes[name] = enum.Enum(name, members)
        self.classes["KVConnectorTransferResults"] = dataclasses.make_dataclass(
            "KVConnectorTransferResults",
            [
                (name, set, dataclasses.field(default_factory=set))
                for name in self._fields("KVConnectorTransferResults")
            ],
        )
        self.classes[BASE] = self._base(BASE, _connector_init)
        self.classes["KVConnectorStats"] = self._base("KVConnectorStats")
        self.classes["KVConnectorStats"].__init__ = _stats_init  # type: ignore[misc] # of a dataclass
        self.classes["KVConnectorPromMetrics"] = self._base("KVConnectorPromMetrics", _prom_init)
        for name in ("BlockStored", "BlockRemoved"):
            self.classes[name] = self._dataclass(name)

    def _install(self) -> None:
        super()._install()
        import sys

        events = sys.modules["vllm.distributed.kv_events"]
        vars(events)["MEDIUM_CPU"] = "CPU"
        utils = sys.modules["vllm.v1.core.kv_cache_utils"]
        vars(utils)["maybe_convert_block_hash"] = lambda name: name


def _connector_init(self: Any, **given: Any) -> None:
    self._given = given


def _stats_init(self: Any, data: dict[str, Any] | None = None) -> None:
    self.data = data or {}


def _prom_init(self: Any, **given: Any) -> None:
    kinds = given["metric_types"]
    self._gauge_cls, self._counter_cls = kinds["gauge"], kinds["counter"]


def kv_cache_config(
    num_blocks: int,
    *,
    specs: Sequence[Any] | None = None,
    is_packed: bool = False,
    **changes: Any,
) -> Any:
    """Of a small model whose layers are outermost, as on vLLM's CPU build, or whose blocks are.
    Cache groups overlay each other; the last of several has a layer less."""
    groups, tensors = [], []
    for number, spec in enumerate(specs or [FullAttentionSpec(PAGE_BYTES)]):
        is_short = number and number + 1 == len(specs or ())
        prefix = f"group{number}." if number else ""
        layers = [f"{prefix}layer{i}" for i in range(LAYERS - bool(is_short))]
        groups.append(types.SimpleNamespace(layer_names=layers, kv_cache_spec=spec))
        tensors.append(
            types.SimpleNamespace(
                size=LAYERS * num_blocks * PAGE_BYTES,
                layers=layers,
                layer_stride=PAGE_BYTES if is_packed else num_blocks * PAGE_BYTES,
                block_stride=LAYERS * PAGE_BYTES if is_packed else PAGE_BYTES,
                offset=0,
                host_resident=False,
            )
        )
    values: dict[str, Any] = {
        "num_blocks": num_blocks,
        "kv_cache_groups": groups,
        "kv_cache_tensors": tensors,
        "kv_cache_layout": "BLHNC" if is_packed else "LBHNC",
    }
    return types.SimpleNamespace(**(values | changes))


def vllm_config(
    settings: dict[str, Any],
    *,
    events: bool = False,
    world_size: int = 1,
    rank: int = 0,
    pipeline: int = 1,
) -> Any:
    """What vLLM's configuration says."""
    named = types.SimpleNamespace
    return named(
        kv_transfer_config=named(
            kv_connector_extra_config={"stratakv": settings},
            kv_load_failure_policy="fail",
            is_kv_consumer=True,
        ),
        parallel_config=named(
            rank=rank,
            world_size=world_size,
            tensor_parallel_size=world_size // pipeline,
            pipeline_parallel_size=pipeline,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        cache_config=named(cache_dtype="auto", kv_cache_layout="LBHNC", enable_prefix_caching=True),
        model_config=named(model="some/model", dtype="torch.float32"),
        kv_events_config=named(enable_kv_cache_events=True) if events else None,
    )


@pytest.fixture(params=VERSIONS)
def host(request: pytest.FixtureRequest) -> Iterator[ConnectorHost]:
    """Each recorded version, installed."""
    made = ConnectorHost(request.param)
    with made.installed():
        yield made


@pytest.fixture
def newest() -> Iterator[ConnectorHost]:
    """The newest one. Of what is run here, the versions differ in nothing but classes and fields,
    which are compared with all of them."""
    made = ConnectorHost(VERSIONS[-1])
    with made.installed():
        yield made
