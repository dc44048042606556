# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at most, measured in the same run as the figures held against it.

The probes are the engine's own (`engine/probes.py`); here they get the units of the reports.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...engine import probes


def memory_copy_gb_per_second() -> float:
    """One thread copying memory, in 10⁹ bytes of payload a second."""
    return probes.memory_copy_bytes_per_second() / 1e9


def disk_read_gb_per_second(directory: Path) -> float:
    """One thread reading a fresh file past the page cache, in 10⁹ bytes a second."""
    return probes.disk_read_bytes_per_second(directory) / 1e9


def matmul_gflops(threads: int) -> float:
    """A float32 matrix product on `threads` threads, in 10⁹ operations a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return probes.multiply_operations_per_second() / 1e9
    finally:
        torch.set_num_threads(before)
