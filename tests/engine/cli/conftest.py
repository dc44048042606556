# SPDX-License-Identifier: Apache-2.0
"""Commands read STRATAKV_* variables; those of whoever runs the tests must not count."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("STRATAKV_")]:
        monkeypatch.delenv(name)
