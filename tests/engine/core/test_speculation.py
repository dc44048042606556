# SPDX-License-Identifier: Apache-2.0
"""Speculation changes how many steps an answer takes, and none of its tokens."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest, TokenOutput
from stratakv.engine.request.structured_params import StructuredOutputsParams
from stratakv.engine.worker.speculation.ngram import NgramProposer

from ...processor_package import MODULE, SOURCE, packages_in
from .conftest import VOCAB, config_of, prompt_of, request, run

END = VOCAB - 1
SPECULATION = {
    "prompt_lookup_min": 1, "speculative_adaptive": False,
    "num_speculative_tokens": 5,
}  # fmt: skip
START_MARK, END_MARK = 1, (2, 3)
REGEX = "[a-f]{5,9}-[0-9]{2}"


def requests(rng: random.Random, count: int) -> list[AddRequest]:
    """Of every kind whose next token depends on those before it, with prompts that repeat."""
    thinks = {
        "reasoning_start_token_ids": (START_MARK,), "reasoning_end_token_ids": END_MARK,
        "thinking_token_budget": 6, "logit_bias": {START_MARK: 6.0, END_MARK[0]: -3.0},
    }  # fmt: skip
    follows = {"structured_outputs": StructuredOutputsParams(regex=REGEX), "ignore_eos": False}
    wishes: list[dict[str, Any]] = [
        {}, {}, thinks, {"min_tokens": 9, "ignore_eos": False, "logit_bias": {END: 90.0}}, follows,
        {"repetition_penalty": 1.6, "frequency_penalty": 0.7, "bad_words_token_ids": ((9, 9),)},
        {"logprobs": 3}, {**follows, "min_tokens": 7, "stop_token_ids": [80]},
        {"stop_token_ids": list(range(0, 250, 9))}, {**thinks, "repetition_penalty": 1.3},
    ]  # fmt: skip
    made = []
    for number in range(count):
        part = prompt_of(rng.randint(2, 12), number)
        prompt = part * rng.randint(1, 5)
        draws = {"temperature": 0.9, "seed": number} if number % 3 == 2 else {}
        wish = wishes[number % len(wishes)]
        most = rng.choice([10, 40, 60] if "min_tokens" in wish else [1, 2, 3, 40, 60])
        fields = {"max_tokens": most, **wish, **draws}
        made.append(request(f"r{number}", prompt, **fields))
    return made


def told(outputs: dict[str, TokenOutput]) -> dict[str, Any]:
    return {
        name: (each.new_token_ids, each.finish_reason, each.stop_reason, each.error)
        for name, each in outputs.items()
    }


@pytest.mark.parametrize(
    ("method", "steps", "blocks"),
    [("ngram", 1, 80), ("suffix", 2, 80), ("ngram", 2, 26), ("suffix", 1, 26)],
)
def test_answers_are_those_without_drafts(
    tiny_model: Path, method: str, steps: int, blocks: int, seed: int
) -> None:
    rng = random.Random(seed + steps + blocks)
    asked = requests(rng, 30)
    options = {"num_blocks": blocks, "max_num_seqs": 6, "max_model_len": 160}
    plain = EngineCore(config_of(tiny_model, **options))
    expected = told(run(plain, *asked))
    plain.shutdown(5.0)
    core = EngineCore(
        config_of(tiny_model, **options, **SPECULATION, speculative_method=method),
        max_steps_in_flight=steps,
    )
    assert told(run(core, *asked)) == expected
    figures = core.scheduler.speculation.stats()
    core.shutdown(5.0)
    assert figures["num_accepted_tokens"] > 30, figures


def test_a_draft_whose_numbers_are_not_finite_ends_nobody(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed of it stands beside what the request reads, and it may spoil that: then the
    step gave nothing, and the next one computes the same token without drafts."""
    broken = tmp_path / "model"
    shutil.copytree(tiny_model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][END] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    wishes = {"max_tokens": 20, "logit_bias": {END: -90.0}}
    asked = [request(f"r{number}", prompt_of(9, number), **wishes) for number in range(3)]
    options = {"num_blocks": 30, "max_model_len": 80, "max_num_seqs": 2}
    plain = EngineCore(config_of(broken, **options))
    expected = told(run(plain, *asked))
    plain.shutdown(5.0)
    monkeypatch.setattr(
        NgramProposer, "propose", lambda _, queries: [[END] * min(4, q.most) for q in queries]
    )
    core = EngineCore(config_of(broken, **options, **SPECULATION, speculative_method="ngram"))
    assert told(run(core, *asked)) == expected
    speculation = core.scheduler.speculation
    assert speculation is not None and speculation.num_draft_tokens > 20
    core.shutdown(5.0)


def test_an_id_that_is_used_again_at_once_gets_no_drafts_of_the_one_before(
    tiny_model: Path,
) -> None:
    prompts = [prompt_of(3, number) * 3 for number in range(4)]
    plain = EngineCore(config_of(tiny_model))
    outputs = run(plain, *(request(str(i), each, max_tokens=2) for i, each in enumerate(prompts)))
    plain.shutdown(5.0)
    core = EngineCore(
        config_of(tiny_model, **SPECULATION, speculative_method="ngram"), max_steps_in_flight=2
    )
    for num_steps in range(1, 6):
        for number, prompt in enumerate(prompts):
            core.add(request("x", prompts[number - 1], max_tokens=40))
            for _ in range(num_steps):
                core.step()
            core.abort_requests(["x"])
            found = run(core, request("x", prompt, max_tokens=2))
            assert found["x"].new_token_ids == outputs[str(number)].new_token_ids
    core.shutdown(5.0)


def test_a_processor_that_fails_ends_its_request_in_the_middle_of_its_prompt(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Also in a step in which others have drafts."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    chunks: list[int] = []
    with packages_in(tmp_path):
        core = EngineCore(
            config_of(
                tiny_model, logits_processors=f"{MODULE}:Only", long_prefill_token_threshold=16,
                **SPECULATION, speculative_method="ngram",
            )
        )  # fmt: skip
        for number in range(3):
            core.add(request(f"r{number}", prompt_of(3, number) * 6, max_tokens=60))
        while core.scheduler.speculation.num_drafts < 3:  # type: ignore[union-attr]
            core.step()
        fails = {"only": 5, "boom": "update"}
        core.add(request("late", prompt_of(150, 9), max_tokens=4, extra_args=fails))
        schedule = core.scheduler.schedule

        def noted(*held: Any) -> Any:
            output = schedule(*held)
            if "late" in output.num_scheduled_tokens and output.draft_token_ids:
                chunks.append(output.num_scheduled_tokens["late"])
            return output

        core.scheduler.schedule = noted  # type: ignore[method-assign]
        outputs: dict[str, TokenOutput] = {}
        while "late" not in outputs:
            outputs |= {each.request_id: each for each in core.step()}
        assert outputs["late"].finish_reason == "error" and chunks == [16]
        core.shutdown(5.0)
