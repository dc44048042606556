# SPDX-License-Identifier: Apache-2.0
"""DraftSource: the draft model of an engine, as its settings and config.json have it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .model_spec import ModelSpec


class DraftSource(NamedTuple):
    """A model that proposes tokens to another one."""

    path: Path
    spec: ModelSpec
