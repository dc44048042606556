# SPDX-License-Identifier: Apache-2.0
"""Probes a machine with a GPU: its properties, and whether the simplest calls work.

    python tools/gpu_probe.py --json FILE [--lock-gib N] [--rehearse]

The checks are independent: the error of a failed check is written to the JSON, and the next check
runs. `tools/on_gpu.py first` starts the probe, and `tools/on_gpu.py probe` starts the probe with
more memory to lock. StrataKV must be on the Python path. With `--rehearse`, no GPU is used, and the
checks that need a GPU are left out."""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

GIB = 1 << 30
# GiB of memory to page-lock, in addition to the 128 MiB of the copies. The amounts are small
# because the first touch of a virtual machine's memory may run at only 1 GB/s.
LOCKED_GIB, TINY_GIB, MOST_GIB = 1.0, 1 / 32, 1024.0
PIECES = (256 << 20, 64 << 20)  # the slab's size of pieces, and a smaller size if it fails
BLOCK_BYTES, NUM_BLOCKS = 2 << 20, 64
PACKAGES = (
    "torch", "triton", "numpy", "cupy-cuda13x", "pytest", "pytest-xdist", "pytest-timeout",
    "hypothesis", "matplotlib", "lmdb", "msgspec", "cbor2", "pyzmq", "transformers",
)  # fmt: skip
MODULES = (
    "stratakv.kernels.copy.copy_engine",
    "stratakv.kernels.attention.paged_decode",
    "stratakv.connector.device.cuda",
    "stratakv.engine.core.engine_core",
    "stratakv.benchmarks.gpu.command",
)


def versions() -> dict[str, str]:
    """Return the versions of the packages that the GPU code uses, or "not installed"."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def imports() -> dict[str, str]:
    """Import each module that the steps need; return the results. Raises RuntimeError for
    failures."""
    found = {}
    for name in MODULES:
        try:
            import_module(name)
            found[name] = "ok"
        except Exception as error:  # noqa: BLE001 - whatever an import may raise
            found[name] = f"{type(error).__name__}: {error}"
    failed = [name for name, said in found.items() if said != "ok"]
    if failed:
        raise RuntimeError(f"cannot be imported: {', '.join(failed)}; {found[failed[0]]}")
    return found


def machine() -> dict[str, Any]:
    """Return the properties of the machine, without the driver, that affect page-locking."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "locked_memory_limit": [soft, hard],
        "huge_pages": text_of("/sys/kernel/mm/transparent_hugepage/enabled"),
        "huge_pages_of_shared_memory": text_of("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
    }


