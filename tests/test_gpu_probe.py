# SPDX-License-Identifier: Apache-2.0
"""`tools/gpu_probe.py`: how much memory it page-locks, and what it refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "gpu_probe.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_probe", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_ways_of_locking_together_keep_to_the_size(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing touches the pages, so they take no memory here."""
    locked: list[int] = []
    monkeypatch.setattr(tool, "unlock", lambda *_: None)
    found = tool.page_locking(int(tool.LOCKED_GIB * tool.GIB), lambda _, size: locked.append(size))
    assert len(found) == 4 and sum(locked) == tool.GIB, "1 GiB unless more is asked for"
    assert max(locked) == tool.PIECES[0], "the slab's own piece is among them"


@pytest.mark.parametrize("given", ["0", "nan", "-1", "4096"])
def test_sizes_that_are_refused(
    tool: ModuleType, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main(["--json", str(tmp_path / "p.json"), "--lock-gib", given, "--rehearse"])
    assert ended.value.code == 2
    assert "--lock-gib takes 0.03125 to 1024" in capsys.readouterr().err
