# SPDX-License-Identifier: Apache-2.0
"""ModelSource: a model on the disk, with its specification."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .model_spec import ModelSpec


class ModelSource(NamedTuple):
    """A model's directory and its specification."""

    path: Path
    spec: ModelSpec
