# SPDX-License-Identifier: Apache-2.0
"""A small vLLM around a KV connector: scheduler, block pool, worker and a KV cache, over the
classes of `fake_connector_host.py`. It keeps vLLM's rules and asserts where vLLM does.

Computing a token writes bytes that follow from all tokens up to it, in every cache group and on
every rank, after those that it attends to have been compared: a block that holds anything else
fails the test in the step that would have used it.
"""

from __future__ import annotations

import collections
import hashlib
import math
import time
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .fake_connector_host import (
    BASE,
    LAYERS,
    PAGE_BYTES,
    TOKEN_BYTES,
    ConnectorHost,
    kv_cache_config,
    vllm_config,
)
from .fake_pool import BLOCK, Block, FullAttentionSpec, Pool


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
        self.tables: list[list[Block]] = []  # a list of blocks for each cache group
        self.num_named = 0
        self.is_loading = False
        self.is_finished = False
        self.num_external = 0  # tokens that came from outside, in all
        self.answer_params: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_blocks(self) -> int:
        """In each group, null ones included."""
        return len(self.tables[0]) if self.tables else 0

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

    def __init__(
        self,
        host: ConnectorHost,
        settings: dict[str, Any],
        num_blocks: int = 12,
        *,
        specs: Sequence[FullAttentionSpec] | None = None,
        num_ranks: int = 1,
        is_packed: bool = False,
    ) -> None:
        """`specs`: a cache group for each. `is_packed`: blocks are outermost in memory."""
        from stratakv.connector.vllm import StrataConnector

        self.host = host
        self.specs = [FullAttentionSpec(PAGE_BYTES)] if specs is None else list(specs)
        self.config = vllm_config(settings, world_size=num_ranks)
        cache_config = kv_cache_config(num_blocks, specs=self.specs, is_packed=is_packed)
        roles = host.classes["KVConnectorRole"]
        self.memory: list[np.ndarray[Any, Any]] = []  # of each rank: [layer, block, token, bytes]
        self.workers = []
        for rank in range(num_ranks):
            config = vllm_config(settings, world_size=num_ranks, rank=rank)
            worker = StrataConnector(config, roles.WORKER, cache_config)
            buffer = torch.zeros(LAYERS * num_blocks * PAGE_BYTES, dtype=torch.uint8)
            views = buffer.view(LAYERS, num_blocks, 1, BLOCK, TOKEN_BYTES)
            if is_packed:
                views = buffer.view(num_blocks, LAYERS, 1, BLOCK, TOKEN_BYTES).transpose(0, 1)
            self.memory.append(views[:, :, 0].numpy())
            groups = cache_config.kv_cache_groups
            worker.register_kv_caches(
                {name: views[i] for group in groups for i, name in enumerate(group.layer_names)}
            )
            self.workers.append(worker)
        self.worker = self.workers[0]
        self.connector = StrataConnector(self.config, roles.SCHEDULER, cache_config)
        self._num_finished: collections.Counter[str] = collections.Counter()  # ranks, by request
        self._failed_on_some: set[str] = set()
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
        for worker in self.workers:
            worker.shutdown()
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
        outputs = [
            self._execute(rank, metadata, scheduled, output.finished_req_ids)
            for rank in range(len(self.workers))
        ]
        result = self._aggregate(outputs)
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
                most = (request.num_tokens - 1) // BLOCK
                local = self.pool.find(request.block_hashes, most, self.specs)
                num_local = len(local[0]) * BLOCK
                answer, is_async = self.connector.get_num_new_matched_tokens(request, num_local)
                if answer is None:
                    continue
                num_external = answer
                assert is_async == bool(num_external)
                assert num_local + num_external < request.num_tokens
            else:
                local, num_local = [[] for _ in self.specs], request.num_computed_tokens
            num_tokens = num_local + num_external if num_external else request.num_tokens
            tables = self._tables(request, local, num_local + num_external)
            num_blocks = math.ceil(num_tokens / BLOCK)
            needed = sum(num_blocks - len(table) for table in tables)
            adopted = [block for table in local for block in table]
            self.pool.touch(adopted)
            # A request that waits for a load cannot be preempted: it has to fit, and others of its
            # kind beside it.
            others = [each for each in self.waiting if each.tables and each is not request]
            reserved = sum(self._missing(each) for each in others) if num_external else 0
            most = math.ceil(request.max_tokens / BLOCK)
            full = sum(most - len(table) for table in tables) if num_external else needed
            if full + reserved > self.pool.num_free:
                self.pool.free(reversed(adopted))
                break
            kept = {block.block_id for table in tables for block in table}
            self.pool.free(block for block in adopted if block.block_id not in kept)
            request.tables = [
                table + self.pool.get_new_blocks(num_blocks - len(table)) for table in tables
            ]
            request.num_named = max(request.num_named, len(local[0]))
            blocks = types.SimpleNamespace(get_block_ids=lambda request=request: _ids_of(request))
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

    def _tables(
        self, request: Request, local: list[list[Block]], num_computed: int
    ) -> list[list[Block]]:
        """The tables of a request that has been computed so far, null blocks where nothing is
        attended to."""
        tables = [[*own] for own in request.tables] or [[] for _ in self.specs]
        for table, more, spec in zip(tables, local, self.specs, strict=True):
            table += more
            for index in range(spec.num_skipped(num_computed) // BLOCK):
                table[index : index + 1] = [self.pool.null_block]
        return tables

    def _forget_skipped(self, request: Request) -> None:
        for table, spec in zip(request.tables, self.specs, strict=True):
            num_skipped = spec.num_skipped(request.num_computed_tokens) // BLOCK
            self.pool.free(reversed(table[:num_skipped]))
            table[:num_skipped] = [self.pool.null_block] * num_skipped

    def _missing(self, request: Request) -> int:
        """Blocks that a request will need by its end."""
        num_missing = math.ceil(request.max_tokens / BLOCK) - request.num_blocks
        return len(self.specs) * num_missing

    def _allocate(self, request: Request, count: int, scheduled: dict[str, int]) -> bool:
        self._forget_skipped(request)
        more = math.ceil((request.num_computed_tokens + count) / BLOCK) - request.num_blocks
        needed = max(0, more) * len(self.specs)
        while needed > self.pool.num_free:
            last = self.running[-1]
            scheduled.pop(last.request_id, None)
            self.preempt(last)
            if last is request:
                return False
        if needed > 0:
            for table in request.tables:
                table += self.pool.get_new_blocks(more)
        self._name(request, request.num_computed_tokens + count)
        return True

    def _name(self, request: Request, num_tokens: int) -> None:
        end = min(num_tokens, request.num_tokens) // BLOCK
        if end > request.num_named:
            for group, table in enumerate(request.tables):
                self.pool.cache_full_blocks(
                    request=request,
                    blocks=table,
                    num_cached_blocks=request.num_named,
                    num_full_blocks=end,
                    block_size=BLOCK,
                    kv_cache_group_id=group,
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

    def _execute(
        self, rank: int, metadata: Any, scheduled: dict[str, int], finished: set[str]
    ) -> Any:
        worker = self.workers[rank]
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        for name, count in scheduled.items():
            self._compute(rank, self.requests[name], count)
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

    def _aggregate(self, outputs: list[Any]) -> Any:
        """As vLLM does: a request has been received when every rank says so."""
        finished: set[str] = set()
        report = outputs[0].kv_connector_worker_meta
        for output in outputs[1:]:
            report = report.aggregate(output.kv_connector_worker_meta)
        for output in outputs:
            self._num_finished.update(output.results.finished_recving)
            self._failed_on_some |= output.results.failed_recving
            assert not output.results.finished_sending
        for name, count in [*self._num_finished.items()]:
            if count == len(outputs):
                finished.add(name)
                del self._num_finished[name]
        failed = self._failed_on_some & finished
        self._failed_on_some -= failed
        invalid = set().union(*(output.invalid_block_ids for output in outputs))
        assert len(self.specs) == 1 or not invalid  # vLLM's core would end
        return types.SimpleNamespace(
            finished_recving=finished,
            failed_recving=failed,
            invalid_block_ids=invalid,
            kv_connector_worker_meta=report,
        )

    def _compute(self, rank: int, request: Request, count: int) -> None:
        start = request.num_computed_tokens
        end = start + count
        wanted = token_bytes(request.all_token_ids)
        for group, (table, spec) in enumerate(zip(request.tables, self.specs, strict=True)):
            salt = np.uint8(16 * rank + group)
            for position in range(spec.num_skipped(start), end):
                block = table[position // BLOCK]
                assert not block.is_null, f"{request.request_id}: token {position} of {group}"
                place = (slice(None), block.block_id, position % BLOCK)
                bytes_here = wanted[position] ^ salt
                if position >= start:
                    self.memory[rank][place] = bytes_here
                elif not (self.memory[rank][place] == bytes_here).all():
                    raise AssertionError(
                        f"{request.request_id}: token {position} has other bytes in group {group} "
                        f"on rank {rank}"
                    )

    def _update(self, output: Any, scheduled: dict[str, int]) -> None:
        results = output
        assert self.config.kv_transfer_config.kv_load_failure_policy == "recompute"
        for name in results.failed_recving:
            request = self.requests.get(name)
            if request is not None and request.is_loading:
                request.num_computed_tokens = 0
                self._failed.add(name)
        for request in self.waiting if output.invalid_block_ids else []:
            [ids] = _ids_of(request)
            bad = [i for i, each in enumerate(ids) if each in output.invalid_block_ids]
            if request.is_loading and bad:
                request.num_computed_tokens = bad[0] * BLOCK
                self._failed.add(request.request_id)
        self.connector.update_connector_output(output)
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
        ids = _ids_of(request)
        keeps, request.answer_params = self.connector.request_finished_all_groups(request, ids)
        self._finished_ids.add(request.request_id)
        if not (keeps or is_delayed):
            self._free(request)

    def _free(self, request: Request) -> None:
        self._let_go(request)
        del self.requests[request.request_id]

    def _let_go(self, request: Request) -> None:
        for table in request.tables:
            self.pool.free(reversed(table))
        request.tables, request.num_named = [], 0


def _ids_of(request: Request) -> tuple[list[int], ...]:
    return tuple([block.block_id for block in table] for table in request.tables)


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
