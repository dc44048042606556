# SPDX-License-Identifier: Apache-2.0
"""The engine's greedy tokens in float64 equal transformers', whatever happens to their blocks.

Batching, chunking, prefix hits, preemption and every tier a block can come from change the order of
work, never the answer. The engine core runs whole: scheduler, worker, connector, slab and SSD.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratakv.engine.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from stratakv.engine.config.lora_config import LoraConfig
from stratakv.engine.config.speculative_config import SpeculativeConfig
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest, RequestExtras, TokenOutput
from stratakv.engine.request.sampling_params import SamplingParams

from .leftovers import settle
from .offload_config import offload_config
from .stepping import step_outputs
from .tiny_models import VARIANTS, VOCAB, greedy_reference, make_llama

OUTPUT_TOKENS = 20


@dataclass
class Answer:
    """Everything one request got."""

    token_ids: list[int] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    last: TokenOutput | None = None


@contextmanager
def running_core(
    model: Path,
    *,
    cache: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    offload: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    speculative: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    executor: str = "uni",
) -> Iterator[EngineCore]:
    """A core on `model` in float64, shut down in an orderly way at the end."""
    config = EngineConfig(
        model=ModelConfig(
            path=model,
            served_name="tiny",
            dtype="float64",
            **({"max_model_len": 256} | (model_options or {})),
        ),
        cache=CacheConfig(**({"block_size": 8, "num_blocks": 200} | (cache or {}))),
        scheduler=SchedulerConfig(
            **({"max_num_batched_tokens": 64, "max_num_seqs": 8} | (scheduler or {}))
        ),
        offload=offload_config(**(offload or {})),
        speculative=SpeculativeConfig(**(speculative or {})),
        lora=LoraConfig(**(lora or {})),
        num_threads=1,
        executor=executor,
    )
    core = EngineCore(config)
    try:
        yield core
    finally:
        core.shutdown(30.0)


def ask(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    tag: str = "r",
    *,
    adapters: Sequence[str] = (),
    num_tokens: int = OUTPUT_TOKENS,
    session: str = "",
) -> list[Answer]:
    """Run `prompts` together; their answers in order. `adapters` has the name of each one's
    adapter; without names all are answered by the model alone."""
    answers = {f"{tag}{index}": Answer() for index in range(len(prompts))}
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    names = adapters or [""] * len(prompts)
    for request_id, prompt, name in zip(answers, prompts, names, strict=True):
        ids = np.asarray(prompt, "<i4").tobytes()
        extras = RequestExtras(adapter=name, session=session)
        assert not core.add(AddRequest(request_id, ids, params, extras=extras))
    for outputs in step_outputs(core):
        for output in outputs:
            answer = answers[output.request_id]
            answer.token_ids += output.new_token_ids
            answer.cached = output.cached_tokens_by_tier or answer.cached
            if output.finish_reason:
                assert output.finish_reason == "length", output
                answer.last = output
        if all(answer.last for answer in answers.values()):
            return list(answers.values())
    raise AssertionError(f"requests did not end: {answers}")


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("grouped"))


@pytest.fixture(scope="module")
def shared(model: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts with common beginnings of several lengths, and what transformers answers."""
    root = prompt(1, 120)
    prompts = [root[:cut] + prompt(10 + cut, 30) for cut in (120, 64, 63, 8, 0)] + [root[:97], root]
    return [(text, greedy_reference(model, text, OUTPUT_TOKENS)) for text in prompts]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_llama(variant: str, tmp_path: Path) -> None:
    directory = make_llama(tmp_path, variant, seed=3, **sharding(variant))
    prompts = [prompt(1, 5), prompt(2, 61), prompt(3, 150)]
    with running_core(directory) as core:
        answers = ask(core, prompts)
    for text, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == greedy_reference(
            directory, text, OUTPUT_TOKENS, guess=answer.token_ids
        )
        assert len(set(answer.token_ids)) > 8, "a repeating answer would prove little"


def sharding(variant: str) -> dict[str, Any]:
    return {"num_hidden_layers": 4} if variant == "grouped" else {}


@pytest.mark.parametrize("budget", [8, 13, 64, 1024])
@pytest.mark.parametrize("block_size", [4, 32])
def test_any_chunking_and_batch(
    budget: int, block_size: int, model: Path, shared: list[tuple[list[int], list[int]]]
) -> None:
    scheduler = {"max_num_batched_tokens": budget}
    cache = {"block_size": block_size, "num_blocks": 400}
    with running_core(model, scheduler=scheduler, cache=cache) as core:
        answers = ask(core, [text for text, _ in shared])
    assert [answer.token_ids for answer in answers] == [expected for _, expected in shared]


def test_no_chunking(model: Path, shared: list[tuple[list[int], list[int]]]) -> None:
    scheduler = {"max_num_batched_tokens": 256, "enable_chunked_prefill": False}
    with running_core(model, scheduler=scheduler) as core:
        answers = ask(core, [text for text, _ in shared])
    assert [answer.token_ids for answer in answers] == [expected for _, expected in shared]


