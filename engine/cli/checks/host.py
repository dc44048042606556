# SPDX-License-Identifier: Apache-2.0
"""Checks of this machine before the start of an engine or a cache server: processor and kernel,
memory and limits, disk, ports, certificates, GPU. Each problem names a remedy."""

from __future__ import annotations

import platform
import resource
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ....tiers.cache_server.access.tls import WARN_DAYS, TlsFiles
from ....tiers.errors import TierConfigError
from ....tiers.settings.sizes import rough_size
from ....tiers.settings.values import ConfigError
from ....tiers.slab.host_memory import MEMINFO
from ....tiers.tier_settings import SsdSettings
from ....tiers.wire.listen import check_free
from .base import Check, Finding, ok, problem, warning
from .disk import check_disks, check_folder
from .machine import check_clock, check_huge_pages, check_memory

MACHINES = ("x86_64", "aarch64")  # the processors for which StrataKV is built and tested
POPULATE, COLLAPSE = (5, 14), (6, 1)  # first Linux with MADV_POPULATE_WRITE, and MADV_COLLAPSE
FEWEST_FILES = 4096  # file descriptors that connections and the files of the tiers may need
SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
GPU_FILE = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCase:
    """The planned use of this machine by an engine or a cache server. An empty `device` means the
    GPU of a machine with a GPU, else the CPU."""

    cpu_bytes: int
    huge_pages: bool = False
    ssd: SsdSettings | None = None
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = ()
    tls: TlsFiles | None = None
    device: str = ""
    release: str = field(default_factory=platform.release)
    machine: str = field(default_factory=platform.machine)
    meminfo: Path = MEMINFO
    shared_huge_pages: Path = SHARED_HUGE_PAGES
    gpu_file: Path = GPU_FILE

    @property
    def uses_gpu(self) -> bool:
        """Whether `device` is a GPU, or is empty on a machine with a GPU."""
        if self.device:
            return self.device != "cpu"
        return self.gpu_file.exists()


def check_kernel(case: HostCase) -> Iterator[Finding]:
    """Check the processor type and the kernel version."""
    if case.machine in MACHINES:
        yield ok("processor", case.machine)
    else:
        yield warning(
            "processor", f"{case.machine}, and this is tested on {' and '.join(MACHINES)}",
            "run the tests: make test",
        )  # fmt: skip
    numbers = case.release.split("-")[0].split(".")[:2]
    version = tuple(int(each) for each in numbers if each.isdigit())
    shown = f"Linux {case.release}"
    if version < POPULATE:
        yield warning(
            "kernel", f"{shown}: before 5.14 memory is faulted in page by page, which makes the "
            "start of a large tier slow", "update the kernel: apt-get install linux-generic",
        )  # fmt: skip
    elif version < COLLAPSE:
        yield warning(
            "kernel", f"{shown}: before 6.1 the cpu tier's memory is not gathered into huge pages",
            "update the kernel, or set huge pages apart and give --kv-offload-cpu-huge-pages",
        )  # fmt: skip
    else:
        yield ok("kernel", shown)


