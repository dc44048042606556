# SPDX-License-Identifier: Apache-2.0
"""ModelSource: a model's directory and its `ModelSpec`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .model_spec import ModelSpec


class ModelSource(NamedTuple):
    path: Path
    spec: ModelSpec
