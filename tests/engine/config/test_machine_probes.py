# SPDX-License-Identifier: Apache-2.0
"""The probes: they leave nothing behind, and a disk that cannot be written is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stratakv.engine.config import machine_probes as probes


def test_the_disk_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    assert 1e6 < probes.disk_read_bytes_per_second(tmp_path) < 1e13
    assert not list(tmp_path.iterdir())


def test_the_disk_probe_without_direct_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems refuse O_DIRECT."""
    opened = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    assert probes.disk_read_bytes_per_second(tmp_path) > 1e6


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        probes.disk_read_bytes_per_second(tmp_path / "nowhere")


def test_memory_and_arithmetic() -> None:
    assert 1e7 < probes.memory_copy_bytes_per_second() < 1e13
    assert 1e7 < probes.multiply_operations_per_second() < 1e16
