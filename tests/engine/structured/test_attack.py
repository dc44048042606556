# SPDX-License-Identifier: Apache-2.0
"""Four clients send hostile grammars, an honest one asks beside them: a part of what
`tools/attack_grammars.py` does for minutes."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.request.structured_params import StructuredOutputsParams
from stratakv.engine.structured import compiler as compiler_module
from stratakv.engine.structured.backends import open_backend
from stratakv.engine.structured.compiler import Compilation, GrammarCompiler
from stratakv.engine.structured.processes.fair_queue import FairQueue
from stratakv.engine.structured.processes.grammar_processes import GrammarProcesses
from stratakv.engine.structured.processes.limited_thread import Limit

from .vocabularies import END, VOCAB, embedded
from .waiting import wait_for

TOOL = Path(__file__).parents[3] / "tools" / "attack_grammars.py"
ONE_OF = 6  # of the sixty
MOMENT, LIMIT = Limit(0.1, 60.0), Limit(0.2)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attack_grammars", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_y03_the_attack_has_sixty_grammars_that_can_be_sent(tool: ModuleType) -> None:
    grammars = tool.hostile_grammars(7)
    assert len(grammars) == 60
    for fields in (*grammars.values(), tool.honest_schema(1)):
        assert StructuredOutputsParams(**fields).spec.text
    assert not set(tool.hostile_grammars(8)) & set(grammars)


@pytest.mark.regression
def test_y03_honest_schemas_are_answered_beside_hostile_ones(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, threads_end: None
) -> None:
    """Each in its turn, whatever was asked for before; nothing is refused afterwards, and nothing
    is left behind. Each trial is charged alike, so that turns do not depend on the machine."""
    monkeypatch.setattr(compiler_module, "MOMENT", MOMENT)
    charge = FairQueue.charge
    monkeypatch.setattr(FairQueue, "charge", lambda queue, tenant, _: charge(queue, tenant, 1.0))
    processes = GrammarProcesses("guidance", EMBEDDED_MODEL, VOCAB, (END,))
    compiler = GrammarCompiler(
        lambda: open_backend("guidance", embedded),
        lambda: None, vocab_size=VOCAB, processes=processes, limit=LIMIT,
    )  # fmt: skip
    taken: list[str] = []
    get = FairQueue.get

    def noting(queue):  # type: ignore[no-untyped-def]
        with queue._condition:  # nothing is taken or queued between taking and noting
            job = get(queue)
            if isinstance(job, Compilation) and job.spec.text not in taken:
                taken.append(job.spec.text)
            return job

    monkeypatch.setattr(FairQueue, "get", noting)

    def ask(fields: dict[str, object], tenant: str) -> Compilation:
        return compiler.ask(StructuredOutputsParams(**fields).spec, tenant)  # type: ignore[arg-type]

    def until_done(*compilations: Compilation) -> None:
        wait_for(
            lambda: (compiler.poll_compilations(), all(each.is_done for each in compilations))[1]
        )

    try:
        until_done(ask(tool.honest_schema(0), "honest"))
        threads = set(threading.enumerate())
        asked = [
            ask(fields, f"hostile-{number % tool.NUM_CLIENTS}")
            for number, fields in enumerate(list(tool.hostile_grammars(0).values())[::ONE_OF])
        ]
        for number in range(1, 4):
            before = len(taken)
            honest = ask(tool.honest_schema(number), "honest")
            queued = len(taken)  # what was taken while it was asked for had its turn before it
            until_done(honest)
            assert honest.grammar is not None, honest.error
            # One of each client at the most.
            between = taken[queued : taken.index(honest.spec.text, before)]
            assert len(between) <= tool.NUM_CLIENTS
        until_done(*asked)
        assert not any(each.may_be_later for each in asked if "killed" in each.error)
        for number in range(4, 6):
            honest = ask(tool.honest_schema(number), "hostile-0")
            until_done(honest)
            assert honest.grammar is not None, honest.error
        assert set(threading.enumerate()) == threads and processes.trusts_threads
        pids = processes.process_ids
    finally:
        compiler.close()
    deadline = time.monotonic() + 60.0
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        os.sched_yield()
