# SPDX-License-Identifier: Apache-2.0
"""The work of a decode step: paged attention of several layers, one after the other.

Layers have KV of their own, together far larger than the level-2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....kernels.attention.paged_decode import paged_decode
from ....kernels.choice import PLAIN
from ..place import Place, check_close
from ..stopwatch import WARM_UPS, Launch
from .streams import on

BLOCK_SIZE, KV_HEADS, GROUP, HEAD_DIM = 16, 8, 4, 128
SEED = 20260


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Attention of one new token of each request, `passes` times over the layers."""

    q: torch.Tensor
    layers: list[torch.Tensor]
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    outs: list[torch.Tensor]
    expected: list[torch.Tensor]
    passes: int
    kernel: str

    @classmethod
    def make(cls, place: Place) -> DecodeStep:
        """Random KV: four layers of 268 MB on a device."""
        requests, tokens = place.choose((32, 2048), (32, 2048), (2, 16))
        num_layers, passes = place.choose((4, 4), (4, 4), (2, 1))
        generator = torch.Generator(place.device).manual_seed(SEED)

        def random(*shape: int) -> torch.Tensor:
            numbers = torch.randn(*shape, device=place.device, generator=generator)
            return numbers.to(torch.bfloat16)

        blocks = requests * tokens // BLOCK_SIZE
        q = random(requests, KV_HEADS * GROUP, HEAD_DIM)
        layers = [random(blocks, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM) for _ in range(num_layers)]
        order = torch.randperm(blocks, device=place.device, generator=generator)
        step = cls(
            q,
            layers,
            order.to(torch.int32).view(requests, -1),
            torch.full((requests,), tokens, dtype=torch.int32, device=place.device),
            [torch.zeros_like(q) for _ in layers],
            [torch.zeros_like(q) for _ in layers],
            passes,
            place.kernel,
        )
        for kv, expected in zip(layers, step.expected, strict=True):
            step.attend(kv, expected, PLAIN)
        return step

    @property
    def kv_bytes(self) -> int:
        """Of all layers."""
        return sum(kv.nbytes for kv in self.layers)

    def attend(self, kv: torch.Tensor, out: torch.Tensor, kernel: str) -> None:
        """One layer."""
        paged_decode(
            self.q,
            kv,
            self.block_tables,
            self.seq_lens,
            scale=HEAD_DIM**-0.5,
            out=out,
            kernel=kernel,
        )

    def run(self) -> None:
        """All layers, `passes` times."""
        for _ in range(self.passes):
            for kv, out in zip(self.layers, self.outs, strict=True):
                self.attend(kv, out, self.kernel)

    def check(self, what: str) -> None:
        """Compare what the last run left with the plain kernel. Raises WrongResult."""
        for number, (out, expected) in enumerate(zip(self.outs, self.expected, strict=True)):
            check_close(f"{what}, layer {number}", out, expected, absolute=2e-3, relative=2e-2)

    def prepare(self, place: Place, stream: torch.cuda.Stream | None) -> Launch:
        """A launch of the step, checked; a graph on a device, with the priority of `stream`."""
        with on(stream):
            for _ in range(WARM_UPS):
                self.run()
        place.synchronise()
        self.check("decode")
        if stream is None:
            return self.run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.run()
        return graph.replay
