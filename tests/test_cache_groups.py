# SPDX-License-Identifier: Apache-2.0
"""Whole engines whose layers lie in several cache groups: the same greedy tokens in float64 as with
one group, wherever their blocks come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratakv.engine.cache.group_spec import plan_groups
from stratakv.engine.config.engine_config import CacheConfig
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.request.core_messages import AddRequest, TokenOutput
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.tiers import assemble
from stratakv.tiers.base import Answer
from stratakv.tiers.block import ALIGNMENT, BlockLayout, pack_key
from stratakv.tiers.settings.values import MAX_BLOCKS, ConfigError
from stratakv.tiers.ssd.index import index_file
from stratakv.tiers.ssd.store import SsdStore

from .checked_logprobs import check_logprobs
from .leftovers import check_nothing_left, settle
from .stepping import step_outputs
from .test_exactness import ask, documents, prompt, rejected_records, running_core, tiers
from .tiny_models import greedy_reference, make_llama

LAYERS = 4
BLOCK = 8  # tokens, that of `running_core`
TOKENS = 20
# What 170 tokens and their answer can be found again of.
PREFIX = 160

Texts = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("groups"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def texts(model: Path) -> Texts:
    return documents(model)


@pytest.fixture(params=["uni", pytest.param("mp", marks=pytest.mark.slow)])
def executor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def family() -> list[list[int]]:
    """Prompts with common beginnings of several lengths."""
    root = prompt(1, 120)
    return [root[:cut] + prompt(10 + cut, 30) for cut in (120, 64, 63, 8, 0)] + [root[:97], root]


def pool(num_blocks: int, num_groups: int = 2) -> dict[str, Any]:
    return {"num_blocks": num_blocks, "num_groups": num_groups}


def check_end(core: EngineCore) -> None:
    settle(core)
    if core.config.executor == "uni":
        check_nothing_left(core)


@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("backend", ["gather", "kernels"])
def test_cold_and_found_in_the_pool(model: Path, num_groups: int, backend: str) -> None:
    prompts = family()
    options = {"attention_backend": backend}
    cache = pool(200, num_groups)
    with running_core(model, cache=cache, model_options=options) as core:
        assert core.ready().num_blocks == 200 * num_groups
        for round_number in range(2):
            answers = ask(core, prompts, tag=f"{round_number}-")
            for text, answer in zip(prompts, answers, strict=True):
                expected = greedy_reference(model, text, TOKENS, guess=answer.token_ids)
                assert answer.token_ids == expected
        for text, answer in zip(prompts, answers, strict=True):
            assert answer.cached["pool"] == (len(text) - 1) // BLOCK * BLOCK
        check_end(core)


def test_in_a_process_of_its_own(model: Path, texts: Texts) -> None:
    with running_core(model, cache=pool(36), executor="mp") as core:
        for round_number in range(2):
            answers = ask(core, [text for text, _ in texts], tag=f"{round_number}-")
            assert [answer.token_ids for answer in answers] == [said for _, said in texts]
        check_end(core)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_preemption(model: Path, num_groups: int) -> None:
    prompts = family()
    with running_core(model, cache=pool(36, num_groups)) as core:
        answers = ask(core, prompts)
        for text, answer in zip(prompts, answers, strict=True):
            expected = greedy_reference(model, text, TOKENS, guess=answer.token_ids)
            assert answer.token_ids == expected
        preempted = [(answer.last.timings or {})["num_preemptions"] for answer in answers]
        assert sum(preempted) > 0, "the pool was meant to be too small"
        check_end(core)


@pytest.mark.parametrize("load", ["always", "both"])
def test_blocks_from_the_cpu_tier(model: Path, texts: Texts, load: str, executor: str) -> None:
    offload = {"tiers": ("cpu",), "cpu_bytes": 64 * 2**20, "load": load}
    budget = {"max_num_batched_tokens": 24}
    with running_core(
        model, cache=pool(36), offload=offload, scheduler=budget, executor=executor
    ) as core:
        for round_number in range(3):
            for index, (text, expected) in enumerate(texts):
                [answer] = ask(core, [text], tag=f"{round_number}-{index}-")
                assert answer.token_ids == expected
                if round_number:
                    assert answer.cached["cpu"] >= (PREFIX if load == "always" else 1)
        check_end(core)


def test_blocks_from_the_ssd_after_a_restart(
    model: Path, texts: Texts, tmp_path: Path, executor: str
) -> None:
    offload = tiers(tmp_path / "ssd", cpu_bytes=2**20)
    for life in range(2):
        with running_core(model, cache=pool(36), offload=offload, executor=executor) as core:
            for index, (text, expected) in enumerate(texts):
                [answer] = ask(core, [text], tag=f"{life}-{index}-")
                assert answer.token_ids == expected
                if life:
                    assert answer.cached["ssd"] >= PREFIX
                settle(core)
            check_end(core)


def digests_of(core: EngineCore, text: list[int]) -> list[bytes]:
    request = AddRequest("names", np.asarray(text, "<i4").tobytes(), SamplingParams())
    return list(core._request_builder.make_request(request).block_hashes)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_a_prefix_ends_where_one_group_lacks_a_block(
    model: Path,
    texts: Texts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: int,
    harm: str,
) -> None:
    real, stores = assemble.open_ssd, []

    def open_ssd(*args: Any, **options: Any) -> SsdStore:
        stores.append(real(*args, **options))
        return stores[-1]

    monkeypatch.setattr(assemble, "open_ssd", open_ssd)
    path = tmp_path / "ssd"
    offload = tiers(path, cpu_bytes=2**20)
    with running_core(model, cache=pool(36), offload=offload) as core:
        for index, (text, _) in enumerate(texts):
            ask(core, [text], tag=f"0-{index}-")
            settle(core)
        layout = core._groups.layout
        lost = [pack_key(digests_of(core, text)[10], group) for text, _ in texts]
    if harm == "damaged":
        for key in lost:
            flip_a_bit(path, key, layout)
    with running_core(model, cache=pool(36), offload=offload) as core:
        assert stores[-1].lookup(lost) == [Answer.HIT] * len(lost)
        if harm == "missing":
            assert stores[-1].drop(lost) == len(lost)
        for index, (text, expected) in enumerate(texts):
            [answer] = ask(core, [text], tag=f"1-{index}-")
            assert answer.token_ids == expected
            assert answer.cached["ssd"] == 10 * BLOCK
        rejected = sum(rejected_records(core).values())
        assert rejected == (len(texts) if harm == "damaged" else 0)
        check_end(core)


def flip_a_bit(path: Path, key: bytes, layout: BlockLayout) -> None:
    """Of the K and V in one record of a closed store."""
    index = index_file.IndexFile(path / "index", 0)
    [slot] = [row.slot for row in index.iter_rows() if row.key == key]
    index.close()
    content = np.memmap(path / "blocks", np.uint8, "r+")
    content[slot * (ALIGNMENT + layout.slot_bytes) + ALIGNMENT + layout.page_bytes // 2] ^= 4
    content.flush()


def test_log_probabilities_of_prompts(model: Path) -> None:
    wish = SamplingParams(
        max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=3
    )
    prompts = {f"r{i}": prompt(i, 40 + 30 * i) for i in range(3)}
    came: dict[str, list[TokenOutput]] = {name: [] for name in prompts}
    with running_core(model, cache=pool(60)) as core:
        for name, text in prompts.items():
            core.add(AddRequest(name, np.asarray(text, "<i4").tobytes(), wish))
        for outputs in step_outputs(core):
            for output in outputs:
                came[output.request_id].append(output)
            if all(parts and parts[-1].finish_reason for parts in came.values()):
                break
        check_end(core)
    for name, parts in came.items():
        ids = [token for part in parts for token in part.new_token_ids]
        entries = [entry for part in parts for entry in part.logprobs or []]
        [of_prompt] = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
        check_logprobs(model, prompts[name], ids, wish, entries, of_prompt)


def test_the_store_of_another_number_of_groups_is_refused(
    model: Path, texts: Texts, tmp_path: Path
) -> None:
    offload = tiers(tmp_path / "ssd", cpu_bytes=2**20)
    with running_core(model, offload=offload) as core:
        ask(core, [texts[0][0]])
    with (
        pytest.raises(ConfigError, match=r"was made for 4 layers .* this engine has 2 layers"),
        running_core(model, cache=pool(36), offload=offload),
    ):
        raise AssertionError("blocks of four layers were taken for those of two")


def test_a_plan_gives_every_layer_a_place_of_its_own(model: Path) -> None:
    whole = load_model_spec(model).layout(BLOCK, "float64")
    ids = set()
    for num_groups in (1, 2, 4):
        groups = plan_groups(whole, num_groups)
        assert len(groups) == num_groups
        assert groups.num_pages(10) * groups.layout.page_bytes == 10 * whole.page_bytes
        places = groups.places()
        assert len(set(places)) == len(places) == LAYERS
        for number, group in enumerate(groups.groups):
            assert [places[layer] for layer in group.layers] == [
                (number, place) for place in range(groups.layout.num_layers)
            ]
        ids.add(groups.layout.layout_id())
    assert len(ids) == 3
    assert plan_groups(whole, 1).layout == whole
    assert groups.num_pages(MAX_BLOCKS // 4) == MAX_BLOCKS
    with pytest.raises(ConfigError, match="lower --num-blocks"):
        groups.num_pages(MAX_BLOCKS // 4 + 1)


@pytest.mark.parametrize("num_groups", [3, 8])
def test_groups_that_cannot_be_made(model: Path, num_groups: int) -> None:
    with (
        pytest.raises(ConfigError, match=rf"{num_groups} cache groups .* a divisor of 4"),
        running_core(model, cache=pool(36, num_groups)),
    ):
        raise AssertionError("it started")
    with pytest.raises(ConfigError, match="number of cache groups"):
        CacheConfig(num_groups=0)
