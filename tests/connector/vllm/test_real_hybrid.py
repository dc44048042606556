# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with a hybrid, a Qwen3-Next of random weights, above both of our forms: the same
tokens as without us, cold and out of every tier, and hits as long as those of vLLM's own prefix
cache. A state of zeros changes the tokens of every prompt; so does a block of attention.

Needs what test_real_vllm.py needs: `make test-vllm` and docs/vllm.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ...tiers.cache_server.rig import server_process
from .real_vllm import (
    HYBRID,
    HYBRID_BLOCKS,
    HYBRID_WHOLE,
    ConnectorEngine,
    SpecEngine,
    Tokens,
    computed,
    flip_bits_on_disk,
    hybrid_expected,
    hybrid_model,
    hybrid_prompts,
    needs_vllm,
    on_disk,
    rejected_on_disk,
    wait_for_tier,
    windowed_model,
)
from .test_real_connector import GROUPS, RANKS
from .vllm_engine import VllmEngine, make_prompts, make_unlike_model

__all__ = ["hybrid_expected", "hybrid_model", "hybrid_prompts", "windowed_model"]

pytestmark = needs_vllm

SLAB = {"cpu_bytes": "16MiB", "load": "always"}  # 30 blocks
STEP = 544  # tokens of a block
FORMS: dict[str, type[VllmEngine]] = {"StrataSpec": SpecEngine, "StrataConnector": ConnectorEngine}


def engine(form: str, model: Path, folder: Path, **settings: Any) -> VllmEngine:
    """A region has room for two prompts, so that the others come from below it."""
    more: dict[str, Any] = {"region_chunks": 140} if form == "StrataSpec" else {}
    arguments = HYBRID | settings.pop("arguments", {})
    return FORMS[form](model, folder, **settings, **more, arguments=arguments)


@pytest.mark.parametrize("form", FORMS)
def test_cold_from_memory_and_from_the_ssd_after_a_kill(
    form: str,
    hybrid_model: Path,
    hybrid_prompts: Tokens,
    hybrid_expected: Tokens,
    tmp_path: Path,
) -> None:
    settings = on_disk(tmp_path, cpu_bytes="16MiB")
    whole = [HYBRID_WHOLE] * len(hybrid_prompts)
    with engine(form, hybrid_model, tmp_path, **settings) as first:
        assert first.generate(hybrid_prompts) == (hybrid_expected, [0] * 4)
        assert first.generate(hybrid_prompts) == (hybrid_expected, whole)
        # In bfloat16 vLLM's tokens depend on what is computed beside them, with us or without. At
        # once the prompts ask for more than vLLM's region holds.
        together = first.generate(hybrid_prompts, together=True)[1]
        assert together == whole or form == "StrataSpec"
        wait_for_tier(first, "ssd", 4 * HYBRID_BLOCKS)
        first.kill()
    with engine(form, hybrid_model, tmp_path, **settings) as second:
        assert second.generate(hybrid_prompts) == (hybrid_expected, whole)
        ssd = second.do({"stats": True})["tiers"]["ssd"]
        assert ssd["loaded_blocks"] >= 4 * HYBRID_BLOCKS
        assert not ssd["rejected"] and not ssd["errors"]
    flip_bits_on_disk(tmp_path)
    with engine(form, hybrid_model, tmp_path, **settings) as third:
        assert third.generate(hybrid_prompts)[0] == hybrid_expected
        assert rejected_on_disk(third) >= 4


@pytest.mark.parametrize("retention", [0, 2 * STEP], ids=["prompt ends", "every two blocks"])
def test_hits_are_those_of_the_prefix_cache_of_vllm(
    hybrid_model: Path, hybrid_prompts: Tokens, tmp_path: Path, retention: int
) -> None:
    """Steps of a block each, so that there is a state at each to be kept, or not."""
    arguments = {"prefix_cache_retention_interval": retention, "max_num_batched_tokens": 600}
    first = hybrid_prompts[0]
    asked = [first, first[:1500], [*first, *make_prompts(1, 700, seed=5)[0]], first]
    roomy = HYBRID | arguments | {"num_gpu_blocks_override": 60}
    with VllmEngine(hybrid_model, tmp_path, **roomy) as alone:
        expected, own = alone.generate(asked)
    assert own == [0, 2 * STEP if retention else 0, HYBRID_WHOLE, HYBRID_WHOLE]
    with engine("StrataConnector", hybrid_model, tmp_path, **SLAB, arguments=arguments) as ours:
        hits = []
        for prompt, wanted in zip(asked, expected, strict=True):
            tokens, cached = ours.generate([prompt])
            assert tokens == [wanted]
            hits += cached
            ours.generate(hybrid_prompts[1:])  # so that vLLM has nothing of it any more
        assert hits == own
        assert ours.do({"stats": True})["failures"] == {}


def test_turns_of_a_conversation(
    hybrid_model: Path, hybrid_prompts: Tokens, tmp_path: Path
) -> None:
    """Answers are long enough for a state to lie in each. In bfloat16 tokens depend on what is
    computed beside them, so requests come one after the other."""
    kept = {"prefix_cache_retention_interval": STEP}
    asked = [{"generate": [each], "max_tokens": 600} for each in hybrid_prompts[:2]]
    with VllmEngine(hybrid_model, tmp_path, **HYBRID | kept) as alone:
        wanted = [alone.do(command)["tokens"][0] for command in asked]
        turns = [p + t for p, t in zip(hybrid_prompts, wanted, strict=False)]
        after = alone.generate(turns)[0]
    with engine("StrataConnector", hybrid_model, tmp_path, **SLAB, arguments=kept) as ours:
        assert [ours.do(command)["tokens"][0] for command in asked] == wanted
        ours.generate(make_prompts(3, len(hybrid_prompts[0]), seed=8))
        assert ours.generate(turns) == (after, [HYBRID_WHOLE + STEP] * 2)
        stats = ours.do({"stats": True})
        assert stats["failures"] == {} and not stats["broken"]


