# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of sampled tokens and of prompts equal transformers', in float64.

They are the model's own, whatever was asked of the sampler and whatever happened to the request on
its way: chunks, company, preemption, blocks that others had computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest, TokenOutput
from stratakv.engine.request.logprobs import PositionLogprobs, PromptLogprobs
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams

from .checked_logprobs import check_logprobs
from .offload_config import offload_config
from .stepping import step_outputs
from .tiny_models import VOCAB, make_llama

WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 3},
    "random": {"temperature": 1.3, "top_p": 0.9, "seed": 5, "logprobs": 20, "prompt_logprobs": 20},
    "none of the likeliest": {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 0},
    "the prompt only": {"temperature": 0.0, "prompt_logprobs": 1},
    "the answer only": {"temperature": 0.0, "logprobs": 1},
    "altered": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.5, "min_p": 0.05,
                "frequency_penalty": 1.0, "presence_penalty": -1.0, "logit_bias": {7: 5.0, 9: -100},
                "logprobs": 4, "prompt_logprobs": 2},
    "nothing": {"temperature": 0.0},
}  # fmt: skip


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def params_of(wish: str, **changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | WISHES[wish] | changes))


@dataclass
class Answer:
    """A prompt and everything that was said about it."""

    prompt: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    cached: dict[str, int] = field(default_factory=dict)
    last: TokenOutput | None = None

    def take(self, output: TokenOutput) -> None:
        assert self.last is None
        self.token_ids += output.new_token_ids
        if output.logprobs is not None:
            assert len(output.logprobs) == len(output.new_token_ids)
            self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            assert self.token_ids == output.new_token_ids, "they belong to the first token"
            self.prompt_logprobs = output.prompt_logprobs
        self.cached = output.cached_tokens_by_tier or self.cached
        if output.finish_reason is not None:
            self.last = output


@contextmanager
def running_core(
    model: Path,
    *,
    num_blocks: int = 400,
    offload: dict[str, Any] | None = None,
    **scheduler: Any,
) -> Iterator[EngineCore]:
    config = EngineConfig(
        model=ModelConfig(model, "tiny", dtype="float64", max_model_len=256),
        cache=CacheConfig(block_size=8, num_blocks=num_blocks),
        scheduler=SchedulerConfig(
            **({"max_num_batched_tokens": 64, "max_num_seqs": 8} | scheduler)
        ),
        offload=offload_config(**(offload or {})),
        num_threads=1,
    )
    core = EngineCore(config)
    try:
        yield core
    finally:
        core.shutdown(30.0)


def ask(
    core: EngineCore, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[Answer]:
    """Run prompts together; their answers in order."""
    answers = {
        f"r{index}": Answer(prompt, wish)
        for index, (prompt, wish) in enumerate(zip(prompts, params, strict=True))
    }
    for name, answer in answers.items():
        assert not core.add(AddRequest(name, pack_token_ids(answer.prompt), answer.params))
    for outputs in step_outputs(core):
        for output in outputs:
            answers[output.request_id].take(output)
        if all(answer.last for answer in answers.values()):
            return list(answers.values())
    raise AssertionError(f"requests did not end: {answers}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("logprobs"))


def check(model: Path, answer: Answer) -> None:
    assert answer.last is not None
    assert answer.last.error is None
    check_logprobs(
        model,
        answer.prompt,
        answer.token_ids,
        answer.params,
        answer.logprobs,
        answer.prompt_logprobs,
    )


def ask_all(
    core: EngineCore, model: Path, lengths: Sequence[int], max_tokens: int = 12
) -> list[Answer]:
    """One prompt for each wish, all together, every answer checked."""
    prompts = [prompt(seed, length) for seed, length in enumerate(lengths)]
    params = [params_of(wish, max_tokens=max_tokens) for wish in WISHES]
    answers = ask(core, prompts, params)
    for answer in answers:
        check(model, answer)
    return answers


LENGTHS = (61, 150, 40, 1, 33, 97, 20)


@pytest.mark.parametrize("budget", [8, 13, 64, 1024])
def test_any_chunking_and_company(budget: int, model: Path) -> None:
    with running_core(model, max_num_batched_tokens=budget) as core:
        answers = ask_all(core, model, LENGTHS)
    assert len(set(answers[1].token_ids)) > 6, "a repeating answer would prove little"


def test_no_chunking(model: Path) -> None:
    with running_core(model, max_num_batched_tokens=256, enable_chunked_prefill=False) as core:
        ask_all(core, model, LENGTHS)


def test_preemption(model: Path) -> None:
    """`test_prompt_logprobs.py` preempts at every moment there is."""
    with running_core(model, num_blocks=34, max_num_batched_tokens=24, preempt_above=1.0) as core:
        ask_all(core, model, (50, 40, 70, 20, 97, 60, 30), max_tokens=60)
        preemptions = core.call("stats", "")["scheduler"]["preemptions"]
    assert preemptions > 2, "the pool was meant to be too small"


def test_what_others_computed_is_not_read(model: Path) -> None:
    """But what it computes is there for others, who are not affected."""
    text = prompt(1, 90)
    plain, asking, answer_only = map(params_of, ("nothing", "greedy", "the answer only"))
    with running_core(model) as core:
        first, second, third = [ask(core, [text], [p])[0] for p in (plain, asking, answer_only)]
        assert [a.cached["pool"] for a in (first, second, third)] == [0, 0, 88]
        core.call("reset_prefix_cache", "")
        fourth, fifth = [ask(core, [text], [p])[0] for p in (asking, plain)]
        assert [a.cached["pool"] for a in (fourth, fifth)] == [0, 88]
    for answer in (first, second, third, fourth, fifth):
        check(model, answer)
        assert answer.token_ids == first.token_ids


def test_nothing_is_loaded_from_a_tier_either(model: Path) -> None:
    text, plain = prompt(2, 90), params_of("nothing")
    tiers = {"tiers": ("cpu",), "cpu_bytes": 4 * 2**20, "load": "always"}
    with running_core(model, num_blocks=34, offload=tiers) as core:

        def push_out() -> None:
            ask(core, [prompt(seed, 200) for seed in (10, 11)], [plain] * 2)

        ask(core, [text], [plain])
        push_out()
        [asking] = ask(core, [text], [params_of("greedy")])
        push_out()
        [later] = ask(core, [text], [plain])
    assert not any(asking.cached.values())
    assert later.cached["cpu"] == 88
    check(model, asking)


def test_a_stop_token_ends_the_entries_too(model: Path) -> None:
    text = prompt(3, 20)
    with running_core(model) as core:
        [whole] = ask(core, [text], [params_of("greedy")])
        stop = whole.token_ids[5]
        [answer] = ask(core, [text], [params_of("greedy", stop_token_ids=(stop,))])
    assert answer.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    check(model, answer)
