# SPDX-License-Identifier: Apache-2.0
"""StateDriver: a decoder with states, driven step by step without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stratakv.engine.models.decoder import PLAIN, AuxStates, Decoder
from stratakv.engine.models.layers import Elementwise
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.models.states.running_states import RunningStates
from stratakv.engine.models.states.state_plan import StatePlan, StateSequence, StateStep

NUM_SLOTS = 16
CPU = torch.device("cpu")


@dataclass
class Request:
    """One request: the tokens that are computed, and K and V of each layer."""

    slot: int
    length: int = 0
    keys: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def copy(self, slot: int) -> Request:
        return Request(slot, self.length, dict(self.keys))

    def truncate(self, length: int) -> None:
        """Forget K and V from `length` on, as after drafts that are not accepted."""
        self.length = length
        self.keys = {layer: (k[:length], v[:length]) for layer, (k, v) in self.keys.items()}


@dataclass
class Part:
    """Tokens of a sequence that a step computes. `saves` has (tokens of the part, slot); without
    it the state behind all of them goes to the sequence's slot. `source` is that slot, or None for
    the first tokens."""

    sequence: Request
    tokens: list[int]
    saves: Sequence[tuple[int, int]] | None = None
    source: int | None = None


class GrowingAttention:
    """Attention whose K and V are whole tensors of each sequence; its plan is the step's parts."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: list[Part]) -> Tensor:
        out, row = torch.empty_like(q), 0
        for part in plan:
            rows = slice(row, row + len(part.tokens))
            row = rows.stop
            known = part.sequence.keys.get(layer)
            both = (k[rows], v[rows])
            if known is not None:
                both = tuple(torch.cat(pair) for pair in zip(known, both, strict=True))
            part.sequence.keys[layer] = both
            keys, values = both
            before = len(keys) - len(part.tokens)
            seen = torch.arange(len(keys)) <= before + torch.arange(len(part.tokens))[:, None]
            out[rows] = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                seen,
                scale=self.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out.flatten(1)


class StateDriver:
    """A decoder, its states, and steps over any mixture of sequences."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype = torch.float64,
        elementwise: Elementwise = PLAIN,
        *,
        is_random: bool = False,
    ) -> None:
        self.path, self.spec = path, load_model_spec(path)
        self.decoder = Decoder.load(
            path, self.spec, 512, dtype, CPU, elementwise, is_random=is_random
        )
        assert self.spec.state is not None
        self.running = RunningStates(self.spec.state, NUM_SLOTS, dtype, CPU)
        # Slots hold what other requests have left; not a number is what shows most.
        self.running.raw.fill_(0xFF)
        self.attention = GrowingAttention(self.spec.attention_scale)

    @torch.inference_mode()
    def step(
        self,
        parts: list[Part],
        wanted: Tensor | None = None,
        aux: AuxStates | None = None,
    ) -> Tensor:
        """Logits `[rows, vocab]` of the wanted rows of the parts, all of them where it is None."""
        tokens = [token for part in parts for token in part.tokens]
        positions: list[int] = []
        sequences: list[StateSequence] = []
        for part in parts:
            start, known = len(positions), part.sequence.length
            positions += range(known, known + len(part.tokens))
            source = part.sequence.slot if part.source is None else part.source
            saves = part.saves
            if saves is None:
                saves = ((len(part.tokens), part.sequence.slot),)
            sequences.append(
                StateSequence(
                    start,
                    len(positions),
                    source if known else None,
                    tuple((start + row, slot) for row, slot in saves),
                )
            )
        plan = StatePlan(sequences, len(tokens), CPU)
        hidden = self.decoder.forward(
            torch.tensor(tokens),
            torch.tensor(positions),
            self.attention,
            parts,
            wanted,
            aux=aux,
            states=StateStep(plan, self.running),
        )
        for part in parts:
            part.sequence.length += len(part.tokens)
        return self.decoder.logits(hidden)

    def state(self, slot: int) -> list[Tensor]:
        """Copies of all parts of a slot."""
        return [
            part[slot].clone()
            for layer in self.running.layers.values()
            for part in layer
            if part is not None
        ]
