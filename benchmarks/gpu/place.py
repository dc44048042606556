# SPDX-License-Identifier: Apache-2.0
"""Where the sections of `stratakv bench gpu` run, and how large they may be.

A rehearsal runs every section on the CPU with the plain kernels, at sizes of a few kilobytes: it
shows that the benchmark works and says nothing of any GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

SECTION_SECONDS = 90.0
Choice = TypeVar("Choice")


class WrongResult(Exception):
    """Something that was to be timed gave a wrong answer; says which and how far off."""


class SectionOver(Exception):
    """A section's time is spent; what it has measured until here stands."""


@dataclass(slots=True)
class Place:
    """The device, the sizes, and one section's deadline, which `start_section` sets anew."""

    device: torch.device
    is_quick: bool
    is_rehearsal: bool
    peers: Path | None = None
    _deadline: float = field(default=float("inf"))

    def choose(self, full: Choice, quick: Choice, rehearsal: Choice) -> Choice:
        """The size, or the list of cases, for this run."""
        if self.is_rehearsal:
            return rehearsal
        return quick if self.is_quick else full

    def start_section(self, seconds: float = SECTION_SECONDS) -> None:
        """Called before every section."""
        self._deadline = time.monotonic() + seconds

    def check_time(self) -> None:
        """Called by sections before every case. Raises SectionOver."""
        if time.monotonic() > self._deadline:
            raise SectionOver

    @property
    def kernel(self) -> str:
        """The kernel to name in calls: under test on a device, the plain one in a rehearsal."""
        return "plain" if self.is_rehearsal else "triton"

    def synchronise(self) -> None:
        """Wait for everything given to the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release_memory(self) -> None:
        """Give back what the last section's tensors held."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def check_close(
    what: str, got: torch.Tensor, expected: torch.Tensor, *, absolute: float, relative: float = 0.0
) -> None:
    """Compare in float32, NaN as a difference. Raises WrongResult."""
    if got.shape != expected.shape:
        raise WrongResult(f"{what}: expected {list(expected.shape)}, got {list(got.shape)}")
    wide, right = got.float(), expected.to(got.device).float()
    off = (wide - right).abs() - relative * right.abs()
    worst = off.max().item() if off.numel() else 0.0
    if not worst <= absolute:
        raise WrongResult(f"{what}: {worst:.3g} beyond what is allowed, which is {absolute:.3g}")
