# SPDX-License-Identifier: Apache-2.0
"""Writes of new K and V into the pool, converted to the pool's type."""
