# SPDX-License-Identifier: Apache-2.0
"""Stores for tests: one in memory, and one whose chosen calls fail, stall or lie."""
