# SPDX-License-Identifier: Apache-2.0
"""Chooses the class of the mixer for a layer that carries a state."""

from __future__ import annotations

from collections.abc import Callable

from ..checkpoint.state_weights import StateWeights
from ..mixers import Mixer
from ..model_spec import ModelSpec
from .gated_delta import GatedDelta
from .mamba2 import Mamba2
from .short_conv import ShortConv
from .state_spec import StateKind

_KINDS: dict[StateKind, Callable[[ModelSpec, int, StateWeights], Mixer]] = {
    StateKind.SHORT_CONV: ShortConv,
    StateKind.GATED_DELTA: GatedDelta,
    StateKind.MAMBA2: Mamba2,
}


def make_state_mixer(spec: ModelSpec, layer: int, weights: StateWeights) -> Mixer:
    """Make the mixer of layer `layer`; the kind of the model's states decides its class."""
    assert spec.state is not None
    return _KINDS[spec.state.kind](spec, layer, weights)
