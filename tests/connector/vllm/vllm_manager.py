# SPDX-License-Identifier: Apache-2.0
"""Runs with a Python that can import vLLM, and needs none of its compiled parts: vLLM's own tiering
manager over our tier, without an engine around it.

The one argument is a folder. Chunks are stored by one manager, which stops, and promoted by the
next, out of the folder's SSD tier; then their records are damaged, and a third one must find
nothing. Prints a JSON object of what happened.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import vllm
from vllm.v1.kv_offload import base, config

from stratakv.connector.vllm import StrataSpec

CHUNK_BYTES, CHUNKS, REGION_CHUNKS = 8192, 8, 12
SECONDS = 30.0


def main() -> None:
    """Three lives of a manager."""
    folder = Path(sys.argv[1])
    keys = [np.random.default_rng(i).bytes(32) + bytes(4) for i in range(CHUNKS)]
    with Manager(folder, "first") as first:
        first.store(keys)
    with Manager(folder, "second") as second:
        promoted, source = second.load(keys)
        names = second.metric_names()
    blocks = folder / "ssd" / "blocks"
    content = bytearray(blocks.read_bytes())
    for place in range(4096 + 100, len(content), 4096):
        content[place] ^= 1
    blocks.write_bytes(content)
    with Manager(folder, "third") as third:
        damaged, _ = third.load(keys)
    left = [path.name for path in Path("/dev/shm").glob("vllm_offload_stratakv-test-*")]
    print(
        json.dumps(
            {
                "version": vllm.__version__,
                "promoted": promoted,
                "source": source,
                "damaged": damaged,
                "metrics": names,
                "left": left,
            }
        )
    )


class Manager:
    """vLLM's manager of one engine."""

    def __init__(self, folder: Path, name: str) -> None:
        settings = {
            "cpu_bytes": "1MiB", "ssd_path": str(folder / "ssd"), "ssd_bytes": "16MiB",
            "ssd_admission": "all", "load": "always",
        }  # fmt: skip
        extra = {"cpu_bytes_to_use": REGION_CHUNKS * CHUNK_BYTES, "stratakv": settings}
        self._extra = extra
        self._spec = StrataSpec(_config(extra, f"stratakv-test-{folder.name}-{name}"))
        self._manager = self._spec.get_manager()
        self._lock = getattr(self._manager, "lock", nullcontext())
        self._context = base.ReqContext(req_id=name)

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.shutdown()

    def store(self, keys: list[Any]) -> None:
        """A request computes these chunks, the i-th all of bytes i + 1."""
        with self._lock:
            self._begin(keys)
            prepared = self._manager.prepare_store(keys, self._context)
            rows = np.asarray(self._manager.primary_tier.get_kv_memoryview()).view(np.uint8)
            for i, row in enumerate(prepared.store_spec.block_ids):
                rows[row] = i + 1
            self._step([self._context.req_id])
            self._manager.complete_store(prepared.keys_to_store, self._context)
            self._end()

    def load(self, keys: list[Any]) -> tuple[list[int], str]:
        """A request looks these chunks up and loads what there is; the first byte of each, and
        where vLLM says the first one came from."""
        with self._lock:
            self._begin(keys)
            found = self._find(keys)
            loaded = self._manager.prepare_load(keys[:found], self._context)
            rows = np.asarray(self._manager.primary_tier.get_kv_memoryview()).view(np.uint8)
            content = [int(rows[row][0]) for row in loaded.block_ids]
            ask = getattr(self._manager, "get_load_source", None)
            source = str(ask(keys[0], self._context)) if ask and found else ""
            self._manager.complete_load(keys[:found], self._context)
            self._end()
        return content, source

    def metric_names(self) -> list[str]:
        """Those of ours that are told, all of which are defined."""
        stats = self._manager.get_stats()
        told = {name for name in stats.reduce() if name.startswith("stratakv:")}
        names = {name.split(":(")[0] for name in told}
        assert names <= StrataSpec.build_metric_definitions(self._extra).keys()
        return sorted(names)

    def _find(self, keys: list[Any]) -> int:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            answers = []
            for key in keys:
                answers.append(self._manager.lookup(key, self._context))
                if answers[-1] is base.LookupResult.MISS:
                    break
            self._step([])
            hits = [answer is base.LookupResult.HIT for answer in answers]
            if all(hits):
                return len(keys)
            if answers[-1] is base.LookupResult.MISS and all(hits[:-1]):
                return len(answers) - 1
            time.sleep(0.005)
        raise TimeoutError("look-ups are answered with RETRY for ever")

    def _begin(self, keys: list[Any]) -> None:
        for i, key in enumerate(keys):
            if hasattr(self._context, "set_offload_key_position"):
                self._context.set_offload_key_position(key, 32 * (i + 1))
        self._manager.on_new_request(self._context)

    def _end(self) -> None:
        self._manager.on_request_finished(self._context)
        deadline = time.monotonic() + SECONDS
        while self._manager.has_pending_work():
            assert time.monotonic() < deadline
            self._step([])
            time.sleep(0.005)

    def _step(self, new_requests: list[str]) -> None:
        self._manager.on_schedule_end(
            base.ScheduleEndContext(new_req_ids=new_requests, preempted_req_ids=[])
        )


def _config(extra: dict[str, Any], engine_id: str) -> Any:
    def made(kind: Any, **values: Any) -> Any:
        names = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in values.items() if name in names})

    sizes = {f"{name}_size": 1 for name in ("world", "tp", "pp", "pcp", "dcp", "data_parallel")}
    return made(
        config.OffloadingConfig,
        groups=(
            made(
                config.OffloadingGroupConfig,
                tokens_per_block=32,
                layer_names=("a", "b"),
                group_id=0,
            ),
        ),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=engine_id,
        model=made(config.OffloadingModelConfig, name="some/model", dtype="float32"),
        cache=made(config.OffloadingCacheConfig, tokens_per_hash=32, blocks_per_chunk=1),
        parallel=made(
            config.OffloadingParallelConfig,
            rank=0,
            **sizes,
            data_parallel_index=0,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        kv_cache_layout="LBHNC",
    )


if __name__ == "__main__":
    main()
