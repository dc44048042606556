# SPDX-License-Identifier: Apache-2.0
"""Whole engines on models whose layers carry states: transformers' greedy tokens in float64,
wherever the states that a request starts with come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.llm import LLM
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.request.beam_params import BeamSearchParams
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.tiers.settings.values import ConfigError

from .engine.models.states.state_models import exact_logits, make_state_model
from .leftovers import check_nothing_left
from .test_exactness import OUTPUT_TOKENS, ask, prompt, running_core
from .tiny_models import make_llama

BLOCK = 8  # tokens, of `running_core`
PARTED = 56  # tokens in whole blocks that the second prompt has in common with the first
BUDGET = 13  # so that chunks end in the middle of blocks
MODELS = (
    "lfm2-state-last",
    "qwen3_next-experts",
    "qwen3_5_text-dense-interval",
    "granitemoehybrid-experts-rope-groups",
    "bamba-biases",
    "nemotron_h-mlps-last",
    "falcon_h1-norm-biases-groups",
)
Texts = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_state_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_state_model(tmp_path_factory.mktemp("lfm2"), "lfm2-state-last")


def prompts() -> list[list[int]]:
    """Two of them begin alike."""
    root = prompt(1, 90)
    return [root, root[:60] + prompt(2, 9), prompt(3, 41), prompt(4, 7)]


def check_answer(model: Path, text: list[int], answer: list[int]) -> None:
    """The answer is the greedy one: each token the best behind those before it."""
    assert len(answer) == OUTPUT_TOKENS
    logits = exact_logits(model, [*text, *answer[:-1]])[len(text) - 1 :]
    assert answer == logits.argmax(-1).tolist()
    assert len(set(answer)) > OUTPUT_TOKENS // 8, "a repeating answer would prove little"


@pytest.fixture(scope="module")
def texts(model: Path) -> Texts:
    """Prompts and their answers, computed whole and alone, and found to be transformers'."""
    known = []
    options = {"scheduler": {"max_num_batched_tokens": 256}}
    with running_core(model, cache={"enable_prefix_caching": False}, **options) as core:
        for number, text in enumerate(prompts()):
            [answer] = ask(core, [text], tag=f"alone-{number}-")
            check_answer(model, text, answer.token_ids)
            known.append((text, answer.token_ids))
    return known


def check_exact(core: EngineCore, texts: Texts, tag: str) -> list[Any]:
    answers = ask(core, [text for text, _ in texts], tag=tag)
    assert [answer.token_ids for answer in answers] == [expected for _, expected in texts]
    return answers


def whole(num_tokens: int) -> int:
    """The tokens of such a prompt that a cache can have."""
    return (num_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("backend", "interval"), [("gather", 0), ("kernels", 2 * BLOCK), ("auto", 2 * BLOCK)]
)
def test_in_odd_chunks_among_others_and_again_from_the_pool(
    model: Path, texts: Texts, backend: str, interval: int
) -> None:
    with running_core(
        model,
        cache={"state_checkpoint_interval": interval, "num_blocks": 900},
        scheduler={"max_num_batched_tokens": BUDGET},
        model_options={"attention_backend": backend},
    ) as core:
        check_exact(core, texts, "first")
        again = check_exact(core, texts[::-1], "again")
        found = [answer.cached["pool"] for answer in again]
        assert found == [whole(len(text)) for text, _ in texts[::-1]]
        # A prompt that goes on behind an answer: with the interval it finds states in there too.
        text, answer = texts[2]
        [longer] = ask(core, [[*text, *answer, 5, 6]], tag="longer")
        check_answer(model, [*text, *answer, 5, 6], longer.token_ids)
        last = len(text) + len(answer) - 1
        assert longer.cached["pool"] == (last - last % interval if interval else whole(len(text)))
        core.step()
        check_nothing_left(core)


