# SPDX-License-Identifier: Apache-2.0
"""The whole engine through the kernels' backend: their plain twins on the CPU, in float64.

Equal tokens say that slots, block tables, lengths and the order of a step are right in every kind
of step, with blocks that are shared, preempted, stored and loaded. An fp8 pool answers as such.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.models.dtypes import FP8_KV
from stratakv.engine.worker.forward.kernel_attention import Kernels
from stratakv.tiers.block import BlockLayout, Identity
from stratakv.tiers.settings.values import ConfigError

from .engine.worker.recording_runtime import RecordingRuntime
from .test_exactness import OUTPUT_TOKENS, ask, prompt, running_core
from .tiny_models import greedy_reference, make_llama

KERNELS = {"attention_backend": "kernels"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("grouped"))


@pytest.fixture(scope="module")
def texts(model: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts with common beginnings, and what transformers answers."""
    root = prompt(1, 120)
    prompts = [root[:cut] + prompt(10 + cut, 30) for cut in (120, 64, 63, 8, 0)] + [root[:97], root]
    return [(text, greedy_reference(model, text, OUTPUT_TOKENS)) for text in prompts]


@pytest.fixture(params=["launched", "recorded"])
def is_recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether decode steps are replayed, by a runtime that stands for a GPU's."""
    if request.param == "recorded":
        opened: list[RecordingRuntime] = []

        def open_runtime(_: object) -> RecordingRuntime:
            opened.append(RecordingRuntime())
            return opened[-1]

        monkeypatch.setattr("stratakv.engine.worker.model_runner.open_runtime", open_runtime)
        # The plain kernels read back, which a device refuses and this runtime does not.
        monkeypatch.setattr(Kernels, "can_record_decodes", True)
        monkeypatch.setattr(Kernels, "can_record_chunks", True)
        yield True
        assert opened and opened[-1].num_replays > 0
    else:
        yield False


@pytest.mark.parametrize(("budget", "block_size"), [(13, 4), (1024, 32)])
def test_any_chunking_and_batch(
    budget: int, block_size: int, is_recorded: bool, model: Path, texts: Any
) -> None:
    scheduler = {"max_num_batched_tokens": budget}
    cache = {"block_size": block_size, "num_blocks": 400}
    with running_core(model, scheduler=scheduler, cache=cache, model_options=KERNELS) as core:
        answers = ask(core, [text for text, _ in texts])
    assert [answer.token_ids for answer in answers] == [expected for _, expected in texts]


def test_preemption(is_recorded: bool, model: Path, texts: Any) -> None:
    with running_core(model, cache={"num_blocks": 36}, model_options=KERNELS) as core:
        answers = ask(core, [text for text, _ in texts])
    assert [answer.token_ids for answer in answers] == [expected for _, expected in texts]
    assert sum((answer.last.timings or {})["num_preemptions"] for answer in answers) > 0


def test_blocks_from_the_tiers(is_recorded: bool, model: Path, tmp_path: Path) -> None:
    documents = [prompt(100 + number, 170) for number in range(4)]
    expected = [greedy_reference(model, text, OUTPUT_TOKENS) for text in documents]
    offload = {"tiers": ("cpu", "ssd"), "cpu_bytes": 2**21, "ssd_path": tmp_path / "ssd",
               "ssd_bytes": 64 * 2**20, "load": "always"}  # fmt: skip
    for life in range(2):
        with running_core(
            model, cache={"num_blocks": 36}, offload=offload, model_options=KERNELS
        ) as core:
            for index, text in enumerate(documents):
                [answer] = ask(core, [text], tag=f"{life}-{index}-")
                assert answer.token_ids == expected[index]
                if life:
                    assert answer.cached["ssd"] >= 160


def fp8_answers(core: EngineCore, documents: list[list[int]], tag: str) -> list[list[int]]:
    return [ask(core, [text], tag=f"{tag}-{i}-")[0].token_ids for i, text in enumerate(documents)]


def test_an_fp8_pool_answers_the_same_from_every_tier(model: Path, tmp_path: Path) -> None:
    """Not what transformers answers: K and V are rounded. But always the same."""
    documents = [prompt(100 + number, 170) for number in range(4)]
    offload = {"tiers": ("cpu", "ssd"), "cpu_bytes": 2**21, "ssd_path": tmp_path / "ssd",
               "ssd_bytes": 64 * 2**20, "load": "always"}  # fmt: skip
    cache = {"num_blocks": 36, "kv_cache_dtype": FP8_KV}
    with running_core(model, cache={"num_blocks": 400} | {"kv_cache_dtype": FP8_KV}) as core:
        assert core._executor.runner.pool.tensor.dtype == torch.float8_e4m3fn
        expected = fp8_answers(core, documents, "alone")
    for life in range(2):
        with running_core(model, cache=cache, offload=offload) as core:
            assert fp8_answers(core, documents, str(life)) == expected
            loaded = core.call("stats", "")["connector"]["tiers"]["ssd"]
    assert loaded, "the tier has figures"


def test_pools_of_other_types_never_find_an_fp8_pools_blocks(model: Path, tmp_path: Path) -> None:
    offload = {"tiers": ("cpu", "ssd"), "cpu_bytes": 2**21, "ssd_path": tmp_path / "ssd",
               "ssd_bytes": 64 * 2**20}  # fmt: skip
    with running_core(model, cache={"kv_cache_dtype": FP8_KV}, offload=offload):
        pass
    with (
        pytest.raises(
            ConfigError, match=r"was made for .* fp8_e4m3, and this engine has .* float64"
        ),
        running_core(model, offload=offload),
    ):
        pass
    kinds = (FP8_KV, "bfloat16", "float64")
    names = {Identity("m", "", "bfloat16", kind, 16).root() for kind in kinds}
    layouts = {BlockLayout(2, 16, 2, 8, kind).layout_id() for kind in (FP8_KV, "bfloat16")}
    assert len(names) == 3 and len(layouts) == 2
