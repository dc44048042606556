# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiering manager over our tier, of each version that STRATAKV_VLLM_MANAGERS names a
Python of, with colons between them; without it, of STRATAKV_VLLM_PYTHON.

A wheel of vLLM for GPUs that was unpacked beside the packages of its CPU build will do.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from stratakv.connector.vllm.versions import check_version

from .vllm_engine import PYTHON, package_path

PYTHONS = [each for each in os.environ.get("STRATAKV_VLLM_MANAGERS", PYTHON).split(":") if each]

pytestmark = [
    pytest.mark.skipif(not PYTHONS, reason="STRATAKV_VLLM_PYTHON names no Python with vLLM"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("python", PYTHONS or [""])
def test_a_manager_over_our_tier(python: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [python, str(Path(__file__).with_name("vllm_manager.py")), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": package_path(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    told = json.loads(done.stdout.splitlines()[-1])
    check_version(told["version"])
    assert told["promoted"] == list(range(1, 9))
    assert told["damaged"] == []
    assert told["source"] in ("", "CacheHitSource.DISK")
    assert "stratakv:tier_loaded_bytes" in told["metrics"]
    assert told["left"] == []
