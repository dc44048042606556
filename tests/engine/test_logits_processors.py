# SPDX-License-Identifier: Apache-2.0
"""An installed package of logits processors, served by real engines: its requests get what it says,
the others what they would get without it, also when it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratakv.engine import LLM, SamplingParams
from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import PROCESSOR_FAILED, AddRequest, TokenOutput
from stratakv.engine.request.request import pack_token_ids
from stratakv.tiers.settings.values import ConfigError

from ..processor_package import MODULE, SOURCE, install, packages_in
from .test_llm import prompt_of

OPTIONS: dict[str, Any] = {"dtype": "float64", "num_blocks": 100, "max_num_seqs": 8,
                           "num_threads": 1, "max_num_batched_tokens": 32}  # fmt: skip
Reference = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`Only` is installed by its entry point; `Counts` has to be named."""
    folder = tmp_path_factory.mktemp("site")
    (folder / f"{MODULE}.py").write_text(SOURCE)
    install(folder, "strata_package", only=f"{MODULE}:Only")
    with packages_in(folder):
        yield folder


@pytest.fixture(scope="module")
def llm(tiny_model: Path, package: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **OPTIONS, logits_processors=f"{MODULE}:Counts") as llm:
        yield llm


def greedy(count: int = 10, **args: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=count, temperature=0.0, ignore_eos=True, extra_args=args or None
    )


def check_all_kinds(llm: LLM, reference: Reference) -> None:
    """More requests than rows, of all kinds, some of which fail on their way."""
    prompts = [prompt_of(seed, 12 + seed) for seed in range(12)]
    wishes = [greedy(), greedy(only=65), greedy(**{"from": 30}), greedy(only=66, boom="apply"),
              greedy(only=67, boom="update"), greedy(**{"from": 250})] * 2  # fmt: skip
    outputs = llm.generate(prompts, wishes)
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        kind = index % 6
        ids, error = output.token_ids, output.error or ""
        if kind in (3, 4, 5):
            assert output.finish_reason == "error"
            name = "only" if kind < 5 else f"{MODULE}:Counts"
            assert error.startswith(f"the logits processor {name} failed on this request: ")
        else:
            assert (output.finish_reason, error) == ("length", "")
        match kind:
            case 0:
                assert ids == reference(prompt, 10)
            case 1:
                assert ids == [65] * 10
            case 2:
                assert ids == list(range(30, 40))
            case 3:
                assert ids == [66] * 3 and error.endswith("RuntimeError: three tokens are enough")
            case 4:
                assert ids == [] and error.endswith("RuntimeError: no state for this one")
            case 5:
                assert ids == list(range(250, 257))
                assert error.endswith(f"OverflowError: no token 257 after {len(prompt)}")


def test_each_request_gets_its_own_in_this_process(llm: LLM, greedy_reference: Reference) -> None:
    check_all_kinds(llm, greedy_reference)
    check_all_kinds(llm, greedy_reference)  # whoever failed has left nothing behind


def test_each_request_gets_its_own_in_a_worker_process(
    tiny_model: Path, package: Path, greedy_reference: Reference
) -> None:
    """Two steps at once there."""
    options = OPTIONS | {"distributed_executor_backend": "mp"}
    with LLM(tiny_model, **options, logits_processors=[f"{MODULE}:Counts"]) as llm:
        check_all_kinds(llm, greedy_reference)


def test_what_a_processor_refuses_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="logits processor only: only must be a token id, got '6'"):
        llm.generate([prompt_of(1)], greedy(only="6"))


def test_a_prompt_of_embeddings_has_no_ids_for_a_callable_that_takes_them(llm: LLM) -> None:
    numbers = np.random.default_rng(5).normal(size=(6, 32))
    fails, forced = llm.generate([numbers, numbers], [greedy(**{"from": 30}), greedy(only=65)])
    assert "a prompt of embeddings has none" in (fails.error or "")
    assert forced.token_ids == [65] * 10


def test_a_request_that_no_processor_takes_ends_before_its_prompt_is_computed(
    tiny_model: Path, package: Path
) -> None:
    core = EngineCore(engine_config(tiny_model, OPTIONS))
    try:
        prompt = pack_token_ids(prompt_of(3, 100))  # four steps of 32 tokens
        assert core.add(AddRequest("a", prompt, greedy(only=1, boom="update"))) == []
        assert core.add(AddRequest("b", pack_token_ids(prompt_of(4, 5)), greedy(3))) == []
        outputs: list[TokenOutput] = core.step()
        [output] = [one for one in outputs if one.request_id == "a"]
        assert (output.finish_reason, output.error_code) == ("error", PROCESSOR_FAILED)
        while not outputs or outputs[-1].finish_reason != "length":
            outputs = core.step()
        assert outputs[-1].request_id == "b" and core.num_failed_steps == 0
    finally:
        core.shutdown(0.0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (f"{MODULE}:Missing", f"{MODULE} has no Missing"),
        ("strata_nowhere:Only", "put its folder on PYTHONPATH"),
        (AssertionError, "builtins:AssertionError is of the type Exception"),
    ],
)
def test_an_engine_does_not_start_without_its_processors(
    tiny_model: Path, package: Path, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(tiny_model, **OPTIONS, logits_processors=[value])
