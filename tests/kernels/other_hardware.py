# SPDX-License-Identifier: Apache-2.0
"""Another GPU for the choice of kernels than this machine has, or one where it has none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stratakv.kernels import kernel_choice as choice
from stratakv.kernels.kernel_choice import Hardware

GPU = torch.device("cuda")


@contextmanager
def other_hardware(hardware: Callable[[], Hardware]) -> Iterator[None]:
    """Kernels are chosen as on a GPU of this hardware, wherever their tensors lie."""
    choose = choice.choose_kernel

    def choose_kernel(
        wanted: str,
        device: torch.device,
        *,
        unsupported: str | None = None,
        native_unsupported: str | None = None,
        strict: bool = False,
    ) -> str:
        return choose(wanted, GPU, unsupported=unsupported, strict=strict)

    replaced = [
        *_replace(choice.probe_hardware, hardware),
        *_replace(choose, choose_kernel),
    ]
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def _replace(original: Any, stand_in: Any) -> Iterator[tuple[Any, str, Any]]:
    """Replace a function of `kernels/kernel_choice.py` in each module that has imported it."""
    name = original.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, stand_in)
            yield module, name, original
