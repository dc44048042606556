# SPDX-License-Identifier: Apache-2.0
"""Eviction policies, which choose the blocks that leave a tier; without torch or the engine."""
