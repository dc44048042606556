# SPDX-License-Identifier: Apache-2.0
"""Two models of one architecture share a cache server: neither goes on with what the other one
computed, also where the keys of blocks do not say of which model they are."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stratakv.engine import LLM, SamplingParams
from stratakv.engine.offline.outputs import RequestOutput

from .tiers.cache_server.rig import RunningServer, running_server
from .tiny_models import make_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPT = [1 + 7 * i % 190 for i in range(150)]
SHARED_BLOCKS = 9
WAIT_SECONDS = 30.0


def answer(model: Path, block_hash: str, server: RunningServer | None = None) -> RequestOutput:
    options = {"num_blocks": 40, "max_model_len": 300, "num_threads": 1, "dtype": "float64"}
    if server is not None:
        options |= {
            "kv_offload": f"cpu,grpc://127.0.0.1:{server.port}",
            "kv_offload_cpu_bytes": "16MiB",
            "kv_offload_load": "always",
            "require_tiers": True,
        }
    with LLM(model, block_hash=block_hash, **options) as llm:
        [output] = llm.generate([PROMPT], GREEDY)
    return output


def wait_stored(server: RunningServer) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while server.tenant_store().stats()["cpu"].blocks < SHARED_BLOCKS:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("block_hash", ["sha256", "sha256_cbor"])
def test_neither_goes_on_with_what_the_other_computed(tmp_path: Path, block_hash: str) -> None:
    models = [make_llama(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    expected = [answer(model, block_hash).token_ids for model in models]
    assert expected[0] != expected[1]
    with running_server(cpu_bytes=16 * 2**20) as server:
        for model, tokens in zip(models, expected, strict=True):
            first = answer(model, block_hash, server)
            assert (first.token_ids, first.cached_tokens_by_tier["remote"]) == (tokens, 0)
            wait_stored(server)
            again = answer(model, block_hash, server)
            assert again.token_ids == tokens
            assert again.cached_tokens_by_tier["remote"] == 16 * SHARED_BLOCKS
