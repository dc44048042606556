# SPDX-License-Identifier: Apache-2.0
"""What this process has open, as the kernel tells it."""

from __future__ import annotations

import contextlib
import os


def open_paths() -> list[str]:
    """The path behind each descriptor; of sockets and the like what the kernel calls them."""
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as that of the list is
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return paths
