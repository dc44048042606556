# SPDX-License-Identifier: Apache-2.0
"""Engines of a test whose model runner lives in a process of the nursery's, and what they leave."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.config.engine_config import EngineConfig
from stratakv.engine.config.offload_config import OffloadConfig
from stratakv.engine.core import engine_core
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.worker_process import process_executor
from stratakv.engine.core.worker_process.process_executor import ProcessExecutor

from .faulty_worker import Plan, read_look
from .leftovers import RunnerLook
from .nursery_site.nursery_client import Nursery
from .open_files import open_paths
from .threads import WAIT_SECONDS

# Far more than a step takes here, on a machine that does other things beside.
STEP_SECONDS = 60.0
# For workers that are to be late, by as much again.
SHORT_STEP_SECONDS = 0.5


class OtherProcess:
    """The worker of one engine after the other."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._nursery = nursery
        self._look_path = str(folder / "look.npz")
        self._made: list[ProcessExecutor] = []
        self._descriptors = 0

    def patch(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seed: int,
        rates: dict[str, float],
        lie: str = "",
        lie_at: int = 0,
    ) -> None:
        """The next engine's worker goes wrong like this."""
        is_late = lie == "is late"
        step_seconds = SHORT_STEP_SECONDS if is_late else STEP_SECONDS
        plan = Plan(self._look_path, seed, rates, lie, lie_at, 3 * SHORT_STEP_SECONDS)
        made = self._made = []

        class Watched(ProcessExecutor):
            def __init__(self, config: EngineConfig, *args: Any) -> None:
                made.append(self)
                # A worker has the slab and no tiers. It would refuse such as are smaller here than
                # an operator may have them.
                config = dataclasses.replace(config, offload=OffloadConfig())
                super().__init__(config, *args, step_seconds=step_seconds)

        monkeypatch.setattr(engine_core, "ProcessExecutor", Watched)
        monkeypatch.setattr(process_executor, "subprocess", self._nursery.module(plan))
        self._descriptors = len(open_paths())

    def arm(self, core: EngineCore) -> None:
        """From now on the model may fail."""
        core.executor.call_worker("arm")

    def look(self, core: EngineCore) -> RunnerLook:
        core.executor.call_worker("look")
        return read_look(self._look_path)

    def check_gone(self) -> None:
        """No process, folder or descriptor of the engine is left."""
        executor = self._made.pop()
        assert executor._process.poll() is not None, "the worker lives on"
        assert not os.path.exists(f"/proc/{executor.pid}")
        assert not executor._directory.exists()
        deadline = time.monotonic() + WAIT_SECONDS
        while len(open_paths()) > self._descriptors:
            assert time.monotonic() < deadline, f"descriptors are left, of {open_paths()}"
            time.sleep(0.01)
