# SPDX-License-Identifier: Apache-2.0
"""What is said of GPUs that cannot be computed on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from stratakv.engine.worker.runtime import cuda_probe
from stratakv.engine.worker.runtime.cuda_probe import CudaState, Gpu, choose_gpu, probe_cuda
from stratakv.engine.worker.runtime.placement import Placement
from stratakv.tiers.settings.values import ConfigError

GOOD = CudaState(
    driver_version=(13, 0),
    runtime_version=(12, 8),
    gpus=(Gpu("H200", (9, 0)), Gpu("A100", (8, 0)), Gpu("V100", (7, 0))),
    has_triton=True,
    visible=None,
)


def on(device: str, **changes: object) -> Placement:
    return Placement(device=torch.device(device), **changes)  # type: ignore[arg-type]


def test_the_gpu_that_was_named():
    assert choose_gpu(on("cuda"), GOOD).name == "H200"
    assert choose_gpu(on("cuda:1"), GOOD).name == "A100"
    assert choose_gpu(on("cuda:2"), GOOD).name == "V100"
    assert choose_gpu(on("cuda", strict_kernels=True, kv_cache_dtype="fp8_e4m3"), GOOD)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"runtime_version": None}, "needs a CUDA build of torch, .*; install one .*or use --dev"),
        ({"driver_version": None, "gpus": ()}, r"an NVIDIA driver for CUDA 12.8, .*--gpus all"),
        ({"driver_version": (11, 4), "gpus": ()},
         r"driver knows CUDA up to 11.4, and this torch is built for 12.8; .* a torch for CUDA 11"),
        ({"gpus": ()}, "finds a driver and no GPU that it may use; look at nvidia-smi"),
        ({"gpus": (), "visible": ""}, r"may use \(CUDA_VISIBLE_DEVICES is ''\); look at"),
        ({"gpus": (), "error": "device is lost"}, "may use: device is lost; look at"),
    ],
)  # fmt: skip
def test_nothing_to_compute_on(changes, expected):
    with pytest.raises(ConfigError, match=expected):
        choose_gpu(on("cuda"), replace(GOOD, **changes))


def test_a_gpu_that_is_not_there():
    with pytest.raises(ConfigError, match=r"--device cuda:3 is not there; .* cuda:1 \(A100\)"):
        choose_gpu(on("cuda:3"), GOOD)


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        ("cuda:2", {}, r"Triton's kernels needs? compute capability 8.0, and V100 has 7.0; drop"),
        ("cuda:1", {"kv_cache_dtype": "fp8_e4m3"}, r"--kv-cache-dtype fp8_e4m3 needs .* 8.9"),
    ],
)
def test_strict_kernels_refuse_what_would_be_slow(device, changes, expected):
    choose_gpu(on(device, **changes), GOOD)
    with pytest.raises(ConfigError, match=expected):
        choose_gpu(on(device, strict_kernels=True, **changes), GOOD)
    choose_gpu(on(device, **changes), replace(GOOD, has_triton=False))
    with pytest.raises(ConfigError, match="needs triton, which is not installed"):
        choose_gpu(on(device, strict_kernels=True), replace(GOOD, has_triton=False))


def test_versions_as_drivers_and_torch_write_them(monkeypatch):
    class Driver:
        @staticmethod
        def cuDriverGetVersion(version: object) -> int:  # noqa: N802 - CUDA's name
            version._obj.value = 12080  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(cuda_probe.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    state = probe_cuda()
    assert (state.driver_version, state.runtime_version) == ((12, 8), (13, 1))
    assert state.gpus == (), "a driver that is too old is not asked"


def test_a_driver_that_fails_is_a_state_too(monkeypatch):
    class Driver:
        @staticmethod
        def cuDriverGetVersion(version: object) -> int:  # noqa: N802 - CUDA's name
            version._obj.value = 13000  # type: ignore[attr-defined]
            return 0

    def lost() -> None:
        raise RuntimeError("CUDA unknown error\n- this may be due to …")

    monkeypatch.setattr(cuda_probe.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lost)
    with pytest.raises(ConfigError, match=r"no GPU that it may use.*CUDA unknown error - this may"):
        choose_gpu(on("cuda"), probe_cuda())


IMPORTS = """
import sys
import stratakv
from stratakv.engine.core import engine_core
assert not {"triton", "cupy"} & set(sys.modules), "a GPU's package was imported"
torch = sys.modules["torch"]
assert not torch.cuda.is_initialized()
"""


def test_importing_the_engine_asks_for_no_gpu():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=120)
