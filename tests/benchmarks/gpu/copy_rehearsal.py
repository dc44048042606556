# SPDX-License-Identifier: Apache-2.0
"""Runs a section of `stratakv bench gpu` on the CPU, as the command does but for its messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stratakv.benchmarks.gpu.section import Place, Results, Section
from stratakv.benchmarks.harness.report import Report


def rehearsal(quick: bool = True) -> Place:
    return Place(torch.device("cpu"), quick, is_rehearsal=True)


class Unwritten(Results):
    """Results without their file."""

    def write(self) -> Path:
        return Path("none")


def no_results(directory: Path = Path("none")) -> Results:
    return Unwritten(Report("gpu", "probe", environment={}), directory)


def rehearse(section: Section, directory: Path, quick: bool = True) -> Results:
    """Its results. On one thread, because pieces of a kilobyte only wait for others."""
    results = no_results(directory)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        section.run(rehearsal(quick), results)
    finally:
        torch.set_num_threads(threads)
    return results


def forbid_timing(monkeypatch: pytest.MonkeyPatch, *modules: object) -> None:
    """Nothing may be timed from now on."""

    def fail(*_: object, **__: object) -> None:
        pytest.fail("something was timed that had not been compared")

    for module in modules:
        for name in ("time_launches", "time_one_way", "time_both_ways", "time_steps"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fail)


def is_plot(path: Path | None) -> bool:
    return path is not None and path.read_bytes().startswith(b"\x89PNG")
