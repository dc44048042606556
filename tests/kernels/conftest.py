# SPDX-License-Identifier: Apache-2.0
"""Where the tests of the kernels run: on a CUDA device if there is one, else in the interpreter.

Triton looks at TRITON_INTERPRET when it is imported, so tests/conftest.py sets it where there is no
device. A machine with one runs the interpreter too when it is told so: TRITON_INTERPRET=1.

A test that takes `device` is one of the `gpu` tests wherever that is a GPU, so that `pytest -m gpu`
there runs every kernel and `pytest` runs nothing twice.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETS


def pytest_itemcollected(item: pytest.Item) -> None:
    if ON_GPU and "device" in getattr(item, "fixturenames", ()):
        item.add_marker("gpu")
    if INTERPRETS and torch.cuda.is_available() and item.get_closest_marker("gpu"):
        item.add_marker(pytest.mark.skip(reason="needs the device: TRITON_INTERPRET=0"))


@pytest.fixture
def device() -> torch.device:
    """Where the tensors of a test belong, so that Triton's kernels can run on them."""
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(autouse=True)
def _guarded_launches(seed: int) -> None:
    """In the interpreter: right bf16, every lane in bounds, and another order for each test."""
    if INTERPRETS and importlib.util.find_spec("triton") is not None:
        from . import interpreter, launch_guard, quick_interpreter

        quick_interpreter.install()
        interpreter.install()
        launch_guard.install()
        launch_guard.shuffle(seed)
