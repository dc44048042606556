# SPDX-License-Identifier: Apache-2.0
"""Launch constants of the kernel that copies blocks."""

from __future__ import annotations

# 16 KB in 8-byte words. A thread then has four wide loads in flight, so that a few programs fill a
# PCIe link. A chunk of narrower words has fewer bytes: 64 single bytes a thread take 190 registers.
CHUNK_WORDS = 2048
NUM_WARPS = 8
# For a move that has the device to itself: several a multiprocessor of the largest devices.
MAX_PROGRAMS = 1024
