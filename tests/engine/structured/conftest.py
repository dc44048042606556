# SPDX-License-Identifier: Apache-2.0
"""A fixture of tests whose grammars have threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from .waiting import wait_for


@pytest.fixture
def threads_end() -> Any:
    """All threads of grammars have ended with the test."""
    yield
    wait_for(lambda: not any(t.name.startswith("stratakv-") for t in threading.enumerate()))
