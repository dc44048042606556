# SPDX-License-Identifier: Apache-2.0
"""Every Python that a test starts reads this: its engines' processes come from the nursery.

Importing torch takes a process 2.4 s of processor time, and the tests start hundreds of them.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from types import SimpleNamespace
from typing import Any

# The modules of the product that start processes which import much.
STARTERS = (
    "local_programs",
    "stratakv.benchmarks.harness.peer",
    "stratakv.benchmarks.harness.served",
    "stratakv.engine.api.openai.templates.template_process",
    "stratakv.engine.client.launcher",
    "stratakv.engine.core.worker_process.process_executor",
    "stratakv.engine.structured.processes.grammar_processes",
)


class _Starters(MetaPathFinder):
    """Has what it finds start processes through the nursery."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in STARTERS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            plain: Any = spec.loader
            run = plain.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                module.subprocess = _subprocess(module.subprocess)

            plain.exec_module = exec_module
        return spec


def _subprocess(plain: Any) -> SimpleNamespace:
    folder = os.path.dirname(__file__)
    if folder not in sys.path:
        sys.path.append(folder)
    from nursery_client import popen

    names = ("PIPE", "DEVNULL", "STDOUT", "TimeoutExpired", "run")
    return SimpleNamespace(Popen=popen, **{name: getattr(plain, name) for name in names})


if os.environ.get("TESTS_NURSERY"):
    sys.meta_path.insert(0, _Starters())
