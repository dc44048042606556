# SPDX-License-Identifier: Apache-2.0
"""Steps through the kernels' plain twins: the same tokens as by gathering, recorded or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stratakv.engine.worker.forward import forward, kernel_attention
from stratakv.engine.worker.forward.kernel_attention import Kernels
from stratakv.engine.worker.forward.prefill_backend import PrefillChoice
from stratakv.engine.worker.runtime.placement import KERNELS, Placement
from stratakv.kernels.attention.gathered_prefill import SDPA, GatheredPrefill
from stratakv.tiers.settings.values import ConfigError

from .recording_runtime import RecordingRuntime

BY_KERNELS = Placement(attention_backend=KERNELS)


def crowd(drive, prompt_of, wanted):
    """Requests that come, end and leave holes at different times; what each answered."""
    prompts = {f"r{i}": prompt_of(length, i) for i, length in enumerate((3, 90, 17, 40, 1, 250))}
    waiting, answers = list(prompts), {}
    while waiting or drive.lives:
        if waiting:
            drive.add(name := waiting.pop(0), prompts[name])
        drive.step(chunk=30)
        for name in [n for n, life in drive.lives.items() if len(life.output) >= wanted(n)]:
            answers[name] = drive.finish(name)
    return answers


def wanted(name: str) -> int:
    return 6 + 5 * int(name[1:])


@pytest.fixture(scope="module")
def gathered(checkpoint, driver, prompt_of):
    return crowd(driver(checkpoint(), block_size=4, num_blocks=400), prompt_of, wanted)


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_kernels_answer_as_gathering_does(block_size, gathered, checkpoint, driver, prompt_of):
    drive = driver(checkpoint(), block_size=block_size, num_blocks=1200, placement=BY_KERNELS)
    assert crowd(drive, prompt_of, wanted) == gathered
    assert not drive.runner.pool.tensor[0].any()


@pytest.fixture
def _recordable(monkeypatch):
    """The plain kernels stand for Triton's: what they read back disturbs no record of these
    tests."""
    monkeypatch.setattr(Kernels, "can_record_decodes", True)
    monkeypatch.setattr(Kernels, "can_record_chunks", True)


@pytest.mark.usefixtures("_recordable")
def test_recorded_steps_answer_the_same_and_write_nobodys_rows_nowhere(
    gathered, checkpoint, driver, prompt_of
):
    runtime = RecordingRuntime()
    drive = driver(
        checkpoint(), block_size=4, num_blocks=400, placement=BY_KERNELS, runtime=runtime
    )
    # 1, 2, 4, 8 and the 16 that the batch holds; chunks of 16, 32, 64, 128 and 256 tokens
    assert runtime.num_recorded == 10
    untouched = drive.free[-60:]
    before = drive.runner.pool.tensor[untouched].clone()
    assert crowd(drive, prompt_of, wanted) == gathered
    assert runtime.num_replays > 20
    assert not drive.runner.pool.tensor[0].any()
    after = drive.runner.pool.tensor[untouched]
    assert torch.equal(after.isnan(), before.isnan())


@pytest.mark.usefixtures("_recordable")
def test_a_small_chunk_alone_is_one_launch_and_gives_the_same(
    gathered, checkpoint, driver, prompt_of
):
    runtime = RecordingRuntime()
    drive = driver(checkpoint(), placement=BY_KERNELS, runtime=runtime)
    drive.add("r3", prompt_of(40, 3))
    drive.step(chunk=17)
    drive.step(chunk=16)
    drive.step(chunk=1000)  # 7 tokens, the last of which has an answer
    assert runtime.num_replays == 3
    drive.add("r1", prompt_of(90, 1))
    drive.step()  # beside a decode
    assert runtime.num_replays == 3
    assert not drive.runner.pool.tensor[0].any()
    while len(drive.lives["r3"].output) < wanted("r3"):
        drive.step()
    assert drive.finish("r3") == gathered["r3"][: wanted("r3")]
    drive.add("r5", prompt_of(250, 5))
    replays = runtime.num_replays
    drive.step(names=["r5"])
    assert runtime.num_replays == replays + 1
    drive.add("long", prompt_of(300, 9))
    drive.step(names=["long"])
    assert runtime.num_replays == replays + 1, "no chunk of so many tokens is recorded"


def test_recorded_steps_are_bypassed_where_they_are_not_wanted(checkpoint, driver, prompt_of):
    runtime = RecordingRuntime()
    eager = Placement(attention_backend=KERNELS, record_decodes=False)
    drive = driver(checkpoint(), placement=eager, runtime=runtime)
    drive.generate("a", prompt_of(5), 4)
    assert runtime.num_recorded == runtime.num_replays == 0


@pytest.mark.usefixtures("_recordable")
def test_staging_memory_is_written_only_after_a_wait(checkpoint, driver, prompt_of):
    runtime = RecordingRuntime()
    drive = driver(checkpoint(), placement=BY_KERNELS, runtime=runtime)
    after_start = runtime.num_waits
    drive.add("a", prompt_of(40))
    for steps in range(1, 6):
        drive.step(chunk=16)
        assert runtime.num_waits == after_start + steps


def test_a_step_waits_for_the_copies_of_the_last_but_one(checkpoint, driver, prompt_of):
    runtime = RecordingRuntime()
    eager = Placement(attention_backend=KERNELS, record_decodes=False)
    drive = driver(checkpoint(), placement=eager, runtime=runtime)
    drive.add("a", prompt_of(40))
    for _ in range(4):
        drive.step(chunk=8)
        assert runtime.last_waited == runtime.num_marks - 2


@pytest.mark.usefixtures("_recordable")
def test_a_prompts_only_token_is_no_answer_yet(gathered, checkpoint, driver, prompt_of):
    """Prompts by one token a step are decodes that nobody samples from."""
    runtime = RecordingRuntime()
    drive = driver(checkpoint(), placement=BY_KERNELS, runtime=runtime)
    drive.add("r2", prompt_of(17, 2))  # in the first row, where the other's answer is not
    drive.add("r0", prompt_of(3, 0))
    while len(drive.lives["r2"].output) < wanted("r2"):
        drive.step(chunk=1)
    assert drive.finish("r2") == gathered["r2"]
    assert drive.finish("r0")[: wanted("r0")] == gathered["r0"]


def test_prompt_logprobs_are_the_same(checkpoint, driver, prompt_of):
    def asked(**options):
        drive = driver(checkpoint(), **options)
        drive.add("a", prompt_of(70), prompt_logprobs=3, logprobs=2, temperature=0.0)
        drive.add("b", prompt_of(9, 1))
        results = [drive.step(chunk=32) for _ in range(4)]
        return next(r.prompt_logprobs["a"] for r in results if r.prompt_logprobs)

    mine, theirs = asked(placement=BY_KERNELS), asked()
    assert [e and e.token_ids for e in mine] == [e and e.token_ids for e in theirs]
    for one, other in zip(mine[1:], theirs[1:], strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-9, atol=1e-9)


class Capturing(TorchDispatchMode):
    """A device that records: whoever reads anything back is refused."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            raise RuntimeError(f"CUDA error: not permitted when stream is capturing ({func})")
        return func(*args, **(kwargs or {}))


