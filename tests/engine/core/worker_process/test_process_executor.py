# SPDX-License-Identifier: Apache-2.0
"""The model runner in a process of its own: the same tokens, and an end with its reason."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.executor import ExecutorDied
from stratakv.engine.core.worker_process import process_executor
from stratakv.engine.core.worker_process.process_executor import ProcessExecutor
from stratakv.tiers.settings.values import ConfigError

from ....faulty_worker import Plan
from ....nursery_site.nursery_client import Nursery
from ..conftest import MakeCore, Reference, config_of, finish, prompt_of, request

MakeLiar = Callable[..., ProcessExecutor]
LATE_SECONDS = 0.9  # where 0.3 are waited for


@pytest.fixture
def make_liar(
    tiny_model: Path, worker_nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeLiar]:
    """Makes executors whose worker does one of `LIES` with its first answer."""
    made: list[ProcessExecutor] = []

    def make(lie: str, seconds: float = 30.0) -> ProcessExecutor:
        plan = Plan("", lie=lie, lie_at=1, late_seconds=LATE_SECONDS)
        monkeypatch.setattr(process_executor, "subprocess", worker_nursery.module(plan))
        made.append(ProcessExecutor(config_of(tiny_model), 80, 256, step_seconds=seconds))
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown(1.0)


def wait_until_dead(pid: int) -> None:
    """Whoever started it may still ask how it ended."""
    deadline = time.monotonic() + 30.0
    while Path(f"/proc/{pid}").exists():
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.01)


def test_random_requests_get_the_tokens_of_one_process(
    make_core: MakeCore, greedy_reference: Reference
) -> None:
    """Shared prefixes, little room, aborts; log-probabilities travel too."""
    core = make_core(distributed_executor_backend="mp", num_blocks=24,
                     admit_below=1.0, preempt_above=1.0)  # fmt: skip
    assert isinstance(core.executor, ProcessExecutor)
    rng = random.Random(5)
    stems = [prompt_of(24, i) for i in range(3)]
    asked = {}
    outputs = []
    for number in range(20):
        prompt = rng.choice(stems)[: rng.randrange(8, 25)] + prompt_of(rng.randrange(1, 9), number)
        asked[f"r{number}"] = prompt
        core.add(request(f"r{number}", prompt, logprobs=2, max_tokens=12))
        if rng.random() < 0.5:
            outputs += core.step()
        if number % 6 == 5:
            core.abort_requests([f"r{number}"])
            del asked[f"r{number}"]
    start, end = (stems[0][0],), (3, 4, 5)
    core.add(request("thinks", stems[0], thinking_token_budget=2, max_tokens=12,
                     reasoning_start_token_ids=start, reasoning_end_token_ids=end))  # fmt: skip
    merged = finish(core, outputs, len(asked) + 1)
    thinks = merged.pop("thinks").new_token_ids
    assert thinks == [*end, *greedy_reference([*stems[0], *end], 9)]
    for name, prompt in asked.items():
        assert merged[name].new_token_ids == greedy_reference(prompt, 12), name
    assert core.scheduler.counts["preemptions"] > 0


@pytest.mark.slow
def test_blocks_go_to_the_tiers_and_come_back(
    make_core: MakeCore, greedy_reference: Reference, tmp_path: Path
) -> None:
    """The slab is filled and read by the other process; what it wrote outlives both."""
    options = {
        "distributed_executor_backend": "mp",
        "num_blocks": 24,
        "kv_offload": "cpu,ssd",
        "kv_offload_load": "always",
        "kv_offload_cpu_bytes": "1MiB",
        "kv_offload_ssd_bytes": "64MiB",
        "kv_offload_ssd_path": str(tmp_path),
    }
    prompts = {f"r{i}": prompt_of(60, i) for i in range(8)}
    seen: dict[str, int] = {}
    for _ in range(2):
        core = make_core(**options)
        for turn in range(2):
            for name, prompt in prompts.items():
                core.add(request(f"{name} {turn}", prompt))
                answer = finish(core, [], 1)[f"{name} {turn}"]
                assert answer.new_token_ids == greedy_reference(prompt, 6)
                for tier, tokens in (answer.cached_tokens_by_tier or {}).items():
                    seen[tier] = seen.get(tier, 0) + tokens
        core.shutdown(10.0)
    assert seen["cpu"] > 0
    assert seen["ssd"] > 0


@pytest.mark.slow
def test_what_was_stored_outlives_a_worker_that_is_killed(
    tiny_model: Path, greedy_reference: Reference, tmp_path: Path
) -> None:
    """Its copies end with it, so nobody waits for them, and the slab goes down to the disk."""
    options = {
        "kv_offload": "cpu,ssd",
        "kv_offload_load": "always",
        "kv_offload_cpu_bytes": "1MiB",
        "kv_offload_ssd_bytes": "64MiB",
        "kv_offload_ssd_path": str(tmp_path),
        "num_blocks": 24,
    }
    core = EngineCore(config_of(tiny_model, distributed_executor_backend="mp", **options))
    assert isinstance(core.executor, ProcessExecutor)
    for i in range(6):
        core.add(request(f"r{i}", prompt_of(60, i)))
        finish(core, [], 1)
    os.kill(core.executor.pid, signal.SIGKILL)
    core.add(request("late", prompt_of(20)))
    with pytest.raises(ExecutorDied):
        finish(core, [], 1)
    began = time.monotonic()
    core.shutdown(30.0)
    assert time.monotonic() - began < 25.0, "it waited for copies that nobody makes"
    again = EngineCore(config_of(tiny_model, **options))
    try:
        again.add(request("a", prompt_of(60, 0)))
        answer = finish(again, [], 1)["a"]
        assert answer.new_token_ids == greedy_reference(prompt_of(60, 0), 6)
        assert (answer.cached_tokens_by_tier or {})["ssd"] > 0
    finally:
        again.shutdown(5.0)


def test_a_worker_that_is_killed_ends_the_engine_with_the_reason(tiny_model: Path) -> None:
    core = EngineCore(config_of(tiny_model, distributed_executor_backend="mp"))
    assert isinstance(core.executor, ProcessExecutor)
    core.add(request("a", prompt_of(20)))
    core.step()
    os.kill(core.executor.pid, signal.SIGKILL)
    with pytest.raises(ExecutorDied, match="ended with exit status -9"):
        finish(core, [], 1)
    core.shutdown(5.0)
    with pytest.raises(ExecutorDied):
        core.executor.dispatch(core.scheduler.schedule())


@pytest.mark.slow
def test_a_worker_that_was_gone_before_the_step_is_noticed(tiny_model: Path) -> None:
    """The socket of one that is gone takes nothing, and nobody may wait for it."""
    core = EngineCore(config_of(tiny_model, distributed_executor_backend="mp"))
    assert isinstance(core.executor, ProcessExecutor)
    assert not core.has_work()
    os.kill(core.executor.pid, signal.SIGKILL)
    wait_until_dead(core.executor.pid)
    time.sleep(0.3)  # for the socket to hear of it, which it mostly does at once
    assert core.has_work(), "an idle engine notices too"
    with pytest.raises(ExecutorDied, match="ended with exit status -9"):
        core.step()
    core.shutdown(5.0)


@pytest.mark.slow
def test_a_worker_that_goes_as_a_message_is_sent_is_noticed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket was ready a moment ago, and nobody may wait for it without end."""
    core = EngineCore(config_of(tiny_model, distributed_executor_backend="mp"))
    executor = core.executor
    assert isinstance(executor, ProcessExecutor)
    os.kill(executor.pid, signal.SIGKILL)
    wait_until_dead(executor.pid)
    time.sleep(0.3)  # as above
    waits = []
    wait = executor._poll_socket

    def wait_late(event: int, seconds: float) -> None:
        waits.append(event)
        if len(waits) > 1:
            wait(event, seconds)

    monkeypatch.setattr(executor, "_poll_socket", wait_late)
    with pytest.raises(ExecutorDied, match="ended with exit status -9"):
        core.step()
    core.shutdown(5.0)


