# SPDX-License-Identifier: Apache-2.0
"""Faults of every tier below a real vLLM, one after the other in the life of one engine of each
form: no request fails, none hangs, all tokens are those of a vLLM without us, each fault is seen to
have struck, and each tier is used again when its fault is over.

Needs what test_real_vllm.py needs: `make test-vllm` and docs/vllm.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ...tiers.cache_server.rig import server_process, token_of
from ...tiers.remote.fault_proxy import FaultProxy
from .real_faults import FAULTS, LOAD, STORE, Below, Fault
from .real_vllm import (
    ConnectorEngine,
    SpecEngine,
    expected,
    model,
    needs_vllm,
    on_disk,
    prompts,
)
from .vllm_engine import VllmEngine

__all__ = ["expected", "model", "prompts"]

pytestmark = needs_vllm

HOST = "127.0.0.2"  # the proxies', see tiers/remote/test_faults.py
NUM_PROMPTS, NUM_BLOCKS = 2, 18
LEAST_FAULTS = 50
# Of an answer; a fault may cost read_seconds a few times, and the machine does other things.
ANSWER_SECONDS = 120.0
SHOWN_SECONDS = 60.0
WELL_SECONDS = 180.0
SERVER_FLAGS = ("--cpu-bytes", "32MiB", "--no-shared-memory")
FORMS: dict[str, type[VllmEngine]] = {"StrataSpec": SpecEngine, "StrataConnector": ConnectorEngine}


@pytest.mark.parametrize("form", FORMS)
def test_no_fault_of_a_tier_fails_a_request(
    form: str,
    model: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    with below(FORMS[form], model, tmp_path) as tiers:
        run = Run(tiers, prompts[:NUM_PROMPTS], expected[:NUM_PROMPTS])
        for tier in ("cpu", "ssd", "remote"):
            run.check_without_fault(tier)
        for fault in FAULTS:
            run.strike(fault)
    print(
        f"\n{form}: {len(run.struck)} faults struck, {run.answers} requests answered, the slowest "
        f"in {run.slowest:.1f} s"
    )
    assert run.amiss == []
    assert len(run.struck) >= LEAST_FAULTS


@contextmanager
def below(engine_of: type[VllmEngine], model: Path, folder: Path) -> Iterator[Below]:
    """An engine with a slab, a disk and a cache server behind proxies, each in a drill's wrapper
    that does nothing yet."""
    token = folder / "token"
    token.write_text(token_of("another"))
    token.chmod(0o600)
    with ExitStack() as stack:
        server = stack.enter_context(server_process(*SERVER_FLAGS))
        proxies = [
            stack.enter_context(FaultProxy((HOST, port), ("127.0.0.1", port)))
            for port in (server.port, server.data_port)
        ]
        settings = on_disk(
            folder, cpu_bytes="8MiB", ssd_bytes="16MiB", read_seconds=1,
            servers=[f"grpc://{HOST}:{server.port}"],
            faults="ssd:lookup:error=0,remote:lookup:error=0",
        )  # fmt: skip
        if engine_of is SpecEngine:
            settings["region_chunks"] = 40
        engine = stack.enter_context(engine_of(model, folder, **settings))
        (blocks,) = (folder / "ssd").rglob("blocks")
        yield Below(engine, server, proxies, blocks, token, SERVER_FLAGS)


class Run:
    """The faults so far. `amiss`: what went against the promise."""

    def __init__(self, tiers: Below, prompts: list[list[int]], expected: list[list[int]]) -> None:
        self.struck: list[str] = []
        self.amiss: list[str] = []
        self.answers = 0
        self.slowest = 0.0
        self._tiers = tiers
        self._prompts = prompts
        self._expected = expected

    def check_without_fault(self, tier: str) -> None:
        """Blocks come from each tier, so that a fault of it has something to strike."""
        self._fill()
        self._make_ready(tier, LOAD)
        before = self._figures()[f"{tier}.loaded_blocks"]
        assert self._answers() == ""
        assert self._figures()[f"{tier}.loaded_blocks"] >= before + NUM_BLOCKS

    def strike(self, fault: Fault) -> None:
        """One fault."""
        began = time.monotonic()
        self._fill()
        self._make_ready(fault.tier, fault.moment)
        before = self._figures()
        with fault.planted(self._tiers):
            wrong = self._answers()
            shown = self._wait_shown(fault, before)
        wrong = wrong or self._answers()
        if wrong:
            self.amiss.append(f"{fault}: {wrong}")
        if shown:
            self.struck.append(str(fault))
        else:
            self.amiss.append(f"{fault}: it has not struck")
        print(f"{len(self.struck):3} {fault}: {shown} {wrong} {time.monotonic() - began:.1f} s")

    def _fill(self) -> None:
        """Until every tier is well and has every block."""
        deadline = time.monotonic() + WELL_SECONDS
        again = 0.0
        while True:
            if time.monotonic() > again:
                self._tiers.do(fault="clear", tiers=["cpu", "ssd", "remote"])
                wrong = self._answers()
                assert not wrong, wrong
                again = time.monotonic() + 5.0
            figures = self._step()
            has_all = all(figures[f"{t}.blocks"] >= NUM_BLOCKS for t in ("cpu", "ssd", "remote"))
            if has_all and figures["well"]:
                return
            assert time.monotonic() < deadline, f"the tiers do not recover: {figures}"

    def _make_ready(self, tier: str, moment: str) -> None:
        """The blocks lie in the tier and in no other; nowhere before a store."""
        every = {"cpu", "ssd", "remote"}
        self._tiers.do(fault="clear", tiers=sorted(every if moment == STORE else every - {tier}))
        self._tiers.do(fault="unlearn")
        self._forget()

    def _answers(self) -> str:
        """Ask for all prompts at once; what was wrong with the answers."""
        self._forget()
        command = {"generate": self._prompts, "max_tokens": 6, "together": True}
        answer = self._tiers.engine.do(command, ANSWER_SECONDS)
        self.answers += len(self._prompts)
        self.slowest = max(self.slowest, answer["seconds"])
        return "" if answer["tokens"] == self._expected else "wrong tokens"

    def _wait_shown(self, fault: Fault, before: dict[str, Any]) -> str:
        """The counter that tells of the fault; empty where none does."""
        deadline = time.monotonic() + SHOWN_SECONDS
        while time.monotonic() < deadline:
            now = self._figures()
            for name, value in now.items():
                if name.startswith(fault.shows) and value > before.get(name, 0):
                    return name
            self._step()
        return ""

    def _step(self) -> dict[str, Any]:
        """Have vLLM make a few steps, for those who report in steps."""
        self._tiers.engine.generate([[7, 8, 9]], seconds=ANSWER_SECONDS)
        return self._figures()

    def _figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = self._tiers.do(fault="figures")
        connections = sum(proxy.num_connections for proxy in self._tiers.proxies)
        return figures | {"network.connections": connections}

    def _forget(self) -> None:
        deadline = time.monotonic() + SHOWN_SECONDS
        while not self._tiers.engine.do({"forget": True})["forgotten"]:
            assert time.monotonic() < deadline, "vLLM does not forget"
            self._step()
