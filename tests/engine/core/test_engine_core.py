# SPDX-License-Identifier: Apache-2.0
"""The engine core, stepped by hand: right tokens; bad requests, faults and ends stay small."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.step_pipeline import MAX_FAILED_STEPS
from stratakv.engine.request.core_messages import OVERLOADED, AddRequest
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.tiers.settings.values import ConfigError

from .conftest import VOCAB, MakeCore, Reference, config_of, finish, prompt_of, request, run


def test_greedy_tokens_are_those_of_transformers(
    make_core: MakeCore, greedy_reference: Reference
) -> None:
    prompts = [prompt_of(1), prompt_of(30), prompt_of(100)]
    results = run(make_core(), *[request(str(i), p, max_tokens=12) for i, p in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        assert results[str(index)].new_token_ids == greedy_reference(prompt, 12)
        assert results[str(index)].finish_reason == "length"
        assert (results[str(index)].timings or {})["total_seconds"] > 0


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (b"", "empty"),
        (b"\1\0\0", "no list of int32"),
        (pack_token_ids([5, VOCAB]), f"from 0 to {VOCAB - 1}, and the prompt holds {VOCAB}"),
        (pack_token_ids([-1, 5]), "the prompt holds -1"),
        (pack_token_ids([1] * 256), "256 tokens, but a context of 256"),
    ],
)
def test_a_bad_prompt_fails_alone(
    make_core: MakeCore, greedy_reference: Reference, packed: bytes, words: str
) -> None:
    core = make_core()
    bad = AddRequest("bad", packed, SamplingParams())
    results = run(core, request("good", prompt_of(9)), bad)
    assert results["bad"].finish_reason == "error"
    assert words in (results["bad"].error or "")
    assert results["good"].new_token_ids == greedy_reference(prompt_of(9), 6)


@pytest.mark.parametrize(
    ("fields", "name", "wrong"),
    [
        ({"logit_bias": {0: 1.0, VOCAB: 1.0}}, "logit_bias", VOCAB),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", -1),
        ({"stop_token_ids": (5, 2**31 - 1)}, "stop_token_ids", 2**31 - 1),
        ({"bad_words_token_ids": [[5, 6], [7, VOCAB]]}, "bad_words_token_ids", VOCAB),
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused(
    make_core: MakeCore, fields: dict[str, Any], name: str, wrong: int
) -> None:
    core = make_core()
    good = {"logit_bias": {VOCAB - 1: 1.0}, "stop_token_ids": (0, VOCAB - 1)}
    results = run(core, request("bad", [1], **fields), request("good", [1], **good))
    error = f"{name} must be token ids from 0 to {VOCAB - 1}, got {wrong}"
    assert (results["bad"].finish_reason, results["bad"].error) == ("error", error)
    assert results["good"].error is None


def test_the_context_bounds_what_is_asked_for(make_core: MakeCore) -> None:
    """Also the memory: a request's buffer is as long as its prompt and max_tokens."""
    results = run(make_core(), request("r", prompt_of(250), max_tokens=2**40, min_tokens=2**39))
    assert len(results["r"].new_token_ids) == 6
    assert results["r"].finish_reason == "length"


def test_the_waiting_queue_is_bounded(tiny_model: Path) -> None:
    config = config_of(tiny_model)
    object.__setattr__(config.scheduler, "max_waiting_requests", 2)
    core = EngineCore(config)
    [refusal] = [o for i in range(3) for o in core.add(request(str(i), prompt_of(4, i)))]
    results = finish(core, [refusal], 3)
    core.shutdown(5.0)
    assert [results[i].finish_reason for i in "012"] == ["length", "length", "error"]
    assert "try later" in (refusal.error or "")
    assert refusal.error_code == OVERLOADED
    [bad] = core.add(AddRequest("bad", b"", SamplingParams()))
    assert bad.error_code is None


def test_aborted_requests_leave_nothing_behind(make_core: MakeCore) -> None:
    core = make_core()
    for number in range(3):
        core.add(request(str(number), prompt_of(40, number), max_tokens=50))
    core.step()
    core.abort_requests(["0", "1", "2", "unknown"])
    for _ in range(3):
        core.step()
    stats = core.call("stats", "")["scheduler"]
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1


