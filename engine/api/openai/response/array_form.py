# SPDX-License-Identifier: Apache-2.0
"""Arrays in JSON answers: the bytes of a numpy file (`.npy`), in base64."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType


def encode_array(array: npt.NDArray[Any] | None) -> str | UnsetType:
    """Return the array's numpy file in base64. None becomes UNSET, which leaves a field out."""
    if array is None:
        return UNSET
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
