# SPDX-License-Identifier: Apache-2.0
"""The model runner against transformers, and against itself under every way to cut the work."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from stratakv.connector.base import KVConnectorWorker
from stratakv.connector.messages import ConnectorMetadata, ConnectorWorkerOutput, CopyJob
from stratakv.engine.models import attention
from stratakv.engine.sampling.token_mask import TokenMask
from stratakv.engine.scheduler.output import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from stratakv.engine.worker.forward import attention_metadata
from stratakv.engine.worker.runtime.placement import GATHER, Placement
from stratakv.tiers.settings.values import ConfigError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 128,
}

CHECKPOINTS = {
    "mha": {"num_key_value_heads": 4},
    "gqa": {},
    "mqa_sharded": {"num_key_value_heads": 1, "max_shard_size": "20KB"},
    "tied": {"tie_word_embeddings": True},
    "wide_heads": {"head_dim": 14},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.5}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "longrope": {"rope_parameters": LONGROPE},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_tokens_and_logits_equal_transformers(
    name, checkpoint, reference, driver, prompt_of
):
    path = checkpoint(**CHECKPOINTS[name])
    prompt = prompt_of(43)
    expected = reference(path, prompt, 32)
    assert expected.smallest_gap > 1e-4

    drive = driver(path)
    assert drive.generate("a", prompt, 32) == expected.tokens
    # transformers rounds its norms to float32 in float64 models too, so it is the one that is off.
    torch.testing.assert_close(torch.cat(drive.logits), expected.logits, rtol=1e-4, atol=1e-4)
    assert drive.generate("b", prompt, 32, chunk=5) == expected.tokens


@pytest.mark.parametrize("block_size", [4, 16])
def test_chunks_change_nothing(block_size, checkpoint, driver, prompt_of):
    drive = driver(checkpoint(), block_size=block_size, num_blocks=300)
    prompt = prompt_of(75)
    whole = drive.generate("whole", prompt, 24)
    exact = torch.cat(drive.logits)
    for chunk in (1, 3, 16):
        drive.logits.clear()
        assert drive.generate(f"by {chunk}", prompt, 24, chunk=chunk) == whole
        logits = torch.cat(drive.logits)
        torch.testing.assert_close(logits, exact, rtol=1e-10, atol=1e-10)


def test_company_changes_nothing(checkpoint, driver, prompt_of):
    """Chunks and decodes in one batch; requests come, end and leave holes at different times."""
    path = checkpoint()
    prompts = {f"r{i}": prompt_of(length, i) for i, length in enumerate((3, 90, 17, 40, 1, 250))}
    wanted = {name: 6 + 5 * i for i, name in enumerate(prompts)}
    alone = {n: driver(path).generate(n, prompts[n], wanted[n]) for n in prompts}

    drive = driver(path, block_size=4, num_blocks=400)
    waiting = list(prompts)
    together: dict[str, list[int]] = {}
    while waiting or drive.lives:
        if waiting:
            drive.add(name := waiting.pop(0), prompts[name])
        drive.step(chunk=30)
        for name in [n for n, life in drive.lives.items() if len(life.output) >= wanted[n]]:
            together[name] = drive.finish(name)
    assert together == alone


def test_long_prompts_use_tiles_and_still_equal_transformers(
    checkpoint, reference, driver, prompt_of
):
    path = checkpoint()
    prompt = prompt_of(attention.TILE_ROWS * 2 + 90)
    expected = reference(path, prompt, 8)
    drive = driver(path)
    # 120 fresh tokens, then a context chunk of three tiles, the last one short.
    drive.add("a", prompt)
    drive.step(chunk=120)
    while len(drive.lives["a"].output) < 8:
        drive.step(chunk=1000)
    assert drive.finish("a") == expected.tokens
    torch.testing.assert_close(torch.cat(drive.logits), expected.logits, rtol=1e-4, atol=1e-4)


def test_a_gather_cut_into_pieces_changes_nothing(checkpoint, driver, prompt_of, monkeypatch):
    path = checkpoint()
    lengths = (5, 300, 12, 180, 160, 33, 31, 2, 290)

    def run() -> tuple[list[list[int]], int]:
        drive = driver(path, num_blocks=300, placement=Placement(attention_backend=GATHER))
        for i, length in enumerate(lengths):
            drive.add(f"r{i}", prompt_of(length, i))
        for _ in range(7):
            drive.step()
        planned = drive.runner._forward.max_group_blocks
        return [drive.finish(f"r{i}") for i in range(len(lengths))], planned

    whole, many = run()
    monkeypatch.setattr(attention_metadata, "GATHER_BYTES", 1)
    cut, few = run()
    assert few == 1024 // 16 < many
    assert cut == whole


def test_preempted_requests_go_on_where_they_were(checkpoint, driver, prompt_of):
    path = checkpoint()
    alone = {n: driver(path).generate(n, prompt_of(20, i), 20) for i, n in enumerate("abc")}
    drive = driver(path)
    for i, name in enumerate("abc"):
        drive.add(name, prompt_of(20, i))
    for _ in range(5):
        drive.step()
    drive.preempt("a")
    drive.preempt("b", forget=True)
    for _ in range(3):
        drive.step(names=["c"])
    while len(drive.lives["a"].output) < 20:
        drive.step(chunk=7, names=["a", "b", "c"])
    for _ in range(20):
        drive.step()
    for name in "abc":
        assert drive.finish(name)[:20] == alone[name]


def test_a_prefix_computed_by_another_request_is_used(checkpoint, driver, prompt_of):
    path = checkpoint()
    prompt = prompt_of(70)
    alone = driver(path).generate("a", prompt, 10)
    drive = driver(path)
    drive.add("first", prompt)
    drive.step()
    drive.add("second", prompt)
    life = drive.lives["second"]
    life.blocks, life.computed = drive.lives["first"].blocks[:4], 64
    for _ in range(10):
        drive.step(names=["second"])
    assert drive.lives["second"].output == alone


def test_a_prompt_gets_no_token_before_its_end(checkpoint, driver, prompt_of):
    drive = driver(checkpoint())
    drive.add("a", prompt_of(40))
    assert drive.step(chunk=16).sampled_token_ids == {"a": []}
    assert drive.step(chunk=16).sampled_token_ids == {"a": []}
    assert len(drive.step(chunk=16).sampled_token_ids["a"]) == 1
    assert [len(logits) for logits in drive.logits] == [1]


def test_logits_that_are_not_finite_stay_with_their_request(checkpoint, driver, prompt_of):
    path = checkpoint()
    good = driver(path).generate("good", prompt_of(30), 8)
    drive = driver(path)
    drive.runner.model._embedding[0] = math.nan  # no other prompt holds token 0
    drive.add("good", prompt_of(30))
    drive.add("bad", [5, 0, 6])
    result = drive.step()
    assert result.nan_request_ids == {"bad"}
    assert result.sampled_token_ids["bad"] == []
    drive.finish("bad")
    # Takes over the block that holds NaN, and fills it only in part.
    drive.add("heir", prompt_of(30))
    for _ in range(7):
        assert not drive.step().nan_request_ids
    assert drive.finish("good") == good
    assert drive.finish("heir") == good[:7]


def with_mask(drive: Any, mask: TokenMask) -> ModelRunnerOutput:
    """A step in which tokens are chosen as the mask says."""
    runner = drive.runner

    def execute(output: SchedulerOutput) -> ModelRunnerOutput:
        step = runner.launch_step(output)
        runner.sample(step, mask)
        return runner.collect_output(step)

    runner.execute = execute
    return drive.step()


def words_of(*token_ids: int) -> np.ndarray:
    """[words]: a mask's row, for 100 tokens, that allows these."""
    words = np.zeros(4, np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words


@pytest.mark.parametrize("banned", ["bad", "both"])
def test_where_all_tokens_are_banned_logits_that_are_not_finite_are_told(
    checkpoint, driver, prompt_of, banned
):
    """First of all, as without a mask: it is the model's fault and not the request's."""
    drive = driver(checkpoint(vocab_size=100))
    drive.runner.model._embedding[0] = math.nan
    drive.add("good", prompt_of(9))
    drive.add("bad", [5, 0, 6])
    good = words_of(*range(40, 50)) if banned == "bad" else words_of()
    result = with_mask(drive, TokenMask(["good", "bad"], np.stack([good, words_of()])))
    assert result.nan_request_ids == {"bad"}
    assert result.banned_request_ids == ({"good"} if banned == "both" else set())


def test_a_request_that_no_mask_names_may_choose_any_token(checkpoint, driver, prompt_of):
    """Also where the mask has several rows of another."""
    free = driver(checkpoint(vocab_size=100))
    free.add("b", prompt_of(9, 1))
    token = free.step().sampled_token_ids["b"]
    other = words_of((token[0] + 50) % 100)
    drive = driver(checkpoint(vocab_size=100))
    for number, name in enumerate("ab"):
        drive.add(name, prompt_of(9, number))
    mask = TokenMask(["a", "a"], np.stack([other, other]))
    assert with_mask(drive, mask).sampled_token_ids["b"] == token


def test_float32_is_close_and_half_types_are_near(checkpoint, driver, prompt_of):
    """The largest error, in units of the largest logit, stays below 1e-5 for float32, 0.02 for
    float16 and 0.1 for bfloat16, on two layers with weights this wide."""
    path = checkpoint()
    prompt = prompt_of(60)

    def logits(dtype: str) -> torch.Tensor:
        drive = driver(path, dtype=dtype)
        drive.add("a", prompt)
        drive.step(chunk=50)
        drive.step(chunk=50)
        return drive.logits[-1]

    exact = logits("float64")
    for dtype, bound in (("auto", 1e-5), ("float16", 0.02), ("bfloat16", 0.1)):
        assert (logits(dtype) - exact).abs().max() < bound * exact.abs().max(), dtype


def test_sampled_tokens_do_not_depend_on_the_batch(checkpoint, driver, prompt_of):
    path = checkpoint()
    params = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    alone = driver(path)
    alone.add("a", prompt_of(20), **params)
    for _ in range(15):
        alone.step()
    drive = driver(path)
    for i in range(3):
        drive.add(f"x{i}", prompt_of(9, i + 1), temperature=1.0)
    drive.step()
    drive.add("a", prompt_of(20), **params)
    for step in range(15):
        drive.step(chunk=20)
        if step == 5:
            drive.finish("x0")
    expected = alone.finish("a")
    assert len(set(expected)) > 3
    assert drive.finish("a") == expected


class RecordingConnector(KVConnectorWorker):
    """Notes its calls, and what the pool held at the time."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pool: torch.Tensor | None = None

    def register_pool(self, pool: torch.Tensor) -> None:
        self.pool = pool
        self.calls.append("register")

    def start_step(self, meta: ConnectorMetadata) -> None:
        self.calls.append(f"start {len(meta.stores)}")

    def wait_before_forward(self) -> None:
        assert self.pool is not None
        self.calls.append(f"wait {bool(self.pool[1:].isnan().all())}")

    def poll(self) -> ConnectorWorkerOutput:
        assert self.pool is not None
        self.calls.append(f"poll {bool(self.pool[1:].isnan().all())}")
        return ConnectorWorkerOutput(finished_stores=[7])

    def shutdown(self, timeout_seconds: float) -> None:
        self.calls.append("shutdown")


def test_copies_start_before_the_forward_pass_and_are_reported_after(checkpoint, driver):
    connector = RecordingConnector()
    drive = driver(checkpoint(), connector=connector)
    meta = ConnectorMetadata(stores=[CopyJob(1, [3], [0])])
    empty = SchedulerOutput([], CachedRequestData(), {}, 0, set(), set(), meta)
    output = drive.runner.execute(empty).connector_output
    assert output is not None and output.finished_stores == [7]
    assert connector.calls == ["register", "start 1", "poll True"]
    connector.calls.clear()
    drive.add("a", [5, 6, 7])
    drive.step()
    # The pool is still untouched while the connector waits, and written when it is polled.
    assert connector.calls == ["start 0", "wait True", "poll False"]
    drive.runner.shutdown()
    assert connector.calls[-1] == "shutdown"


def test_the_null_block_is_never_written(checkpoint, driver, prompt_of):
    drive = driver(checkpoint(), block_size=4, num_blocks=300)
    for i in range(5):
        drive.add(f"r{i}", prompt_of(3 + 20 * i, i))
    for _ in range(6):
        drive.step(chunk=13)
    assert not drive.runner.pool.tensor[0].any()


def test_a_pool_too_small_for_one_request_is_refused(checkpoint, driver):
    with pytest.raises(ConfigError, match=r"--num-blocks 65 .*--max-model-len to 160"):
        driver(checkpoint(), num_blocks=11)