def test_a_fault_in_the_worker_ends_the_requests_of_its_step_only(
    make_core: MakeCore, greedy_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(max_num_seqs=1)
    outputs = core.add(request("first", prompt_of(20))) + core.add(request("next", prompt_of(21)))
    monkeypatch.setattr(core._executor.runner.model, "forward", _raise)
    outputs += core.step()
    monkeypatch.undo()
    results = finish(core, outputs, 2)
    assert results["first"].finish_reason == "error"
    assert "no more memory" in (results["first"].error or "")
    assert results["next"].new_token_ids == greedy_reference(prompt_of(21), 6)
    # What the failed step should have written must not be found.
    again = run(core, request("again", prompt_of(20)))["again"]
    assert again.new_token_ids == greedy_reference(prompt_of(20), 6)
    assert not any((again.cached_tokens_by_tier or {}).values())


def _raise(*_: object, **__: object) -> None:
    raise MemoryError("no more memory")


def test_a_worker_that_fails_without_requests_is_given_up(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core()
    monkeypatch.setattr(core._executor.runner, "launch_step", _raise)
    for _ in range(MAX_FAILED_STEPS - 1):
        assert core.step() == []
    with pytest.raises(RuntimeError, match="5 steps in a row, the last with: no more memory"):
        core.step()


def test_resetting_the_prefix_cache(make_core: MakeCore) -> None:
    core = make_core()
    run(core, request("a", prompt_of(40)))
    assert run(core, request("b", prompt_of(40)))["b"].cached_tokens_by_tier == {"pool": 32}
    core.add(request("c", prompt_of(40)))
    core.step()
    with pytest.raises(ValueError, match="wait until they have ended"):
        core.call("reset_prefix_cache", "pool")
    finish(core, [], 1)
    assert core.call("reset_prefix_cache", "") == {"done": True}
    assert run(core, request("d", prompt_of(40)))["d"].cached_tokens_by_tier == {"pool": 0}


@pytest.mark.parametrize(
    ("name", "argument"), [("restart", ""), ("reset_prefix_cache", "disk"), ("pause", "some")]
)
def test_calls_that_cannot_be(make_core: MakeCore, name: str, argument: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"answers stats, follow, tool_called, reset_prefix_cache|takes (pool|new) or all",
    ):
        make_core().call(name, argument)


def test_salts_and_tenants_keep_blocks_apart(make_core: MakeCore) -> None:
    core = make_core()
    prompt = prompt_of(40)

    def cached(request_id: str, **fields: Any) -> int:
        result = run(core, request(request_id, prompt, max_tokens=1, **fields))[request_id]
        return sum((result.cached_tokens_by_tier or {}).values())

    fields: list[dict[str, Any]] = [{}, {"cache_salt": "x"}, {"tenant": "x"}, {"tenant": "y"}]
    assert [cached(f"a{i}", **f) for i, f in enumerate(fields)] == [0, 0, 0, 0]
    assert [cached(f"b{i}", **f) for i, f in enumerate(fields)] == [32, 32, 32, 32]
    assert cached("c", skip_reading_prefix_cache=True) == 0


def test_an_orderly_shutdown_keeps_the_pool_in_the_tiers(
    make_core: MakeCore, greedy_reference: Reference, small_tiers: dict[str, str]
) -> None:
    prompt = prompt_of(100)
    first = make_core(**small_tiers)
    run(first, request("a", prompt))
    first.shutdown()
    first.shutdown()
    second = make_core(**small_tiers)
    result = run(second, request("b", prompt))["b"]
    assert result.new_token_ids == greedy_reference(prompt, 6)
    assert (result.cached_tokens_by_tier or {})["ssd"] == 96
    assert second.call("stats", "")["connector"]["tiers"]["ssd"]["hits"] > 0


def test_a_wake_up_announces_the_blocks_from_below(
    make_core: MakeCore, small_tiers: dict[str, str]
) -> None:
    """While a load runs there is no work; the wake-up says when there is."""
    prompt = prompt_of(100)
    first = make_core(**small_tiers)
    run(first, request("a", prompt))
    first.shutdown()
    second = make_core(**small_tiers)
    woken = threading.Event()
    second.set_wakeup(woken.set)
    outputs = second.add(request("b", prompt))
    steps = 0
    while not outputs:
        woken.clear()
        if second.has_work():
            outputs = second.step()
            steps += 1
        else:
            assert woken.wait(5.0), "nobody said that the load had ended"
    assert outputs[0].new_token_ids
    assert steps < 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"num_blocks": 8, "max_model_len": 256},
            "cannot hold one request of 256 tokens, which takes 33 blocks",
        ),
        ({"max_model_len": 512}, "--max-model-len 512 is too long"),
        ({"enable_chunked_prefill": False}, "--no-enable-chunked-prefill"),
        (
            {"kv_offload": "cpu,ssd", "kv_offload_cpu_bytes": "1MiB", "kv_offload_ssd_path": "FILE",
             "kv_offload_ssd_bytes": "16MiB"},
            "FILE",
        ),
    ],
)  # fmt: skip
def test_settings_that_cannot_work(
    make_core: MakeCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any], words: str,
) -> None:  # fmt: skip
    (tmp_path / "FILE").write_text("not a directory")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        make_core(**options)


def test_the_start_says_what_it_does(make_core: MakeCore, tiny_model: Path) -> None:
    said: list[str] = []
    make_core(progress=said.append, kv_offload="cpu", kv_offload_cpu_bytes="2MiB")
    assert "preparing the tiers: cpu, 2MiB of memory" in said
    assert any(str(tiny_model) in text for text in said)