def test_a_step_that_fails_in_the_worker_ends_its_requests_only(make_core: MakeCore) -> None:
    core = make_core(distributed_executor_backend="mp")
    core.add(request("a", prompt_of(20)))
    step = core.scheduler.schedule()
    step.new_requests[0].block_ids = ([10**6] * 3,)
    handle = core.executor.dispatch(step)
    core.executor.sample(handle)
    with pytest.raises(RuntimeError, match=r"Error|slots from -1 to the last one"):
        core.executor.result(handle)
    core.scheduler.fail_step(step, "it failed")
    core.add(request("b", prompt_of(20)))
    assert len(finish(core, [], 1)["b"].new_token_ids) == 6


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("answers another step", "answered step 2 where step 1 was due"),
        ("says nonsense", "its answer cannot be read"),
        ("begins anew", "said Up, which was not asked for"),
        ("exits", "ended with exit status 7"),
        ("loses its device", "its device is lost: it fell off"),
    ],
)
@pytest.mark.slow
def test_a_worker_that_answers_wrongly_is_given_up(
    make_liar: MakeLiar, make_core: MakeCore, lie: str, words: str
) -> None:
    core = make_core()
    core.add(request("a", prompt_of(20)))
    step = core.scheduler.schedule()
    executor = make_liar(lie)
    handle = executor.dispatch(step)
    executor.sample(handle)
    with pytest.raises(ExecutorDied, match=words):
        executor.result(handle)
    with pytest.raises(ExecutorDied, match=words):
        executor.poll_copies()
    core.scheduler.fail_step(step, "over")


