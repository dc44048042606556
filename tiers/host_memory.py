# SPDX-License-Identifier: Apache-2.0
"""How much memory the host can still hand out. Knows nothing of who asks for it."""

from __future__ import annotations


def available_memory_bytes() -> int | None:
    """What the kernel believes it can hand out without swapping; None where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
