# SPDX-License-Identifier: Apache-2.0
"""Writes of new K and V to the paged pool, converted to the pool's type."""
