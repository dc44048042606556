# SPDX-License-Identifier: Apache-2.0
"""A small vLLM around a KV connector: scheduler, block pool, worker and a KV cache, over classes
made of recorded signatures. It keeps vLLM's rules and asserts where vLLM does.

Computing a token writes bytes that follow from all tokens up to it, after those before it have been
compared: a block that holds anything else fails the test in the step that would have used it.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import itertools
import math
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from .fake_host import VERSIONS, FakeHost, signature_of

BLOCK, LAYERS, TOKEN_BYTES = 4, 3, 4096  # so that the least slab, 1 MiB, has 21 slots
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


class Block:
    """One of the pool's."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.is_null = False
        self.next_free_block: Block | None = None


class Pool:
    """vLLM's block pool, with the recorded parameters of what is listened to."""

    def __init__(self, num_blocks: int, record: dict[str, Any]) -> None:
        self.hash_block_size = BLOCK
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.blocks[0].is_null = True
        self.free_block_queue = types.SimpleNamespace(fake_free_list_head=Block(-1))
        self._free = self.blocks[1:]
        self._tail = Block(-1)
        self._link()
        for name in ("get_new_blocks", "cache_full_blocks", "evict_blocks", "reset_prefix_cache"):
            recorded = signature_of(record["classes"]["BlockPool"]["methods"][name]["parameters"])
            mine = list(inspect.signature(getattr(Pool, name)).parameters)[1:]
            assert mine == list(recorded.parameters), name

    @property
    def num_free(self) -> int:
        return len(self._free)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        assert len(taken) == num_blocks
        self._link()
        for block in taken:
            assert block.ref_cnt == 0
            block.block_hash = None
            block.ref_cnt = 1
        return taken

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        for index in range(num_cached_blocks, num_full_blocks):
            assert blocks[index].block_hash is None
            group = kv_cache_group_id.to_bytes(4, "big")
            blocks[index].block_hash = request.block_hashes[index] + group

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            self.blocks[block_id].block_hash = None

    def reset_prefix_cache(self) -> bool:
        if self.num_free != len(self.blocks) - 1:
            return False
        for block in self.blocks:
            block.block_hash = None
        return True

    def find(self, request: Request, most: int) -> list[Block]:
        """The leading blocks that have been computed."""
        by_key = {block.block_hash: block for block in self.blocks if block.block_hash}
        found = []
        for name in request.block_hashes[:most]:
            block = by_key.get(name + bytes(4))
            if block is None:
                break
            found.append(block)
        return found

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                self._free.remove(block)
            block.ref_cnt += 1
        self._link()

    def free(self, blocks: Iterable[Block]) -> None:
        """The tail of a sequence first."""
        named, unnamed = [], []
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                (unnamed if block.block_hash is None else named).append(block)
        self._free = [*unnamed, *self._free, *named]
        self._link()

    def _link(self) -> None:
        chain = [self.free_block_queue.fake_free_list_head, *self._free, self._tail]
        for block, following in itertools.pairwise(chain):
            block.next_free_block = following


class Request:
    """One of vLLM's, as far as a connector looks."""

    def __init__(
        self, name: str, tokens: list[int], max_tokens: int, params: dict[str, Any] | None = None
    ) -> None:
        self.request_id = name
        self.all_token_ids = list(tokens)
        self.max_tokens = len(tokens) + max_tokens
        self.kv_transfer_params = params
        self.lora_request = None
        self.skip_reading_prefix_cache = False
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.blocks: list[Block] = []
        self.num_named = 0
        self.is_loading = False
        self.is_finished = False
        self.num_external = 0  # tokens that came from outside, in all
        self.answer_params: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        names, parent = [], b"root"
        for start in range(0, self.num_tokens - BLOCK + 1, BLOCK):
            tokens = self.all_token_ids[start : start + BLOCK]
            parent = hashlib.sha256(parent + bytes(tokens)).digest()
            names.append(parent)
        return names


