# SPDX-License-Identifier: Apache-2.0
"""A trace: prompts in order of arrival, each a chain of blocks.

Blocks are numbered from 0 in the order of their first use, so that an array can be indexed by them;
policies see 40-byte keys, as long and as even in their bits as those of the product.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

BLOCK_TOKENS = 512
KEY_BYTES = 40


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: when it came, its blocks head first, and how many tokens they hold."""

    arrival_seconds: float
    chain: Sequence[int]
    tokens: int


@dataclass(frozen=True)
class Trace:
    """Prompts whose blocks are prefix-chained: every block has one predecessor, always the same."""

    name: str
    prompts: Sequence[Prompt]

    @cached_property
    def num_accesses(self) -> int:
        """Blocks of all prompts, each as often as it was asked for."""
        return sum(len(prompt.chain) for prompt in self.prompts)

    @cached_property
    def num_blocks(self) -> int:
        """Distinct blocks."""
        return 1 + max((max(prompt.chain, default=-1) for prompt in self.prompts), default=-1)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.prompts[-1].arrival_seconds - self.prompts[0].arrival_seconds

    @cached_property
    def keyed_chains(self) -> list[list[bytes]]:
        """The chains as keys; equal blocks share one object, so that comparing them is cheap."""
        keys = [key_of(block) for block in range(self.num_blocks)]
        return [[keys[block] for block in prompt.chain] for prompt in self.prompts]

    @cached_property
    def next_uses(self) -> list[array[int]]:
        """For each block of each prompt the index of the next prompt that has it; past the last
        prompt where there is none."""
        coming = array("q", [len(self.prompts)]) * self.num_blocks
        result: list[array[int]] = []
        for index in range(len(self.prompts) - 1, -1, -1):
            chain = self.prompts[index].chain
            result.append(array("q", [coming[block] for block in chain]))
            for block in chain:
                coming[block] = index
        result.reverse()
        return result

    def capacity_blocks(self, percent: float) -> int:
        """A share of the distinct blocks, at least one."""
        return max(1, int(self.num_blocks * percent / 100))


def key_of(block: int) -> bytes:
    """The key of a block."""
    return hashlib.blake2b(block.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()
