# SPDX-License-Identifier: Apache-2.0
"""A small vLLM around a KV connector: scheduler, block pool, worker and a KV cache, over the
classes of `fake_connector_host.py`. It keeps vLLM's rules and asserts where vLLM does.

Computing a token writes bytes that follow from all tokens up to it, in every cache group and on
every rank, after those that it attends to have been compared: a block that holds anything else
fails the test in the step that would have used it. A state is the bytes of its whole block, made
new by each step from the one behind the token before.
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
from .fake_pool import BLOCK, Block, FullAttentionSpec, MambaSpec, Pool
from .fake_request import Request

REST_SECONDS = 60.0


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
        retention: int | None = None,
        hash_tokens: int | None = None,
    ) -> None:
        """`specs`: a cache group for each. `is_packed`: blocks are outermost in memory.
        `retention`: which windows and states vLLM keeps. `hash_tokens`: of a hash, where that is
        less than the smallest block."""
        from stratakv.connector.vllm import StrataConnector

        self.host = host
        self.specs = [FullAttentionSpec(PAGE_BYTES)] if specs is None else list(specs)
        sizes = [spec.block_size for spec in self.specs]
        self.position = math.lcm(*sizes)  # where hits end
        self.hash_tokens = hash_tokens or math.gcd(*sizes)
        self.has_states = any(isinstance(spec, MambaSpec) for spec in self.specs)
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
            worker.register_kv_caches(
                {
                    # A state of several tensors comes as a list.
                    name: [views[i], views[i]] if isinstance(spec, MambaSpec) else views[i]
                    for group, spec in zip(cache_config.kv_cache_groups, self.specs, strict=True)
                    for i, name in enumerate(group.layer_names)
                }
            )
            self.workers.append(worker)
        self.worker = self.workers[0]
        self.connector = StrataConnector(self.config, roles.SCHEDULER, cache_config)
        self._num_finished: collections.Counter[str] = collections.Counter()  # ranks, by request
        self._failed_on_some: set[str] = set()
        self.pool = Pool(
            num_blocks,
            host.record,
            hash_block_size=self.hash_tokens,
            position=self.position,
            retention=retention,
        )
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
        self.compares = True

    # A user

    def add(self, name: str, tokens: Sequence[int], max_tokens: int = 1, **params: Any) -> Request:
        lora = params.pop("lora", None)
        request = Request(name, list(tokens), max_tokens, params or None, self.hash_tokens)
        request.lora_request = lora
        self.requests[name] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)
        return request

    def run(self, name: str, tokens: Sequence[int], max_tokens: int = 1, **params: Any) -> Request:
        """A request from its beginning to its end, and what goes on afterwards."""
        request = self.add(name, tokens, max_tokens, **params)
        self.run_all()
        return request

    def run_all(self) -> None:
        """Step until nothing is left to do: by time, since a step takes none while loads do."""
        deadline = time.monotonic() + REST_SECONDS
        while self.has_requests():
            assert time.monotonic() < deadline, "vLLM never comes to rest"
            self.step()

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
        self.pool.cached_in_step.clear()
        for request in [*self.running]:
            if request not in self.running:
                continue
            count = self._chunk(request, request.num_computed_tokens)
            if self._allocate(request, count, scheduled):
                scheduled[request.request_id] = count
        # Those that hold blocks come first, as in vLLM: one in front of them may want their room.
        for request in sorted(self.waiting, key=lambda each: not each.tables):
            if request.is_loading:
                if request.request_id not in self._received:
                    continue
                self._received.remove(request.request_id)
                self._loaded(request)
            num_external = 0
            if not request.num_computed_tokens:
                most = (request.num_tokens - 1) // self.position
                local = self.pool.find(request.block_hashes, most, self.specs)
                num_local = len(local[0]) * self.specs[0].block_size
                answer, is_async = self.connector.get_num_new_matched_tokens(request, num_local)
                if answer is None:
                    continue
                num_external = answer
                assert is_async == bool(num_external)
                assert num_local + num_external < request.num_tokens
                assert num_external % self.position == 0
            else:
                local, num_local = [[] for _ in self.specs], request.num_computed_tokens
            if self._uses_new_state(local):
                break
            start = num_local + num_external
            end = start if num_external else start + self._chunk(request, start)
            tables = self._tables(request, local, start)
            adopted = [block for table in local for block in table]
            self.pool.touch(adopted)
            # A request that waits for a load cannot be preempted: it has to fit, and others of its
            # kind beside it.
            others = [each for each in self.waiting if each.tables and each is not request]
            reserved = sum(self._missing(each.tables, each) for each in others)
            needed = self._num_new(tables, end)
            if num_external:
                needed = max(needed, self._missing(tables, request)) + reserved
            if needed > self.pool.num_free:
                self.pool.free(reversed(adopted))
                break
            kept = {block.block_id for table in tables for block in table}
            self.pool.free(block for block in adopted if block.block_id not in kept)
            request.tables = tables
            self._grow(request, end)
            if not request.num_cached:
                request.num_cached = {i: len(table) for i, table in enumerate(local)}
            blocks = types.SimpleNamespace(get_block_ids=lambda request=request: _ids_of(request))
            self.connector.update_state_after_alloc(request, blocks, num_external)
            if num_external:
                if "get_external_cache_hit_sources" in self.host._methods(BASE):
                    hits = self.connector.get_external_cache_hit_sources(request, num_external)
                    assert sum(hits.values()) == num_external
                    self.hits.append(hits)
                request.num_external += num_external
                request.num_computed_tokens = start
                request.is_loading = True
                continue
            request.num_computed_tokens = num_local
            self.waiting.remove(request)
            self.running.append(request)
            self._cache(request, end)
            scheduled[request.request_id] = end - num_local
        return scheduled

    def _chunk(self, request: Request, start: int) -> int:
        """How many tokens the next step computes: all of them, but where there are states it ends
        at the last boundary before the last token, so that the state there can be kept."""
        end = request.num_tokens
        boundary = (end - 1) // self.position * self.position
        return boundary - start if self.has_states and start < boundary else end - start

    def _uses_new_state(self, local: list[list[Block]]) -> bool:
        """Whether a hit ends with a state that this step computes: vLLM waits for the next one."""
        return any(
            isinstance(spec, MambaSpec) and bool(table)
            and table[-1].block_hash in self.pool.cached_in_step
            for spec, table in zip(self.specs, local, strict=True)
        )  # fmt: skip

    def _tables(
        self, request: Request, local: list[list[Block]], num_computed: int
    ) -> list[list[Block]]:
        """The tables of a request that has been computed so far, null blocks where nothing is
        attended to."""
        tables = [[*own] for own in request.tables] or [[] for _ in self.specs]
        for table, more, spec in zip(tables, local, self.specs, strict=True):
            table += more
            for index in range(spec.num_skipped(num_computed) // spec.block_size):
                table[index : index + 1] = [self.pool.null_block]
        return tables

    def _num_new(self, tables: list[list[Block]], num_tokens: int) -> int:
        """Blocks that these tables lack for so many tokens: of states the last one only."""
        num_new = 0
        for table, spec in zip(tables, self.specs, strict=True):
            lacks = max(0, math.ceil(num_tokens / spec.block_size) - len(table))
            num_new += min(1, lacks) if isinstance(spec, MambaSpec) else lacks
        return num_new

    def _grow(self, request: Request, num_tokens: int) -> None:
        for table, spec in zip(request.tables, self.specs, strict=True):
            lacks = max(0, math.ceil(num_tokens / spec.block_size) - len(table))
            if isinstance(spec, MambaSpec):
                table += [self.pool.null_block] * (lacks - 1)
                lacks = min(1, lacks)
            table += self.pool.get_new_blocks(lacks)

    def _forget_skipped(self, request: Request) -> None:
        for table, spec in zip(request.tables, self.specs, strict=True):
            num_skipped = spec.num_skipped(request.num_computed_tokens) // spec.block_size
            self.pool.free(reversed(table[:num_skipped]))
            table[:num_skipped] = [self.pool.null_block] * num_skipped

    def _missing(self, tables: list[list[Block]], request: Request) -> int:
        """Blocks that a request will need by its end."""
        num_states = sum(isinstance(spec, MambaSpec) for spec in self.specs)
        return self._num_new(tables, request.max_tokens) + num_states

    def _allocate(self, request: Request, count: int, scheduled: dict[str, int]) -> bool:
        self._forget_skipped(request)
        end = request.num_computed_tokens + count
        while self._num_new(request.tables, end) > self.pool.num_free:
            last = self.running[-1]
            scheduled.pop(last.request_id, None)
            self.preempt(last)
            if last is request:
                return False
        self._grow(request, end)
        self._cache(request, end)
        return True

    def _cache(self, request: Request, num_tokens: int) -> None:
        """Caches whole positions, and of these the blocks that are kept."""
        tokens = min(num_tokens, request.num_tokens) // self.position * self.position
        for group, (table, spec) in enumerate(zip(request.tables, self.specs, strict=True)):
            first, end = request.num_cached.get(group, 0), tokens // spec.block_size
            if end > first:
                self.pool.cache_full_blocks(
                    request=request,
                    blocks=table,
                    num_cached_blocks=first,
                    num_full_blocks=end,
                    block_size=spec.block_size,
                    kv_cache_group_id=group,
                    block_mask=self.pool.kept(spec, first, end, request.num_prompt_tokens),
                )
                request.num_cached[group] = end

    def _loaded(self, request: Request) -> None:
        request.is_loading = False
        name = request.request_id
        if name in self._failed:
            self._failed.remove(name)
            self.num_failed += 1
            if not request.num_computed_tokens:
                self._let_go(request)
                return
        self._cache(request, request.num_computed_tokens)

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
        wanted = self._bytes_of(request)
        for group, (table, spec) in enumerate(zip(request.tables, self.specs, strict=True)):
            size, salt = spec.block_size, np.uint8(16 * rank + group)
            pages = self.memory[rank].reshape(LAYERS, -1, size, PAGE_BYTES // size)
            assert np.shares_memory(pages, self.memory[rank])
            if isinstance(spec, MambaSpec):
                self._compute_state(pages, table, spec, wanted ^ salt, start, end, request)
                continue
            for position in range(spec.num_skipped(start), end):
                block = table[position // size]
                assert not block.is_null, f"{request.request_id}: token {position} of {group}"
                place = (slice(None), block.block_id, position % size)
                bytes_here = np.resize(wanted[position] ^ salt, PAGE_BYTES // size)
                if position >= start:
                    pages[place] = bytes_here
                elif self.compares and not (pages[place] == bytes_here).all():
                    raise AssertionError(
                        f"{request.request_id}: token {position} has other bytes in group {group} "
                        f"on rank {rank}"
                    )

    def _bytes_of(self, request: Request) -> np.ndarray[Any, Any]:
        return token_bytes(request.all_token_ids)

    def _compute_state(
        self,
        pages: np.ndarray[Any, Any],
        table: list[Block],
        spec: MambaSpec,
        wanted: np.ndarray[Any, Any],
        start: int,
        end: int,
        request: Request,
    ) -> None:
        """The state behind the token before `start` becomes the one behind `end`, in the block that
        this ends in."""
        if start:
            before = table[(start - 1) // spec.block_size]
            assert not before.is_null, f"{request.request_id}: no state behind {start} tokens"
            state = np.resize(wanted[start - 1], pages.shape[2:])
            assert (pages[:, before.block_id] == state).all(), (
                f"{request.request_id}: another state behind {start} tokens"
            )
        after = table[(end - 1) // spec.block_size]
        assert not after.is_null and after.ref_cnt == 1
        assert after.block_hash is None or end % spec.block_size == 0
        pages[:, after.block_id] = np.resize(wanted[end - 1], pages.shape[2:])

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
                request.num_computed_tokens = bad[0] * self.specs[0].block_size
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
            if request.num_computed_tokens < request.num_tokens:
                continue
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
        request.tables, request.num_cached = [], {}


def _ids_of(request: Request) -> tuple[list[int], ...]:
    return tuple([block.block_id for block in table] for table in request.tables)


def next_token(tokens: Sequence[int]) -> int:
    """What a greedy model would say."""
    return hashlib.sha256(bytes(tokens)).digest()[0]


def token_bytes(tokens: Sequence[int], adapter: bytes = b"") -> np.ndarray[Any, Any]:
    """What the KV cache has of each token, in every layer."""
    hasher, rows = hashlib.sha512(adapter), []
    for token in tokens:
        hasher.update(bytes([token]))
        rows.append(np.frombuffer(hasher.digest(), np.uint8))
    return np.tile(np.stack(rows), TOKEN_BYTES // 64)