class Vllm:
    """An engine with a connector in both roles."""

    def __init__(self, host: ConnectorHost, settings: dict[str, Any], num_blocks: int = 12) -> None:
        from stratakv.connector.vllm import StrataConnector

        self.host = host
        self.config = vllm_config(settings)
        cache_config = kv_cache_config(num_blocks)
        roles = host.classes["KVConnectorRole"]
        self.worker = StrataConnector(self.config, roles.WORKER, cache_config)
        self._buffer = torch.zeros(LAYERS * num_blocks * PAGE_BYTES, dtype=torch.uint8)
        self.memory = self._buffer.view(LAYERS, num_blocks, BLOCK, TOKEN_BYTES).numpy()
        views = self._buffer.view(LAYERS, num_blocks, 1, BLOCK, TOKEN_BYTES)
        self.worker.register_kv_caches({f"layer{i}": views[i] for i in range(LAYERS)})
        self.connector = StrataConnector(self.config, roles.SCHEDULER, cache_config)
        self.pool = Pool(num_blocks, host.record)
        self.connector.bind_gpu_block_pool(self.pool)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._finished_ids: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self.num_failed = 0
        self.hits: list[dict[Any, int]] = []
        self.preempted: set[str] = set()

    # A user

    def add(self, name: str, tokens: Sequence[int], max_tokens: int = 1, **params: Any) -> Request:
        request = Request(name, list(tokens), max_tokens, params or None)
        self.requests[name] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)
        return request

    def run(self, name: str, tokens: Sequence[int], max_tokens: int = 1, **params: Any) -> Request:
        """A request from its beginning to its end, and what goes on afterwards."""
        request = self.add(name, tokens, max_tokens, **params)
        self.run_all()
        return request

    def run_all(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if not self.has_requests():
                return
            self.step()
        raise AssertionError("vLLM never comes to rest")

    def has_requests(self) -> bool:
        return bool(self.requests or self._finished_ids) or self.connector.has_pending_push_work()

    def abort(self, request: Request) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._end(request, is_delayed=request.is_loading)

    def preempt(self, request: Request) -> None:
        """As where there are no blocks for another one."""
        self.running.remove(request)
        self._let_go(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self.preempted.add(request.request_id)

    def stop(self) -> None:
        self.worker.shutdown()
        self.connector.shutdown()

    # The engine

    def step(self) -> None:
        scheduled = self._schedule()
        output = types.SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=self.preempted,
            finished_req_ids=self._finished_ids,
            scheduled_new_reqs=[
                types.SimpleNamespace(
                    req_id=name, num_computed_tokens=self.requests[name].num_computed_tokens
                )
                for name in scheduled
            ],
            scheduled_cached_reqs=types.SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        )
        metadata = self.connector.build_connector_meta(output)
        self.preempted, self._finished_ids = set(), set()
        if not scheduled:
            time.sleep(0.001)  # as vLLM does, for the sake of other threads
        result = self._execute(metadata, scheduled, output.finished_req_ids)
        self._update(result, scheduled)

    def _schedule(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        for request in [*self.running]:
            if request in self.running and self._allocate(request, 1, scheduled):
                scheduled[request.request_id] = 1
        for request in [*self.waiting]:
            if request.is_loading:
                if request.request_id not in self._received:
                    continue
                self._received.remove(request.request_id)
                self._loaded(request)
            num_external = 0
            if not request.num_computed_tokens:
                local = self.pool.find(request, (request.num_tokens - 1) // BLOCK)
                num_local = len(local) * BLOCK
                answer, is_async = self.connector.get_num_new_matched_tokens(request, num_local)
                if answer is None:
                    continue
                num_external = answer
                assert is_async == bool(num_external)
                assert num_local + num_external < request.num_tokens
            else:
                local, num_local = [], request.num_computed_tokens
            num_tokens = num_local + num_external if num_external else request.num_tokens
            needed = math.ceil(num_tokens / BLOCK) - len(request.blocks) - len(local)
            self.pool.touch(local)
            # A request that waits for a load cannot be preempted: it has to fit, and others of its
            # kind beside it.
            others = [each for each in self.waiting if each.blocks and each is not request]
            reserved = sum(_missing(each) for each in others) if num_external else 0
            full = _missing(request) - len(local) if num_external else needed
            if full + reserved > self.pool.num_free:
                self.pool.free(reversed(local))
                break
            request.blocks += local + self.pool.get_new_blocks(needed)
            request.num_named = max(request.num_named, len(local))
            ids = [block.block_id for block in request.blocks]
            blocks = types.SimpleNamespace(get_block_ids=lambda ids=ids: (ids,))
            self.connector.update_state_after_alloc(request, blocks, num_external)
            if num_external:
                if "get_external_cache_hit_sources" in self.host._methods(BASE):
                    hits = self.connector.get_external_cache_hit_sources(request, num_external)
                    assert sum(hits.values()) == num_external
                    self.hits.append(hits)
                request.num_external += num_external
                request.num_computed_tokens = num_local + num_external
                request.is_loading = True
                continue
            request.num_computed_tokens = num_local
            self.waiting.remove(request)
            self.running.append(request)
            self._name(request, request.num_tokens)
            scheduled[request.request_id] = request.num_tokens - num_local
        return scheduled

    def _allocate(self, request: Request, count: int, scheduled: dict[str, int]) -> bool:
        needed = math.ceil((request.num_computed_tokens + count) / BLOCK) - len(request.blocks)
        while needed > self.pool.num_free:
            last = self.running[-1]
            scheduled.pop(last.request_id, None)
            self.preempt(last)
            if last is request:
                return False
        if needed > 0:
            request.blocks += self.pool.get_new_blocks(needed)
        self._name(request, request.num_computed_tokens + count)
        return True

    def _name(self, request: Request, num_tokens: int) -> None:
        end = min(num_tokens, request.num_tokens) // BLOCK
        if end > request.num_named:
            self.pool.cache_full_blocks(
                request=request,
                blocks=request.blocks,
                num_cached_blocks=request.num_named,
                num_full_blocks=end,
                block_size=BLOCK,
                kv_cache_group_id=0,
            )
            request.num_named = end

    def _loaded(self, request: Request) -> None:
        request.is_loading = False
        name = request.request_id
        if name in self._failed:
            self._failed.remove(name)
            self.num_failed += 1
            if not request.num_computed_tokens:
                self._let_go(request)
                return
        self._name(request, request.num_computed_tokens)

    def _execute(self, metadata: Any, scheduled: dict[str, int], finished: set[str]) -> Any:
        worker = self.worker
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        for name, count in scheduled.items():
            self._compute(self.requests[name], count)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(finished)
        output = types.SimpleNamespace(
            results=results,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return output

    def _compute(self, request: Request, count: int) -> None:
        start = request.num_computed_tokens
        wanted = token_bytes(request.all_token_ids)
        ids = [block.block_id for block in request.blocks]
        for position in range(start + count):
            place = (slice(None), ids[position // BLOCK], position % BLOCK)
            if position >= start:
                self.memory[place] = wanted[position]
            elif not (self.memory[place] == wanted[position]).all():
                raise AssertionError(f"{request.request_id}: token {position} has other bytes")

    def _update(self, output: Any, scheduled: dict[str, int]) -> None:
        results = output.results
        assert self.config.kv_transfer_config.kv_load_failure_policy == "recompute"
        for name in results.failed_recving:
            request = self.requests.get(name)
            if request is not None and request.is_loading:
                request.num_computed_tokens = 0
                self._failed.add(name)
        for request in self.waiting if output.invalid_block_ids else []:
            ids = [block.block_id for block in request.blocks]
            bad = [i for i, each in enumerate(ids) if each in output.invalid_block_ids]
            if request.is_loading and bad:
                request.num_computed_tokens = bad[0] * BLOCK
                self._failed.add(request.request_id)
        self.connector.update_connector_output(output)
        assert not results.finished_sending
        for name in results.finished_recving:
            assert name in self.requests, f"{name} was reported twice, or never began"
            request = self.requests[name]
            assert request.is_loading and name not in self._received
            if request.is_finished:
                self._free(request)
            else:
                self._received.add(name)
        for name, count in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += count
            request.all_token_ids.append(next_token(request.all_token_ids))
            if request.num_tokens >= request.max_tokens:
                self.running.remove(request)
                self._end(request, is_delayed=False)

    def _end(self, request: Request, *, is_delayed: bool) -> None:
        request.is_finished = True
        ids = [block.block_id for block in request.blocks]
        keeps, request.answer_params = self.connector.request_finished_all_groups(request, (ids,))
        self._finished_ids.add(request.request_id)
        if not (keeps or is_delayed):
            self._free(request)

    def _free(self, request: Request) -> None:
        self._let_go(request)
        del self.requests[request.request_id]

    def _let_go(self, request: Request) -> None:
        self.pool.free(reversed(request.blocks))
        request.blocks, request.num_named = [], 0


def _missing(request: Request) -> int:
    """Blocks that a request will need by its end."""
    return math.ceil(request.max_tokens / BLOCK) - len(request.blocks)


def next_token(tokens: Sequence[int]) -> int:
    """What a greedy model would say."""
    return hashlib.sha256(bytes(tokens)).digest()[0]


def token_bytes(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """What the KV cache has of each token, in every layer."""
    hasher, rows = hashlib.sha512(), []
    for token in tokens:
        hasher.update(bytes([token]))
        rows.append(np.frombuffer(hasher.digest(), np.uint8))
    return np.tile(np.stack(rows), TOKEN_BYTES // 64)


def kv_cache_config(num_blocks: int, **changes: Any) -> Any:
    """Of a small model whose layers are outermost, as on vLLM's CPU build."""
    spec = types.SimpleNamespace(page_size_bytes=PAGE_BYTES, block_size=BLOCK)
    layers = [f"layer{i}" for i in range(LAYERS)]
    values: dict[str, Any] = {
        "num_blocks": num_blocks,
        "kv_cache_groups": [types.SimpleNamespace(layer_names=layers, kv_cache_spec=spec)],
        "kv_cache_tensors": [
            types.SimpleNamespace(
                size=LAYERS * num_blocks * PAGE_BYTES,
                layers=layers,
                layer_stride=num_blocks * PAGE_BYTES,
                block_stride=PAGE_BYTES,
                offset=0,
                host_resident=False,
            )
        ],
        "kv_cache_layout": "LBHNC",
    }
    return types.SimpleNamespace(**(values | changes))


def vllm_config(settings: dict[str, Any], *, events: bool = False, world_size: int = 1) -> Any:
    """What vLLM's configuration says."""
    named = types.SimpleNamespace
    return named(
        kv_transfer_config=named(
            kv_connector_extra_config={"stratakv": settings},
            kv_load_failure_policy="fail",
            is_kv_consumer=True,
        ),
        parallel_config=named(
            world_size=world_size,
            tensor_parallel_size=world_size,
            pipeline_parallel_size=1,
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
