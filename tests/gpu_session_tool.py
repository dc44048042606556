# SPDX-License-Identifier: Apache-2.0
"""`tools/on_gpu.py` as a module for tests, with commands to run in it and its archives to read."""

from __future__ import annotations

import importlib
import json
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def imported_tool() -> Iterator[ModuleType]:
    """The module `on_gpu`, imported from its folder as a command imports it, with `gpu_session`;
    both are forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        yield importlib.import_module("on_gpu")
    for name in [name for name in sys.modules if name.startswith(("on_gpu", "gpu_session"))]:
        del sys.modules[name]


def python(steps: ModuleType, name: str, code: str, seconds: float = 60) -> Any:
    return steps.Command(name, ("-c", code, "{out}"), seconds)


def read_archive(archive: Path, step: str) -> tuple[dict[str, Any], set[str]]:
    with tarfile.open(archive) as tar:
        names = {name.removeprefix(f"on-gpu-{step}/") for name in tar.getnames()}
        file = tar.extractfile(f"on-gpu-{step}/on-gpu.json")
        assert file is not None
        return json.load(file), names
