# SPDX-License-Identifier: Apache-2.0
"""Stores for tests: one in memory, and one whose calls can fail, stall or report misses."""