def test_prefix_hits(model: Path, shared: list[tuple[list[int], list[int]]]) -> None:
    with running_core(model) as core:
        for round_number in range(2):
            for index, (text, expected) in enumerate(shared):
                [answer] = ask(core, [text], tag=f"{round_number}-{index}-")
                assert answer.token_ids == expected
        assert answer.cached["pool"] >= len(text) // 8 * 8 - 8


def test_caching_switched_off(model: Path, shared: list[tuple[list[int], list[int]]]) -> None:
    with running_core(model, cache={"enable_prefix_caching": False}) as core:
        for index, (text, expected) in enumerate(shared[:3]):
            [answer] = ask(core, [text], tag=f"{index}-")
            assert answer.token_ids == expected
            assert not any(answer.cached.values())


def test_preemption(model: Path, shared: list[tuple[list[int], list[int]]]) -> None:
    # 34 blocks of 8 hold one and a half of the longest requests.
    with running_core(model, cache={"num_blocks": 36}) as core:
        answers = ask(core, [text for text, _ in shared])
    assert [answer.token_ids for answer in answers] == [expected for _, expected in shared]
    preemptions = [(answer.last.timings or {})["num_preemptions"] for answer in answers]
    assert sum(preemptions) > 0, "the pool was meant to be too small"


def tiers(path: Path, **changes: Any) -> dict[str, Any]:
    return {"tiers": ("cpu", "ssd"), "cpu_bytes": 4 * 2**20, "ssd_path": path,
            "ssd_bytes": 64 * 2**20, "load": "always"} | changes  # fmt: skip


def documents(model: Path) -> list[tuple[list[int], list[int]]]:
    texts = [prompt(100 + number, 170) for number in range(5)]
    return [(text, greedy_reference(model, text, OUTPUT_TOKENS)) for text in texts]


def test_blocks_from_the_cpu_tier(model: Path) -> None:
    texts = documents(model)
    offload = {"tiers": ("cpu",), "cpu_bytes": 64 * 2**20, "load": "always"}
    with running_core(model, cache={"num_blocks": 36}, offload=offload) as core:
        for round_number in range(3):
            for index, (text, expected) in enumerate(texts):
                [answer] = ask(core, [text], tag=f"{round_number}-{index}-")
                assert answer.token_ids == expected
                if round_number:
                    assert answer.cached["cpu"] >= 160


def test_blocks_from_the_cpu_tier_in_one_batch(model: Path) -> None:
    texts = documents(model)
    offload = {"tiers": ("cpu",), "cpu_bytes": 64 * 2**20, "load": "always"}
    with running_core(model, cache={"num_blocks": 70}, offload=offload) as core:
        for round_number in range(3):
            answers = ask(core, [text for text, _ in texts], tag=f"{round_number}-")
            assert [answer.token_ids for answer in answers] == [expected for _, expected in texts]


def test_blocks_from_the_ssd_after_a_restart(model: Path, tmp_path: Path) -> None:
    texts = documents(model)
    offload = tiers(tmp_path / "ssd", cpu_bytes=2**20)
    for life in range(2):
        with running_core(model, cache={"num_blocks": 36}, offload=offload) as core:
            for index, (text, expected) in enumerate(texts):
                [answer] = ask(core, [text], tag=f"{life}-{index}-")
                assert answer.token_ids == expected
                if life:
                    assert answer.cached["ssd"] >= 160
                settle(core)


def test_damaged_blocks_are_computed_again(model: Path, tmp_path: Path) -> None:
    texts = documents(model)
    offload = tiers(tmp_path / "ssd", cpu_bytes=2**20)
    with running_core(model, cache={"num_blocks": 36}, offload=offload) as core:
        for index, (text, _) in enumerate(texts):
            ask(core, [text], tag=f"0-{index}-")
            settle(core)
    damage_everything(tmp_path / "ssd")
    with running_core(model, cache={"num_blocks": 36}, offload=offload) as core:
        for index, (text, expected) in enumerate(texts):
            [answer] = ask(core, [text], tag=f"1-{index}-")
            assert answer.token_ids == expected
            assert not answer.cached.get("ssd")
        assert sum(rejected_records(core).values()) >= len(texts)


def damage_everything(path: Path) -> None:
    """Flip one bit in every 4 KiB page of the slot file, and nothing in the index."""
    content = np.memmap(path / "blocks", np.uint8, "r+")
    rng = random.Random(5)
    for page in range(0, len(content), 4096):
        if content[page : page + 4096].any():
            # Bits beyond the header's 128 bytes in a header page are padding nobody reads.
            content[page + rng.randrange(128)] ^= 1 << rng.randrange(8)
    content.flush()


def rejected_records(core: EngineCore) -> dict[str, int]:
    stats = core.call("stats", "")
    return dict(stats["connector"]["tiers"]["ssd"]["rejected"])
