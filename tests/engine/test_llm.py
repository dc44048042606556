# SPDX-License-Identifier: Apache-2.0
"""The Python API: what `LLM` answers, what it refuses, and that importing it costs nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from stratakv.engine import LLM, BeamSearchParams, SamplingParams
from stratakv.engine.client.base import EngineDead
from stratakv.engine.request.logprobs import PositionLogprobs
from stratakv.tiers.settings.values import ConfigError

from ..tiers.store_contract import wait_until

VOCAB = 257
OPTIONS: dict[str, Any] = {"dtype": "float64", "num_blocks": 100, "max_num_seqs": 8,
                           "num_threads": 1}  # fmt: skip
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
Reference = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **OPTIONS) as made:
        yield made


def prompt_of(seed: int, length: int = 30) -> list[int]:
    return random.Random(seed).choices(range(VOCAB - 1), k=length)


def test_token_ids_in_and_out(llm: LLM, greedy_reference: Reference) -> None:
    prompts = [prompt_of(1), prompt_of(2, 3)]
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == greedy_reference(prompt, 10)
        assert (output.prompt_token_ids, output.prompt) == (prompt, None)
        assert (output.finish_reason, output.error) == ("length", None)
        assert output.timings["total_seconds"] > 0


def test_text_in_and_out(llm: LLM) -> None:
    assert llm.tokenizer is not None
    [output] = llm.generate("Grüße", GREEDY)
    assert output.prompt == "Grüße"
    assert output.prompt_token_ids == llm.tokenizer.encode("Grüße")
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert output.text


def test_a_second_time_comes_from_the_pool(llm: LLM) -> None:
    llm.reset_prefix_cache()
    counts = [llm.generate([prompt_of(3, 50)], GREEDY)[0] for _ in range(2)]
    assert [c.num_cached_tokens for c in counts] == [0, 48]
    assert counts[1].cached_tokens_by_tier == {"pool": 48}
    assert counts[0].token_ids == counts[1].token_ids
    [salted] = llm.generate([prompt_of(3, 50)], GREEDY, cache_salt="other")
    assert salted.num_cached_tokens == 0
    assert salted.token_ids == counts[0].token_ids
    skips = msgspec.structs.replace(GREEDY, skip_reading_prefix_cache=True)
    [skipping] = llm.generate([prompt_of(3, 50)], skips)
    assert skipping.num_cached_tokens == 0
    assert skipping.token_ids == counts[0].token_ids


def test_a_pause_keeps_calls_waiting(llm: LLM) -> None:
    """Nothing is lost: the call goes on where it stood."""
    wanted = llm.generate([prompt_of(4, 40)], GREEDY)[0].token_ids
    llm.pause("all")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.generate, [prompt_of(4, 40)], GREEDY)
        wait_until(lambda: llm.stats()["scheduler"]["num_waiting"] == 1)
        before = llm.stats()["scheduler"]["generated_tokens"]
        with pytest.raises(FutureTimeout):
            waiting.result(0.1)
        assert llm.stats()["scheduler"]["generated_tokens"] == before
        llm.resume()
        assert waiting.result(30.0)[0].token_ids == wanted
    with pytest.raises(ValueError, match="pause takes new or all, not 'some'"):
        llm.pause("some")


def test_more_prompts_than_may_wait(tiny_model: Path) -> None:
    with LLM(tiny_model, **OPTIONS) as llm:
        object.__setattr__(llm.config.scheduler, "max_waiting_requests", 3)
        params = SamplingParams(max_tokens=2, temperature=0.0)
        outputs = llm.generate([prompt_of(n, 4) for n in range(20)], params)
    assert all(output.error is None and output.token_ids for output in outputs)


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    outputs = llm.generate([prompt_of(4), prompt_of(4)], params)
    assert [len(output.token_ids) for output in outputs] == [1, 5]
    with pytest.raises(ValueError, match="3 prompts need one or 3 sampling parameters, not 2"):
        llm.generate([[1], [2], [3]], params)


def test_a_seed_fixes_the_draws(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    first, second = llm.generate([prompt_of(5), prompt_of(5)], params)
    assert first.token_ids == second.token_ids


def test_a_stop_string_ends_a_request_also_in_the_core(llm: LLM) -> None:
    [whole] = llm.generate([prompt_of(6)], SamplingParams(max_tokens=60, seed=1, ignore_eos=True))
    stop = whole.text[10:12]
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True, stop=(stop,))
    [output] = llm.generate([prompt_of(6)], params)
    assert output.text == whole.text.partition(stop)[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) < 60
    stats = llm.stats()["scheduler"]
    assert stats["num_running"] == 0


def test_log_probabilities(llm: LLM) -> None:
    """`tests/test_logprobs.py` compares them with transformers."""
    params = SamplingParams(
        max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=0
    )
    plain, asking = llm.generate([prompt_of(9), prompt_of(9)], [GREEDY, params])
    assert (plain.logprobs, plain.prompt_logprobs) == ([], None)
    assert asking.prompt_logprobs is not None
    assert [entry.token_ids[0] for entry in asking.logprobs] == asking.token_ids
    assert all(entry.rank == 1 and len(entry.token_ids) == 4 for entry in asking.logprobs)
    first, *rest = asking.prompt_logprobs
    assert first is None
    assert [entry and entry.token_ids for entry in rest] == [[t] for t in prompt_of(9)[1:]]
    parts = list(llm.stream(prompt_of(9), params))
    check_same([entry for part in parts for entry in part.logprobs or ()], asking.logprobs)
    check_same(parts[0].prompt_logprobs or (), asking.prompt_logprobs)
    assert all(part.prompt_logprobs is None for part in parts[1:])


def test_log_probabilities_end_with_a_stop_string(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True, logprobs=0)
    [whole] = llm.generate([prompt_of(6)], params)
    stop = whole.text[10:12]
    [output] = llm.generate([prompt_of(6)], msgspec.structs.replace(params, stop=(stop,)))
    assert len(output.token_ids) < 60
    check_same(output.logprobs, whole.logprobs[: len(output.token_ids)])


def check_same(
    entries: Sequence[PositionLogprobs | None], expected: Sequence[PositionLogprobs | None]
) -> None:
    """Equal but for the rounding of another batch."""
    assert len(entries) == len(expected)
    for entry, other in zip(entries, expected, strict=True):
        if entry is None or other is None:
            assert entry is other
        else:
            assert (entry.token_ids, entry.rank) == (other.token_ids, other.rank)
            assert entry.logprobs == pytest.approx(other.logprobs)


def test_bad_words_are_never_written(llm: LLM) -> None:
    """The tiny model has a token for each byte, so each word is a sequence."""
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    text, banned = "Hello", []
    for _ in range(4):
        [output] = llm.generate(text, msgspec.structs.replace(params, bad_words=tuple(banned)))
        assert not any(word in output.text for word in banned)
        banned.append(next(w for w in words_of(output.text) if w not in banned))
    with pytest.raises(ValueError, match=r"prompt 0: bad_words must be words that"):
        llm.generate(text, SamplingParams(bad_words=(" ",)))


def words_of(text: str) -> list[str]:
    """Pieces of two whole characters, without spaces."""
    pairs = [text[i : i + 2] for i in range(len(text) - 1)]
    return [pair for pair in pairs if "\ufffd" not in pair and " " not in pair]


def test_the_models_own_sampling(tiny_model: Path, tmp_path: Path) -> None:
    for path in tiny_model.iterdir():
        if path.name != "generation_config.json":
            (tmp_path / path.name).symlink_to(path)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert llm.default_sampling_params() == SamplingParams()
        config = tmp_path / "generation_config.json"
        config.write_text(
            '{"temperature": 0.6, "top_k": 20, "max_new_tokens": 3, "eos_token_id": 2}'
        )
        params = llm.default_sampling_params()
        assert params == SamplingParams(temperature=0.6, top_k=20, max_tokens=3)
        assert len(llm.generate([[1]], params)[0].token_ids) <= 3
        config.write_text('{"temperature": "hot"}')
        with pytest.raises(ConfigError, match=r"generation_config\.json.*temperature"):
            llm.default_sampling_params()


def test_a_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True, length_penalty=0.0)
    first, second = llm.beam_search([[7, 8, 9], "abc"], params)
    for found, prompt in ((first, [7, 8, 9]), (second, list(b"abc"))):
        assert len({tuple(each.tokens) for each in found.sequences}) == 4
        scores = [each.score for each in found.sequences]
        assert scores == sorted(scores, reverse=True)
        for each in found.sequences:
            assert len(each.tokens) == len(prompt) + 6
            told = [next(iter(entry.values())).logprob for entry in each.logprobs]
            assert each.score == each.cum_logprob == pytest.approx(sum(told))
            assert each.finish_reason == "length" and each.error is None
    (greedy,) = llm.generate(
        [[7, 8, 9]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    )
    (alone,) = llm.beam_search(
        [[7, 8, 9]], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
    )
    assert alone.sequences[0].tokens == [7, 8, 9, *greedy.token_ids]
    with pytest.raises(ValueError, match="takes BeamSearchParams, not SamplingParams"):
        llm.beam_search("a", SamplingParams())  # type: ignore[arg-type]


def test_a_stream_is_the_same_text(llm: LLM) -> None:
    parts = list(llm.stream(prompt_of(7), GREEDY))
    [output] = llm.generate([prompt_of(7)], GREEDY)
    assert "".join([part.text for part in parts]) == output.text
    assert [token for part in parts for token in part.token_ids] == output.token_ids
    assert parts[-1].finish_reason == "length"


def test_a_stream_may_be_left(llm: LLM) -> None:
    stream = llm.stream(prompt_of(8), SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.generate([prompt_of(8)], GREEDY)[0].error is None
    assert llm.stats()["scheduler"]["num_running"] == 0


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1], []], "prompt 1: it is empty"),
        ([""], "prompt 0: it is empty"),
        ([[1] * 256], "prompt 0: it has 256 tokens and at most 255 fit"),
        (["x" * 256], "prompt 0: the prompt has 256 tokens and at most 255"),
        ([[-1]], "from 0 to 256, and it holds -1"),
        ([[VOCAB]], f"and it holds {VOCAB}"),
        ([[2**40]], "32-bit integer"),
        ([[1.5]], "32-bit integer"),
        (["a\ud800"], "surrogate"),
        ([1, 2, 3], "prompt 0: a prompt is a text or a list of token ids, not int; put a single"),
        ([None], "a prompt is a text or a list of token ids, not NoneType"),
        ([{1, 2}], "a prompt is a text or a list of token ids, not set"),
        ([bytearray(b"text")], "a prompt is a text or a list of token ids, not bytearray"),
        ({"x"}, "prompts are a text or a list of prompts, not set"),  # type: ignore[arg-type]
        ([b"text"], "a prompt is a text or a list of token ids, not bytes"),
        (5, "prompts are a text or a list of prompts, not int"),  # type: ignore[list-item]
        ({"prompt": "x"}, "prompts are a text or a list of prompts, not dict"),
    ],
)
def test_prompts_that_cannot_be_used(llm: LLM, prompts: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts)


def test_a_model_without_a_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    for path in tiny_model.iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    with LLM(tmp_path, **OPTIONS) as llm:
        [output] = llm.generate([[1, 2, 3]], GREEDY)
        assert (len(output.token_ids), output.text) == (10, "")
        with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
            llm.generate("text")
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            llm.generate([[1]], SamplingParams(stop=("x",)))
        with pytest.raises(ValueError, match="bad_words need a tokenizer"):
            llm.generate([[1]], SamplingParams(bad_words=("x",)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blok_size": 16}, "no option 'blok_size'; did you mean block_size"),
        ({"block_size": 24}, "--block-size takes a power of two"),
        ({"enable_prefix_caching": "maybe"}, r"takes true or false .*, not 'maybe'"),
        ({"kv_offload": ["cpu", "sdd"]}, "not 'cpu,sdd'; did you mean ssd"),
        ({"model": "/nowhere"}, "/nowhere is not a directory"),
        ({"in_process": False, "log_level": "loud"}, "log_level takes debug or info"),
        ({"in_process": "perhaps"}, "in_process takes true or false"),
        ({"progress": 5}, "progress takes a function of one text, not 5"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(**options)


@pytest.mark.slow
def test_both_modes_give_the_same_tokens(llm: LLM, tiny_model: Path) -> None:
    prompts = [prompt_of(n) for n in range(4)]
    wishes = {"n": 2, "bad_words": "a", "logit_bias": {70: 3.0}, "logprobs": 2,
              "prompt_logprobs": 1, "thinking_token_budget": 1,
              "reasoning_start_token_ids": [prompts[1][-3]],
              "reasoning_end_token_ids": [5, 6]}  # fmt: skip
    # Numbers of numpy's types are taken and travel as any other.
    drawn = SamplingParams(
        max_tokens=np.int64(10), seed=np.uint8(3), temperature=np.float64(1.0), ignore_eos=True,
        **wishes,
    )  # type: ignore[arg-type]  # fmt: skip
    params = [GREEDY, drawn] * 2

    expected = llm.generate(prompts, params)
    with LLM(tiny_model, in_process=False, **OPTIONS) as other:
        for output, wanted in zip(other.generate(prompts, params), expected, strict=True):
            choices, others = output.outputs, wanted.outputs
            assert [each.token_ids for each in choices] == [each.token_ids for each in others]
            check_same(output.logprobs, wanted.logprobs)
            check_same(output.prompt_logprobs or (), wanted.prompt_logprobs or ())
        other.reset_prefix_cache(reset_tiers=True)
    other.close()
    with pytest.raises(EngineDead, match="was closed"):
        other.generate(prompts, params)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 3}, "sampling parameters are SamplingParams or a list, not dict"),
        ("greedy", "sampling parameters are SamplingParams or a list, not str"),
        ([5], "prompt 0: sampling parameters are SamplingParams, not int"),
    ],
)
def test_parameters_that_are_none(llm: LLM, params: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate("text", params)


@pytest.mark.parametrize("salt", [5, "\ud800", None])
def test_a_salt_that_cannot_be_hashed(llm: LLM, salt: Any) -> None:
    with pytest.raises(ValueError, match="cache_salt is a text of valid Unicode"):
        llm.generate("text", GREEDY, cache_salt=salt)


def test_a_closed_engine_says_so(tiny_model: Path) -> None:
    llm = LLM(tiny_model, **OPTIONS)
    stream = llm.stream("text", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    calls: list[Callable[[], Any]] = [
        lambda: next(stream), lambda: llm.generate([]), lambda: llm.stream("text"), llm.stats,
        llm.reset_prefix_cache, llm.pause, llm.resume,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(EngineDead, match="this LLM was closed; make a new one"):
            call()


LEFT_OPEN = """
import json, sys
from stratakv.engine import LLM, SamplingParams
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
print(llm.generate([[7] * 100], SamplingParams(max_tokens=1))[0].cached_tokens_by_tier)
"""


@pytest.mark.slow
def test_an_engine_left_open_is_closed_with_python(tiny_model: Path, tmp_path: Path) -> None:
    """Its blocks are on the disk afterwards."""
    options = {
        "num_blocks": 100, "num_threads": 1, "kv_offload": "cpu,ssd", "kv_offload_load": "always",
        "kv_offload_cpu_bytes": "1MiB", "kv_offload_ssd_path": str(tmp_path / "ssd"),
        "kv_offload_ssd_bytes": "16MiB",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, str(tiny_model), json.dumps(options)],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "{'pool': 0, 'cpu': 0, 'ssd': 0}"
    with LLM(tiny_model, **options) as llm:
        (answer,) = llm.generate([[7] * 100], SamplingParams(max_tokens=1))
    assert answer.cached_tokens_by_tier == {"pool": 0, "cpu": 0, "ssd": 96}


def test_the_import_is_light() -> None:
    code = (
        "import sys, stratakv.engine, stratakv.engine.cli.main\n"
        "import stratakv.engine.config.engine_options\n"
        "print([n for n in ('torch', 'numpy', 'zmq', 'tokenizers', 'fastapi') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]", done.stderr
    import stratakv.engine

    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        stratakv.engine.LLMs  # noqa: B018