def tight(model: Path, *, more: int = 0) -> dict[str, Any]:
    """Settings for a pool that holds one request of the longest prompt, and `more` pages."""
    longest = 90 + OUTPUT_TOKENS
    with running_core(model, cache={"num_blocks": 400}) as core:
        assert core._groups.state is not None
        num_pages = core._groups.state.num_pages
    return {
        "cache": {"num_blocks": 1 + -(-longest // BLOCK) + num_pages + more},
        "model_options": {"max_model_len": longest},
        "scheduler": {"max_num_batched_tokens": BUDGET},
    }


def test_among_preemptions(model: Path, texts: Texts) -> None:
    with running_core(model, **tight(model)) as core:
        for turn in range(2):
            check_exact(core, [*texts, *texts[::-1]], f"{turn}-")
        assert core.scheduler.counts["preemptions"] > 0, "the pool was meant to be too small"
        core.step()  # tells the worker who has ended
        check_nothing_left(core)


def test_out_of_the_slab_and_out_of_a_file_after_a_restart(
    model: Path, texts: Texts, tmp_path: Path
) -> None:
    offload = {
        "tiers": ("cpu", "ssd"),
        "cpu_bytes": 16 * 2**20,
        "load": "always",
        "ssd_path": tmp_path / "ssd",
        "ssd_bytes": 64 * 2**20,
    }
    options = tight(model)
    with running_core(model, offload=offload, **options) as core:
        for turn in range(2):
            for index, text in enumerate(texts):
                [answer] = check_exact(core, [text], f"{turn}-{index}-")
                if turn:
                    # Of the prompt that parts from another one the pool may have had no room for
                    # more than the checkpoint at the junction.
                    ends = {whole(len(text[0])), *([PARTED] if index == 1 else [])}
                    assert sum(answer.cached.values()) in ends
        counts = core.scheduler.counts
        assert counts["loads"] > 0
        assert counts["loads_failed"] == 0
    options["cache"]["num_blocks"] += 400
    with running_core(model, offload=offload, **options) as core:
        answers = check_exact(core, texts, "restart")
        found = [sum(answer.cached.values()) for answer in answers]
        lengths = [whole(len(text)) for text, _ in texts]
        assert found in (lengths, [lengths[0], PARTED, *lengths[2:]])
        assert answers[0].cached["ssd"] == lengths[0]
        core.step()
        check_nothing_left(core)


def test_drafts_change_no_token(model: Path, texts: Texts) -> None:
    """Drafts out of the text itself are wrong most of the time, and some of them right."""
    with running_core(
        model,
        cache={"state_checkpoint_interval": BLOCK, "num_blocks": 900},
        scheduler={"max_num_batched_tokens": 40},
        speculative={
            "method": "ngram", "num_tokens": 3, "prompt_lookup_min": 1, "adaptive": False
        },
    ) as core:  # fmt: skip
        for turn in range(2):
            check_exact(core, texts, f"{turn}-")
        speculation = core.scheduler.speculation
        assert speculation is not None
        stats = speculation.stats()
        assert stats["num_drafts"] > 20
        core.step()
        check_nothing_left(core)


@pytest.fixture(scope="module")
def llm(lfm2: Path) -> Iterator[LLM]:
    with LLM(
        lfm2,
        dtype="float64",
        block_size=BLOCK,
        num_blocks=600,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        num_threads=1,
    ) as llm:
        yield llm


GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)


def test_forks_have_states_of_their_own(llm: LLM) -> None:
    text = prompt(11, 45)
    several = SamplingParams(max_tokens=16, temperature=1.0, seed=7, n=3, ignore_eos=True)
    [first] = llm.generate([text], several)
    assert len({tuple(each.token_ids) for each in first.outputs}) == 3
    [again] = llm.generate([text], several)
    assert [each.token_ids for each in again.outputs] == [each.token_ids for each in first.outputs]
    assert again.num_cached_tokens == whole(45)
    alone = SamplingParams(max_tokens=16, temperature=1.0, seed=7, ignore_eos=True)
    [one] = llm.generate([text], alone)
    assert one.token_ids == first.outputs[0].token_ids


def test_prompts_in_parts_answer_as_the_whole(llm: LLM, lfm2: Path) -> None:
    text = prompt(12, 70)
    with llm.open_session(GREEDY) as session:
        for start in range(0, 60, 20):
            session.feed(text[start : start + 20])
        answer = session.answer(text[60:])
    check_answer(lfm2, text, answer.token_ids)


def test_beams(llm: LLM, lfm2: Path) -> None:
    """Beams part and go on behind each other: each has the likelihood that the model gives it."""
    text = prompt(13, 30)
    params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    [found] = llm.beam_search([text], params)
    assert len(found.sequences) == 3
    for beam in found.sequences:
        tokens = beam.tokens[len(text) :]
        logits = exact_logits(lfm2, beam.tokens[:-1])[len(text) - 1 :].double()
        chosen = logits.log_softmax(-1)[range(12), tokens]
        assert float(chosen.sum()) == pytest.approx(beam.cum_logprob, abs=1e-4)


def test_two_steps_in_flight_in_a_process_of_their_own(lfm2: Path) -> None:
    with running_core(
        lfm2,
        executor="mp",
        cache={"state_checkpoint_interval": BLOCK, "num_blocks": 600},
        scheduler={"max_num_batched_tokens": BUDGET},
    ) as core:
        for turn in range(2):
            for text, answer in zip(prompts(), ask(core, prompts(), tag=f"{turn}"), strict=True):
                check_answer(lfm2, text, answer.token_ids)
        [longer] = ask(core, [[*prompts()[2], *answer_of(core, prompts()[2]), 9]], tag="longer")
        assert longer.cached["pool"] >= 56, "answers have checkpoints too"


def answer_of(core: EngineCore, text: list[int]) -> list[int]:
    [answer] = ask(core, [text], tag="same")
    return answer.token_ids


def test_what_cannot_be(lfm2: Path, tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"cache": {"state_checkpoint_interval": 12}}, "multiple of the block size .8 tokens."),
        ({"cache": {"state_checkpoint_interval": -8}}, "not -8"),
        (
            {
                "offload": {
                    "tiers": ("cpu", "ssd"),
                    "load": "always",
                    "ssd_path": tmp_path / "ssd",
                    "ssd_codec": "fp8",
                    "ssd_bytes": 2**24,
                }
            },
            "would spoil the states that layers of this model carry",
        ),
        ({"offload": {"tiers": ("cpu",), "load": "both"}}, "cannot be overlapped"),
    ]
    for options, words in refused:
        with pytest.raises(ConfigError, match=words), running_core(lfm2, **options):
            raise AssertionError("it started")
    with (
        pytest.raises(ConfigError, match=r"draft model .* has layers that carry a state"),
        running_core(
            make_llama(tmp_path / "llama"),
            speculative={"method": "draft_model", "model": lfm2},
        ),
    ):
        raise AssertionError("it started")
    assert load_model_spec(lfm2).state is not None