@pytest.mark.parametrize("how", ["zero", "flip"])
def test_bytes_that_changed_in_memory_are_computed(
    hybrid_model: Path, hybrid_prompts: Tokens, hybrid_expected: Tokens, tmp_path: Path, how: str
) -> None:
    with engine("StrataConnector", hybrid_model, tmp_path, **SLAB) as ours:
        ours.generate(hybrid_prompts)
        ours.generate(make_prompts(3, len(hybrid_prompts[0]), seed=9))  # pushes them all out
        assert ours.do({"forget": True})["forgotten"]
        assert ours.do({"damage": how})["damaged"] >= 4 * HYBRID_BLOCKS
        assert ours.generate(hybrid_prompts)[0] == hybrid_expected
        assert ours.do({"stats": True})["damaged"] >= 4
        assert ours.generate(hybrid_prompts)[0] == hybrid_expected


def test_prefill_here_and_decode_there(
    hybrid_model: Path, hybrid_prompts: Tokens, hybrid_expected: Tokens, tmp_path: Path
) -> None:
    with server_process("--cpu-bytes", "32MiB") as server:
        settings = SLAB | {"servers": [f"grpc://127.0.0.1:{server.port}"]}
        with engine("StrataConnector", hybrid_model, tmp_path, **settings) as prefill:
            assert prefill.generate(hybrid_prompts)[0] == hybrid_expected
            wait_for_tier(prefill, "remote", 4 * HYBRID_BLOCKS)
            prefill.kill()
        with engine("StrataConnector", hybrid_model, tmp_path, **settings) as decode:
            for prompt, wanted in zip(hybrid_prompts, hybrid_expected, strict=True):
                asked = {"max_tokens": 6, "params": {"do_remote_prefill": True}}
                answer = decode.do(asked | {"generate": [prompt]})
                assert (answer["tokens"], answer["cached"]) == ([wanted], [HYBRID_WHOLE])


def test_two_ranks(hybrid_model: Path, hybrid_prompts: Tokens, tmp_path: Path) -> None:
    settings = SLAB | {"arguments": RANKS}
    with engine("StrataConnector", hybrid_model, tmp_path, **settings) as ours:
        tokens, cached = ours.generate(hybrid_prompts)
        assert cached == [0] * 4
        again, cached = ours.generate(hybrid_prompts)
        assert again == tokens
        assert min(cached) > 0


def test_several_cache_groups_below_the_offloading_of_vllm(
    windowed_model: Path, tmp_path: Path
) -> None:
    """StrataSpec, whose host hands chunks of every group over."""
    prompts = make_prompts(6)
    expected = computed(windowed_model, prompts, tmp_path, **GROUPS)
    settings = on_disk(tmp_path, cpu_bytes="16MiB") | {"region_chunks": 80, "arguments": GROUPS}
    with SpecEngine(windowed_model, tmp_path, **settings) as first:
        assert first.generate(prompts) == (expected, [0] * 6)
        assert first.generate(prompts) == (expected, [288] * 6)
        wait_for_tier(first, "ssd", 90)
        first.kill()
    with SpecEngine(windowed_model, tmp_path, **settings) as second:
        assert second.generate(prompts) == (expected, [288] * 6)
        assert second.do({"stats": True})["tiers"]["ssd"]["loaded_blocks"] >= 90


def test_groups_whose_blocks_have_unlike_numbers_of_tokens(tmp_path: Path) -> None:
    """A Gemma 4: blocks of 32 tokens beside those of 64."""
    model, prompts = make_unlike_model(tmp_path / "model"), make_prompts(6)
    arguments = GROUPS | {"num_gpu_blocks_override": 60}
    expected = computed(model, prompts, tmp_path, **arguments)
    whole = [256] * 6  # of 300 tokens
    settings = on_disk(tmp_path, cpu_bytes="16MiB") | {"arguments": arguments}
    with ConnectorEngine(model, tmp_path, **settings) as first:
        assert first.generate(prompts) == (expected, [0] * 6)
        assert first.generate(prompts) == (expected, whole)
        wait_for_tier(first, "ssd", 60)
        first.kill()
    with ConnectorEngine(model, tmp_path, **settings) as second:
        assert second.generate(prompts) == (expected, whole)
        assert second.do({"damage": "zero"})["damaged"]
        assert second.generate(prompts)[0] == expected
        assert second.do({"stats": True})["damaged"] > 0


def test_speculation_is_refused(hybrid_model: Path, tmp_path: Path) -> None:
    """Before anything runs: a state that has seen a refused token is wrong."""
    proposes = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    refused = engine(
        "StrataConnector", hybrid_model, tmp_path, **SLAB,
        arguments={"speculative_config": proposes},
    )  # fmt: skip
    assert refused.refused is not None
    assert any("2 blocks for proposed tokens" in each for each in refused.refused), refused.refused
