# SPDX-License-Identifier: Apache-2.0
"""Models whose layers carry states, handed over and shared: of a prompt all blocks of K and V, and
the states behind its last token. The tokens of transformers in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.core.engine_core import EngineCore

from ...test_exactness import prompt
from ...tiers.cache_server.rig import ServerProcess, server_process
from ..models.states.state_models import exact_logits, make_state_model
from .conftest import config_of
from .test_handover import BLOCK, computed_tokens, gone_on, prefilled
from .test_windowed_handover import loaded_blocks

LENGTHS = [5, BLOCK, 5 * BLOCK + 3, 9 * BLOCK, 12 * BLOCK + 7]


@pytest.fixture(scope="module", params=["lfm2-state-last", "granitemoehybrid-dense-still"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_state_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with server_process("--cpu-bytes", "32MiB") as server:
        yield server


def make_core(model: Path, server: ServerProcess, **options: Any) -> EngineCore:
    given = {
        "kv_offload": f"cpu,grpc://127.0.0.1:{server.port}",
        "kv_offload_cpu_bytes": "4MiB",
        "kv_offload_load": "always",
        "require_tiers": True,
        "num_blocks": 200,
        "max_num_batched_tokens": 13,
    }
    return EngineCore(config_of(model, **(given | options)))


@pytest.fixture
def nodes(model: Path, server: ServerProcess, patient_clients: None) -> Iterator[list[EngineCore]]:
    cores = [make_core(model, server, role=role) for role in ("prefill", "decode")]
    yield cores
    for core in cores:
        core.shutdown(5.0)


def check_answer(model: Path, text: list[int], answer: list[int]) -> None:
    logits = exact_logits(model, [*text, *answer[:-1]])[len(text) - 1 :]
    assert answer == logits.argmax(-1).tolist()


def num_needed(core: EngineCore, num_tokens: int) -> int:
    """Blocks of K and V, and the pieces of the states behind them."""
    assert core._groups.state is not None
    return -(-num_tokens // BLOCK) + core._groups.state.num_pages


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
        check_answer(model, text, answer.new_token_ids)
        assert computed_tokens(two) - before == 5, "one for each token behind the first"
        assert sum(answer.cached_tokens_by_tier.values()) == length
        assert loaded_blocks(two) - loaded == num_needed(one, length)


@pytest.mark.parametrize("length", [40, 41, 42, 47, 48])
def test_without_a_ticket_that_fits_states_begin_in_front_of_the_last_token(
    model: Path, nodes: list[EngineCore], length: int
) -> None:
    """The states behind a prompt have its last token already, which is computed again where there
    is no token of another engine; and its block keeps the right K and V."""
    one, two = nodes
    text = prompt(100 + length, length)
    ticket = prefilled(one, text).ticket
    assert ticket is not None
    for fields in ({"ticket": None}, {"ticket": ticket, "min_tokens": 3}, {"ticket": ticket}):
        check_answer(model, text, gone_on(two, text, **fields).new_token_ids)


@pytest.mark.parametrize("length", [4 * 13 + 1, 5 * 13 + 1, 8 * BLOCK + 1])
def test_a_last_chunk_of_one_token_has_its_states_kept(
    model: Path, nodes: list[EngineCore], length: int
) -> None:
    one, two = nodes
    text = prompt(200 + length, length)
    for _ in range(2):  # the second time all but the last token is in the pool
        ticket = prefilled(one, text).ticket
        assert ticket is not None
    before = computed_tokens(two)
    check_answer(model, text, gone_on(two, text, ticket).new_token_ids)
    assert computed_tokens(two) - before == 5


def test_an_engine_finds_what_another_one_has_left_at_a_server(
    model: Path, server: ServerProcess, patient_clients: None
) -> None:
    """States and blocks at a cache server, looked up from afar: the hit ends at the states."""
    text = prompt(77, 90)
    with_end = [*text, *prompt(78, 11)]
    parted = [*text[:40], *prompt(79, 30)]
    one = make_core(model, server)
    check_answer(model, text, gone_on(one, text, None).new_token_ids)
    one.shutdown(10.0)  # writes what it has
    two = make_core(model, server)
    try:
        for prompt_ids, expected in ((with_end, 88), (parted, 0), (text, 88)):
            answer = gone_on(two, prompt_ids, None)
            check_answer(model, prompt_ids, answer.new_token_ids)
            assert sum(answer.cached_tokens_by_tier.values()) == expected
    finally:
        two.shutdown(5.0)
