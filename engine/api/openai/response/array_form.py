# SPDX-License-Identifier: Apache-2.0
"""Arrays in answers of JSON: the bytes of a file of numpy's (`.npy`), in base64."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType


def encode_array(array: npt.NDArray[Any] | None) -> str | UnsetType:
    """Base64 of the array; UNSET, which leaves the field out, where there is none."""
    if array is None:
        return UNSET
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
