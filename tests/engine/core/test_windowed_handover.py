# SPDX-License-Identifier: Apache-2.0
"""Models whose layers see windows, handed over: of full attention all blocks of a prompt, of a
window those that the token behind it reads. The tokens of transformers in float64."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stratakv.engine.core.engine_core import EngineCore

from ...test_exactness import prompt
from ...test_windowed_models import MODELS, WINDOW
from ...tiers.cache_server.rig import WAIT_SECONDS, ServerProcess, server_process
from ...tiny_models import greedy_reference, make_model
from .conftest import config_of
from .conftest import request as ask_for
from .test_handover import BLOCK, computed_tokens, gone_on, prefilled

LENGTHS = [7, BLOCK, 3 * WINDOW + 1, 4 * WINDOW, 16 * BLOCK]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    return make_model(tmp_path_factory.mktemp("model"), kind, seed=3, **MODELS[kind])


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    """One for each model: its blocks have one layout."""
    with server_process("--cpu-bytes", "32MiB") as server:
        yield server


@pytest.fixture
def nodes(model: Path, server: ServerProcess, patient_clients: None) -> Iterator[list[EngineCore]]:
    """A prefill node, whose steps are shorter than a window, and a decode node."""
    common: dict[str, Any] = {
        "kv_offload": f"cpu,grpc://127.0.0.1:{server.port}",
        "kv_offload_cpu_bytes": "2MiB",
        "kv_offload_load": "always",
        "require_tiers": True,
        "num_blocks": 80,
        "max_num_batched_tokens": 13,
    }
    cores = [EngineCore(config_of(model, role=role, **common)) for role in ("prefill", "decode")]
    yield cores
    for core in cores:
        core.shutdown(5.0)


def test_the_decode_node_computes_nothing_of_the_prompt(
    model: Path, nodes: list[EngineCore]
) -> None:
    one, two = nodes
    for length in LENGTHS:
        text = prompt(length, length)
        output = prefilled(one, text)
        assert output.ticket is not None
        before, loaded = computed_tokens(two), loaded_blocks(two)
        answer = gone_on(two, text, output.ticket)
        assert answer.new_token_ids == greedy_reference(model, text, 6)
        assert computed_tokens(two) - before == 5, "one for each token behind the first"
        assert sum(answer.cached_tokens_by_tier.values()) == length
        assert loaded_blocks(two) - loaded == num_needed(one, length)
    # Prompts with a common beginning, of which the decode node has what it kept.
    for seed, shared in ((1, 8 * BLOCK), (2, 3 * BLOCK + 1)):
        text = prompt(4 * WINDOW, 4 * WINDOW)[:shared] + prompt(seed, WINDOW + 2)
        before = computed_tokens(two)
        answer = gone_on(two, text, prefilled(one, text).ticket)
        assert answer.new_token_ids == greedy_reference(model, text, 6)
        assert computed_tokens(two) - before == 5


def test_a_followed_prompt_is_read_as_far_as_its_windows_need(nodes: list[EngineCore]) -> None:
    one, two = nodes
    text = prompt(9, 4 * WINDOW)
    assert two.call("follow", msgspec.json.encode(ask_for("f", text)).decode()) is True
    ticket = prefilled(one, text).ticket
    slab = two._connector._hierarchy._slab  # type: ignore[attr-defined]
    deadline = time.monotonic() + WAIT_SECONDS
    while len(slab.keys()) < num_needed(one, len(text)):
        assert time.monotonic() < deadline, "what has come is not followed"
        two.has_work()
        time.sleep(0.001)
    loaded = loaded_blocks(two)
    answer = gone_on(two, text, ticket)
    assert answer.cached_tokens_by_tier == {"pool": 0, "cpu": len(text)}
    assert loaded_blocks(two) == loaded, "nothing was left to read"


def num_needed(core: EngineCore, num_tokens: int) -> int:
    """Blocks that the token behind so many reads."""
    kinds = core._groups.attention
    return sum(-(-num_tokens // BLOCK) - kind.first_seen(num_tokens) // BLOCK for kind in kinds)


def loaded_blocks(core: EngineCore) -> int:
    return int(core.call("stats", "")["connector"]["tiers"]["remote"]["loaded_blocks"])
