# SPDX-License-Identifier: Apache-2.0
"""Faults of every tier below a real vLLM, one after the other in the life of one engine of each
form, and of one with a hybrid: no request fails, none hangs, all tokens are those of a vLLM without
us, each fault is seen to have struck, and each tier is used again when its fault is over.

Needs what test_real_vllm.py needs: `make test-vllm` and docs/vllm.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ...nursery_site.nursery_client import LIFE
from ...tiers.cache_server.rig import server_process, token_of
from ...tiers.remote.fault_proxy import FaultProxy
from .real_faults import FAULTS, LOAD, STORE, Below, Fault
from .real_vllm import (
    HYBRID,
    HYBRID_BLOCK_BYTES,
    HYBRID_BLOCKS,
    ConnectorEngine,
    SpecEngine,
    Tokens,
    expected,
    hybrid_expected,
    hybrid_model,
    hybrid_prompts,
    model,
    needs_vllm,
    on_disk,
    prompts,
)
from .vllm_engine import CHUNK_BYTES, VllmEngine

__all__ = ["expected", "hybrid_expected", "hybrid_model", "hybrid_prompts", "model", "prompts"]

pytestmark = needs_vllm

HOST = "127.0.0.2"  # the proxies', see tiers/remote/test_faults.py
NUM_PROMPTS = 2
LEAST_FAULTS = 50
# Of an answer; a fault may cost read_seconds a few times, and the machine does other things.
ANSWER_SECONDS = 120.0
SHOWN_SECONDS = 60.0
WELL_SECONDS = 180.0
SERVER_FLAGS = ("--cpu-bytes", "32MiB", "--no-shared-memory")
FORMS: dict[str, type[VllmEngine]] = {"StrataSpec": SpecEngine, "StrataConnector": ConnectorEngine}


@dataclass
class Case:
    """An engine of one form with one model, what it is asked and what it answers without us."""

    engine_of: type[VllmEngine]
    model: Path
    prompts: Tokens
    expected: Tokens
    num_blocks: int  # of these prompts
    block_bytes: int
    arguments: dict[str, Any] = field(default_factory=dict)
    # In bfloat16 vLLM's tokens depend on what is computed beside them, with us or without.
    is_together: bool = True


@pytest.fixture(params=FORMS)
def plain(request: pytest.FixtureRequest, model: Path, prompts: Tokens, expected: Tokens) -> Case:
    kept = slice(NUM_PROMPTS)
    form = FORMS[request.param]
    return Case(form, model, prompts[kept], expected[kept], NUM_PROMPTS * 9, CHUNK_BYTES)


@pytest.fixture
def hybrid(hybrid_model: Path, hybrid_prompts: Tokens, hybrid_expected: Tokens) -> Case:
    kept = slice(NUM_PROMPTS)
    return Case(
        ConnectorEngine,
        hybrid_model,
        hybrid_prompts[kept],
        hybrid_expected[kept],
        NUM_PROMPTS * HYBRID_BLOCKS,
        HYBRID_BLOCK_BYTES,
        HYBRID,
        is_together=False,
    )


def test_no_fault_of_a_tier_fails_a_request(plain: Case, tmp_path: Path) -> None:
    check_faults(plain, tmp_path)


def test_no_fault_of_a_tier_fails_a_request_to_a_hybrid(hybrid: Case, tmp_path: Path) -> None:
    """A state is a tenth of what each fault strikes, and a hit is nothing without it."""
    check_faults(hybrid, tmp_path)


def check_faults(case: Case, folder: Path) -> None:
    """All of them, in one life, which a busy machine makes longer than that of other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LIFE, "3600")
        check_in_one_life(case, folder)


def check_in_one_life(case: Case, folder: Path) -> None:
    with below(case, folder) as tiers:
        run = Run(tiers, case)
        for tier in ("cpu", "ssd", "remote"):
            run.check_without_fault(tier)
        for fault in FAULTS:
            run.strike(fault)
    print(
        f"\n{case.engine_of.__name__}, {case.model.name}: {len(run.struck)} faults struck, "
        f"{run.answers} requests answered, the slowest in {run.slowest:.1f} s"
    )
    assert run.amiss == []
    assert len(run.struck) >= LEAST_FAULTS


@contextmanager
def below(case: Case, folder: Path) -> Iterator[Below]:
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
            faults="ssd:lookup:error=0,remote:lookup:error=0", arguments=case.arguments,
        )  # fmt: skip
        if case.engine_of is SpecEngine:
            settings["region_chunks"] = 40
        engine = stack.enter_context(case.engine_of(case.model, folder, **settings))
        (blocks,) = (folder / "ssd").rglob("blocks")
        yield Below(engine, server, proxies, blocks, token, case.block_bytes, SERVER_FLAGS)


class Run:
    """The faults so far. `amiss`: what went against the promise."""

    def __init__(self, tiers: Below, case: Case) -> None:
        self.struck: list[str] = []
        self.amiss: list[str] = []
        self.answers = 0
        self.slowest = 0.0
        self._tiers = tiers
        self._prompts = case.prompts
        self._expected = case.expected
        self._num_blocks = case.num_blocks
        self._is_together = case.is_together

    def check_without_fault(self, tier: str) -> None:
        """Blocks come from each tier, so that a fault of it has something to strike."""
        self._fill()
        self._make_ready(tier, LOAD)
        before = self._figures()[f"{tier}.loaded_blocks"]
        assert self._answers() == ""
        assert self._figures()[f"{tier}.loaded_blocks"] >= before + self._num_blocks

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
            tiers = ("cpu", "ssd", "remote")
            has_all = all(figures[f"{tier}.blocks"] >= self._num_blocks for tier in tiers)
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
        """Ask for all prompts; what was wrong with the answers."""
        self._forget()
        command = {
            "generate": self._prompts, "max_tokens": 6, "together": self._is_together,
        }  # fmt: skip
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
