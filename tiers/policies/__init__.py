# SPDX-License-Identifier: Apache-2.0
"""Eviction policies, which choose the blocks that a tier evicts. Imports no torch or engine."""
