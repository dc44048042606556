# SPDX-License-Identifier: Apache-2.0
"""Launch constants of the kernel that copies blocks."""

from __future__ import annotations

# 16 KB of 8-byte words, so that each thread has four wide loads in flight and a few programs use
# all of a PCIe link. The number of words is the same for narrower words, because 64 single bytes
# per thread would need 190 registers.
CHUNK_WORDS = 2048
NUM_WARPS = 8
# The programs of a copy that has the GPU to itself: several per multiprocessor of the largest GPUs.
MAX_PROGRAMS = 1024
