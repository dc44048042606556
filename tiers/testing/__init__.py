# SPDX-License-Identifier: Apache-2.0
"""Stores for tests: one in memory, and one in which chosen calls fail, stall or report misses."""
