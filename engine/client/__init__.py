# SPDX-License-Identifier: Apache-2.0
"""How a front reaches the engine core: over a process boundary, or in the same process."""
