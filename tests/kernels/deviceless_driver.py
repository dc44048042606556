# SPDX-License-Identifier: Apache-2.0
"""A Triton driver without a device: everything of a launch but the launch.

Arguments are specialised, kernels are compiled by the wheel's own ptxas, and shared memory, threads
and grids are refused where the GPU would refuse them. Tensors lie on the CPU and no kernel runs, so
memory that only kernels write holds zeros.

For a process of its own: where Triton interprets, it cannot compile.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from stratakv.kernels.attention import paged_decode_triton
from stratakv.kernels.kernel_choice import Hardware

from .other_hardware import other_hardware

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_THREADS = 1024  # of a program
WARP = 32


class Gpu(NamedTuple):
    """The limits of one kind of GPU."""

    name: str
    capability: tuple[int, int]
    shared_bytes: int  # of a program
    multiprocessors: int


GPUS = {
    gpu.capability: gpu
    for gpu in (
        Gpu("V100", (7, 0), 98_304, 80),
        Gpu("A100", (8, 0), 166_912, 108),
        Gpu("H100", (9, 0), 232_448, 132),
    )
}


class Variant(NamedTuple):
    """A kernel as it was compiled: its constants, numbers that it is specialised on where they are
    1 among them, and the types of its arguments, with `/16` where these are multiples of 16."""

    kernel: str
    constants: dict[str, Any]
    arguments: dict[str, str]


class Launch(NamedTuple):
    """One launch."""

    kernel: str
    grid: tuple[int, int, int]
    constants: dict[str, Any]


class DevicelessDriver(DriverBase):
    """The driver of this process, with one GPU at a time. `compiled` and `launched` are those of
    the GPU that was opened last."""

    def __init__(self) -> None:
        self.utils = _Utils(self)
        self.launcher_cls = partial(_Launcher, self)
        self.gpu = GPUS[9, 0]
        self.compiled: list[Variant] = []
        self.launched: list[Launch] = []
        self.stand_in = other_hardware(self.hardware)
        self._num_opened = 0

    def open_gpu(self, capability: tuple[int, int]) -> None:
        """Go on with another GPU. Triton keeps compiled kernels by the device's number, and each
        GPU has a number of its own, so nothing is compiled for a new one yet."""
        self.gpu = GPUS[capability]
        self.compiled, self.launched = [], []
        self._num_opened += 1

    def hardware(self) -> Hardware:
        return Hardware(self.gpu.name, self.gpu.capability, has_triton=True)

    def note_compiled(self, *, src: Any, **_: Any) -> None:
        """Triton's listener; it also hears of kernels that the cache folder has."""
        self.compiled.append(variant_of(src))

    def launch(self, variant: Variant, grid: tuple[int, int, int]) -> None:
        """Raises RuntimeError for a grid that CUDA refuses."""
        if 0 in grid:  # Triton launches nothing then
            return
        if not all(0 < size <= most for size, most in zip(grid, MAX_GRID, strict=True)):
            raise RuntimeError(
                f"Triton Error [CUDA]: invalid argument: expected a grid of {variant.kernel} up to "
                f"{MAX_GRID}, got {grid}"
            )
        self.launched.append(Launch(variant.kernel, grid, variant.constants))

    # What Triton asks a driver for

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError(f"no launcher is compiled here, and {ty} is asked for")

    def get_current_device(self) -> int:
        return self._num_opened

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        major, minor = self.gpu.capability
        return GPUTarget("cuda", 10 * major + minor, WARP)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is measured without a device")


class _Utils:
    """The part of a driver that knows the device's limits and loads machine code."""

    def __init__(self, driver: DevicelessDriver) -> None:
        self._driver = driver

    def get_device_properties(self, device: int) -> dict[str, int]:
        gpu = self._driver.gpu
        return {
            "max_shared_mem": gpu.shared_bytes,
            "multiprocessor_count": gpu.multiprocessors,
            "warpSize": WARP,
        }

    def load_binary(
        self, name: str, code: bytes, shared_bytes: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spilled bytes, and the most threads of a program."""
        if not code.startswith(b"\x7fELF"):
            raise RuntimeError(f"expected machine code of {name}, got {code[:16]!r}")
        return 0, 0, 0, 0, MAX_THREADS


class _Launcher:
    """The launcher of one compiled kernel."""

    def __init__(self, driver: DevicelessDriver, src: Any, metadata: Any) -> None:
        self._driver, self._variant = driver, variant_of(src)

    def __call__(self, x: int, y: int, z: int, *_: Any) -> None:
        self._driver.launch(self._variant, (x, y, z))


def variant_of(src: Any) -> Variant:
    names = src.fn.arg_names
    divisible = {path for path, marks in src.attrs.items() if ["tt.divisibility", 16] in marks}
    arguments = {
        name: f"{kind}/16" if (place,) in divisible else str(kind)
        for place, (name, kind) in enumerate(src.signature.items())
        if kind != "constexpr"
    }
    constants = {names[path[0]]: value for path, value in src.constants.items() if len(path) == 1}
    return Variant(src.fn.__name__, constants, arguments)


def install() -> DevicelessDriver:
    """Give this process the driver, for as long as it lives. Raises RuntimeError where Triton
    interprets."""
    if knobs.runtime.interpret:
        raise RuntimeError(
            "expected a process that compiles, got TRITON_INTERPRET="
            f"{os.environ.get('TRITON_INTERPRET')}; set it to 0 before triton is imported"
        )
    driver = DevicelessDriver()
    driver.stand_in.__enter__()
    triton.runtime.driver.set_active(driver)
    knobs.compilation.listener = driver.note_compiled
    # Cached by torch's device, which is the CPU for every GPU here.
    paged_decode_triton._capability = lambda device: driver.gpu.capability
    paged_decode_triton.multiprocessors = lambda device: driver.gpu.multiprocessors
    _zero_new_memory()
    return driver


def _zero_new_memory() -> None:
    """New tensors of this process hold zeros."""

    def empty(*size: Any, memory_format: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **options)

    plain: Any = torch
    plain.empty, plain.empty_like = empty, torch.zeros_like
    plain.Tensor.new_empty = torch.Tensor.new_zeros
