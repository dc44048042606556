# SPDX-License-Identifier: Apache-2.0
"""The parts that serve an engine's slab to other engines."""