def text_of(path: str) -> str:
    """Return the text of the file `path`, or the reason why the file cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        return f"not there ({error.strerror})"


def device() -> dict[str, Any]:
    """Return properties of the GPU and its driver, from torch and the CUDA runtime."""
    import torch

    from stratakv.kernels.copy.copy_engine import cuda_runtime

    properties = torch.cuda.get_device_properties(0)
    runtime = cuda_runtime()
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / GIB, 1),
        "cuda_of_torch": torch.version.cuda,
        "runtime_version": runtime.version,
        "why_no_batched_copies": runtime.refusal,
    }


def one_kernel() -> dict[str, Any]:
    """Compile and launch a small Triton kernel. The check needs a C compiler, Python's headers,
    libcuda and a writable folder, which every Triton kernel needs."""
    import torch

    from stratakv.engine.models.layers import norm as plain
    from stratakv.kernels.layer.elementwise import rms_norm

    x = torch.randn(4, 256, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(256, dtype=torch.bfloat16, device="cuda")
    began = time.monotonic()
    found = rms_norm(x, weight, 1e-6)
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    torch.testing.assert_close(found, plain(x, weight, 1e-6))
    return {"first_launch_seconds": round(seconds, 2)}


def both_names() -> dict[str, str]:
    """Construct all classes with a device as argument, for the device names `cuda` and `cuda:0`."""
    import torch

    from stratakv.connector.device.cuda_copy_runtime import TorchRuntime
    from stratakv.engine.worker.runtime.cuda_runtime import CudaMeter, CudaRuntime

    found = {}
    for name in ("cuda", "cuda:0"):
        given = torch.device(name)
        TorchRuntime(given).enter_thread(is_own=False)
        CudaRuntime(given)
        meter = CudaMeter(given)
        found[name] = f"ok, {meter.total_bytes() / GIB:.1f} GiB"
    return found


def batched_copies() -> dict[str, Any]:
    """Copy 64 blocks to the host in one call and back in one call; compare every byte."""
    import torch

    from stratakv.connector.device.cuda_copy_runtime import TorchRuntime
    from stratakv.kernels.copy.copy_engine import Batch

    runtime = TorchRuntime(torch.device("cuda"))
    num_bytes = BLOCK_BYTES * NUM_BLOCKS
    there = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=runtime.device)
    back = torch.zeros_like(there)
    torch.cuda.synchronize()
    stream, event = runtime.create_stream(), runtime.create_event()
    locked = runtime.page_locked(num_bytes)
    places = [number * BLOCK_BYTES for number in range(NUM_BLOCKS)]
    sizes = [BLOCK_BYTES] * NUM_BLOCKS
    # The blocks are copied out in one order and back in another, so that a wrong address is found.
    host = [locked.address + place for place in places]
    out = Batch([there.data_ptr() + place for place in places], host[::-1], sizes)
    home = Batch(host[::-1], [back.data_ptr() + place for place in places], sizes)
    seconds = {}
    for what, batch in (("out", out), ("back", home)):
        began = time.perf_counter()
        runtime.copy_batch(batch, stream)
        submitted = time.perf_counter() - began
        runtime.record_event(event, stream)
        runtime.synchronise_event(event)
        seconds[what] = {
            "submit_us": round(submitted * 1e6, 1),
            "gb_per_second": round(num_bytes / (time.perf_counter() - began) / 1e9, 2),
        }
    if not torch.equal(there, back):
        raise RuntimeError("a block came back with other bytes than it went out with")
    locked.close()
    runtime.destroy_event(event)
    runtime.destroy_stream(stream)
    return seconds


def page_locking(total_bytes: int, register: Callable[[int, int], None] | None) -> dict[str, Any]:
    """Return the GB/s of page-locking, in pieces, private memory and a memory file, which the slab
    uses. With a `register` of None, for a rehearsal, the pages are only touched."""
    found: dict[str, Any] = {}
    kinds = ("anonymous", "memory file")
    num_bytes = total_bytes // (len(PIECES) * len(kinds)) // mmap.PAGESIZE * mmap.PAGESIZE
    for piece in PIECES:
        for what in kinds:
            memory, file = map_memory(what, num_bytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            slowest, began = 0.0, time.perf_counter()
            for first in range(0, num_bytes, piece):
                start, size = time.perf_counter(), min(piece, num_bytes - first)
                if register is None:
                    ctypes.memset(address + first, 1, size)
                else:
                    register(address + first, size)
                slowest = max(slowest, time.perf_counter() - start)
            seconds = time.perf_counter() - began
            found[f"{what}, pieces of {piece >> 20} MB"] = {
                "gb_per_second": round(num_bytes / seconds / 1e9, 2),
                "slowest_piece_ms": round(slowest * 1e3, 1),
            }
            if register is not None:
                unlock(address, num_bytes, piece)
            del address
            if file is not None:
                os.close(file)
    return found


def map_memory(what: str, num_bytes: int) -> tuple[mmap.mmap, int | None]:
    """Return new memory, and the descriptor of its file or None."""
    if what == "anonymous":
        return mmap.mmap(-1, num_bytes), None
    file = os.memfd_create("stratakv-probe")
    os.truncate(file, num_bytes)
    return mmap.mmap(file, num_bytes), file


def unlock(address: int, num_bytes: int, piece: int) -> None:
    """Unlock the memory that `page_locking` locked."""
    from stratakv.kernels.copy.copy_engine import cuda_runtime

    for first in range(0, num_bytes, piece):
        cuda_runtime().unregister_host(address + first)


def checks(lock_gib: float, *, is_rehearsal: bool) -> dict[str, Callable[[], Any]]:
    """Return the checks by name, in the order of execution."""
    found: dict[str, Callable[[], Any]] = {
        "versions": versions,
        "machine": machine,
        "imports": imports,
    }
    if is_rehearsal:
        return found | {"page_locking": lambda: page_locking(int(TINY_GIB * GIB), None)}

    def lock(address: int, size: int) -> None:
        from stratakv.kernels.copy.copy_engine import cuda_runtime

        cuda_runtime().register_host(address, size)

    return found | {
        "device": device,
        "one_kernel": one_kernel,
        "both_names": both_names,
        "batched_copies": batched_copies,
        "page_locking": lambda: page_locking(int(lock_gib * GIB), lock),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--lock-gib", type=float, metavar="N", default=LOCKED_GIB,
        help=f"memory to page-lock in all (default: {LOCKED_GIB:g})",
    )  # fmt: skip
    parser.add_argument("--rehearse", action="store_true", help="leave out what needs a GPU")
    args = parser.parse_args(arguments)
    if not TINY_GIB <= args.lock_gib <= MOST_GIB:
        parser.error(f"--lock-gib takes {TINY_GIB:g} to {MOST_GIB:g}, not {args.lock_gib:g}")
    found: dict[str, Any] = {"is_rehearsal": args.rehearse}
    failed = []
    for name, check in checks(args.lock_gib, is_rehearsal=args.rehearse).items():
        try:
            found[name] = check()
        except Exception as error:  # noqa: BLE001 - a check that fails says why, and the next runs
            found[name] = {"error": f"{type(error).__name__}: {error}"}
            failed.append(name)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    print(f"failed: {', '.join(failed)}" if failed else "every check of the probe went well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