@pytest.mark.slow
def test_a_worker_that_answers_too_late_is_given_up(
    make_liar: MakeLiar, make_core: MakeCore
) -> None:
    core = make_core()
    executor = make_liar("is late", seconds=0.3)
    step = core.scheduler.schedule()
    handle = executor.dispatch(step)
    executor.sample(handle)
    with pytest.raises(ExecutorDied, match=r"did not answer within 0\.3 s"):
        executor.result(handle)


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(tiny_model: Path, tmp_path: Path) -> None:
    config = config_of(tiny_model)
    with pytest.raises(ConfigError, match="pool"):
        ProcessExecutor(config, 3, 1000)
    with pytest.raises(ExecutorDied, match="ended with exit status 5"):
        ProcessExecutor(config, 80, 1000, command=[sys.executable, "-c", "raise SystemExit(5)"])


@pytest.mark.slow
def test_a_killed_engine_leaves_no_directory(
    make_core: MakeCore, greedy_reference: Reference
) -> None:
    """The socket's file is needed until both ends have met."""
    core = make_core(distributed_executor_backend="mp")
    assert isinstance(core.executor, ProcessExecutor)
    assert not core.executor._directory.exists()
    core.add(request("r", prompt_of(12)))
    assert finish(core, [], 1)["r"].new_token_ids == greedy_reference(prompt_of(12), 6)


@pytest.mark.slow
def test_a_worker_that_hangs_at_the_end_is_not_waited_for(
    make_liar: MakeLiar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_executor, "_END_SECONDS", 0.5)
    executor = make_liar("", seconds=600.0)
    os.kill(executor.pid, signal.SIGSTOP)
    began = time.monotonic()
    executor.shutdown(0.2)
    assert time.monotonic() - began < 20.0
    assert executor._process.poll() is not None


@pytest.mark.slow
def test_an_engine_whose_worker_hangs_shuts_down_in_its_time(tiny_model: Path) -> None:
    """With two steps under way; what the tiers have is kept."""
    core = EngineCore(
        config_of(
            tiny_model,
            distributed_executor_backend="mp",
            kv_offload="cpu",
            kv_offload_cpu_bytes="1MiB",
        )
    )
    executor = core.executor
    assert isinstance(executor, ProcessExecutor)
    core.add(request("a", prompt_of(20), max_tokens=30))
    core.step()
    os.kill(executor.pid, signal.SIGSTOP)
    core.steps.begin_step()
    core.shutdown(2.0)
    assert executor._process.poll() is not None
    assert not executor.is_alive


