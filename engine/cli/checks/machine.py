# SPDX-License-Identifier: Apache-2.0
"""Checks of memory, shared memory and the clock, with the limits of the process and container."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from ....tiers.settings.sizes import rough_size
from ....tiers.slab.host_memory import MEMINFO, available_memory_bytes
from ....tiers.slab.shared_memory import HUGE_PAGE_BYTES
from .base import Finding, ok, problem, warning

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - engines make regions of shared memory here
# The share of available memory above which a warning says that other processes may lack memory.
TIGHT_SHARE = 0.9

_TIMEX_BYTES = 512  # more bytes than struct timex has
_CLOCK_UNKNOWN = 5  # adjtimex's result TIME_ERROR: the clock is not synchronised


def check_shared_memory(region_bytes: int, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Check that `region_bytes` fit into the file system of shared memory."""
    try:
        space = os.statvfs(folder)
    except OSError as error:
        yield problem(str(folder), f"is not there ({error.strerror})", "mount a tmpfs there")
        return
    whole, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    wanted = rough_size(region_bytes)
    if not os.access(folder, os.W_OK):
        yield problem(str(folder), "cannot be written to", "change its permissions")
    elif free < region_bytes:
        larger = f"start the container with --shm-size {region_bytes >> 20}m or more"
        cure = larger if whole < region_bytes else "free some"
        yield problem(
            str(folder),
            f"has {rough_size(free)} of {rough_size(whole)} free and the region takes {wanted}",
            f"{cure}, or give a smaller --region-bytes",
        )
    else:
        yield ok(str(folder), f"{rough_size(free)} free for a region of {wanted}")


def check_memory(
    slab_bytes: int, region_bytes: int, available: int | None = None
) -> Iterator[Finding]:
    """Check that the available memory suffices for the cpu tier's slab and the shared region."""
    wanted = slab_bytes + region_bytes
    shown = f"slab {rough_size(slab_bytes)} + region {rough_size(region_bytes)}"
    left = available_memory_bytes() if available is None else available
    if left is None:
        yield warning("memory", "the available size is unknown", f"see that {shown} fit")
    elif wanted > left:
        yield problem(
            "memory",
            f"{shown} are more than the {rough_size(left)} that host and container have",
            "make --cpu-bytes smaller, or raise the container's limit",
        )
    elif wanted > TIGHT_SHARE * left:
        yield warning(
            "memory",
            f"{shown} leave {rough_size(left - wanted)} for weights, the KV cache and all else",
            "make --cpu-bytes smaller",
        )
    else:
        yield ok("memory", f"{shown} of {rough_size(left)} available")
    yield from _check_limits(slab_bytes, region_bytes)


def check_huge_pages(slab_bytes: int, meminfo: Path = MEMINFO) -> Iterator[Finding]:
    """Check that enough huge pages for `slab_bytes` are reserved and free."""
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(rows.get("HugePages_Free", "0").split()[0])
    needed = -(-slab_bytes // HUGE_PAGE_BYTES)
    if free < needed:
        yield warning(
            "huge pages",
            f"{free} are free and the slab takes {needed}, so it will have plain ones",
            f"set vm.nr_hugepages to {needed} or more",
        )
    else:
        yield ok("huge pages", f"{free} free, {needed} wanted")


def check_clock() -> Iterator[Finding]:
    """Check that the kernel's clock is synchronised, because certificates depend on the clock."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # zeros change no clock
    if state < 0:
        yield warning("clock", "cannot be looked at", "see that it is right")
    elif state == _CLOCK_UNKNOWN:
        yield warning(
            "clock",
            "the kernel was not told that it is right, and certificates are judged by it",
            "run chrony, ntpd or systemd-timesyncd on the host",
        )
    else:
        yield ok("clock", "synchronized")


def _check_limits(slab_bytes: int, region_bytes: int) -> Iterator[Finding]:
    limits = (
        ("-v", resource.RLIMIT_AS, slab_bytes + region_bytes, "address space"),
        ("-f", resource.RLIMIT_FSIZE, max(slab_bytes, region_bytes), "the size of a file"),
    )
    for flag, limit, least, what in limits:
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < least:
            yield problem(
                "limits",
                f"{what} is limited to {rough_size(soft)} and {rough_size(least)} are needed",
                f"raise it with ulimit {flag}",
            )
