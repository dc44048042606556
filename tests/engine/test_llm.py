# SPDX-License-Identifier: Apache-2.0
"""The Python API: what `LLM` answers, what it refuses, and that importing it costs nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine import LLM, SamplingParams
from stratakv.engine.client.base import EngineDead
from stratakv.engine.config import ConfigError

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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blok_size": 16}, "no option 'blok_size'; did you mean block_size"),
        ({"block_size": 24}, "--block-size takes a power of two"),
        ({"enable_prefix_caching": "no"}, "takes True or False, not 'no'"),
        ({"kv_offload": ["cpu", "sdd"]}, "not 'cpu,sdd'; did you mean ssd"),
        ({"model": "/nowhere"}, "/nowhere is no directory"),
        ({"in_process": False, "log_level": "loud"}, "log_level takes debug or info"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(**options)


def test_both_modes_give_the_same_tokens(llm: LLM, tiny_model: Path) -> None:
    prompts = [prompt_of(n) for n in range(4)]
    params = [GREEDY, SamplingParams(max_tokens=10, seed=3, ignore_eos=True)] * 2
    expected = [output.token_ids for output in llm.generate(prompts, params)]
    with LLM(tiny_model, in_process=False, **OPTIONS) as other:
        assert [output.token_ids for output in other.generate(prompts, params)] == expected
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
        llm.reset_prefix_cache,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(EngineDead, match="this LLM was closed; make a new one"):
            call()


LEFT_OPEN = """
import sys
from stratakv.engine import LLM, SamplingParams
llm = LLM(sys.argv[1], num_blocks=100, num_threads=1, kv_offload="cpu,ssd",
          kv_offload_cpu_bytes="1MiB", kv_offload_ssd_path=sys.argv[2],
          kv_offload_ssd_bytes="16MiB")
print(llm.generate([[7] * 100], SamplingParams(max_tokens=1))[0].cached_tokens_by_tier)
"""


def test_an_engine_left_open_is_closed_with_python(tiny_model: Path, tmp_path: Path) -> None:
    """Its blocks are on the disk afterwards."""
    answers = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", LEFT_OPEN, str(tiny_model), str(tmp_path / "ssd")],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        answers.append(done.stdout.strip())
    assert answers == ["{'pool': 0}", "{'pool': 0, 'ssd': 96}"]


def test_the_import_is_light() -> None:
    code = (
        "import sys, stratakv.engine, stratakv.engine.options, stratakv.engine.cli.main\n"
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
