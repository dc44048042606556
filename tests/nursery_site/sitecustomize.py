# SPDX-License-Identifier: Apache-2.0
"""Every Python that a test starts reads this: its engines' processes come from the nursery, and
the scans of its SSD stores from another.

Importing torch takes a process 2.4 s of processor time, and the tests start hundreds of them.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from types import SimpleNamespace
from typing import Any

# The modules of the product that start processes which import much, and who starts them in tests.
STARTERS = {
    "local_programs": "nursery_client",
    "stratakv.benchmarks.harness.peer": "nursery_client",
    "stratakv.benchmarks.harness.served": "nursery_client",
    "stratakv.engine.api.openai.templates.template_process": "nursery_client",
    "stratakv.engine.client.launcher": "nursery_client",
    "stratakv.engine.core.worker_process.process_executor": "nursery_client",
    "stratakv.engine.structured.processes.grammar_processes": "nursery_client",
    "stratakv.tiers.ssd.folder.guard": "scan_client",
}


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
                _replace_starter(module)

            plain.exec_module = exec_module
        return spec


def _subprocess(plain: Any, client: str) -> SimpleNamespace:
    folder = os.path.dirname(__file__)
    if folder not in sys.path:
        sys.path.append(folder)
    popen = importlib.import_module(client).popen
    names = ("PIPE", "DEVNULL", "STDOUT", "TimeoutExpired", "run")
    return SimpleNamespace(Popen=popen, **{name: getattr(plain, name) for name in names})


def _replace_starter(module: Any) -> None:
    module.subprocess = _subprocess(module.subprocess, STARTERS[module.__name__])


if os.environ.get("TESTS_NURSERY"):
    sys.meta_path.insert(0, _Starters())
    # By the conftest.py of a folder that pytest was given.
    for _name in STARTERS.keys() & sys.modules.keys():
        _replace_starter(sys.modules[_name])
