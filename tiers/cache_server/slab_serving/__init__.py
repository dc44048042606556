# SPDX-License-Identifier: Apache-2.0
"""Serves an engine's slab to other engines."""
