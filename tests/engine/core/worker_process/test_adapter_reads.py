# SPDX-License-Identifier: Apache-2.0
"""The worker process reads adapters in parallel with steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from stratakv.engine.core.client_calls.deferred import Deferred
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.executor import ExecutorDied
from stratakv.engine.core.worker_process import adapter_reads, process_executor
from stratakv.engine.core.worker_process.adapter_reads import AdapterReader, AdapterReads
from stratakv.engine.core.worker_process.process_executor import ProcessExecutor
from stratakv.engine.request.core_messages import LoadAdapter, RequestExtras
from stratakv.engine.worker.adapter_slots import ReadAdapter
from stratakv.tiers.settings.values import ConfigError

from ....faulty_worker import Plan
from ....nursery_site.nursery_client import Nursery
from ....threads import WAIT_SECONDS
from ....two_engines import wait_for
from ...written_adapters import write_adapter
from ..conftest import MakeCore, config_of, prompt_of, request, run


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file that reads wait for."""
    return tmp_path / "gate"


@pytest.fixture
def core(
    tiny_model: Path, worker_nursery: Nursery, monkeypatch: pytest.MonkeyPatch, gate: Path
) -> Iterator[EngineCore]:
    plan = Plan("", reads_wait_for=str(gate))
    monkeypatch.setattr(process_executor, "subprocess", worker_nursery.module(plan))
    core = EngineCore(
        config_of(tiny_model, distributed_executor_backend="mp", enable_lora=True, max_loras=2)
    )
    yield core
    gate.touch()
    core.shutdown(5.0)


def begin_load(core: EngineCore, name: str, folder: Path) -> Deferred:
    message = msgspec.json.encode(LoadAdapter(name, str(folder), False)).decode()
    deferred = core.call("load_adapter", message)
    assert isinstance(deferred, Deferred)
    return deferred


def said(core: EngineCore, adapter: str) -> list[int]:
    asked = request("r", prompt_of(30), extras=RequestExtras(adapter=adapter))
    return run(core, asked)["r"].new_token_ids


def test_steps_go_on_while_the_worker_reads(
    core: EngineCore, gate: Path, tmp_path: Path, tiny_model: Path, make_core: MakeCore
) -> None:
    folders = {str(seed): write_adapter(tmp_path / str(seed), tiny_model, seed) for seed in (0, 1)}
    loads = [begin_load(core, name, folder) for name, folder in folders.items()]
    loads.append(begin_load(core, "same", folders["0"]))
    failing = begin_load(core, "missing", tmp_path)
    base = said(core, "")
    assert not any(each.future.done() for each in loads), "the worker has not read them"
    gate.touch()
    with pytest.raises(ConfigError, match=r"adapter_config.json is missing"):
        failing.future.result(WAIT_SECONDS)
    for each in loads:
        each.future.exception(WAIT_SECONDS)
        each.finish(each.future)
    alone = make_core(lora_modules=folders)
    assert [said(core, "0"), said(core, "1")] == [said(alone, "0"), said(alone, "1")]
    assert said(core, "same") == said(core, "0") != base


def test_a_worker_that_ends_while_it_reads_fails_the_load(
    core: EngineCore, tmp_path: Path, tiny_model: Path
) -> None:
    load = begin_load(core, "a", write_adapter(tmp_path / "a", tiny_model))
    assert isinstance(core.executor, ProcessExecutor)
    os.kill(core.executor.pid, signal.SIGKILL)
    with pytest.raises(ExecutorDied, match="ended while it read an adapter"):
        load.future.result(WAIT_SECONDS)
    with pytest.raises(ExecutorDied, match="ended while it read an adapter"):
        core.executor.read_adapter(tmp_path / "a")


class Ends:
    """The two ends in one process; the reader waits for `answer`."""

    def __init__(self) -> None:
        self.answer: Future[int] = Future()
        self.reads = AdapterReads()
        self.reader = AdapterReader(os.dup(self.reads.worker_fd), self._read)
        self.reads.start_receiving()

    def _read(self, path: Path) -> ReadAdapter:
        rank = self.answer.result(WAIT_SECONDS)
        return ReadAdapter(path, b"f", rank, 64)

    def close(self) -> None:
        self.reads.close()
        self.reader.close(WAIT_SECONDS)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_an_adapter_that_is_read_too_late_is_dropped(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_reads, "READ_SECONDS", 0.01)
    with pytest.raises(ConfigError, match=r"/late was not read within 0\.01 s; copy it"):
        ends.reads.read_adapter(Path("/late"))
    ends.answer.set_result(4)
    monkeypatch.setattr(adapter_reads, "READ_SECONDS", WAIT_SECONDS)
    found = ends.reads.read_adapter(Path("/second"))
    assert (found.rank, ends.reader.take_adapter(found.number).rank) == (4, 4)
    wait_for(lambda: not ends.reader._found, "the late adapter is forgotten")


def test_other_errors_keep_their_words(ends: Ends) -> None:
    ends.answer.set_exception(MemoryError("too large"))
    with pytest.raises(RuntimeError, match="MemoryError: too large"):
        ends.reads.read_adapter(Path("/large"))


def test_a_line_that_is_no_message_ends_the_reads(ends: Ends) -> None:
    with ThreadPoolExecutor() as pool:
        read = pool.submit(ends.reads.read_adapter, Path("a"))
        ends.reads._socket.sendall(b"no JSON\n")
        with pytest.raises(ExecutorDied):
            read.result(WAIT_SECONDS)
        ends.answer.set_result(8)