class CapturingRuntime(RecordingRuntime):
    def record_work(self, work):
        work()
        with Capturing():
            return super().record_work(work)


def test_steps_of_plain_kernels_are_launched_and_not_recorded(
    gathered, checkpoint, driver, prompt_of, caplog
):
    """float64 on a GPU, a GPU that is too old for Triton's kernels, a head too large."""
    runtime = CapturingRuntime()
    drive = driver(
        checkpoint(), block_size=4, num_blocks=400, placement=BY_KERNELS, runtime=runtime
    )
    assert runtime.num_recorded == 0
    assert "cannot be recorded" in caplog.text
    assert crowd(drive, prompt_of, wanted) == gathered


def test_what_reads_back_cannot_be_recorded(checkpoint, driver, monkeypatch):
    """Or the test above would show nothing."""
    monkeypatch.setattr(Kernels, "can_record_decodes", True)
    with pytest.raises(RuntimeError, match="stream is capturing"):
        driver(checkpoint(), placement=BY_KERNELS, runtime=CapturingRuntime())


def test_every_launch_of_prefill_and_decode_runs_before_the_first_request(
    checkpoint, driver, monkeypatch
):
    """Each is compiled when it first runs. Lengths are those that tell a short chunk from a long
    one, and tables are as wide as they are later."""
    seen = []
    prefill, decode = kernel_attention.paged_prefill, kernel_attention.paged_decode

    def noted(name, real):
        def call(q, kv, tables, *args, **given):
            seen.append((name, len(q), tables.shape[1], tables.data_ptr() % 16))
            return real(q, kv, tables, *args, **given)

        return call

    monkeypatch.setattr(kernel_attention, "paged_prefill", noted("prefill", prefill))
    monkeypatch.setattr(kernel_attention, "paged_decode", noted("decode", decode))
    said: list[str] = []
    drive = driver(
        checkpoint(), placement=BY_KERNELS, runtime=RecordingRuntime(), max_model_len=1000,
        progress=said.append,
    )  # fmt: skip
    assert ("decode", 1, 64, 0) in seen
    assert [each for each in seen if each[0] == "prefill"] == [
        ("prefill", 2, 64, 0), ("prefill", 128, 64, 0)
    ]  # fmt: skip
    assert any(words.startswith("kernels are compiled, which took ") for words in said)
    seen.clear()
    for number in range(3):  # a chunk behind one decode, behind two: rows of the table in between
        drive.add(f"r{number}", [5 + number] * 40)
        drive.step()
    chunks = [each for each in seen if each[0] == "prefill"]
    assert len(chunks) == 3 and all(each[2:] == (64, 0) for each in chunks)


def test_a_triton_that_compiles_nothing_is_told_at_the_start(checkpoint, driver, monkeypatch):
    errors = pytest.importorskip("triton.runtime.errors")
    failures = [errors.OutOfResources(300_000, 232_448, "shared memory"), ValueError("of another")]

    def refuse(*args, **given):
        raise failures.pop(0)

    monkeypatch.setattr(kernel_attention, "paged_prefill", refuse)
    placement = {"placement": BY_KERNELS, "runtime": RecordingRuntime()}
    with pytest.raises(ConfigError, match=r"shared memory, Required: 300000.*triton 3\.6\.0 and"):
        driver(checkpoint(), **placement)
    with pytest.raises(ValueError, match="of another"):
        driver(checkpoint(), **placement)


def test_long_chunks_by_a_library_answer_the_same(
    gathered, checkpoint, driver, prompt_of, monkeypatch
):
    """Short chunks, long ones and decodes in one step; of some requests the context is too long for
    the library's buffers."""
    min_rows, rows = 12, []

    class Noted(GatheredPrefill):
        def run(self, q, *args):
            rows.append(len(q))
            return super().run(q, *args)

    def choose(self, backend):
        return Noted(SDPA, self.attention.layers[0], 150, min_rows=min_rows)

    monkeypatch.setattr(PrefillChoice, "choose", choose)
    monkeypatch.setattr(forward, "MIN_ROWS", min_rows)
    drive = driver(checkpoint(), block_size=4, num_blocks=400, placement=BY_KERNELS)
    assert crowd(drive, prompt_of, wanted) == gathered
    assert len(rows) > 10 and min(rows) >= min_rows
