# SPDX-License-Identifier: Apache-2.0
"""The contract of `CopyDevice`, run over every device there is, in all the ways it can copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from stratakv.connector.device.base import CopyDevice
from stratakv.connector.device.contract import CHECKS, check_device_contract
from stratakv.connector.device.contract_rig import LAYOUTS, ContractBroken, Rig, Surroundings
from stratakv.connector.device.cpu import CpuCopyDevice
from stratakv.tiers.block import BlockLayout

from .surroundings import ALL, CpuSurroundings

# Both kinds of pages where they make a difference: a copy by the CPU, a batch, a kernel.
CASES = [
    pytest.param(surroundings, layout, id=f"{surroundings.name}-{name}")
    for surroundings in ALL
    for name, layout in zip(("short-pages", "whole-pages"), LAYOUTS, strict=True)
    if name == "whole-pages" or surroundings.name in ("cpu", "cuda", "cuda-kernel")
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("surroundings", "layout"), CASES)
def test_contract(
    surroundings: Surroundings, layout: BlockLayout, check: Callable[[Rig], None]
) -> None:
    with contextlib.closing(Rig(surroundings, layout)) as rig:
        check(rig)


def test_a_device_that_breaks_the_contract_is_found() -> None:
    class Forgetful(CpuSurroundings):
        """Its device waits for nothing."""

        def device(self) -> CopyDevice:
            device = CpuCopyDevice()
            copy = device.copy
            device.copy = lambda stream, block_ids, slots, after=(): copy(stream, block_ids, slots)  # type: ignore[method-assign]
            return device

    with pytest.raises(ContractBroken, match="a copy waits for both of its events"):
        check_device_contract(Forgetful())


def test_the_whole_contract_in_one_call() -> None:
    check_device_contract(CpuSurroundings())