@pytest.mark.slow
def test_tokens_that_came_are_delivered_where_the_worker_dies_behind_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes between the answer to one step and the message that has the next one sampled."""
    core = EngineCore(config_of(tiny_model, distributed_executor_backend="mp"))
    executor = core.executor
    assert isinstance(executor, ProcessExecutor)
    try:
        core.add(request("a", prompt_of(20), max_tokens=30))
        update = core.scheduler.update_from_output

        def update_and_kill(*given: Any) -> Any:
            outputs = update(*given)
            executor._process.kill()
            executor._process.wait()
            executor._died("it was killed")
            return outputs

        monkeypatch.setattr(core.scheduler, "update_from_output", update_and_kill)
        (output,) = core.step()
        assert len(output.new_token_ids) == 1
        with pytest.raises(ExecutorDied, match="it was killed"):
            core.step()
        assert core.scheduler.counts["generated_tokens"] == 1
    finally:
        core.shutdown(2.0)


@pytest.mark.slow
def test_what_a_worker_answered_before_it_was_killed_is_delivered(tiny_model: Path) -> None:
    core = EngineCore(config_of(tiny_model, distributed_executor_backend="mp"))
    executor = core.executor
    assert isinstance(executor, ProcessExecutor)
    try:
        core.add(request("a", prompt_of(20), max_tokens=30))
        outputs = core.step()
        while not executor._socket.poll(1000):
            assert executor.is_alive
        executor._process.kill()
        executor._process.wait()
        outputs += core.step()
        with pytest.raises(ExecutorDied, match="exit status -9"):
            core.step()
        tokens = [token for output in outputs for token in output.new_token_ids]
        assert len(tokens) == core.scheduler.counts["generated_tokens"] == 2
    finally:
        core.shutdown(2.0)


@pytest.mark.slow
@pytest.mark.usefixtures("no_nursery")
def test_a_worker_that_hangs_ends_with_its_launcher(tiny_model: Path) -> None:
    code = (
        "import sys, time\n"
        "from stratakv.engine.core.engine_core import EngineCore\n"
        "from stratakv.engine.config.engine_options import engine_config\n"
        f"options = {{'distributed_executor_backend': 'mp', 'num_blocks': 40}}\n"
        f"core = EngineCore(engine_config({str(tiny_model)!r}, options))\n"
        "print(core.executor.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        worker = int(launcher.stdout.readline())
        os.kill(worker, signal.SIGSTOP)
    finally:
        launcher.kill()
        launcher.wait()
    wait_until_dead(worker)


@pytest.mark.slow
def test_a_worker_that_was_given_up_is_ended_with_the_engine(tiny_model: Path) -> None:
    """It lives, but its answers count no more: the shutdown ends it, and closes the tiers."""
    core = EngineCore(
        config_of(
            tiny_model,
            distributed_executor_backend="mp",
            kv_offload="cpu",
            kv_offload_cpu_bytes="1MiB",
        )
    )
    executor = core.executor
    assert isinstance(executor, ProcessExecutor)
    try:
        core.add(request("a", prompt_of(20)))
        executor._step_seconds = 0.3
        os.kill(executor.pid, signal.SIGSTOP)
        with pytest.raises(ExecutorDied, match="did not answer"):
            core.step()
        assert executor._process.poll() is None
        assert not executor.is_alive
        assert core.has_work(), "who waits for a step hears why there is none"
        core.shutdown(5.0)
        assert executor._process.poll() is not None
    finally:
        executor.shutdown(0.0)
    assert not executor._directory.exists()


def test_a_shutdown_goes_on_where_the_worker_takes_no_blocks(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may end at any moment, between the question whether it lives and the last copies too."""
    core = EngineCore(config_of(tiny_model, kv_offload="cpu", kv_offload_cpu_bytes="1MiB"))
    closed: list[float] = []
    close = core._connector.shutdown
    monkeypatch.setattr(core._connector, "shutdown", lambda s: closed.append(s) or close(s))

    def refuse(_: object) -> None:
        raise ExecutorDied("it ended just now")

    monkeypatch.setattr(core.executor, "start_copies", refuse)
    core.shutdown(5.0)
    assert closed
    assert "did not go to the tiers" in caplog.text