def check_tier_memory(case: HostCase) -> Iterator[Finding]:
    yield from check_memory(case.cpu_bytes, 0)
    if case.huge_pages:
        for each in check_huge_pages(case.cpu_bytes, case.meminfo):
            needed = -(-case.cpu_bytes // 2**21)
            cure = f"sysctl -w vm.nr_hugepages={needed}" if each.cure else ""
            yield each._replace(cure=cure)
        return
    try:
        setting = case.shared_huge_pages.read_text()
    except OSError:
        return  # this kernel lacks the setting of huge pages
    if "[deny]" in setting:
        yield warning(
            "huge pages", f"{case.shared_huge_pages} denies them, so that the cpu tier lies on "
            "scattered pages", f"echo never > {case.shared_huge_pages}: then who asks has them",
        )  # fmt: skip
    else:
        yield ok("huge pages", "the kernel may gather the cpu tier's memory into them")


def check_limits(case: HostCase) -> Iterator[Finding]:
    """Check the process limits: locked memory, open files and core dumps."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    enough = locked == resource.RLIM_INFINITY or locked >= case.cpu_bytes
    shown = "unlimited" if locked == resource.RLIM_INFINITY else rough_size(locked)
    if case.uses_gpu and not enough:
        yield warning(
            "locked memory", f"{shown}, and a GPU copies from {rough_size(case.cpu_bytes)} of it: "
            "some drivers count that", "ulimit -l unlimited; for a unit LimitMEMLOCK=infinity, for "
            "a container --ulimit memlock=-1",
        )  # fmt: skip
    else:
        yield ok("locked memory", shown if case.uses_gpu else f"{shown}; without a GPU none is")
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < FEWEST_FILES:
        yield warning(
            "open files", f"at most {files}: fewer connections than the limits allow",
            f"ulimit -Hn {FEWEST_FILES}; for a unit LimitNOFILE=65536",
        )  # fmt: skip
    else:
        yield ok("open files", f"at most {'any number' if files < 0 else files}")
    core, _ = resource.getrlimit(resource.RLIMIT_CORE)
    if core:
        yield warning(
            "core dumps", "are written, and one holds every cached prompt",
            "ulimit -c 0; for a unit LimitCORE=0",
        )  # fmt: skip


def check_disk(case: HostCase) -> Iterator[Finding]:
    if case.ssd is not None:
        yield from check_disks(case.ssd, check_folder)


def check_ports(case: HostCase) -> Iterator[Finding]:
    for port in case.ports:
        try:
            check_free(case.host, port, "--port")
        except TierConfigError as error:
            yield problem("port", str(error), f"ss -ltnp 'sport = :{port}' says who has it")
        else:
            yield ok("port", f"{port} of {case.host} is free")


def check_certificates(case: HostCase) -> Iterator[Finding]:
    """Check that certificate and key match, stay valid for a while, and that the key is private."""
    if case.tls is None:
        return
    try:
        case.tls.context()
        ends = case.tls.ends_at()
    except TierConfigError as error:
        yield problem("certificates", str(error), "name PEM files of one pair")
        return
    now = datetime.now(UTC)
    for path, end in ends.items():
        look = f"openssl x509 -enddate -noout -in {path}"
        if end <= now:
            yield problem(
                "certificates", f"{path} ended on {end:%Y-%m-%d}", f"put another one there; {look}"
            )
        elif end - now < timedelta(days=WARN_DAYS):
            yield warning(
                "certificates", f"{path} ends on {end:%Y-%m-%d}, in {(end - now).days} days",
                "put another one there and send SIGHUP to the server",
            )  # fmt: skip
        else:
            yield ok("certificates", f"{path} lasts until {end:%Y-%m-%d}")
    mode = stat.S_IMODE(case.tls.key.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        yield problem(
            "certificates", f"other users can read or write {case.tls.key} (mode {mode:04o})",
            f"chmod 600 {case.tls.key}",
        )  # fmt: skip


def check_host_clock(case: HostCase) -> Iterator[Finding]:
    """Check the clock if TLS is used, because the validity of certificates depends on the clock."""
    if case.tls is not None:
        yield from check_clock()


def check_gpu(case: HostCase) -> Iterator[Finding]:
    if not case.uses_gpu:
        yield ok("gpu", "none was asked for")
        return
    try:
        import torch

        from ...worker.runtime.cuda_probe import choose_gpu, probe_cuda
        from ...worker.runtime.placement import Placement
    except ImportError as error:
        yield problem("gpu", f"torch cannot be imported ({error})", "pip install '.[engine]'")
        return
    try:
        device = torch.device(case.device or "cuda")
        state = probe_cuda()
        gpu = choose_gpu(Placement(device=device, strict_kernels=True), state)
    except (ConfigError, RuntimeError) as error:
        yield problem("gpu", str(error), "nvidia-smi shows what the driver sees")
        return
    yield ok("gpu", f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}")


CHECKS: tuple[Check[HostCase], ...] = (
    check_kernel,
    check_tier_memory,
    check_limits,
    check_disk,
    check_ports,
    check_certificates,
    check_host_clock,
    check_gpu,
)
