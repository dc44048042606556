# SPDX-License-Identifier: Apache-2.0
"""Prompt embeddings in the front: requesting, scaling and shortening a vector.

The pooled hidden states depend on the model and are set by `--pooling`. In a matryoshka model, the
first numbers of a vector form a usable shorter vector; the model's config.json declares this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...tiers.settings.format import format_value
from ..models.checkpoint.files import is_there
from ..models.checkpoint.json_fields import read_json
from .core_messages import NO_EXTRAS, AddRequest
from .sampling_params import SamplingParams

Vector = NDArray[np.float64]

# The engine generates at least one token, which is dropped.
EMBEDDING_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_MAX_LISTED = 1024  # entries of a config.json's list


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The vector lengths that a client may ask for. The full length is always allowed.
    `may_be_fewer` allows smaller lengths: the lengths in `listed`, or any if that is empty."""

    may_be_fewer: bool = False
    listed: tuple[int, ...] = ()

    @classmethod
    def load(cls, model_path: Path) -> Dimensions:
        """Read `is_matryoshka` and the list of `matryoshka_dimensions` in config.json."""
        path = model_path / "config.json"
        config = read_json(path).values if is_there(path) else {}
        found: Any = config.get("matryoshka_dimensions")
        entries = found[:_MAX_LISTED] if isinstance(found, list) else []
        listed = tuple(each for each in entries if type(each) is int and each >= 1)
        return cls(config.get("is_matryoshka") is True or bool(listed), listed)

    def check_asked_count(self, asked: int | None, full: int) -> None:
        """Raise ValueError, which begins with the field's name, if a vector of `full` numbers
        cannot be cut to `asked` numbers."""
        if asked is None or (type(asked) is int and asked == full):
            return
        if not self.may_be_fewer:
            raise ValueError(
                f"dimensions must be {full} or left out, got {format_value(asked)}: the model's "
                "config.json does not say is_matryoshka, so fewer numbers of its vectors mean "
                "nothing"
            )
        if self.listed and asked not in self.listed:
            known = ", ".join(map(str, self.listed))
            raise ValueError(f"dimensions must be one of {known}, got {format_value(asked)}")
        if type(asked) is not int or not 1 <= asked <= full:
            raise ValueError(f"dimensions must be from 1 to {full}, got {format_value(asked)}")


def with_pooling(request: AddRequest, pooling: str) -> AddRequest:
    """Return a copy of the request that asks for its prompt's embedding."""
    extras = msgspec.structs.replace(request.extras or NO_EXTRAS, pooling=pooling)
    return msgspec.structs.replace(request, extras=extras)


def finish_vector(data: bytes | None, *, normalize: bool, dimensions: int | None = None) -> Vector:
    """Return the vector for the client: the first `dimensions` numbers of the engine's vector,
    scaled to length 1 if `normalize`. Raises ValueError if the engine's vector is missing or not
    finite."""
    if data is None:
        raise ValueError("the engine sent no embedding; use one version of StrataKV")
    vector: Vector = np.frombuffer(data, "<f8")[:dimensions]
    if not np.isfinite(vector).all():
        raise ValueError("the model's hidden states for this prompt were not finite numbers")
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return vector
