# SPDX-License-Identifier: Apache-2.0
"""What the tests of the attention sections share: a rehearsal, and results with ceilings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stratakv.benchmarks.gpu.section import Place, Results
from stratakv.benchmarks.harness.report import Report


def rehearsal(peers: Path | None = None) -> Place:
    place = Place(torch.device("cpu"), is_quick=True, is_rehearsal=True, peers=peers)
    place.start_section()
    return place


def on_a_device(*, is_quick: bool) -> Place:
    """For the choice of cases only: nothing can be measured on it here."""
    return Place(torch.device("cuda"), is_quick=is_quick, is_rehearsal=False)


def empty_results(directory: Path) -> Results:
    results = Results(Report("gpu", "test"), directory)
    results.set_ceiling("device_copy_gb_per_second", 100.0)
    results.set_ceiling("matmul_bf16_tflops", 0.5)
    return results


def one_wrong_row(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`right` with its last row off by a fifth, which is little beside the other rows."""

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        out = right(*arguments, **options)
        out[-1] *= 1.2
        return out

    return wrong


def refuse_timing(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Timing in `module` fails the test."""

    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("timed before its result was compared")

    monkeypatch.setattr(module, "time_launches", fail)
