# SPDX-License-Identifier: Apache-2.0
"""The CPU tier: a slab of memory, its index, and the memory that it lies in."""
