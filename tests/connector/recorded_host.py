# SPDX-License-Identifier: Apache-2.0
"""Modules of a host made of what `tools/record_hosts.py` recorded: its classes have the recorded
methods, want what is abstract there, and do nothing else."""

from __future__ import annotations

import abc
import importlib.metadata
import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def read_record(host: str) -> dict[str, Any]:
    """The newest record of a host."""
    path = sorted((HERE / host / "signatures").glob("*.json"))[-1]
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def base_class(record: dict[str, Any], name: str) -> type:
    """A class with the recorded methods."""
    body: dict[str, Any] = {"__init__": lambda self, *args, **more: None}
    for method, about in record["classes"][name]["methods"].items():
        if method != "__init__":
            body[method] = _method(about["is_abstract"])
    return abc.ABCMeta(name, (), body)


def _method(is_abstract: bool) -> Any:
    def method(self: Any, *args: Any, **more: Any) -> None:
        return None

    return abc.abstractmethod(method) if is_abstract else method


def install(monkeypatch: pytest.MonkeyPatch, host: str, modules: dict[str, dict[str, Any]]) -> None:
    """Put modules with these names in the place of the host's, at the recorded version."""
    # What is imported of ours while they are there goes with them.
    for ours in ("adapter", "storage"):
        name = f"stratakv.connector.{host}.{ours}"
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        del sys.modules[name]
    for name, values in modules.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            part = ".".join(parts[:i])
            if part not in sys.modules or i == len(parts):
                module = types.ModuleType(part)
                module.__path__ = []  # type: ignore[attr-defined]
                monkeypatch.setitem(sys.modules, part, module)
        vars(sys.modules[name]).update(values)
    set_version(monkeypatch, host, read_record(host)["version"])


def set_version(monkeypatch: pytest.MonkeyPatch, host: str, version: str) -> None:
    """Have the installed host be of this version."""
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == host else real(name)
    )


def check_methods(ours: type, record: dict[str, Any], name: str) -> None:
    """Every method of the host's that ours replaces takes the same parameters in the same order,
    and nothing more without a default; every abstract one is replaced."""
    replaced = 0
    for method, about in record["classes"][name]["methods"].items():
        if method == "__init__":
            continue
        mine = vars(ours).get(method)
        assert mine is not None or not about["is_abstract"], f"{method} is missing"
        if mine is None or about["is_property"]:
            continue
        replaced += 1
        parameters = list(inspect.signature(mine).parameters.values())[1:]
        assert [
            [each.name, each.default is not inspect.Parameter.empty] for each in parameters
        ] == about["parameters"], method
    assert replaced
