# SPDX-License-Identifier: Apache-2.0
"""The CPU tier: a slab of block slots in shared memory, and its index for other processes."""
